"""What goes with an object or its process stays when a fork of the process drops it or ends."""

import os
import subprocess
import sys
from pathlib import Path

from fengine.core.owned import Folder


def test_a_folder_goes_once_with_its_object_or_by_name(tmp_path: Path) -> None:
    one, two = (Folder(name, str(tmp_path)).make() for name in ("x-", "y-"))
    (Path(one.name) / "file").touch()
    one.cleanup()
    one.cleanup()
    assert os.listdir(tmp_path) == [Path(two.name).name] and Path(two.name).stat().st_mode & 0o77 == 0
    del two
    assert not os.listdir(tmp_path)


def test_a_fork_leaves_it_and_the_end_of_the_process_does_not(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from fengine.core.owned import Folder\n"
        "kept, dropped = (Folder(parent=sys.argv[1]).make() for _ in range(2))\n"
        "if (child := os.fork()) == 0:\n"
        "    del dropped\n"
        "    kept.cleanup()\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(len(os.listdir(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n" and not os.listdir(tmp_path)
