"""Memory given back and taken again: it is really free meanwhile, and afterwards every bit is as before."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_checkpoints
import torch
from books import check_scheduler
from loops import in_loop
from safetensors.torch import load_file
from test_weights import ask, between_steps, fresh, start

from fengine import Engine
from fengine.config import CompileConfig, EngineConfig, ModelConfig
from fengine.errors import (
    EngineBusyError,
    EngineDeadError,
    InvalidRequestError,
    MemoryReleasedError,
    OutOfMemoryError,
    UnsupportedFeatureError,
)
from fengine.worker.cuda_graphs import Graphs


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with start(checkpoint) as engine:
        yield engine


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["cuda_graph"], ["kv_cache", "weights"], "kv_cache", None])
def test_requests_are_refused_until_everything_is_back(engine: Engine, tags: Any) -> None:
    before = ask(engine)
    engine.release_memory_occupation(tags)
    assert engine.flush_cache().success and engine.get_server_info()["status"] != "ready"
    calls: list[Callable[[], Any]] = [
        lambda: ask(engine),
        lambda: next(engine.generate(input_ids=[1], stream=True)),  # type: ignore[call-overload]
        lambda: asyncio.run(engine.async_generate(input_ids=[1])),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(MemoryReleasedError, match="resume_memory_occupation"):
            call()
    engine.resume_memory_occupation(tags)
    assert engine.get_server_info()["status"] == "ready"
    assert ask(engine) == before
    in_loop(engine._parts.core, lambda: check_scheduler(engine._parts.core.stepper.scheduler))


def test_an_engine_that_is_dead_does_not_ask_for_its_memory(engine: Engine) -> None:
    engine.release_memory_occupation()
    engine._parts.core.inbox.close(EngineDeadError("a rank has ended"))
    with pytest.raises(EngineDeadError, match="a rank has ended"):
        ask(engine)


def test_the_prefix_cache_goes_with_the_pages(engine: Engine) -> None:
    prompt = list(range(40))
    for cached in (0, 32):
        assert engine.generate(input_ids=prompt)["meta_info"]["cached_tokens"] == cached  # type: ignore[call-overload]
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()
    assert engine.generate(input_ids=prompt)["meta_info"]["cached_tokens"] == 0  # type: ignore[call-overload]


def test_wrong_tags_and_states(engine: Engine) -> None:
    before = ask(engine)
    for tags in ("pages", [], ["kv_cache", "pages"], 3, {"kv_cache": 1}, [["kv_cache"]]):
        for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
            with pytest.raises(InvalidRequestError, match="kv_cache"):
                call(tags)  # type: ignore[arg-type]
    for tags in (None, ["weights"]):
        with pytest.raises(MemoryReleasedError, match="not currently released"):
            engine.resume_memory_occupation(tags)
    engine.release_memory_occupation(["kv_cache"])
    for tags in (["kv_cache"], ["weights", "kv_cache"]):  # a call that is refused changes nothing
        with pytest.raises(MemoryReleasedError, match="kv_cache: already released"):
            engine.release_memory_occupation(tags)
    with pytest.raises(MemoryReleasedError, match="weights: not currently released"):
        engine.resume_memory_occupation(["kv_cache", "weights"])
    engine.release_memory_occupation()  # what is left
    with pytest.raises(MemoryReleasedError, match="already released"):
        engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert ask(engine) == before


def test_nothing_is_released_while_requests_run(engine: Engine) -> None:
    before, refused = ask(engine), []

    def release() -> None:
        try:
            engine.release_memory_occupation(["weights"])
        except EngineBusyError as error:
            refused.append(error)

    between_steps(engine, 5, release)
    assert ask(engine) == before and refused
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert ask(engine) == before


def test_updates_meanwhile(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    """As reinforcement learning does it: all is released, weights come back first and are updated, then the pages."""
    other = tiny_checkpoints.write(tmp_path, seed=1)
    engine.release_memory_occupation()
    for update in (engine.update_weights_from_disk, lambda path: engine.update_weights_from_tensor(load(path))):
        result = update(other)
        assert not result.success and "resume_memory_occupation" in result.message
    with pytest.raises(MemoryReleasedError):
        engine.get_weights_by_name("model.norm.weight")
    engine.resume_memory_occupation(["weights"])
    assert engine.update_weights_from_tensor(load(other)).success
    engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert ask(engine) == fresh(other)


def test_a_tied_head_alone_while_the_embedding_is_gone(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, tie_word_embeddings=True)
    head = {"lm_head.weight": load(directory)["model.embed_tokens.weight"]}
    with start(directory) as engine:
        assert engine.update_weights_from_tensor(head).success
        engine.release_memory_occupation(["weights"])
        result = engine.update_weights_from_tensor(head)
        assert not result.success and "resume_memory_occupation" in result.message


def load(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_weights_that_nobody_can_read_again(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    tensors = load(tiny_checkpoints.write(tmp_path, seed=1))
    assert engine.update_weights_from_tensor(tensors).success
    new = ask(engine)
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    with pytest.raises(MemoryReleasedError, match="21 tensors hold no values"):
        ask(engine)
    name, tensor = tensors.popitem()
    assert engine.update_weights_from_tensor(tensors).success
    with pytest.raises(MemoryReleasedError, match="1 tensors hold no values"):
        ask(engine)
    with pytest.raises(MemoryReleasedError, match="1 tensors hold no values"):
        engine.get_weights_by_name(name)
    other = next(iter(tensors))
    assert engine.get_weights_by_name(other, 1) == tensors[other][:1].tolist()
    assert engine.update_weights_from_tensor({name: tensor}).success
    assert ask(engine) == new


def test_a_checkpoint_that_changed_meanwhile_is_not_read(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path)
    with start(directory) as engine:
        engine.release_memory_occupation(["weights"])
        tiny_checkpoints.write(directory, seed=1)
        engine.resume_memory_occupation(["weights"])
        with pytest.raises(MemoryReleasedError, match="hold no values"):
            ask(engine)
        assert engine.update_weights_from_disk(directory).success
        assert ask(engine) == fresh(directory)


def test_no_memory_to_resume(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ask(engine)
    engine.release_memory_occupation()
    memory = engine._parts.memory.device
    with monkeypatch.context() as patch:
        patch.setattr(memory, "new_kv", lambda: (_ for _ in ()).throw(OutOfMemoryError("no pages")))
        with pytest.raises(OutOfMemoryError, match="no pages"):
            engine.resume_memory_occupation(["kv_cache"])
        sizes = memory._sizes
        patch.setattr(memory, "_sizes", [(storage, 1 << 60) for storage, _ in sizes])
        told: list[bool] = []
        patch.setattr(memory.weights, "agreed", told.append)
        with pytest.raises(OutOfMemoryError, match="weights"):
            engine.resume_memory_occupation(["weights"])
        assert told == [False]  # the other ranks of a group wait for it
    with pytest.raises(MemoryReleasedError):
        ask(engine)
    engine.resume_memory_occupation()
    assert ask(engine) == before


def test_graphs_that_cannot_be_captured_again_leave_the_engine_refusing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runner:
        graphs = {1: "half of them"}

        def warm_up(self, kv: object, page_size: int) -> object:
            raise torch.OutOfMemoryError("no memory for graphs")

    with start(checkpoint) as engine:
        before, memory, core, runner = ask(engine), engine._parts.memory, engine._parts.core, Runner()
        with (
            monkeypatch.context() as patch,
            pytest.raises(OutOfMemoryError, match="no memory for graphs: .*cuda_graph"),
        ):
            patch.setattr("fengine.engine.memory.CudaRunner", Runner)
            patch.setattr(memory.device, "runner", runner)
            in_loop(core, memory._capture)
        assert not runner.graphs
        with pytest.raises(MemoryReleasedError, match="cuda_graph"):
            ask(engine)
        engine.resume_memory_occupation(["cuda_graph"])
        assert ask(engine) == before


def test_graphs_are_captured_when_they_are_asked_for_and_all_is_there(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, before = list[bool](), ask(engine)
    assert engine.begin_weight_update().success and engine.end_weight_update().success  # of nothing
    monkeypatch.setattr(engine._parts.memory.device, "capture", lambda: captured.append(True))
    for order in (["weights", "kv_cache", "cuda_graph"], ["cuda_graph", "kv_cache", "weights"]):
        engine.release_memory_occupation()
        for count, tag in enumerate(order):
            assert len(captured) == 0
            engine.resume_memory_occupation([tag])
            assert len(captured) == (count == 2)
        captured.clear()
        assert ask(engine) == before


def storages() -> dict[int, int]:
    """Bytes of tensors by their address."""
    found = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@pytest.mark.parametrize("kind", ["plain", "released", "adapters", "draft"])
def test_an_engine_that_has_ended_holds_no_tensor(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Also where it is still named: the next one may need the room."""
    adapter = str(tiny_adapters.random_adapter(tmp_path / "a", checkpoint, 4))
    options: Any = {
        "adapters": {"lora_paths": {"a": adapter}, "max_loras_per_batch": 1},
        "draft": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(checkpoint)},
    }.get(kind, {})
    before = storages()
    engine = start(checkpoint, **options)
    ask(engine)
    held = storages().keys() - before.keys()
    if kind == "released":
        engine.release_memory_occupation()
    engine.shutdown()
    left = {place: size for place, size in storages().items() if place not in before}
    assert len(held) > 10 and left == {}


def test_an_engine_that_cannot_start_leaves_nothing(checkpoint: Path) -> None:
    """Its loop would hold the weights for ever."""
    path, before, threads = checkpoint / "generation_config.json", storages(), threading.enumerate()
    path.write_text('{"num_beams": 4}')
    model = ModelConfig(str(checkpoint), device="cpu", skip_tokenizer_init=True, sampling_defaults="model")
    with pytest.raises(UnsupportedFeatureError, match="num_beams"):
        Engine.from_config(EngineConfig(model=model, compile=CompileConfig(enabled=False)))
    path.unlink()
    gc.collect()
    assert storages() == before and threading.enumerate() == threads


def test_shutdown_while_released(checkpoint: Path) -> None:
    with start(checkpoint) as engine:
        engine.release_memory_occupation()


@pytest.mark.gpu
def test_graphs_are_captured_again_on_a_gpu(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, head_dim=64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"device": "cuda", "max_running_requests": 8, "max_total_tokens": 1 << 16}
    with Engine(model_path=str(directory), skip_tokenizer_init=True, chunked_prefill_size=64, **options) as engine:
        before = ask(engine)
        for tags in (["kv_cache"], ["weights"], ["cuda_graph"], None):
            held = torch.cuda.memory_allocated()  # the first capture of the loop's thread takes room for cuBLAS
            engine.release_memory_occupation(tags)
            if tags != ["cuda_graph"]:
                assert torch.cuda.memory_allocated() < held
            with pytest.raises(MemoryReleasedError):
                ask(engine)
            engine.resume_memory_occupation(tags)
            assert ask(engine) == before
        other = tiny_checkpoints.write(tmp_path / "other", head_dim=64, dtype=torch.bfloat16, seed=1)
        assert engine.update_weights_from_disk(other).success
        new = ask(engine)
    with Engine(model_path=str(other), skip_tokenizer_init=True, chunked_prefill_size=64, **options) as engine:
        assert ask(engine) == new != before


@pytest.mark.gpu
def test_a_thread_that_never_multiplied_before_captures_a_product() -> None:
    """The loop's, when memory is resumed: it has no handle of cuBLAS yet, and in a capture none can be made."""
    x, graphs, y = torch.ones(64, 64, device="cuda"), Graphs(torch.device("cuda")), torch.empty(64, 64, device="cuda")
    torch.mm(x, x)  # loads the library
    thread = threading.Thread(target=lambda: graphs.capture("product", lambda: torch.mm(x, x, out=y)))
    thread.start()
    thread.join()
    assert graphs.replay("product") and y.eq(64).all()


def test_kept_weights_come_back_whatever_they_were(checkpoint: Path) -> None:
    """Also those of an update, which no checkpoint holds."""
    with start(checkpoint, enable_weights_cpu_backup=True) as engine:
        norm = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
        assert engine.update_weights_from_tensor([("model.norm.weight", norm.flip(0) * 2)]).success
        before = ask(engine)
        for tags in (["weights"], None):
            engine.release_memory_occupation(tags)
            with pytest.raises(MemoryReleasedError):
                ask(engine)
            engine.resume_memory_occupation(tags)
            assert ask(engine) == before
            assert not engine._parts.memory.device._kept  # nor is their copy any more
