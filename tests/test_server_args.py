"""`ServerArgs` field by field: what is honoured changes the configuration, what is refused is refused by name."""

from dataclasses import fields
from typing import Any

import pytest
from checksum import checksum_engine, expected

from fengine.build import Parts
from fengine.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig
from fengine.engine import Engine
from fengine.errors import UnsupportedFeatureError
from fengine.server_args import REFUSED, ServerArgs

BASE = ServerArgs(model_path="box").to_config()

HONOURED: dict[str, tuple[Any, Any]] = {  # field -> a value, and what of the configuration it must become
    "model_path": ("elsewhere", lambda c: c.model.path == "elsewhere"),
    "tokenizer_path": ("t", lambda c: c.model.tokenizer_path == "t"),
    "skip_tokenizer_init": (True, lambda c: c.model.skip_tokenizer_init),
    "load_format": ("dummy", lambda c: c.model.load_format.name == "dummy"),
    "dtype": ("half", lambda c: c.model.dtype.name == "float16"),
    "device": ("cpu", lambda c: c.model.device == "cpu"),
    "revision": ("main", lambda c: c.model.revision == "main"),
    "context_length": (99, lambda c: c.model.context_length == 99),
    "mem_fraction_static": (0.5, lambda c: c.cache.mem_fraction_static == 0.5),
    "max_total_tokens": (100, lambda c: c.cache.max_total_tokens == 100),
    "max_running_requests": (7, lambda c: c.scheduler.max_running_requests == 7),
    "chunked_prefill_size": (33, lambda c: c.scheduler.max_step_tokens == 33),
    "page_size": (4, lambda c: c.cache.page_size == 4),
    "schedule_policy": ("lpm", lambda c: c.scheduler.policy.name == "lpm"),
    "disable_radix_cache": (True, lambda c: not c.cache.prefix_cache),
    "disable_overlap_schedule": (True, lambda c: c.scheduler.overlap is False),
    "disable_cuda_graph": (True, lambda c: not c.compile.cuda_graph),
    "random_seed": (5, lambda c: c.random_seed == 5),
    "numerics": ("fast", lambda c: c.numerics.name == "fast"),
}
BY_THE_ENGINE = {
    "incremental_streaming_output",
    "stream_output",
    "enable_metrics",
}  # they shape outputs, not the config


def given(name: str, value: Any) -> ServerArgs:
    return ServerArgs(**({"model_path": "box"} | {name: value}))


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_field_reaches_the_configuration(name: str) -> None:
    value, holds = HONOURED[name]
    assert holds(given(name, value).to_config()) and not holds(BASE)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"{name}='something'"):
        given(name, "something").to_config()
    default = next(f.default for f in fields(ServerArgs) if f.name == name)
    assert given(name, default).to_config() == given(name, None).to_config() == BASE


def test_the_defaults_are_the_configurations() -> None:
    assert BASE == EngineConfig(ModelConfig(path="box"), CacheConfig(), compile=CompileConfig())
    names = {f.name for f in fields(ServerArgs)}
    assert names >= set(HONOURED) | BY_THE_ENGINE and not (set(HONOURED) | BY_THE_ENGINE) & set(REFUSED)


def over(parts: Parts, args: ServerArgs) -> Engine:
    engine = Engine.__new__(Engine)
    engine._start(parts, args)
    return engine


@pytest.mark.parametrize("name", ["incremental_streaming_output", "stream_output"])
def test_incremental_streams_give_every_token_once(name: str) -> None:
    with checksum_engine() as engine:
        for value in (True, False):
            stream = over(engine._parts, given(name, value)).generate(
                input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 9}, stream=True
            )
            chunks = [chunk["output_ids"] for chunk in stream]
            assert (sum(chunks, []) if value else chunks[-1]) == expected([5, 6], 9)


def test_metrics_add_the_latency_of_the_first_token() -> None:
    with checksum_engine() as engine:
        for value in (True, False):
            output = over(engine._parts, given("enable_metrics", value)).generate(input_ids=[5])
            assert ("first_token_latency" in output["meta_info"]) == value
