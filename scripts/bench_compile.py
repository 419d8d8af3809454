"""What torch.compile brings on a CPU: tokens/s of the model in the box, and how long an engine takes to start.

Two engines in one process, `eager` and `compiled`, take turns with the same batches; greedy, prompts of 20 tokens.
`ratio` is eager over compiled, the median over turns. `start_s` is of `Engine(...)` alone in a process of its own,
without the import; what torch.compile keeps on disk is there by then.
"""

import statistics
import subprocess
import sys
from functools import partial
from typing import Any

from measure import parser, save, summary, turns
from workloads import generate

from fengine import Engine

BATCHES, TOKENS = (1, 8, 32), 64


def rate(engine: Engine, batch: int) -> float:
    """Output tokens/s."""
    return batch * TOKENS / generate(engine, [([5 + i] * 20, TOKENS) for i in range(batch)])[0]


def opened(compiled: bool) -> Engine:
    return Engine(model_path="box", device="cpu", enable_torch_compile=compiled, disable_radix_cache=True)


def start_of(compiled: bool) -> float:
    """Seconds in a new process."""
    code = f"""if True:
        import time
        from fengine import Engine
        start = time.perf_counter()
        with Engine(model_path="box", device="cpu", enable_torch_compile={compiled}):
            print(time.perf_counter() - start)"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    args = parser(__doc__).parse_args()
    engines = {name: opened(name == "compiled") for name in ("eager", "compiled")}
    start_s = {name: summary([start_of(name == "compiled") for _ in range(3)]) for name in engines}
    rows: dict[str, Any] = {}
    for batch in BATCHES:
        rates = turns({name: partial(rate, engine, batch) for name, engine in engines.items()}, args.runs)
        pairs = zip(rates["eager"], rates["compiled"], strict=True)
        rows[f"batch {batch}"] = {
            **{name: summary(found) for name, found in rates.items()},
            "ratio": statistics.median(eager / compiled for eager, compiled in pairs),
        }
    for engine in engines.values():
        engine.shutdown()
    save("bench_compile", {"start_s": start_s, "tokens_per_s": rows}, args.out)


if __name__ == "__main__":
    main()
