"""scripts/ray_batch.py on a local Ray cluster: the bytes of the single-process run, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("ray", reason="the extra `ray` is not installed: pip install 'fengine[ray]'")

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["task=jsonl", "task.data=rows.jsonl", "task.match=exact", "task.target=answer", "compile=none", "view=quiet"]
WORDS += ["sampling.temperature=0.8", "sampling.max_new_tokens=8", "model.device=cpu", "seed=3"]
MAIN = "import sys; from fengine.run import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """outputs.jsonl of one process; rows.jsonl is there, with rows that fail."""
    rows = [{"id": f"r{i}", "prompt": f"{i} + 7 =", "answer": str(i + 7)} for i in range(40)]
    lines = [json.dumps(row) for row in [*rows[:20], {"id": "none", "answer": ""}, *rows[20:]]]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "no json"]) + "\n")
    assert process([sys.executable, "-c", MAIN, "eval", *WORDS, "out=whole"], tmp_path).wait(300) == 1
    return (tmp_path / "whole" / "outputs.jsonl").read_bytes()


def process(argv: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_ADDRESS": ""}
    return subprocess.Popen(argv, cwd=folder, env=environment)


def on_ray(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    script = [sys.executable, str(ROOT / "scripts" / "ray_batch.py"), "--workers", "2", "--batch", "4", "--cpus", "1"]
    return process([*script, *WORDS, *words], folder)


def test_the_bytes_of_one_process_also_after_a_kill(whole: bytes, tmp_path: Path) -> None:
    assert on_ray(tmp_path, "out=ray").wait(300) == 1, "two rows fail"
    assert (tmp_path / "ray" / "outputs.jsonl").read_bytes() == whole
    child, journal = on_ray(tmp_path, "out=killed"), tmp_path / "killed" / "journal.log"
    while child.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") > 10):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL
    kept = journal.read_bytes()
    assert not (tmp_path / "killed" / "outputs.jsonl").exists() and kept.count(b"\n") < 42
    assert on_ray(tmp_path, "out=killed").wait(300) == 1
    assert (tmp_path / "killed" / "outputs.jsonl").read_bytes() == whole
    assert journal.read_bytes().startswith(kept), "what was there is not computed again"
    manifests = [json.loads((tmp_path / run / "manifest.json").read_text()) for run in ("whole", "killed")]
    assert manifests[0]["identity"] == manifests[1]["identity"] and manifests[0]["in_force"] == manifests[1]["in_force"]
    assert on_ray(tmp_path, "out=killed", "sampling.top_p=0.5").wait(60) == 2, "another config"
