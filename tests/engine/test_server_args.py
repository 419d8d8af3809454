"""`ServerArgs` field by field: what is honoured changes the configuration, what is refused is refused by name."""

import argparse
import json
import logging
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from checksum import checksum_engine, expected

from fengine.api.engine import Engine
from fengine.api.server_args import ServerArgs
from fengine.api.sglang_args import ALSO_OFF, FOREIGN, HARMLESS, REFUSED
from fengine.config import CacheConfig, CompileConfig, EngineConfig, ModelConfig
from fengine.core.sampling_params import RECOMMENDED
from fengine.engine import load
from fengine.errors import ConfigError, FengineError, UnknownParameterError, UnsupportedFeatureError
from fengine.eval.runs.answering import sampling_of
from fengine.eval.runs.config import EvalConfig, SamplingConfig
from fengine.eval.tasks.task import Ask
from fengine.worker import hub
from fengine.worker.cuda_graphs import Buckets
from fengine.worker.hub import BOX

BASE = ServerArgs(model_path="box").to_config()
DOCUMENTED = json.loads((Path(__file__).parent / "sglang_documented_args.json").read_text())

HONOURED: dict[str, tuple[Any, Any]] = {  # field -> a value, and what of the configuration it must become
    "tp_size": (2, lambda c: c.parallel.tp_size == 2),
    "dp_size": (2, lambda c: c.parallel.dp_size == 2),
    "dp_restart": (True, lambda c: c.parallel.dp_restart),
    "model_path": ("elsewhere", lambda c: c.model.path == "elsewhere"),
    "tokenizer_path": ("t", lambda c: c.model.tokenizer_path == "t"),
    "skip_tokenizer_init": (True, lambda c: c.model.skip_tokenizer_init),
    "load_format": ("dummy", lambda c: c.model.load_format.name == "dummy"),
    "dtype": ("half", lambda c: c.model.dtype.name == "float16"),
    "device": ("cpu", lambda c: c.model.device == "cpu"),
    "base_gpu_id": (2, lambda c: c.model.gpu_id == 2),
    "quantization": ("gptq_marlin", lambda c: c.model.quantization == "gptq"),
    "download_dir": ("d", lambda c: c.model.download_dir == "d"),
    "revision": ("main", lambda c: c.model.revision == "main"),
    "context_length": (99, lambda c: c.model.context_length == 99),
    "json_model_override_args": ('{"a": 1}', lambda c: c.model.json_overrides == '{"a": 1}'),
    "mem_fraction_static": (0.5, lambda c: c.cache.mem_fraction_static == 0.5),
    "max_total_tokens": (100, lambda c: c.cache.max_total_tokens == 100),
    "max_running_requests": (7, lambda c: c.scheduler.max_running_requests == 7),
    "max_queued_requests": (3, lambda c: c.scheduler.max_queued_requests == 3),
    "chunked_prefill_size": (33, lambda c: c.scheduler.max_step_tokens == 33),
    "page_size": (4, lambda c: c.cache.page_size == 4),
    "schedule_policy": ("shortest-prefill-first", lambda c: c.scheduler.policy.name == "shortest_prefill_first"),
    "disable_radix_cache": (True, lambda c: not c.cache.prefix_cache),
    "disable_overlap_schedule": (True, lambda c: c.scheduler.overlap is False),
    "disable_cuda_graph": (True, lambda c: not c.compile.cuda_graph),
    "disable_prefill_cuda_graph": (True, lambda c: not c.compile.prefill_graphs),
    "disable_decode_cuda_graph": (True, lambda c: c.compile.graph_rows == 0),
    "cuda_graph_max_bs": (8, lambda c: c.compile.graph_rows == 8),
    "cuda_graph_bs": ([1, 16, 4], lambda c: c.compile.graph_rows == 16),
    "cuda_graph_max_bs_decode": (2, lambda c: c.compile.graph_rows == 2),
    "cuda_graph_bs_decode": ([2, 3], lambda c: c.compile.graph_rows == 3),
    "cuda_graph_backend_decode": ("disabled", lambda c: c.compile.graph_rows == 0),
    "cuda_graph_backend_prefill": ("disabled", lambda c: not c.compile.prefill_graphs),
    "enable_torch_compile": (False, lambda c: c.compile.enabled is False),
    "allow_image_urls": (True, lambda c: c.multimodal.allow_image_urls),
    "allowed_media_domains": (["a.org"], lambda c: c.multimodal.image_hosts == ("a.org",)),
    "image_folder": ("/shared", lambda c: c.multimodal.image_folder == "/shared"),
    "image_cache_mib": (9, lambda c: c.multimodal.cache_mib == 9),
    "media_url_max_file_size_mb": (9, lambda c: c.multimodal.max_image_mib == 9),
    "max_image_pixels": (9, lambda c: c.multimodal.max_image_pixels == 9),
    "kv_cache_dtype": ("fp8_e4m3", lambda c: c.cache.kv_cache_dtype == "fp8_e4m3"),
    "is_embedding": (True, lambda c: c.model.is_embedding),
    "speculative_algorithm": ("NGRAM", lambda c: c.speculation.algorithm.name == "ngram"),
    "speculative_draft_model_path": ("small", lambda c: c.speculation.draft == "small"),
    "speculative_adaptive": (False, lambda c: not c.speculation.adaptive),
    "speculative_num_steps": (4, lambda c: c.speculation.num_draft_tokens == 5),
    "speculative_num_draft_tokens": (5, lambda c: c.speculation.num_draft_tokens == 5),
    "speculative_ngram_min_match_window_size": (3, lambda c: c.speculation.ngram_min_match == 3),
    "speculative_ngram_max_match_window_size": (9, lambda c: c.speculation.ngram_max_match == 9),
    "random_seed": (5, lambda c: c.random_seed == 5),
    "enable_lora": (True, lambda c: c.lora.enabled),
    "lora_paths": (['{"lora_name": "a", "lora_path": "b"}'], lambda c: c.lora.paths == ("a=b",) and c.lora.on),
    "max_loras_per_batch": (3, lambda c: c.lora.max_loras_per_batch == 3),
    "max_lora_rank": (32, lambda c: c.lora.max_lora_rank == 32),
    "lora_target_modules": (["q_proj"], lambda c: c.lora.target_modules == ("q_proj",)),
    "max_loaded_loras": (9, lambda c: c.lora.max_loaded_loras == 9),
    "numerics": ("fast", lambda c: c.numerics.name == "fast"),
    "sampling_defaults": ("model", lambda c: c.model.sampling_defaults == "model"),
}
BY_THE_ENGINE = set(  # they shape calls, outputs and logs, not the config
    "incremental_streaming_output stream_output enable_metrics stream_interval preferred_sampling_params "
    "allow_auto_truncate enable_custom_logit_processor enable_return_hidden_states "
    "return_hidden_states_mode "
    "enable_priority_scheduling schedule_low_priority_values_first default_priority_value weight_version chat_template "
    "hf_chat_template_name default_chat_template_kwargs grammar_backend constrained_json_whitespace_pattern "
    "constrained_json_disable_any_whitespace return_hidden_states log_level log_requests log_requests_level "
    "crash_dump_folder served_model_name enable_weights_cpu_backup".split()
)


def given(name: str, value: Any, **more: Any) -> ServerArgs:
    settings: dict[str, Any] = {"model_path": "box", name: value}
    return ServerArgs(**settings | more)


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_field_reaches_the_configuration(name: str) -> None:
    value, holds = HONOURED[name]
    guessing = name in ("speculative_num_steps", "speculative_num_draft_tokens")
    if guessing:
        with pytest.raises(ConfigError, match=f"{name}={value} is given, but no speculative_algorithm"):
            given(name, value).to_config()
    more = {"speculative_algorithm": "NGRAM"} if guessing else {}
    assert holds(given(name, value, **more).to_config()) and not holds(BASE)


def test_sglangs_other_settings_are_accepted_or_refused_by_name() -> None:
    for group in HARMLESS.values():
        for value in (None, "something", 7, [1]):
            settings: dict[str, Any] = dict.fromkeys(group, value)
            assert ServerArgs("box", **settings).to_config() == BASE, group
    for reason, group in REFUSED.items():
        for name, default in group.items():
            with pytest.raises(UnsupportedFeatureError) as error:
                given(name, "something").to_config()
            assert f"{name}='something' ({reason})" in str(error.value)
            for off in (default, None, *ALSO_OFF.get(name, ())):
                assert given(name, off).to_config() == BASE, name


def test_the_defaults_are_the_configurations() -> None:
    assert BASE == EngineConfig(ModelConfig(path="box"), CacheConfig(), compile=CompileConfig())


def test_every_field_is_honoured_harmless_or_refused_and_only_one_of_these() -> None:
    foreign = [name for groups in (HARMLESS, REFUSED) for group in groups.values() for name in group]
    names = [f.name for f in fields(ServerArgs)]
    assert sorted(names) == sorted([*HONOURED, *BY_THE_ENGINE, *foreign]) and len(foreign) == len(FOREIGN)
    assert set(ALSO_OFF) <= {name for group in REFUSED.values() for name in group}


def test_what_the_documents_print_is_accepted() -> None:
    for name, value in DOCUMENTED.items():
        given(name, value).to_config()


def test_all_that_the_documents_print_at_once_makes_an_engine() -> None:
    with Engine(**(DOCUMENTED | {"model_path": "box", "tokenizer_path": "box", "device": "cpu"})) as engine:
        assert engine.generate("Hello", {"max_new_tokens": 2})["text"]


def test_hints_are_accepted_and_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    hints: dict[str, Any] = {
        "attention_backend": "fa3", "mm_attention_backend": "fa3", "sampling_backend": "flashinfer",
        "grammar_backend": "xgrammar", "torch_compile_max_bs": 8, "show_time_cost": True, "kv_cache_dtype": "bfloat16",
        "trust_remote_code": True, "enable_memory_saver": True, "gpu_id_step": 1, "nnodes": 1, "node_rank": 0,
    }  # fmt: skip
    with caplog.at_level(logging.INFO, logger="fengine"):
        assert ServerArgs(model_path="box", **hints).to_config() == BASE
    (line,) = caplog.messages
    assert "attention_backend='fa3' (fengine's own kernels" in line and "grammars are llguidance's" in line
    assert given("dtype", torch.bfloat16).to_config().model.dtype.name == "bfloat16"


def test_unknown_and_missing_settings_are_told_with_the_nearest_name() -> None:
    with pytest.raises(UnknownParameterError, match="Did you mean 'page_size'"):
        Engine(model_path="box", pagesize=4)  # type: ignore[call-arg]
    for name, said in (("temprature", r"nearest is a sampling parameter of a call: generate\(prompt, {'temperature'"),
                       ("tensor_parallel_size", "It is 'tp_size' here"), ("max_model_len", "'context_length'"),
                       ("max_tokens", "It is a sampling .*{'max_new_tokens'"), ("tp", "It is 'tp_size' here"),
                       ("model_name", "It is 'model_path' here")):  # fmt: skip
        with pytest.raises(UnknownParameterError, match=said):
            ServerArgs("box", **{name: 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"it needs a model_path: Engine\(model_path='box'\)"):
        Engine()  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="server_args must be a ServerArgs, got dict"):
        Engine(server_args={"model_path": "box"})  # type: ignore[call-overload]
    with pytest.raises(FengineError, match="unknown argument 'nothing_like_it'"):
        ServerArgs("box", nothing_like_it=1)  # type: ignore[call-arg]


def test_a_refusal_tells_every_name_with_its_value_and_reason() -> None:
    with pytest.raises(UnsupportedFeatureError) as error:
        ServerArgs(model_path="x", ep_size=2, quantization="gguf", pp_size=2).to_config()  # type: ignore[call-arg]
    for words in ("ep_size=2 (several GPUs", "quantization='gguf' (quantized weights", "pp_size=2 (several GPUs"):
        assert words in str(error.value)
    for wrong in (True, 1.5, "1"):  # a bool is no int, though Python has it equal
        with pytest.raises(UnsupportedFeatureError):
            given("pp_size", wrong).to_config()


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("stream_interval", 0, "stream_interval must be at least 1"),
        ("return_hidden_states_mode", "all", "return_hidden_states_mode must be one of last, full"),
        ("weight_version", "", "weight_version"),
        ("preferred_sampling_params", "{", "preferred_sampling_params"),
        ("preferred_sampling_params", '{"temprature": 1}', "Did you mean 'temperature'"),
        ("preferred_sampling_params", "[1]", "must be a JSON object"),
        ("preferred_sampling_params", '{"top_k": 1, "top_k": 2}', "key 'top_k' occurs twice"),
        ("json_model_override_args", '{"a": 1, "a": 2}', "key 'a' occurs twice"),
        ("preferred_sampling_params", {"top_p": 2}, "top_p must be in"),
        ("schedule_policy", "hrrn", "schedule_policy must be one of fcfs, lpm, lof, random"),
        ("load_format", "pt", "load_format must be one of"),
        ("dtype", "int3", "dtype must be one of"),
        ("enable_metrics", 1, "enable_metrics must be bool"),
        ("default_priority_value", "1", "default_priority_value must be"),
        ("base_gpu_id", -1, "base_gpu_id must be at least 0"),
        ("json_model_override_args", "[1]", "must be a JSON object"),
        ("json_model_override_args", "{", "json_model_override_args"),
        ("sampling_defaults", "own", "sampling_defaults must be one of model, openai"),
        ("cuda_graph_bs", ["many"], "cuda_graph_bs must be numbers of rows"),
        ("log_level", "loud", "log_level must be one of"),
        ("log_requests_level", 9, "log_requests_level must be"),
        ("grammar_backend", "mine", "grammar_backend must be"),
    ],
)  # fmt: skip
def test_bad_values_are_told(name: str, bad: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given(name, bad).to_config()


@pytest.mark.parametrize(
    "settings",
    [
        {"crash_dump_folder": "~nobody"},
        {"max_total_tokens": 5},  # less than a page has by default
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "box", "speculative_num_steps": 16},
        {"chat_template": "chatml"},
        {"chat_template": "{{ messages }}", "hf_chat_template_name": "default"},
        {"hf_chat_template_name": "rag"},
    ],
)
def test_what_cannot_be_together_is_refused_before_weights_are_read(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_params", None)
    with pytest.raises(ConfigError, match=list(settings)[-1].removeprefix("speculative_").replace("steps", "draft")):
        Engine(model_path="box", **settings)


def test_two_names_for_a_gpu_must_agree() -> None:
    for device in (None, "cpu", "cuda", "cuda:2"):
        assert ServerArgs("box", device=device, base_gpu_id=2).to_config().model.gpu_id == 2
    with pytest.raises(ConfigError, match="name two GPUs"):
        ServerArgs("box", device="cuda:1", base_gpu_id=2).to_config()


def test_the_models_own_sampling_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    """generation_config.json < preferred_sampling_params < the call; without the word nothing of the file holds."""
    model = tiny_checkpoints.write(tmp_path / "m", "llama")
    recommended = {"temperature": 0.4, "top_k": 0, "repetition_penalty": 1.5, "do_sample": True, "max_length": 9}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    own = {"temperature": 0.4, "top_k": -1, "repetition_penalty": 1.5}
    asked: Any = {"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True}
    cases: list[tuple[Any, dict[str, Any]]] = [
        ({}, {}),
        ({"sampling_defaults": "openai"}, {}),
        ({"sampling_defaults": "model"}, own),
        ({"sampling_defaults": "model", "preferred_sampling_params": {"top_k": 2}}, own | {"top_k": 2}),
    ]
    for given, holds in cases:
        with Engine(model_path=str(model), skip_tokenizer_init=True, device="cpu", **given) as engine:
            plain = Engine.from_parts(engine._parts)
            for more in ({}, {"temperature": 0.9}):
                got = engine.generate(input_ids=[5, 6], sampling_params=asked | more)["output_ids"]
                assert got == plain.generate(input_ids=[5, 6], sampling_params=holds | asked | more)["output_ids"]
            assert engine.get_model_info()["preferred_sampling_params"] == (holds or None)
            told = engine.config.model.sampling_defaults  # what applies goes to the records of runs
            assert json.loads(told) == own if "model" in given.values() else told == "openai"
    (model / "generation_config.json").write_text('{"typical_p": 0.3}')
    (model / "model.safetensors").unlink()  # it is not read for a refusal
    with pytest.raises(UnsupportedFeatureError, match="recommends what is not built: typical_p"):
        Engine(model_path=str(model), skip_tokenizer_init=True, sampling_defaults="model")


def test_a_model_of_the_hub_lies_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **more: asked.append((name, more["cache_dir"])) or BOX)
    draft: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "some/draft"}
    with Engine(model_path="some/model", download_dir="cache", device="cpu", **draft) as engine:
        assert engine.generate("Hi", {"max_new_tokens": 1})["output_ids"]
        assert engine.update_weights_from_disk("some/update")[0]
    assert set(asked) == {(f"some/{name}", "cache") for name in ("model", "draft", "update")}


def test_a_run_leaves_to_the_model_what_it_does_not_set() -> None:
    for defaults, left in (("openai", set()), ("model", set(RECOMMENDED) - {"temperature"})):
        engine = EngineConfig(ModelConfig(sampling_defaults=defaults))
        config = EvalConfig(engine=engine, sampling=SamplingConfig(temperature=0.8))
        asked = sampling_of(config, Ask("a", {}, "generate"), "0", 0)
        assert asked["temperature"] == 0.8 and set(RECOMMENDED) - asked.keys() == left
        assert sampling_of(config, Ask("a", {"temperature": 0.1}, "generate"), "0", 0)["temperature"] == 0.1


def test_values_over_those_of_the_config_are_applied_and_checked_like_them() -> None:
    for given in ({"max_position_embeddings": 4096}, '{"max_position_embeddings": 4096}'):
        with Engine(model_path="box", json_model_override_args=given, allow_auto_truncate=True) as engine:
            assert engine.tokenizer_manager.context_len == 4096
            assert engine.tokenizer.max_chars == 8 * 4096 + 4096
            with pytest.warns(UserWarning, match="was truncated to its first 2047 tokens"):  # however long it is
                engine.generate("a " * 40_000, {"max_new_tokens": 0})
    with pytest.raises(FengineError, match="hidden_act"):
        Engine(model_path="box", json_model_override_args={"hidden_act": "gelu"})


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


def test_graphs_are_captured_where_they_are_wanted() -> None:
    few = Buckets(64, 512, True, False, prefill_graphs=False, graph_rows=8)
    assert {bucket.rows for bucket in few.all() if bucket.graph} == {1, 2, 4, 8}
    assert few.of(3, 3).graph and not few.of(9, 9).graph and not few.of(9, 3).graph
    prompts = Buckets(64, 512, True, False, graph_rows=0)
    assert prompts.of(9, 3).graph and not any(prompts.of(rows, rows).graph for rows in range(1, 65))
    assert not any(bucket.graph for bucket in Buckets(64, 512, False, False, graph_rows=8).all())


def test_a_variable_that_asks_for_other_logprobs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "False")
    assert ServerArgs(model_path="box").to_config() == BASE
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with pytest.raises(UnsupportedFeatureError, match="SGLANG_RETURN_ORIGINAL_LOGPROB of the environment"):
        ServerArgs(model_path="box").to_config()


def test_timeouts_come_from_sglangs_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (BASE.scheduler.waiting_timeout, BASE.scheduler.running_timeout) == (None, None)
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "0.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "-1")
    told = ServerArgs(model_path="box").to_config().scheduler
    assert (told.waiting_timeout, told.running_timeout) == (0.5, None)
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="SGLANG_REQ_RUNNING_TIMEOUT='soon' must be a number of seconds"):
        ServerArgs(model_path="box").to_config()
