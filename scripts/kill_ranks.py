"""Kills processes of engines at random moments, and looks what comes of it: one clear error each, nothing is left.

    python scripts/kill_ranks.py --times 100 [--device cuda] [--ranks 2] [--replicas 1] [--tokens 900]

Each time an engine generates a batch, and after a random time one of its other processes gets SIGKILL: a rank, a
replica, or a replica's rank. With `--tokens`
there are 8 prompts of so many, new each time: at 900 a step has the rows that copy engines carry. Told are the errors,
the seconds from the kill to the error and to the engine's end, and processes or files that are left.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measure import parser, save, summary

from fengine import Engine
from fengine.errors import EngineDeadError

PROMPTS = ["One two three", "What is 2+3?", "capital of France", "Sort: 3 1 2"]


def alive(pid: int) -> bool:
    """Whether a process of that number computes or holds something."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    """The processes that it has started, and those that these have."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        own = [int(word) for file in files for word in file.read_text().split()]
    except OSError:  # it has ended
        return []
    return [found for child in own for found in (child, *below(child))]


def once(engine: Engine, delay: float, victim: int, rng: random.Random, tokens: int) -> dict[str, Any]:
    """Kills one of the engine's processes while it generates."""
    pids = below(os.getpid())
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pids[victim % len(pids)], signal.SIGKILL)

    timer = threading.Timer(delay, kill)
    timer.start()
    error = "none"
    try:
        while True:
            if tokens:
                ids = [[rng.randrange(5, 200) for _ in range(tokens)] for _ in range(8)]
                engine.generate(None, {"max_new_tokens": 4, "ignore_eos": True}, ids)
            else:
                engine.generate(PROMPTS, {"max_new_tokens": 200, "ignore_eos": True})
    except EngineDeadError as found:
        error = str(found)
    told = time.monotonic()
    timer.join()
    engine.shutdown()
    ended = time.monotonic()
    deadline = ended + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return {"error": error, "told_s": told - killed[0], "ended_s": ended - killed[0], "left": sum(map(alive, pids)),
            "files": len(os.listdir(tempfile.gettempdir()))}  # fmt: skip


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--times", type=int, default=100)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--replicas", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--tokens", type=int, default=0, help="of each prompt")
    p.add_argument("--longest", type=float, default=0.5, help="seconds until the kill, at most")
    args = p.parse_args()
    rng, found = random.Random(1), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # of these engines alone
        for _ in range(args.times):
            engine = Engine(model_path="box", device=args.device, tp_size=args.ranks, dp_size=args.replicas,
                            max_running_requests=8, max_total_tokens=4096 + 8 * args.tokens)  # fmt: skip
            found.append(once(engine, rng.random() * args.longest, rng.randrange(1 << 16), rng, args.tokens))
            print(len(found), found[-1], flush=True)
    figures = {
        "device": args.device, "ranks": args.ranks, "replicas": args.replicas, "kills": len(found),
        "errors": dict(Counter(each["error"] for each in found)),
        "told_s": summary([each["told_s"] for each in found]) | {"runs": None},
        "ended_s": summary([each["ended_s"] for each in found]) | {"runs": None},
        "processes_left": sum(each["left"] for each in found), "files_left": sum(each["files"] for each in found),
    }  # fmt: skip
    save("kill_ranks", figures, args.out)


if __name__ == "__main__":
    main()
