"""What takes an engine seconds: memory that goes back to the system, and many compiled engines in one process."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from forked import run

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_the_system_gets_its_memory_back(tmp_path: Path) -> None:
    """In a process of its own: what others have left in the heap may hold pages of what is freed."""
    directory = tiny_checkpoints.write(tmp_path, **LARGE)
    here = str(Path(__file__).parent)
    done = run(
        f"import sys; sys.path.append({here!r}); import released; released.release_and_resume({str(directory)!r})"
    )
    assert done.returncode == 0, done.stderr[-3000:]


@torch._dynamo.config.patch(recompile_limit=2)
def test_each_engine_of_a_process_compiles_on_its_own(tmp_path: Path) -> None:
    """Dynamo allows few recompilations per code object; engines must not eat up each other's."""
    for i in range(4):
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 16 * (i + 1)}))
        with Engine(
            model_path=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, enable_torch_compile=True
        ) as engine:
            assert engine.stats()["compiles"] == 1
            assert len(engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})["output_ids"]) == 3


@pytest.mark.parametrize("layout", speculation.LAYOUTS)
def test_bits_are_those_without_speculation(reference: Any, layout: str) -> None:
    speculation.check_layout(reference, speculation.LAYOUTS[layout], rounds=2)
