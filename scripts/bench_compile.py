"""What torch.compile brings on a CPU: tokens/s of the model in the box, and how long an engine takes to start.

Two engines in one process, `eager` and `compiled`, take turns with the same batches; greedy, prompts of 20 tokens.
`ratio` is eager over compiled, the median over turns. `start_s` is of `Engine(...)` alone in a process of its own,
without the import; what torch.compile keeps on disk is there by then.
"""

import statistics
import subprocess
import sys
import time
from typing import Any

from measure import parser, save, summary

from fengine import Engine

BATCHES, TOKENS = (1, 8, 32), 64


def rate(engine: Engine, batch: int) -> float:
    """Output tokens/s."""
    params: Any = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=[[5 + i] * 20 for i in range(batch)], sampling_params=params)
    return batch * TOKENS / (time.perf_counter() - start)


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
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(-1, args.runs):
            for name in list(engines)[:: 1 if turn % 2 else -1]:
                found = rate(engines[name], batch)
                if turn >= 0:
                    rates[name].append(found)
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
