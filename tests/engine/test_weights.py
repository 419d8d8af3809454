"""Weight updates: the oracle is an engine loaded afresh; a refused update leaves every bit as it was."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_checkpoints
import tiny_vision
import torch
from books import check_scheduler
from checksum import VOCAB, checksum_engine, expected
from extended_cases import Ask, outcome, run, running
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import in_loop
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fengine import Engine
from fengine.core.sampling_params import SamplingParams as Params
from fengine.engine.request_state import version_spans
from fengine.engine.weights.places import Place
from fengine.errors import (
    EngineBusyError,
    EngineClosedError,
    InvalidRequestError,
    MemoryReleasedError,
    StorageError,
    UnsupportedFeatureError,
)
from fengine.models.sources import Source
from fengine.ops import linear
from fengine.worker import safetensors_file

KINDS: dict[str, dict[str, Any]] = {  # heads of 10: the parts of fused matrices begin in the middle of a packed block
    "tied": {"family": "llama", "tie_word_embeddings": True, "dtype": torch.bfloat16},
    "biased": {"family": "qwen2", "shards": True},
    "normed": {"family": "qwen3", "head_dim": 10},
    "other row order": {"family": "glm4", "head_dim": 20, "pad_token_id": 0},
    "joined": {
        "family": "phi3",
        "pad_token_id": 0,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
    "windows": {"family": "gemma3", "head_dim": 10, "sliding_window": 9, "num_hidden_layers": 6},
    "experts": {
        "family": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "stacked experts": {
        "family": "gpt_oss",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
PROMPTS = [[3, 4, 5, 6, 7], [9] * 40, [100, 1, 50]]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    root, kind = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    return tiny_checkpoints.write(root / "a", **kind), tiny_checkpoints.write(root / "b", seed=1, **kind)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("two")
    return tiny_checkpoints.write(root / "a"), tiny_checkpoints.write(root / "b", seed=1)


@pytest.fixture(scope="module")
def shared(two: tuple[Path, Path]) -> Iterator[Engine]:
    """An engine that every test leaves with the weights of `two[0]`."""
    with start(two[0]) as engine:
        yield engine


def start(directory: Path, **options: Any) -> Engine:
    fixed = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "device": "cpu", "enable_torch_compile": False}
    return Engine(model_path=str(directory), **fixed | options)


def ask(engine: Engine, prompts: list[list[int]] = PROMPTS, count: int = 8) -> list[Any]:
    """Tokens and logprobs."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    return [(o["output_ids"], [t[0] for t in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def fresh(directory: Path, **options: Any) -> list[Any]:
    with start(directory) as engine:
        return ask(engine, **options)


# -- what updates do --------------------------------------------------------------------------------------------------


def in_buckets(engine: Engine, directory: Path) -> None:
    assert engine.begin_weight_update().success
    before = ask(engine)
    items = list(tensors_of(directory).items())
    for i in range(0, len(items), 5):
        bucket = [(name, tensor.clone()) for name, tensor in items[i : i + 5]]
        assert engine.update_weights_from_tensor(bucket, flush_cache=False).success
        for _, tensor in bucket:
            tensor.fill_(torch.nan)  # the trainer goes on with its own tensors
    assert ask(engine) == before
    assert engine.end_weight_update(weight_version="buckets").success and engine._parts.core.weight_version == "buckets"


def fused(directory: Path) -> list[tuple[str, Tensor]]:
    tensors = tensors_of(directory)
    for parts, name in (("q_proj k_proj v_proj", "qkv_proj"), ("gate_proj up_proj", "gate_up_proj")):
        for first in [key for key in tensors if parts.split()[0] in key and ".experts." not in key]:
            keys = [first.replace(parts.split()[0], part) for part in parts.split()]
            tensors[first.replace(parts.split()[0], name)] = torch.cat([tensors.pop(key) for key in keys])
    return list(tensors.items())


WAYS: dict[str, Callable[[Engine, Path], Any]] = {
    "disk": lambda engine, directory: engine.update_weights_from_disk(str(directory)),
    "dict": lambda engine, directory: engine.update_weights_from_tensor(tensors_of(directory)),
    "float32": lambda engine, directory: engine.update_weights_from_tensor(
        [(name, torch.nn.Parameter(tensor.float())) for name, tensor in tensors_of(directory).items()], "direct"
    ),
    "fused": lambda engine, directory: engine.update_weights_from_tensor(fused(directory)),
    "buckets": in_buckets,
}


def test_an_updated_engine_is_a_fresh_engine(pair: tuple[Path, Path]) -> None:
    old, new = fresh(pair[0]), fresh(pair[1])
    assert old != new
    with start(pair[0]) as engine:
        for way in WAYS.values():
            assert ask(engine) == old
            way(engine, pair[1])
            assert ask(engine) == new  # nothing of the old weights' prefix cache is left
            assert engine.update_weights_from_disk(pair[0], "auto") == (True, engine_says(engine))  # type: ignore[arg-type]


def engine_says(engine: Engine) -> str:
    return f"{len(engine._parts.weights.places)} tensors were updated, the prefix cache is empty"


def test_some_tensors_alone(shared: Engine, two: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = tensors_of(two[0]), tensors_of(two[1])
    name = "model.layers.1.self_attn.k_proj.weight"
    mixed = tiny_checkpoints.write(tmp_path)
    save_file(old | {name: new[name]}, mixed / "model.safetensors", {"format": "pt"})
    assert shared.update_weights_from_tensor([(name, new[name])]).success
    assert ask(shared) == fresh(mixed)
    assert shared.update_weights_from_tensor({name: old[name]}).success
    assert ask(shared) == fresh(two[0])


# -- reading ----------------------------------------------------------------------------------------------------------


def test_weights_by_name_are_transformers_state_dict(pair: tuple[Path, Path]) -> None:
    state = AutoModelForCausalLM.from_pretrained(pair[0]).state_dict()
    files = dict(tensors_of(pair[0]))  # which hold each expert by itself
    state = {name: x for name, x in state.items() if ".experts." not in name} | {
        name: x for name, x in files.items() if ".experts." in name
    }
    with start(pair[0]) as engine:
        for name, tensor in state.items():
            assert engine.get_weights_by_name(name, truncate_size=37) == tensor.float().tolist()[:37], name
        whole = engine.get_weights_by_name("model.layers.0.self_attn.qkv_proj.weight", 10**6)
        parts: Any = [state.get(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
        assert parts[0] is None or whole == torch.cat(parts).float().tolist()
        assert len(engine.get_weights_by_name("model.embed_tokens.weight") or ()) == 100
        assert engine.get_weights_by_name("model.norm.weight", 0) == []
        assert engine.get_weights_by_name("model.layers.9.mlp.up_proj.weight") is None
        for bad in ((3, 1), ("model.norm.weight", -1), ("model.norm.weight", 1.5), ("model.norm.weight", True)):
            with pytest.raises(InvalidRequestError):
                engine.get_weights_by_name(*bad)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 150), columns=st.integers(1, 5), data=st.data())
def test_rows_of_a_packed_matrix(rows: int, columns: int, data: st.DataObject) -> None:
    matrix = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    leaf = linear.pack(matrix).packed
    start_row = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - start_row))
    place = Place(leaf, start_row, Source("", (count, columns)), lanes=True)
    assert torch.equal(place.read(), matrix[start_row : start_row + count])
    assert torch.equal(place.read(7), matrix[start_row : start_row + min(count, 7)])
    matrix[start_row : start_row + count] = -1 - torch.arange(count)[:, None]
    place.write(matrix[start_row : start_row + count].clone())
    assert torch.equal(leaf, linear.pack(matrix).packed)


# -- refusals: nothing changes ----------------------------------------------------------------------------------------

NORM, WIDE = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
ENTRIES = {
    "NaN": ({WIDE: torch.full((96, 64), torch.nan)}, "NaN or infinite"),
    "one infinity": ({WIDE: torch.ones(96, 64).index_fill_(0, torch.tensor(95), -torch.inf)}, "NaN or infinite"),
    "shape": ({WIDE: torch.ones(64, 96)}, r"expected shape \[96, 64\], got \[64, 96\]"),
    "scalar": ({NORM: torch.tensor(1.0)}, r"expected shape \[64\], got \[\]"),
    "unknown": ({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}, "not part of this LlamaForCausalLM"),
    "integers": ({NORM: torch.ones(64, dtype=torch.int64)}, "int64 is not supported"),
    "float64": ({NORM: torch.ones(64, dtype=torch.float64)}, "float64 is not supported"),
    "no values": ({NORM: torch.ones(64, device="meta")}, "dense tensor with values"),
    "sparse": ({WIDE: torch.ones(96, 64).to_sparse()}, "dense tensor with values"),
    "no tensor": ({NORM: [1.0] * 64}, "must be a torch.Tensor, got list"),
    "fused, of other rows": ({"model.layers.0.self_attn.qkv_proj.weight": torch.ones(5, 64)}, "not part of"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("session", [False, True], ids=["at once", "in a session"])
def test_one_bad_tensor_refuses_all(shared: Engine, two: tuple[Path, Path], entry: str, session: bool) -> None:
    bad, message = ENTRIES[entry]
    new = tensors_of(two[1])
    before = shared._parts.core.weight_version
    if session:
        assert shared.begin_weight_update("target").success
        assert shared.update_weights_from_tensor({"lm_head.weight": new.pop("lm_head.weight")}).success
    result = shared.update_weights_from_tensor(new | bad)
    assert not result.success and pytest.raises(ValueError, match=message).matches(ValueError(result.message))
    if session:
        result = shared.end_weight_update(weight_version="never")
        assert not result.success and "nothing was changed" in result.message
    assert ask(shared) == fresh(two[0]) and shared._parts.core.weight_version == before


def test_names_given_twice(shared: Engine, two: tuple[Path, Path]) -> None:
    new = tensors_of(two[1])
    result = shared.update_weights_from_tensor([(NORM, new[NORM]), (NORM, new[NORM])])
    assert not result.success and "given twice" in result.message
    assert shared.begin_weight_update().success
    assert shared.update_weights_from_tensor({NORM: new[NORM]}).success
    assert not shared.update_weights_from_tensor({NORM: new[NORM]}).success
    assert not shared.end_weight_update().success
    assert ask(shared) == fresh(two[0])


def released(tensor: Tensor) -> Tensor:
    """As a trainer's sharded parameter is, outside of its forward pass."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", [Tensor.to_sparse, released, Tensor.tolist])
def test_what_cannot_be_read_under_single_and_fused_names(shared: Engine, kind: Any) -> None:
    before = ask(shared)
    for name, rows in (("q_proj", 64), ("qkv_proj", 128)):
        value = kind(torch.ones(rows, 64))
        result = shared.update_weights_from_tensor({f"model.layers.0.self_attn.{name}.weight": value})
        assert not result.success and "q_proj.weight': " in result.message and ask(shared) == before


def test_a_value_that_the_live_dtype_cannot_hold(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, dtype=torch.float16)
    with start(directory) as engine:
        before = ask(engine)
        result = engine.update_weights_from_tensor({WIDE: torch.full((96, 64), 1e6)})
        assert not result.success and "torch.float16" in result.message and ask(engine) == before


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, tie_word_embeddings=True)
    table = tensors_of(directory)["model.embed_tokens.weight"]
    with start(directory) as engine:
        before = ask(engine)
        assert engine.update_weights_from_tensor({"lm_head.weight": table.clone()}).success
        result = engine.update_weights_from_tensor({"lm_head.weight": table + 1})
        assert not result.success and "ties its embeddings" in result.message and ask(engine) == before
        assert engine.begin_weight_update().success  # the head may come before the embedding
        assert engine.update_weights_from_tensor({"lm_head.weight": -table}).success
        assert engine.update_weights_from_tensor({"model.embed_tokens.weight": -table}).success
        assert engine.end_weight_update().success
        assert engine.get_weights_by_name("lm_head.weight", 3) == (-table[:3]).tolist()


def test_sessions_begin_and_end_once(shared: Engine) -> None:
    assert not shared.end_weight_update().success
    assert shared.begin_weight_update(selector="all").success
    assert not shared.begin_weight_update().success
    assert shared.end_weight_update().success
    assert shared.begin_weight_update().success
    for name in ("nowhere", "elsewhere"):
        assert not shared.update_weights_from_tensor([(name, torch.ones(1))]).success
    told = shared.end_weight_update()
    assert not told.success and "'nowhere'" in told.message and "elsewhere" not in told.message
    with pytest.raises(InvalidRequestError, match="selector"):
        shared.begin_weight_update("draft")


def test_what_the_parts_of_a_session_ask_is_done_at_its_end(two: tuple[Path, Path]) -> None:
    norm = tensors_of(two[1])[NORM]
    with start(two[0]) as engine:
        for given, told in (({"weight_version": "whole"}, "whole"), ({}, "part")):
            engine.pause_generation("in_place")
            waiting: Any = engine.generate(input_ids=[3], stream=True)
            assert engine.begin_weight_update().success
            assert engine.update_weights_from_tensor(
                {NORM: norm}, weight_version="part", abort_all_requests=True
            ).success
            assert engine.end_weight_update(**given).success  # type: ignore[arg-type]
            engine.continue_generation()
            assert [chunk["meta_info"]["finish_reason"]["type"] for chunk in waiting] == ["abort"]
            output: Any = engine.generate(input_ids=[3], sampling_params={"max_new_tokens": 1})
            assert output["meta_info"]["weight_version"] == told


def bucket(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """SGLang's flattened bucket: bytes, or elements of one dtype."""
    parts = [t.flatten().view(torch.uint8) if dtype is None else t.flatten().to(dtype) for t in tensors.values()]
    facts = [{"name": n, "shape": tuple(t.shape), "dtype": str(dtype or t.dtype)} for n, t in tensors.items()]
    return {"flattened_tensor": torch.cat(parts), "metadata": facts}


def test_flattened_buckets_are_their_tensors(two: tuple[Path, Path]) -> None:
    tensors = tensors_of(two[1])
    with start(two[0]) as engine:
        names = list(tensors)
        halves = [bucket({n: tensors[n] for n in names[k::2]}, torch.float32 if k else None) for k in range(2)]
        halves[0]["metadata"] = [SimpleNamespace(**entry) for entry in halves[0]["metadata"]]
        result = engine.update_weights_from_tensor([SimpleNamespace(**halves[0]), halves[1]], "flattened_bucket")
        assert result.success, result.message
        assert ask(engine) == fresh(two[1])
        whole = bucket(tensors)
        for change, words in (
            ({"flattened_tensor": whole["flattened_tensor"][:-1]}, "ends within"),
            ({"metadata": whole["metadata"][:-1]}, "the metadata names"),
            ({"metadata": [*whole["metadata"][:-1], {"name": "x"}]}, "needs 'shape'"),
            ({"metadata": [*whole["metadata"][:-1], {"name": "x", "shape": (1,), "dtype": "int3"}]}, "int3"),
            ({"metadata": [*whole["metadata"][:-1], {"name": "x", "shape": 3, "dtype": "float32"}]}, "'x', 3, "),
            ({"flattened_tensor": None}, "needs 'flattened_tensor'"),
            ({"flattened_tensor": torch.ones(3, 3)}, "one axis"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match=words):
                engine.update_weights_from_tensor(whole | change, "flattened_bucket")
        assert ask(engine) == fresh(two[1])


def test_nested_tensors_are_refused(shared: Engine, two: tuple[Path, Path]) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        result = shared.update_weights_from_tensor([(NORM, torch.nested.nested_tensor(parts, layout=layout))])
        assert not result.success and NORM in result.message
    assert ask(shared) == fresh(two[0])


@pytest.mark.parametrize("name", KINDS)
def test_saved_weights_load_again(name: str, tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path / "a", **KINDS[name])
    scaled = {n: t * 0.5 for n, t in tensors_of(directory).items() if n == NORM}
    with start(directory) as engine:
        assert engine.update_weights_from_tensor(scaled).success
        wanted = ask(engine)
        engine.save_sharded_model(path=str(tmp_path / "one"))
        engine.collective_rpc(
            "save_sharded_model", path=tmp_path / "many", max_size=4000, pattern="m-{part}.safetensors"
        )
        with pytest.raises(InvalidRequestError, match="holds weights already"):
            engine.save_sharded_model(path=str(tmp_path / "one"))
        with pytest.raises(StorageError, match="cannot be written"):
            engine.save_sharded_model(path=str(directory / "config.json" / "x"))
        with pytest.raises(StorageError, match="cannot be written"):
            engine.save_sharded_model(path=str(tmp_path / ("x" * 5000)))
        for bad in (
            {"path": 3},
            {"path": "~nosuchuser/x"},
            {"path": "x", "max_size": 0},
            {"path": "x", "pattern": "same.safetensors"},
            {"path": "x", "pattern": "\udcff{part}.safetensors"},
        ):
            with pytest.raises(InvalidRequestError):
                engine.save_sharded_model(**bad)  # type: ignore[arg-type]
    assert len(list((tmp_path / "many").glob("m-*.safetensors"))) > 2
    for folder in ("one", "many"):
        with start(tmp_path / folder, load_format="sharded_state") as again:
            assert ask(again) == wanted
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "many").num_parameters() > 0


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_saved_tensors_have_the_names_of_the_files(family: str, tmp_path: Path) -> None:
    """By other names transformers would draw them at random."""
    directory = tiny_vision.write(tmp_path / "a", family)
    with start(directory) as engine:
        engine.save_sharded_model(path=str(tmp_path / "saved"))
    files, saved = tensors_of(directory), tensors_of(tmp_path / "saved")
    assert all(torch.equal(files[name], tensor) for name, tensor in saved.items())
    assert {name for name in files.keys() - saved.keys() if "post_layernorm" not in name} == set()


def test_pickles_and_code_are_refused_by_name(shared: Engine, two: tuple[Path, Path]) -> None:
    assert "must be a torch.Tensor, got bytes" in shared.update_weights_from_tensor({NORM: b"\x80"}).message
    for bad in (b"\x80", "gASV", ["gASV"], 3, [3], [("a", 1, 2)], [(1, torch.ones(1))]):
        with pytest.raises(InvalidRequestError):
            shared.update_weights_from_tensor(bad)
    with pytest.raises(UnsupportedFeatureError, match="load_format"):
        shared.update_weights_from_tensor({}, "pkg.custom_loader")
    for bad in (b"\x80", ["gASV"]):
        with pytest.raises(InvalidRequestError, match="needs 'flattened_tensor'"):
            shared.update_weights_from_tensor(bad, "flattened_bucket")
    with pytest.raises(UnsupportedFeatureError, match="load_format"):
        shared.update_weights_from_disk(str(two[1]), "pt")
    with pytest.raises(UnsupportedFeatureError, match="pickles"):
        shared.update_weights_from_ipc({})
    for bad in (3, "", None):
        with pytest.raises(InvalidRequestError, match="model_path"):
            shared.update_weights_from_disk(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="weight_version"):
        shared.update_weights_from_tensor({}, weight_version=3)  # type: ignore[arg-type]


def test_bad_directories(shared: Engine, two: tuple[Path, Path], tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        result = shared.update_weights_from_disk(str(path))
        assert not result.success and message in result.message, result
        assert ask(shared) == before

    before = ask(shared)
    refused(tmp_path / "nowhere", "does not exist")
    refused(tiny_checkpoints.write(tmp_path / "other", num_hidden_layers=1), "num_layers is 1, 2 runs")
    broken = tiny_checkpoints.write(tmp_path / "broken", seed=1)
    file = broken / "model.safetensors"
    data, tensors = file.read_bytes(), load_file(file)
    file.write_bytes(data[:-1])
    refused(broken, "is truncated or no safetensors file")
    save_file({name: tensor for name, tensor in tensors.items() if name != NORM}, file)
    refused(broken, f"tensor {NORM!r} of shape [64] is missing")
    save_file(tensors | {WIDE: tensors[WIDE] * torch.inf}, file)
    refused(broken, "NaN or infinite")
    file.unlink()
    refused(broken, "no weights")


def test_a_file_truncated_while_it_is_read(
    shared: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    broken = tiny_checkpoints.write(tmp_path, seed=1)
    file, before, read, seen = broken / "model.safetensors", ask(shared), safetensors_file.read_tensor, []

    def reading(*arguments: Any) -> Tensor:
        seen.append(1)
        if len(seen) == 10:
            file.write_bytes(file.read_bytes()[:5000])
        return read(*arguments)

    monkeypatch.setattr(safetensors_file, "read_tensor", reading)
    result = shared.update_weights_from_disk(broken)  # type: ignore[arg-type]
    assert not result.success and "while it was read" in result.message and len(seen) >= 10
    assert ask(shared) == before


def test_a_copy_that_fails_is_never_computed_with(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = Place.write, []

    def failing(place: Place, tensor: Tensor) -> None:
        seen.append(1)
        if len(seen) == 5:
            raise RuntimeError("the device is gone")
        write(place, tensor)

    with start(two[0]) as engine:
        answers: list[Any] = []
        long = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
        asking = threading.Thread(target=lambda: answers.append(engine.generate(input_ids=[5], sampling_params=long)))
        monkeypatch.setattr(Place, "write", failing)
        errors: list[Any] = []

        def fail() -> None:
            try:
                engine.update_weights_from_disk(two[1])  # type: ignore[arg-type]
            except RuntimeError as error:
                errors.append(str(error))

        between_steps(engine, 20, fail)
        asking.start()
        asking.join()
        assert errors == ["the device is gone"] and answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
        with pytest.raises(MemoryReleasedError, match="incomplete"):
            ask(engine)
        assert engine.update_weights_from_tensor({NORM: tensors_of(two[1])[NORM]}).success
        with pytest.raises(MemoryReleasedError, match="incomplete"):
            ask(engine)
        assert engine.update_weights_from_disk(two[1]).success  # type: ignore[arg-type]
        assert ask(engine) == fresh(two[1])


def test_requests_that_come_while_weights_are_written_get_the_new(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, asked, came = Place.write, list[Future[list[Any]]](), threading.Event()
    with start(two[0]) as engine, ThreadPoolExecutor() as pool:
        submit = engine._parts.core.submit

        def submitting(states: Any) -> None:
            try:
                submit(states)
            finally:
                came.set()

        def writing(place: Place, tensor: Tensor) -> None:
            asked[:] = asked or [pool.submit(ask, engine)]
            assert came.wait(60)
            write(place, tensor)

        monkeypatch.setattr(engine._parts.core, "submit", submitting)
        monkeypatch.setattr(Place, "write", writing)
        assert engine.update_weights_from_disk(two[1]).success  # type: ignore[arg-type]
        assert asked[0].result() == fresh(two[1])


# -- requests that run ------------------------------------------------------------------------------------------------


def between_steps(engine: Engine, step: int, action: Callable[[], Any]) -> None:
    """Runs `action` in the loop's thread, once, right before step number `step` (from 1) from now is scheduled."""
    scheduler = engine._parts.core.stepper.scheduler
    schedule, seen = scheduler.schedule, []

    def scheduling() -> Any:
        if scheduler.has_work:
            seen.append(1)
            if len(seen) == step:
                action()
        return schedule()

    in_loop(engine._parts.core, lambda: setattr(scheduler, "schedule", scheduling))


@pytest.mark.parametrize("overlap", [False, True])
def test_running_requests_go_on_with_the_new_weights(two: tuple[Path, Path], overlap: bool) -> None:
    """What was drawn stays; what comes is what the new model says after it. Prompts share pages, some still wait."""
    prompts = [[*range(10, 50), i] for i in range(6)]
    requests: list[Any] = []
    with start(two[0], max_running_requests=4, disable_overlap_schedule=not overlap) as engine:
        core = engine._parts.core

        def update() -> None:
            requests.extend(state.request for state in core.requests.states.values())
            result = engine.update_weights_from_disk(two[1], weight_version="v1")  # type: ignore[arg-type]
            assert result.success and "4 running requests go on" in result.message

        between_steps(engine, 12, update)
        outputs = ask(engine, prompts, count=30)
        in_loop(core, lambda: check_scheduler(core.stepper.scheduler))
        assert engine._parts.core.weight_version == "v1" and len(requests) == 6
    with start(two[1]) as other:
        for request in requests:
            tokens, logprobs = outputs[prompts.index(request.token_ids[: request.prompt_len])]
            spans = version_spans(request, len(tokens))
            split = spans[0]["end"] if spans[0]["version"] == "default" else 0
            assert [span["version"] for span in spans] == (["default", "v1"] if split else ["v1"])
            assert spans[-1]["end"] == 30 and (0 < split < 30 or not split)
            [(rest, rest_logprobs)] = ask(other, [request.token_ids[: request.prompt_len + split]], 30 - split)
            assert (tokens[split:], logprobs[split:]) == (rest, rest_logprobs)
        assert sum(len(version_spans(request, 30)) for request in requests) == 4 * 2 + 2  # two had not begun


@pytest.mark.parametrize("begun", [2, 4, 12])  # the step before which it comes; the prompt takes 4 or 5
@pytest.mark.parametrize("kind", ["scored", "pooled"])
def test_a_prompt_is_read_by_one_set_of_weights(two: tuple[Path, Path], kind: str, begun: int) -> None:
    """Input logprobs and hidden states are of the weights that drew the first token; cached tokens do not count."""
    prompt = list(range(10, 50))
    scored = Ask(prompt, Params(logprob_start=20, top_logprobs=2, logprob_ids=(7,), hidden="full"))
    this = scored if kind == "scored" else Ask(prompt, Params(pool="mean"), new=0)
    with running(two[0], tokens=8, overlap=True) as parts:
        run(parts, [Ask(prompt[:11], new=1)])  # 8 tokens of the prompt are cached
        schedule, seen = parts.core.stepper.scheduler.schedule, []

        def scheduling() -> Any:
            seen.append(1)
            if len(seen) == begun:
                assert parts.updates.update_from_disk(two[1], None, version="v1").success
            return schedule()

        in_loop(parts.core, lambda: setattr(parts.core.stepper.scheduler, "schedule", scheduling))
        (request,) = run(parts, [this])
    begun_to_draw = kind == "scored" and begun == 12  # the pooled one has ended by then
    with running(two[1] if begun < 12 else two[0], cached=False) as other:
        (alone,) = run(other, [this])
    if not begun_to_draw:
        assert outcome(request) == outcome(alone) and request.num_cached == 0
        return
    got, want = request.record, alone.record
    assert [span["version"] for span in version_spans(request, request.num_output)] == ["default", "v1"]
    assert got and want and (got.input_logprobs, got.input_top, got.input_ids) == (
        want.input_logprobs, want.input_top, want.input_ids
    )  # fmt: skip
    assert request.num_cached == 8 and got.hidden[0].tobytes() == want.hidden[0][8:].tobytes()
    assert len(got.hidden) == len(got.output_top) == request.num_output


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_weights_change_while_generation_is_paused(two: tuple[Path, Path], mode: str) -> None:
    prompt, sampling = [5, 6, 7], {"temperature": 0, "max_new_tokens": 250, "ignore_eos": True}
    with start(two[0]) as engine:
        between_steps(engine, 30, lambda: engine.pause_generation(mode))
        stream = engine.generate(input_ids=prompt, sampling_params=sampling, stream=True, return_logprob=True)
        while engine.get_load()[0]["num_reqs"] == 0 or not engine._parts.core.stepper.paused:
            next(stream)  # type: ignore[call-overload]
        assert engine.update_weights_from_disk(two[1], weight_version="v1").success  # type: ignore[arg-type]
        engine.continue_generation()
        last: Any = list(stream)[-1]
        meta = last["meta_info"]
        assert [span["version"] for span in meta["weight_versions"]] == ["default", "v1"]
        split = meta["weight_versions"][1]["start"]
        tokens, logprobs = last["output_ids"], [t[0] for t in meta["output_token_logprobs"]]
    with start(two[1]) as other:
        assert ask(other, [prompt + tokens[:split]], 250 - split) == [(tokens[split:], logprobs[split:])]


def test_running_requests_may_be_aborted(two: tuple[Path, Path]) -> None:
    with start(two[0]) as engine:
        stream = engine.generate(
            input_ids=[5], sampling_params={"temperature": 0, "max_new_tokens": 900, "ignore_eos": True}, stream=True
        )
        next(stream)  # type: ignore[call-overload]
        assert engine.update_weights_from_disk(two[1], abort_all_requests=True).success  # type: ignore[arg-type]
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["type"] == "abort"  # type: ignore[index]
        assert ask(engine) == fresh(two[1])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), page_size=st.sampled_from([1, 4, 16]), pool=st.integers(96, 300),
       overlap=st.booleans(), prefix_cache=st.booleans(), steps=st.lists(st.integers(1, 40), max_size=4))  # fmt: skip
def test_no_token_is_lost_however_often_weights_change(seed: int, steps: list[int], **options: Any) -> None:
    """The checksum model has no weights: an empty update retracts every running request and changes nothing else."""
    draw = random.Random(seed)
    head = [draw.randrange(VOCAB) for _ in range(seed % 20)]
    work = [head + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))] for _ in range(8)]
    counts = [draw.randint(1, 25) for _ in work]
    with checksum_engine(rows=4, tokens=24, **options) as engine:
        for step in steps:
            between_steps(engine, step, lambda: engine.update_weights_from_tensor([]))
        outputs: Any = engine.generate(
            input_ids=work, sampling_params=[{"temperature": 0, "max_new_tokens": count} for count in counts]
        )
        assert [o["output_ids"] for o in outputs] == [expected(p, n) for p, n in zip(work, counts, strict=True)]


def test_spans_of_versions() -> None:
    class Drawn:
        versions = (("a", 0), ("b", 3), ("b", 5), ("c", 9))

    def spans(count: int) -> list[tuple[str, int, int]]:
        return [(s["version"], s["start"], s["end"]) for s in version_spans(Drawn, count)]  # type: ignore[arg-type]

    assert spans(12) == [("a", 0, 3), ("b", 3, 9), ("c", 9, 12)]
    assert spans(4) == [("a", 0, 3), ("b", 3, 4)] and spans(2) == [("a", 0, 2)] and spans(0) == [("a", 0, 0)]


def test_the_loop_does_not_wait_for_an_update_that_waits_for_it(shared: Engine) -> None:
    """As if a logit processor, which the loop calls, changed weights while another thread does."""
    updates = shared._parts.updates
    with updates.alone(), pytest.raises(EngineBusyError, match="from outside"):
        in_loop(shared._parts.core, lambda: updates.begin("all"))
    assert in_loop(shared._parts.core, lambda: updates.begin("all")).success and updates.end().success


def test_a_closed_engine(two: tuple[Path, Path], tmp_path: Path) -> None:
    engine = start(two[0])
    engine.shutdown()
    assert not engine._parts.weights.places and not engine._parts.weights.params  # nothing holds the weights
    calls: list[Callable[[], Any]] = [
        lambda: engine.update_weights_from_disk(two[1]),  # type: ignore[arg-type]
        lambda: engine.update_weights_from_tensor({}),
        lambda: engine.update_weights_from_distributed([], [], []),
        lambda: engine.init_weights_update_group("127.0.0.1", 1, 1, 2, "g", "gloo"),
        lambda: engine.destroy_weights_update_group("g"),
        engine.begin_weight_update,
        engine.end_weight_update,
        lambda: engine.get_weights_by_name(NORM),
        engine.release_memory_occupation,
        engine.resume_memory_occupation,
        lambda: engine.save_sharded_model(path=str(tmp_path / "saved")),
    ]
    for call in calls:
        with pytest.raises(EngineClosedError):
            call()
