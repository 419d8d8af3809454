"""How long `fengine diff` takes for two runs, as a command of its own, and how its memory grows with the rows.

    python scripts/bench_diff.py --rows 10000 --runs 5

The runs are made up: rows with a question, an answer of 48 tokens, their logprobs. They are compared where they are
equal; where every row differs in the bits of all its logprobs, and every third in a token; and where the second one has
its rows in another order.
"""

import hashlib
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure

from fengine.eval.cli.schema import flat
from fengine.eval.runs.config import EvalConfig
from fengine.eval.runs.provenance import canonical

CASES = ("equal", "all differ", "another order")
MAIN = """
import sys
from fengine.run import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1], file=sys.stderr)
sys.exit(code)
"""


def make(folder: Path, rows: int, case: str) -> None:
    """A run's manifest and outputs, which depend on nothing but `rows` and `case`."""
    folder.mkdir()
    lines = [line(i, case == "all differ") for i in range(rows)]
    if case == "another order":
        random.Random(1).shuffle(lines)
    data = b"".join(lines)
    (folder / "outputs.jsonl").write_bytes(data)
    config, given = flat(EvalConfig(seed=int(case == "all differ"))), {"rows": rows, "sha256": "x"}
    identity = {"config": config, "config_sha256": canonical(config), "input": given, "task": {}}
    result = {"outputs_sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"fengine_manifest": 1, "identity": identity, "in_force": None, "sessions": [], "result": result}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def line(number: int, other: bool) -> bytes:
    """One record; `other`: with other bits, and every third with another token in the middle of its answer."""
    draw = random.Random(number)
    ids = [draw.randrange(32000) for _ in range(48)]
    logprobs = [float32(-draw.expovariate(2.0)) for _ in ids]
    if other:
        logprobs = [float32(value * (1 + 1e-6)) for value in logprobs]
        ids[24] += number % 3 == 0
    text = " ".join(f"w{token % 997}" for token in ids)
    answer = {"prompt": f"Question {number}: what comes next?", "text": text, "output_ids": ids, "logprobs": logprobs}
    answer |= {"finish_reason": {"type": "stop", "matched": 2}, "sampling_seed": number}
    data = {"id": f"row-{number}", "prompt": answer["prompt"], "answer": text[:20]}
    record = {"id": f"row-{number}", "data": data, "answers": [answer], "scores": {"exact_match": number % 2 == 0}}
    return json.dumps(record).encode() + b"\n"


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def timed(a: Path, b: Path, code: int) -> tuple[float, float]:
    """Seconds of the command, and its peak memory in MiB."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "diff", str(a), str(b)],
        env=measure.of_this_checkout(),
        capture_output=True,
        check=False,
    )
    seconds = time.perf_counter() - begun
    assert done.returncode == code, done.stderr.decode()
    return seconds, int(done.stderr.split()[-1]) / 1024


def main() -> None:
    p = measure.parser(__doc__)
    p.add_argument("--rows", type=int, default=10_000)
    args = p.parse_args()
    figures: dict[str, Any] = {"rows": args.rows}
    with tempfile.TemporaryDirectory() as top:
        for rows in (args.rows // 5, args.rows):
            base = Path(top) / f"{rows}"
            make(base, rows, "equal")
            for case in CASES:
                other = Path(top) / f"{rows} {case}"
                make(other, rows, case)
                found = [timed(base, other, int(case == "all differ")) for _ in range(args.runs)]
                figures[f"{case}, {rows} rows"] = {
                    "seconds": measure.summary([seconds for seconds, _ in found]),
                    "peak_mib": measure.summary([memory for _, memory in found]),
                    "bytes": (other / "outputs.jsonl").stat().st_size,
                }
    measure.save("bench_diff", figures, args.out)


if __name__ == "__main__":
    main()
