"""What an engine gives back to the system, seen by its own process: for one that has not done anything else."""

import resource
from pathlib import Path
from typing import Any

from fengine import Engine


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def ask(engine: Engine) -> Any:
    greedy: Any = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    outputs: Any = engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=greedy, return_logprob=True)
    return [(o["output_ids"], o["meta_info"]["output_token_logprobs"]) for o in outputs]


def release_and_resume(directory: str) -> None:
    weights = (Path(directory) / "model.safetensors").stat().st_size
    pool = 2 * 4 * 8 * 64 * 4 * 8192  # k and v, layers, heads, width, bytes, tokens
    options: dict[str, Any] = {"max_total_tokens": 8192, "page_size": 4, "enable_torch_compile": True}
    with Engine(model_path=directory, skip_tokenizer_init=True, device="cpu", **options) as engine:
        before, compiles, full = ask(engine), engine.stats()["compiles"], resident()
        engine.release_memory_occupation(["kv_cache"])
        without_pool = resident()
        assert full - without_pool > 0.95 * pool
        engine.release_memory_occupation(["weights"])
        assert without_pool - resident() > 0.95 * weights
        usage = engine.get_server_info()["internal_states"][0]["memory_usage"]
        assert usage["weight"] == usage["kvcache"] == 0
        engine.resume_memory_occupation(["weights"])
        assert resident() - without_pool < 0.5 * weights  # and not what was read from disk as well
        engine.resume_memory_occupation(["kv_cache"])
        assert resident() - full < 0.5 * weights
        assert ask(engine) == before and engine.stats()["compiles"] == compiles
