"""`ServerArgs` field by field: what is honoured changes the configuration, what is refused is refused by name."""

import argparse
from dataclasses import asdict, fields
from typing import Any

import pytest
from checksum import checksum_engine, expected

from fengine.api.engine import Engine
from fengine.api.foreign_args import ALSO_OFF, HARMLESS
from fengine.api.server_args import REFUSED, ServerArgs
from fengine.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig
from fengine.errors import ConfigError, UnsupportedFeatureError

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
    "enable_torch_compile": (False, lambda c: c.compile.enabled is False),
    "is_embedding": (True, lambda c: c.model.is_embedding),
    "speculative_algorithm": ("NGRAM", lambda c: c.speculation.algorithm.name == "ngram"),
    "speculative_num_draft_tokens": (5, lambda c: c.speculation.num_draft_tokens == 5),
    "speculative_ngram_min_match_window_size": (3, lambda c: c.speculation.ngram_min_match == 3),
    "speculative_ngram_max_match_window_size": (9, lambda c: c.speculation.ngram_max_match == 9),
    "random_seed": (5, lambda c: c.random_seed == 5),
    "enable_lora": (True, lambda c: c.lora.enabled),
    "lora_paths": (["a=b"], lambda c: c.lora.paths == ("a=b",) and c.lora.on),
    "max_loras_per_batch": (3, lambda c: c.lora.max_loras_per_batch == 3),
    "max_lora_rank": (32, lambda c: c.lora.max_lora_rank == 32),
    "lora_target_modules": (["q_proj"], lambda c: c.lora.target_modules == ("q_proj",)),
    "max_loaded_loras": (9, lambda c: c.lora.max_loaded_loras == 9),
    "numerics": ("fast", lambda c: c.numerics.name == "fast"),
}
BY_THE_ENGINE = set(  # they shape calls and outputs, not the config; tests/test_doors_*.py
    "incremental_streaming_output stream_output enable_metrics stream_interval preferred_sampling_params "
    "allow_auto_truncate enable_custom_logit_processor enable_return_hidden_states return_hidden_states_mode "
    "enable_priority_scheduling schedule_low_priority_values_first default_priority_value weight_version chat_template "
    "hf_chat_template_name default_chat_template_kwargs grammar_backend constrained_json_whitespace_pattern "
    "constrained_json_disable_any_whitespace".split()
)
ACCEPTED = [name for group in HARMLESS.values() for name in group]


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


def test_every_field_is_honoured_harmless_or_refused_and_only_one_of_these() -> None:
    kinds = [set(HONOURED), BY_THE_ENGINE, set(ACCEPTED), set(REFUSED)]
    assert set.union(*kinds) == {f.name for f in fields(ServerArgs)}
    assert (
        sum(map(len, kinds))
        == len(fields(ServerArgs))
        == len(set(ACCEPTED)) + len(set(REFUSED)) + len([*HONOURED, *BY_THE_ENGINE])
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_harmless_field_changes_nothing(name: str) -> None:
    for value in (None, "something", 7, [1]):
        assert given(name, value).to_config() == BASE


def test_a_refusal_tells_every_name_with_its_value_and_reason() -> None:
    with pytest.raises(UnsupportedFeatureError) as error:
        ServerArgs(model_path="x", tp_size=2, quantization="fp8", dp_size=2).to_config()
    for words in ("tp_size=2 (several GPUs", "quantization='fp8' (quantized weights", "dp_size=2 (several GPUs"):
        assert words in str(error.value)
    for name, values in ALSO_OFF.items():
        for value in values:
            assert given(name, value).to_config() == BASE
    for wrong in (True, 1.5, "1"):  # a bool is no int, though Python has it equal
        with pytest.raises(UnsupportedFeatureError):
            given("tp_size", wrong).to_config()


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("stream_interval", 0, "stream_interval must be at least 1"),
        ("return_hidden_states_mode", "all", "return_hidden_states_mode must be last or full"),
        ("weight_version", "", "weight_version"),
        ("preferred_sampling_params", "{", "preferred_sampling_params"),
        ("preferred_sampling_params", '{"temprature": 1}', "Did you mean 'temperature'"),
        ("preferred_sampling_params", "[1]", "must be a dict"),
        ("preferred_sampling_params", {"top_p": 2}, "top_p must be in"),
        ("schedule_policy", "random", "schedule_policy must be one of fcfs, lpm"),
        ("load_format", "pt", "load_format must be one of"),
        ("enable_metrics", 1, "enable_metrics must be bool"),
        ("default_priority_value", "1", "default_priority_value must be"),
    ],
)  # fmt: skip
def test_bad_values_are_told(name: str, bad: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given(name, bad).to_config()


def test_the_record_goes_through_asdict_and_the_command_line() -> None:
    args = ServerArgs(model_path="box", page_size=4, preferred_sampling_params='{"top_k": 3}')
    assert ServerArgs(**asdict(args)) == args and ServerArgs("box") == ServerArgs(model_path="box")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert ServerArgs.from_cli_args(parser.parse_args(["--model-path", "box"])) == ServerArgs(model_path="box")
    words = (
        "--model-path box --page-size 4 --mem-fraction-static 0.5 --disable-cuda-graph --tp-size 2 --no-enable-metrics"
    )
    parsed = ServerArgs.from_cli_args(parser.parse_args([*words.split(), "--disable-overlap-schedule"]))
    assert (parsed.page_size, parsed.mem_fraction_static, parsed.tp_size) == (4, 0.5, 2)  # type: ignore[attr-defined]
    assert (parsed.disable_cuda_graph, parsed.disable_overlap_schedule, parsed.enable_metrics) == (True, True, False)


@pytest.mark.parametrize("name", ["incremental_streaming_output", "stream_output"])
def test_incremental_streams_give_every_token_once(name: str) -> None:
    with checksum_engine() as engine:
        for value in (True, False):
            stream = Engine.from_parts(engine._parts, given(name, value)).generate(
                input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 9}, stream=True
            )
            chunks = [chunk["output_ids"] for chunk in stream]
            assert (sum(chunks, []) if value else chunks[-1]) == expected([5, 6], 9)


def test_metrics_add_the_latency_of_the_first_token() -> None:
    with checksum_engine() as engine:
        for value in (True, False):
            output = Engine.from_parts(engine._parts, given("enable_metrics", value)).generate(input_ids=[5])
            assert ("first_token_latency" in output["meta_info"]) == value
