"""What an engine tells about itself, its caches' flushing, and profiles of its steps."""

import gc
import gzip
import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from checksum import checksum_engine
from test_weights import ask, between_steps, start

import fengine
from fengine import Engine, ServerArgs
from fengine.config import EngineConfig
from fengine.errors import EngineClosedError, InvalidRequestError, ProfileError, UnsupportedFeatureError
from fengine.eval.cli import engines as engines_file
from fengine.eval.cli.engines import EngineCache


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with start(Path("box"), page_size=8, random_seed=5) as engine:
        yield engine


# -- information ------------------------------------------------------------------------------------------------------


def test_server_info_has_every_setting_as_resolved(engine: Engine) -> None:
    info = engine.get_server_info()
    assert {field.name for field in fields(ServerArgs)} <= info.keys()
    assert json.loads(json.dumps(info)).keys() == info.keys()  # plain values
    resolved = {"model_path": "box", "page_size": 8, "random_seed": 5, "device": "cpu", "max_total_tokens": 2048,
                "enable_torch_compile": False, "max_running_requests": 64, "chunked_prefill_size": 512,
                "disable_overlap_schedule": True,
                "load_format": "auto"}  # fmt: skip
    assert {name: info[name] for name in resolved} == resolved
    assert info["version"] == fengine.__version__ and info["status"] == "ready"
    seconds = info["startup_time"]
    phases = [seconds[name] for name in ("load_weight", "kv_cache_allocation", "tokenizer_e2e")]
    assert all(one > 0 for one in phases) and sum(phases) < seconds["scheduler_e2e"]
    assert seconds["cuda_graph"].keys() >= {"prefill", "decode", "target_verify", "draft_decode"}
    assert info["max_total_num_tokens"] == 2048 and type(info["launch_command"]) is str
    assert info["max_req_input_len"] == min(2048, info["context_length"]) - 1
    [state] = info["internal_states"]
    assert state["world_size"] == 1 and state["effective_max_running_requests_per_dp"] == 64
    usage = state["memory_usage"]
    stored = (Path(fengine.__file__).parent / "models/box/model.safetensors").stat().st_size
    assert 0.9 * stored < usage["weight"] * 2**30 < 1.1 * stored and usage["token_capacity"] == 2048
    assert usage["kvcache"] > 0 and usage["graph"] == 0


def test_throughput_counts_output_tokens(engine: Engine) -> None:
    ask(engine, count=5)
    state = engine.get_server_info()["internal_states"][0]
    assert state["output_tokens"] >= 15 and state["last_gen_throughput"] > 0


def test_model_info(engine: Engine) -> None:
    info = engine.get_model_info()
    assert info["model_path"] == info["served_model_name"] == "box" and info["is_generation"] is True
    assert info["weight_version"] == "default" and info["load_format"] == "auto"
    assert info["architectures"] == ["LlamaForCausalLM"] and info["model_type"] == "llama"
    assert info["disaggregation_mode"] == "null" and info["reasoning_parser"] is None


def test_load(engine: Engine) -> None:
    def told(load: Any) -> Any:
        assert load["num_total_reqs"] == load["num_reqs"] and load["num_used_tokens"] == load["num_tokens"]
        return {name: load[name] for name in ("dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens")}

    (load,) = engine.get_load()
    assert told(load) == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    assert load["max_total_num_tokens"] == engine._parts.pool_tokens and load["token_usage"] == 0
    seen: list[Any] = []
    between_steps(engine, 3, lambda: seen.extend(engine.get_load()))
    ask(engine, [[1] * 8, [2] * 17])
    [load] = seen
    assert told(load) == {"dp_rank": 0, "num_reqs": 2, "num_waiting_reqs": 0, "num_tokens": (2 + 3) * 8}
    assert engine.get_all_child_pids() == []


def test_the_checksum_engine_tells_about_itself_too() -> None:
    """An engine over parts made by hand: no checkpoint, no weights."""
    with checksum_engine() as engine:
        assert engine.get_model_info()["model_type"] is None
        assert engine.get_server_info()["internal_states"][0]["memory_usage"]["weight"] == 0


def test_flush_cache_says_whether_it_could() -> None:
    refused: list[Any] = []
    with checksum_engine() as engine:
        between_steps(engine, 3, lambda: refused.append(engine.flush_cache()))
        engine.generate(input_ids=list(range(20)), sampling_params={"max_new_tokens": 5})
        assert refused[0].success is False and "running" in refused[0].message
        assert engine.stats()["pages_cached"] > 0
        success, message = engine.flush_cache()
        assert success is True and message and engine.stats()["pages_cached"] == 0
        assert engine.flush_cache().success


def test_freeze_gc(engine: Engine) -> None:
    before = gc.get_freeze_count()
    engine.freeze_gc()
    assert gc.get_freeze_count() > before


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen, as where a process begins, and commands do it; behind it all is again: engines that end
    collect."""
    monkeypatch.setattr(engines_file, "gc", gc)
    gc.unfreeze()
    yield
    gc.freeze()


class Parts:
    """What only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


class Fake:
    """An engine that frees its parts as engines do."""

    def __init__(self) -> None:
        self.parts: Parts | None = Parts()

    def shutdown(self) -> None:
        self.parts = None
        gc.collect()


def test_a_command_spares_the_collector_what_is_there_when_its_engine_is_open(thawed: None) -> None:
    assert gc.get_freeze_count() == 0
    with EngineCache(lambda _: Fake()) as engines:
        parts = weakref.ref(engines.get(EngineConfig(random_seed=8)).parts)
        assert gc.get_freeze_count() > 100_000
        assert engines.get(EngineConfig(random_seed=8)).parts is parts()
        engines.get(EngineConfig(random_seed=9))
        assert parts() is None and gc.get_freeze_count() > 100_000  # the memory of an engine comes back
    assert gc.get_freeze_count() == 0


def test_calls_without_a_counterpart_are_refused_by_name(engine: Engine) -> None:
    calls: list[Callable[[], Any]] = [
        engine.start_expert_distribution_record,
        engine.stop_expert_distribution_record,
        engine.dump_expert_distribution_record,
        lambda: engine.collective_rpc("save_remote_model", url="x"),
        lambda: engine.save_remote_model(url="x"),
    ]
    for call in calls:
        with pytest.raises(UnsupportedFeatureError):
            call()


# -- profiles ---------------------------------------------------------------------------------------------------------


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def steps(path: Path) -> list[str]:
    found = [e for e in events(path) if e.get("ph") == "X" and e["name"].startswith("step: ")]
    return [e["name"] for e in sorted(found, key=lambda e: e["ts"]) if e.get("cat") != "gpu_user_annotation"]


def test_a_profile_of_all_steps(engine: Engine, tmp_path: Path) -> None:
    before = ask(engine)
    engine.flush_cache()
    engine.start_profile(output_dir=str(tmp_path / "new" / "folder"), profile_id="run", profile_prefix="night",
                         record_shapes=True)  # fmt: skip
    assert ask(engine) == before
    engine.stop_profile()
    [path] = (tmp_path / "new" / "folder").iterdir()
    assert path.name == "night-run.trace.json.gz"
    assert steps(path) == ["step: 48 tokens, 3 rows", *["step: 3 tokens, 3 rows"] * 7]
    assert any("attention" in e["name"] for e in events(path) if e.get("ph") == "X")
    assert ask(engine) == before


def test_a_profile_of_some_steps(engine: Engine, tmp_path: Path) -> None:
    engine.flush_cache()
    engine.start_profile(output_dir=tmp_path, start_step=1, num_steps=3, profile_id="a", activities=["CPU"])
    ask(engine, [[7]], count=10)
    assert steps(tmp_path / "a.trace.json.gz") == ["step: 1 tokens, 1 rows"] * 3
    with pytest.raises(ProfileError, match="nothing is being profiled"):  # it has ended by itself
        engine.stop_profile()
    engine.start_profile(output_dir=tmp_path, start_step=100, profile_id="b")
    with pytest.raises(ProfileError, match="step 100.*never reached"):
        engine.stop_profile()
    assert not (tmp_path / "b.trace.json.gz").exists()


def test_profiles_in_the_wrong_order(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="nothing"):
        engine.stop_profile()
    engine.start_profile(output_dir=tmp_path, profile_id="a")
    with pytest.raises(ProfileError, match="on already"):
        engine.start_profile(output_dir=tmp_path, profile_id="b")
    with checksum_engine() as other, pytest.raises(ProfileError, match="another engine"):
        other.start_profile(output_dir=tmp_path)
    engine.stop_profile()
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace.json.gz"]


def test_folders_that_cannot_be_written(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/profile", "a\0b", "~nobody-of-this-name/x"):
        with pytest.raises(ProfileError, match="cannot be written"):
            engine.start_profile(output_dir=str(folder))
    with pytest.raises(ProfileError, match="nothing"):
        engine.stop_profile()


def test_a_trace_that_cannot_be_written_after_all(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    for count in (None, 2):
        engine.start_profile(output_dir=str(folder), num_steps=count)
        folder.rmdir()
        ask(engine)
        with pytest.raises(ProfileError, match="cannot be written"):
            engine.stop_profile()
    ask(engine)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_trace_whose_name_no_file_can_have(engine: Engine, tmp_path: Path, name: str) -> None:
    for count in (None, 1):
        engine.start_profile(output_dir=tmp_path, profile_id=name, num_steps=count)
        ask(engine)
        with pytest.raises(ProfileError, match="cannot be written"):
            engine.stop_profile()


@pytest.mark.parametrize("count", [None, 2])
def test_a_profiler_that_fails_at_its_end(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None
) -> None:
    """Also in the middle of a step, where the loop would die of it."""
    stop = torch.profiler.profile.stop

    def failing(profiler: torch.profiler.profile) -> None:
        stop(profiler)
        raise RuntimeError("was stopped by somebody else")

    monkeypatch.setattr(torch.profiler.profile, "stop", failing)
    engine.start_profile(output_dir=tmp_path, num_steps=count)
    ask(engine)
    with pytest.raises(ProfileError, match="somebody else"):
        engine.stop_profile()
    ask(engine)


@pytest.mark.parametrize("name", ["FENGINE_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR"])
def test_the_folder_from_the_environment(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:  # fmt: skip
    monkeypatch.setenv(name, str(tmp_path))
    engine.start_profile()
    engine.stop_profile()
    [path] = tmp_path.iterdir()
    assert path.name.endswith(".trace.json.gz") and events(path)


BAD: list[tuple[type[Exception], dict[str, Any]]] = [
    (InvalidRequestError, {"num_steps": 0}),
    (InvalidRequestError, {"num_steps": "3"}),
    (InvalidRequestError, {"start_step": -1}),
    (InvalidRequestError, {"profile_id": "../x"}),
    (InvalidRequestError, {"profile_prefix": "a/b"}),
    (InvalidRequestError, {"output_dir": 3}),
    (InvalidRequestError, {"activities": "CPU"}),
    (InvalidRequestError, {"activities": []}),
    (InvalidRequestError, {"no_such": 1}),
    (InvalidRequestError, {"with_stack": "no"}),
    (InvalidRequestError, {"record_shapes": 1}),
    (UnsupportedFeatureError, {"activities": [["CPU"]]}),
    (UnsupportedFeatureError, {"activities": ["CPU", "MEM"]}),
    (UnsupportedFeatureError, {"activities": ["RPD"]}),
    (UnsupportedFeatureError, {"profile_by_stage": True}),
    (UnsupportedFeatureError, {"merge_profiles": True}),
]


@pytest.mark.parametrize(("kind", "arguments"), BAD, ids=str)
def test_arguments_of_profiles(
    engine: Engine, tmp_path: Path, kind: type[Exception], arguments: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=next(iter(arguments))):
        engine.start_profile(**({"output_dir": tmp_path} | arguments))
    assert not list(tmp_path.iterdir())


def test_shutdown_ends_a_profile(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with checksum_engine() as engine:
            engine.start_profile(output_dir=tmp_path, profile_id=name)
            engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 3})
        assert len(steps(tmp_path / f"{name}.trace.json.gz")) == 3
        with pytest.raises(EngineClosedError):
            engine.start_profile(output_dir=tmp_path)
