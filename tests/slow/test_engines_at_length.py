"""What takes an engine seconds: memory that goes back to the system, and many compiled engines in one process."""

import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints

from fengine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
speculation: Any = importlib.import_module("test_speculation")
reference = speculation.reference

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
LARGE: dict[str, Any] = {
    "vocab_size": 4000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_the_system_gets_its_memory_back(tmp_path: Path) -> None:
    """In a process of its own: what others have left in the heap may hold pages of what is freed."""
    code = "import sys; sys.path.append('..'); import test_engines_at_length as t; t.release_and_resume(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def ask(engine: Engine) -> Any:
    greedy: Any = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    outputs: Any = engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=greedy, return_logprob=True)
    return [(o["output_ids"], o["meta_info"]["output_token_logprobs"]) for o in outputs]


def release_and_resume(folder: str) -> None:
    directory = tiny_checkpoints.write(Path(folder), **LARGE)
    weights = (directory / "model.safetensors").stat().st_size
    pool = 2 * 4 * 8 * 64 * 4 * 8192  # k and v, layers, heads, width, bytes, tokens
    options: dict[str, Any] = {"max_total_tokens": 8192, "page_size": 4, "enable_torch_compile": True}
    with Engine(model_path=str(directory), skip_tokenizer_init=True, device="cpu", **options) as engine:
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


def test_each_engine_of_a_process_compiles_on_its_own(tmp_path) -> None:  # noqa: ANN001
    """Dynamo allows few recompilations per code object; engines must not eat up each other's."""
    for i in range(10):
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 16 * (i + 1)}))
        with Engine(
            model_path=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, enable_torch_compile=True
        ) as engine:
            assert engine.stats()["compiles"] == 1
            assert len(engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})["output_ids"]) == 3


@pytest.mark.parametrize("layout", speculation.LAYOUTS)
def test_bits_are_those_without_speculation(reference: Any, layout: str) -> None:
    speculation.check_layout(reference, speculation.LAYOUTS[layout], rounds=2)
