"""An engine whose keys and values are kept in FP8: what it takes, how near it is, and what is refused."""

from typing import Any

import pytest

from fengine import Engine
from fengine.errors import ConfigError, UnsupportedFeatureError

FEW: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}


def test_it_takes_a_quarter_of_the_bytes_on_a_cpu_and_the_logprobs_are_near() -> None:
    where: dict[str, Any] = {"model_path": "box", "device": "cpu", "max_total_tokens": 256}
    asked: dict[str, Any] = {"sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True}
    found = []
    for options in ({}, FEW):
        with Engine(**where, **options) as llm:
            meta = llm.generate("Once upon a time there was a little fox.", logprob_start_len=0, **asked)["meta_info"]
            size = llm.get_server_info()["internal_states"][0]["memory_usage"]["kvcache"]
            found.append((size, [lp for lp, _, _ in meta["input_token_logprobs"][1:]]))
    (whole, want), (few, got) = found
    assert 0.25 < few / whole < 0.28
    errors = [abs(a - b) for a, b in zip(got, want, strict=True)]
    assert 0 < max(errors) < 0.5


def test_what_is_not_built_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"kv_cache_dtype='fp8_e5m2' .*auto, fp8_e4m3"):
        Engine(model_path="box", device="cpu", kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be str"):
        Engine(model_path="box", device="cpu", kv_cache_dtype=8)  # type: ignore[arg-type]
