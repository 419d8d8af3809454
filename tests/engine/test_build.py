"""What is decided before anything runs: "auto" values, contradictions, the size of the pool, the device."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fengine import Engine
from fengine.api.features import FEATURES
from fengine.config import (
    Algorithm,
    CacheConfig,
    EngineConfig,
    Hardware,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
    resolve,
)
from fengine.core.owned import Folder
from fengine.engine.build import build
from fengine.engine.load import load
from fengine.errors import (
    ConfigError,
    ModelLoadError,
    OutOfMemoryError,
    StorageError,
    UnsupportedArchitectureError,
    UnsupportedFeatureError,
)
from fengine.models.spec import LayerKind, ModelSpec, RopeSpec
from fengine.worker import kv_pool
from fengine.worker.device import device_of, refuse_unbuilt_shape
from fengine.worker.kv_pool import PoolSize, kv_bytes_per_token, new_pool, pool_bytes, pool_size
from fengine.worker.step import CpuRunner

CPU = Hardware("cpu")
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
SPEC = ModelSpec("LlamaForCausalLM", 32, 8, 16, 2, 2, 1, 4, 1e-5, RopeSpec(1e4), 64, True)


def test_resolve_leaves_no_auto_and_keeps_what_is_given() -> None:
    config = resolve(EngineConfig(), CPU)
    assert config.cache.page_size and config.scheduler.max_running_requests and config.scheduler.max_step_tokens
    assert config.scheduler.overlap is False and config.model.device == "cpu"
    assert resolve(EngineConfig(), Hardware("cuda")).scheduler.overlap is True
    given = EngineConfig(cache=CacheConfig(page_size=8), scheduler=SchedulerConfig(3, 9, overlap=True))
    assert resolve(given, CPU).cache.page_size == 8
    assert resolve(given, CPU).scheduler == given.scheduler
    assert resolve(config, CPU) == config


def test_all_contradictions_are_reported_at_once() -> None:
    config = EngineConfig(cache=CacheConfig(page_size=0, mem_fraction_static=1.5), scheduler=SchedulerConfig(64, 8))
    with pytest.raises(ConfigError, match=r"(?s)page_size.*mem_fraction_static.*max_step_tokens \(8\)"):
        resolve(config, CPU)


def test_the_pool_is_what_is_asked_for_or_what_fits() -> None:
    config = resolve(EngineConfig(cache=CacheConfig(page_size=4, max_total_tokens=101)), CPU)
    assert pool_size(config, SPEC, torch.float32, 8, 64) == PoolSize(26, None)  # 25 whole pages and the null page
    config = resolve(EngineConfig(cache=CacheConfig(page_size=4)), CPU)
    assert pool_size(config, SPEC, torch.float32, 8, 64) == PoolSize(8 * 16 + 1, None)  # all rows need no more
    assert kv_bytes_per_token(SPEC, torch.float32) == 2 * 2 * 1 * 4 * 4
    wide = replace(SPEC, num_layers=10**6, head_dim=1024)
    with pytest.raises(OutOfMemoryError, match="mem_fraction_static.*max_total_tokens"):
        pool_size(config, wide, torch.float32, 8, 64)


def test_the_pool_counts_both_groups_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 32 bytes a token, one of them with a window of 8 of 4,096 tokens of context."""
    kinds = (LayerKind(window=8), LayerKind())
    monkeypatch.setattr(kv_pool, "CPU_POOL_BYTES", 512 << 20)
    config = resolve(EngineConfig(cache=CacheConfig(page_size=4), scheduler=SchedulerConfig(64, 512)), CPU)
    mixed, row = replace(SPEC, kinds=kinds), (8 + 128) // 4 + 3
    size = pool_size(config, mixed, torch.float32, 64, 4096)
    assert size.windows is not None and not size.windows.alone
    need = 64 * row + 512 // 4
    assert size == PoolSize(64 * 1024 + 1, size.windows._replace(num_pages=need + 64 * 1024 // 16 + 1))
    assert pool_bytes(mixed, size, 4, torch.float32) == 4 * 32 * (size.pages + size.windows.num_pages)
    kv = new_pool(mixed, PoolSize(9, size.windows._replace(num_pages=5)), 4, torch.float32, "cpu")
    assert [k.shape[0] for k in kv.k_PSGK] == [5, 9] and kv.num_pages == 9 and kv.window_layers == (0,)
    assert pool_size(config, mixed, torch.float32, 64, 128).windows is None  # nothing is ever left behind
    tight = replace(config, cache=replace(config.cache, max_total_tokens=400))
    size = pool_size(tight, mixed, torch.float32, 64, 4096)
    assert size.stored == (101, 101)  # no more than full layers have
    wide = replace(mixed, num_kv_heads=64, head_dim=64)  # 32 KiB a token and layer: memory is short
    size = pool_size(config, wide, torch.float32, 64, 4096)
    assert 0.9 < pool_bytes(wide, size, 4, torch.float32) / (512 << 20) < 1.01


def test_a_model_of_windows_alone_has_more_page_ids_than_pages() -> None:
    config = resolve(EngineConfig(cache=CacheConfig(page_size=4), scheduler=SchedulerConfig(2, 64)), CPU)
    spec = replace(SPEC, kinds=(LayerKind(window=8),) * 2)
    asked = replace(config, cache=replace(config.cache, max_total_tokens=400))
    size = pool_size(asked, spec, torch.float32, 2, 4096)
    assert size.stored == (101, 0) and size.pages == 801
    kv = new_pool(spec, size, 4, torch.float32, "cpu")
    assert pool_bytes(spec, size, 4, torch.float32) == sum(x.nbytes for x in kv.tensors) == 101 * 4 * 2 * 32
    drafting = replace(asked, speculation=replace(asked.speculation, algorithm=Algorithm.eagle3))  # whose KV needs all
    assert pool_size(drafting, spec, torch.float32, 2, 4096) == PoolSize(101, None)
    small = replace(config, cache=replace(config.cache, max_total_tokens=64))
    assert pool_size(small, spec, torch.float32, 2, 4096).pages == 17  # a window does not fit: rows are shorter
    assert not pool_size(config, replace(spec, causal=False), torch.float32, 2, 4096).windows


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (ModelConfig(path="/nowhere/at/all"), ModelLoadError, "/nowhere/at/all"),
        (ModelConfig(path=""), ModelLoadError, "model directory '' does not exist"),
        (
            ModelConfig(path="box", tokenizer_path=""),
            ConfigError,
            "model.tokenizer_path must be null or a path, got ''",
        ),
        (ModelConfig(path="box", device="tpu"), ConfigError, "tpu"),
        (ModelConfig(path="box", device="cuda:99"), ConfigError, "cuda"),
        (ModelConfig(path="box", context_length=10**6), ConfigError, "1000000"),
    ],
)
def test_what_cannot_be_built_says_why(model: ModelConfig, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        build(EngineConfig(model=model), FEATURES)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(EngineConfig(model=ModelConfig(path="box", device="cuda:0"))) == "cuda:0"
    numbered = resolve(EngineConfig(model=ModelConfig(path="box", gpu_id=1)), Hardware("cuda"))
    assert device_of(numbered) == "cuda:1" and numbered.compile.cuda_graph
    assert resolve(EngineConfig(model=ModelConfig(path="box", gpu_id=1)), Hardware("cpu")).model.device == "cpu"
    with pytest.raises(ConfigError, match="'cuda:2', and torch sees 2"):
        device_of(EngineConfig(model=ModelConfig(path="box", device="cuda:2")))


def test_head_widths_that_the_cuda_kernels_do_not_take_are_refused_there_only() -> None:
    refuse_unbuilt_shape(SPEC, "cpu", torch.float32)
    wide = replace(SPEC, head_dim=16)
    refuse_unbuilt_shape(wide, "cuda:0", torch.float16)
    refuse_unbuilt_shape(replace(wide, few_kv=True), "cuda:0", torch.bfloat16)
    with pytest.raises(UnsupportedFeatureError, match="with float16 on CUDA .*bfloat16"):
        refuse_unbuilt_shape(replace(wide, few_kv=True), "cuda:0", torch.float16)
    with pytest.raises(UnsupportedArchitectureError, match="head_dim is 4.*device=cpu"):
        refuse_unbuilt_shape(SPEC, "cuda", torch.bfloat16)


def test_engine_takes_fields_or_server_args_but_not_unknown_ones() -> None:
    with pytest.raises(TypeError, match="unknown_field"):
        Engine(model_path="box", unknown_field=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="schedule_policy must be one of fcfs, lpm"):
        Engine(model_path="box", schedule_policy="longest")


def test_an_engine_may_start_in_inference_mode(tmp_path) -> None:  # noqa: ANN001
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 16}))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_torch_compile": False}
    with torch.inference_mode():
        engine = Engine(model_path=str(tmp_path), **options)
    with engine:
        assert len(engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})["output_ids"]) == 3
        norm_D = torch.full((16,), 2.0)
        assert engine.update_weights_from_tensor([("model.norm.weight", norm_D)])[0]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"page_size": "4"}, ConfigError, "page_size must be .*int.*'4'"),
        ({"page_size": 4.0}, ConfigError, "page_size must be .*int.*4.0"),
        ({"max_running_requests": True}, ConfigError, "max_running_requests must be .*True"),
        ({"max_running_requests": 10**9}, ConfigError, "max_running_requests must be at most 65536"),
        ({"mem_fraction_static": "a", "random_seed": "b"}, ConfigError, "mem_fraction_static.*random_seed"),
        ({"dtype": ["a"]}, ConfigError, "dtype must be"),
        ({"disable_radix_cache": "no"}, ConfigError, "disable_radix_cache must be bool"),
        ({"device": "cpu:0"}, ConfigError, "must be cpu, cuda or cuda:NUMBER"),
        ({"max_total_tokens": 2**40}, ConfigError, "lower max_total_tokens"),
    ],
)
def test_a_wrong_field_is_told_by_name(fields: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        Engine(model_path="box", **fields)


def test_a_pool_that_no_memory_holds_is_told_with_its_size() -> None:
    with pytest.raises(OutOfMemoryError, match="MiB on cpu.*max_total_tokens"):
        new_pool(replace(SPEC, num_layers=1, num_kv_heads=2**20), PoolSize(2**20, None), 16, torch.float32, "cpu")


def test_memory_that_runs_out_at_start_is_told_with_the_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 392.00 MiB")

    monkeypatch.setattr(CpuRunner, "warm_up", warm_up)
    with pytest.raises(OutOfMemoryError, match="(?s)392.00 MiB.*max_step_tokens.*max_running_requests.*mem_fraction"):
        Engine(model_path="box")


@pytest.mark.parametrize(("where", "embeds"), [("config", False), ("generation_config", False), ("config", True)])
def test_an_eos_that_no_model_can_draw_is_told(
    tmp_path: Path, where: str, embeds: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' config classes have one by default, however small the vocabulary is made; vectors have no end."""
    ends, shape = {"eos_token_id": [63, 64, 255001]}, SHAPE | {"hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / f"{where}.json").write_text(json.dumps(ends | (shape if where == "config" else {})))
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, load_format=LoadFormat.dummy, is_embedding=embeds)
    loaded = load(EngineConfig(model=model), FEATURES.tokenizer)
    assert loaded.eos_ids == {63, 64, 255001}
    assert ("[64, 255001], behind the vocabulary of 64" in caplog.text) == (not embeds)


def test_no_temporary_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    with pytest.raises(ConfigError, match="No usable temporary directory.*set TMPDIR"):
        Engine(model_path="box")
    with pytest.raises(StorageError, match="No usable temporary directory.*set TMPDIR"):
        Folder()


def test_no_compiler_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile says it; the same error tells of a damaged cache."""

    def warm_up(*_: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(warm_up, RuntimeError("No working C++ compiler"), None)  # type: ignore[attr-defined]

    monkeypatch.setattr(CpuRunner, "warm_up", warm_up)
    with pytest.raises(ConfigError, match="(?s)No working C.. compiler.*apt install g.*delete"):
        Engine(model_path="box")
