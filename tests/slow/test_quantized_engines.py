"""Weights in few bits in a compiled model and over two ranks: the bits of the eager model of one."""

import importlib
import sys
from pathlib import Path
from typing import Any

from fengine import Engine
from fengine.worker.hub import BOX

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
quantize: Any = importlib.import_module("quantize")


def test_compiled_and_over_two_ranks(tmp_path: Path) -> None:
    quantize.quantize(BOX, tmp_path / "few", "w4a16", 32)
    asked: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 16}, "return_logprob": True}
    found = []
    for how in ({}, {"enable_torch_compile": True}, {"tp_size": 2}):
        facts: dict[str, Any] = {"model_path": str(tmp_path / "few"), "device": "cpu", "max_total_tokens": 256}
        with Engine(**facts | how) as engine:
            found.append(engine.generate("Once upon a time", **asked)["meta_info"]["output_token_logprobs"])
    assert found[0] == found[1] == found[2] and len(found[0]) == 16
