"""Engines of several replicas: one's bits, results in order, prompts where they are known, and what a death does."""

import asyncio
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_adapters
import tiny_checkpoints
import tiny_vision
import torch
from forked import Fork, run
from test_ranks import PARAMS, PROMPTS, SETTINGS, adapted, results

from fengine import Engine
from fengine.config import EngineConfig, LoraConfig
from fengine.config.schema import ModelConfig
from fengine.core.images import Image, ImageSpan
from fengine.core.plain import to_plain
from fengine.core.request import Adapter, Request, SamplingParams
from fengine.engine.parallel import child, remote
from fengine.engine.parallel.replicas import Replicas
from fengine.engine.parallel.routing import Replica, prefix_keys
from fengine.errors import (
    AdapterError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    MemoryReleasedError,
    StorageError,
    UnsupportedFeatureError,
)
from fengine.eval.runs.manifest import in_force
from fengine.lora.shared import Replicated, SharedAdapters
from fengine.worker.hub import BOX
from fengine.worker.safetensors_file import leave_tensors

LONG = "Sort these numbers, smallest first, and say nothing else: " * 6


@pytest.fixture(scope="module")
def one() -> Iterator[Engine]:
    with Engine(**SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    with Engine(**SETTINGS, dp_size=2, enable_custom_logit_processor=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def again() -> Iterator[Engine]:
    """Of two replicas that are started again: tests that end them leave both at work."""
    with Engine(**SETTINGS, dp_size=2, dp_restart=True) as engine:
        yield engine


def replicas(engine: Engine) -> list[Replica]:
    core: Any = engine._parts.core
    assert isinstance(core, Replicas)
    return core.replicas


def test_replicas_give_the_bits_of_one(one: Engine, two: Engine) -> None:
    assert results(one) == results(two)
    assert one.generate(PROMPTS, {"n": 3, "max_new_tokens": 5}) != []
    both = [engine.generate(PROMPTS, {"n": 2, "max_new_tokens": 5, "sampling_seed": 3}) for engine in (one, two)]
    assert [[out["text"] for out in each] for each in both][0] == [out["text"] for out in both[1]]


def test_each_tells_of_itself(two: Engine) -> None:
    """Also behind what a service manager or a scheduler of jobs sends to every process: the first one decides."""
    for pid, number in product(two.get_all_child_pids(), (signal.SIGINT, signal.SIGTERM)):
        os.kill(pid, number)
    assert [(load["dp_rank"], load["num_reqs"]) for load in two.get_load()] == [(0, 0), (1, 0)]
    info = two.get_server_info()
    assert len(info["internal_states"]) == 2 and info["startup_time"]["load_weight"] > 0


def test_streams_and_event_loops(one: Engine, two: Engine) -> None:
    params: Any = {"max_new_tokens": 12, "temperature": 0}

    def streamed(engine: Engine) -> Any:
        return [(out["text"], out["output_ids"]) for out in engine.generate(PROMPTS[0], params, stream=True)][-1]

    async def awaited(engine: Engine) -> Any:
        outputs = await asyncio.gather(*(engine.async_generate(prompt, params) for prompt in PROMPTS))
        return [out["text"] for out in outputs]

    assert streamed(one) == streamed(two)
    assert asyncio.run(awaited(one)) == asyncio.run(awaited(two))


def test_embeddings() -> None:
    found = []
    for size in (1, 2):
        with Engine(model_path="box", is_embedding=True, max_total_tokens=600, dp_size=size) as engine:
            found.append([out["embedding"] for out in engine.encode(PROMPTS)])
    assert found[0] == found[1]


def test_a_prompt_goes_where_its_beginning_is_known(two: Engine) -> None:
    for rank in (1, 0):
        two.flush_cache()
        two.generate(LONG, {"max_new_tokens": 1}, routed_dp_rank=rank)
        for _ in range(2):  # alone, replica 0 would be the first choice
            assert two.generate(LONG + "9 8", {"max_new_tokens": 1})["meta_info"]["cached_tokens"] >= 64
        assert replicas(two)[rank].hit(list(replicas(two)[rank].known)) and not replicas(two)[1 - rank].known


def test_a_batch_is_shared(two: Engine) -> None:
    """Equal prompts that nobody knows, too; a prompt that one replica knows moves it by a few."""
    two.flush_cache()
    for prompts in ([f"{i} and some more" for i in range(40)], [LONG] * 40):
        before = [each.finished for each in replicas(two)]
        two.generate(prompts, {"max_new_tokens": 1})
        counts = [each.finished - had for each, had in zip(replicas(two), before, strict=True)]
        assert sum(counts) == 40 and min(counts) >= 14, counts


def test_pinned_requests(two: Engine) -> None:
    for bad in (2, -1, "x"):
        with pytest.raises(InvalidRequestError, match=r"out of range \[0, 2\)"):
            two.generate("a", routed_dp_rank=bad)


def test_what_is_asked_of_all(two: Engine) -> None:
    before = two.stats()
    two.generate(PROMPTS * 2, {"max_new_tokens": 2})
    assert two.stats()["finished"] == before["finished"] + 2 * len(PROMPTS)
    assert two.flush_cache().success
    two.pause_generation("in_place")
    collector: Any = two.generate("a", {"max_new_tokens": 2}, stream=True)
    stream = two.generate("a", {"max_new_tokens": 400}, rid="x", stream=True)
    with pytest.raises(InvalidRequestError, match="'x' is in use"):
        two.generate("b", rid="x")
    two.abort("x")
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    two.continue_generation()
    assert list(collector)[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert two.update_weights_from_disk("box", weight_version="second").success
    assert two.generate("a", {"max_new_tokens": 2})["meta_info"]["weight_version"] == "second"
    assert not two.update_weights_from_disk("/nowhere").success
    two.release_memory_occupation(["kv_cache"])
    two.resume_memory_occupation()
    assert two.get_model_info()["num_parameters"] > 0 and two.get_server_info()["internal_states"]
    assert two.get_weights_by_name("model.norm.weight")


def test_errors_are_those_of_one(one: Engine, two: Engine) -> None:
    with pytest.raises(ContextLengthError):
        two.generate(input_ids=[5] * 100000)
    with pytest.raises(UnsupportedFeatureError, match="processor"):
        two.register_logit_processor("same", lambda logits, params: logits)
        two.generate("a", custom_logit_processor="same")
    refused = {
        "start_profile with parallel.dp_size=2": two.start_profile, "use dp_size=1": two.steps_told(print).__enter__,
        "use update_weights_from_tensor": partial(two.destroy_weights_update_group, "g"),
    }  # fmt: skip
    for said, call in refused.items():
        with pytest.raises(UnsupportedFeatureError, match=said):
            call()
    with pytest.raises(InvalidRequestError, match="is no text, number"):
        two.update_weights_from_disk(cast(Any, object()))


def test_tensors_reach_every_replica(two: Engine) -> None:
    half, params = torch.full((256,), 0.5), PARAMS[1] | {"sampling_seed": 5}
    with Engine(**SETTINGS) as one:
        assert one.update_weights_from_tensor([("model.norm.weight", half)]).success
        want = [one.generate(prompt, params)["text"] for prompt in PROMPTS]
    before = [two.generate(prompt, params, routed_dp_rank=0)["text"] for prompt in PROMPTS]
    assert two.begin_weight_update().success
    assert two.update_weights_from_tensor({"model.norm.weight": half}).success
    assert two.end_weight_update(weight_version="half").success
    for rank in (0, 1):
        outputs: Any = [two.generate(prompt, params, routed_dp_rank=rank) for prompt in PROMPTS]
        assert [out["text"] for out in outputs] == want != before
        assert outputs[0]["meta_info"]["weight_version"] == "half"
    assert in_force(two)["updated_weights"] == {"updates_from_memory": 1}  # in the record of a run with them
    bad: dict[str, Any] = {"model.norm.weight": [1.0], "nobody": half}
    for name, value in bad.items():
        answer = two.update_weights_from_tensor([(name, value)])
        assert not answer.success and name in answer.message
    with pytest.raises(UnsupportedFeatureError, match="load_format"):
        two.update_weights_from_tensor([], load_format="mine")
    assert two.update_weights_from_disk("box", weight_version="second").success
    assert "updated_weights" not in in_force(two)
    assert [two.generate(prompt, params)["text"] for prompt in PROMPTS] == before


def test_one_of_them_saves_the_weights(one: Engine, two: Engine, tmp_path: Path, monkeypatch: Any) -> None:
    assert two.update_weights_from_disk(cast(Any, Path(BOX))).success
    monkeypatch.chdir(tmp_path)
    for engine, name in ((one, "one"), (two, "two")):
        engine.save_sharded_model(path=name, max_size=1 << 20)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) > 8 and files == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    with pytest.raises(InvalidRequestError, match="holds weights already"):
        two.save_sharded_model(path="two")
    with pytest.raises(StorageError, match="cannot be written"):
        two.save_sharded_model(path="two/config.json/x")


def test_adapters_are_those_of_one(tmp_path: Path) -> None:
    """Loaded at the start, later, as tensors, and anew under a name; what cannot be loaded is not half loaded."""
    for seed, name in enumerate(("first", "second")):
        tiny_adapters.random_adapter(tmp_path / name, BOX, 8, seed=seed)
    lora: Any = {"lora_paths": {"first": str(tmp_path / "first")}, "max_loras_per_batch": 2, "max_lora_rank": 8}
    params: Any = PARAMS[0] | {"max_new_tokens": 8}

    def told(engine: Engine, names: list[str | None]) -> list[Any]:
        outputs: Any = engine.generate(PROMPTS, params, lora_path=names, return_logprob=True)
        return [out["meta_info"]["output_token_logprobs"] for out in outputs]

    def anew(engine: Engine) -> list[Any]:
        before = told(engine, ["first"] * 5)
        assert engine.unload_lora_adapter("first").success
        answer = engine.load_lora_adapter("first", str(tmp_path / "second"))
        assert answer.success and answer.loaded_adapters["first"] == str(tmp_path / "second")
        return [before, told(engine, ["first"] * 5)]

    with Engine(**SETTINGS, **lora) as one, Engine(**SETTINGS, **lora, dp_size=2, dp_restart=True) as two:
        want = adapted(one, tmp_path)
        assert adapted(two, tmp_path) == want
        for engine in (one, two):
            assert engine.load_lora_adapter("first", str(tmp_path / "first")).success
        assert anew(two) == (want := anew(one)) and want[0] != want[1]
        digests: list[Any] = [engine._parts.adapters.digests()["first"] for engine in (one, two)]
        assert digests[0] == digests[1] != ""
        names = list(two.lora_adapters())
        assert not two.load_lora_adapter("bad", str(tmp_path / "nowhere")).success
        assert "already loaded" in two.load_lora_adapter("first", str(tmp_path / "first")).error_message
        assert "does not exist" in two.unload_lora_adapter("bad").error_message
        with pytest.raises(InvalidRequestError, match="never been loaded: 'bad'"):
            two.generate("a", lora_path="bad")
        with pytest.raises(InvalidRequestError, match="lora_name must be a text"):
            two.load_lora_adapter(3, str(tmp_path / "first"))  # type: ignore[arg-type]
        assert list(two.lora_adapters()) == names
        killed(two)
        came_back(two, 1)
        assert [told_alone(two, prompt, params) for prompt in PROMPTS] == want[1]


def told_alone(engine: Engine, prompt: str, params: Any) -> Any:
    """By replica 1, with the adapter `first`."""
    output = engine.generate(prompt, params, lora_path="first", return_logprob=True, routed_dp_rank=1)
    return output["meta_info"]["output_token_logprobs"]


def test_images_are_those_of_one(tmp_path: Path) -> None:
    """The same ids with another image are another prompt, also where it is asked who knows it."""
    directory, spot = tiny_vision.write(tmp_path, "qwen2_5_vl"), tiny_vision.TOKEN
    prompts = [[5, spot, 7, 8], [9, spot, 10, spot, 11], [3, 4, 5], [5, spot, 7, 8]]
    pictures: list[Any] = [tiny_vision.picture(1), [tiny_vision.picture(2, 33, 64), tiny_vision.picture(3)], None,
                           tiny_vision.picture(4)]  # fmt: skip
    found, params = [], {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 2}
    for size in (1, 2):
        with Engine(model_path=str(directory), skip_tokenizer_init=True, max_total_tokens=2048, dp_size=size) as engine:
            for _ in range(2):
                outs: Any = engine.generate(None, params, prompts, image_data=pictures, return_logprob=True)
                found.append([(out["output_ids"], out["meta_info"]["output_token_logprobs"]) for out in outs])
    assert found[:2] == found[2:] and found[0][0] != found[0][3]


def test_prompts_are_known_by_adapter_and_images() -> None:
    def request(**how: Any) -> Request:
        return Request("r", 130, [7] * 130, SamplingParams(), 0, 1, frozenset(), **how)

    images = [(ImageSpan(70, Image(key, 10, 1, {})),) for key in (b"a", b"b")]
    kinds = [request(), request(cache_salt="x"), request(adapter=Adapter("a", 1, None)),
             request(adapter=Adapter("a", 2, None)), *(request(images=each) for each in images)]  # fmt: skip
    keys = [prefix_keys(each) for each in kinds]
    assert len({key[0] for key in keys}) == 4 and len({key[1] for key in keys}) == 6
    assert prefix_keys(request(images=images[0])) == keys[4]


def killed(engine: Engine) -> list[Any]:
    """The outcomes of calls to both replicas, of which replica 1 dies before their first step: tokens, or an error."""
    engine.pause_generation("in_place")
    params: Any = {"max_new_tokens": 40, "ignore_eos": True}
    streams = [engine.generate("One two", params, routed_dp_rank=rank, stream=True) for rank in range(2)]
    core, second, found = cast(Any, engine._parts.core), replicas(engine)[1], list[Any]()
    cast(Any, second.child).process.kill()
    with core._lock:
        assert core._lock.wait_for(lambda: second.facts is None, 300)
    engine.continue_generation()
    for stream in streams:
        try:
            found.append(list(stream)[-1]["meta_info"]["completion_tokens"])
        except EngineDeadError as error:
            found.append(str(error))
    return found


def came_back(engine: Engine, rank: int) -> None:
    core: Any = engine._parts.core
    with core._lock:
        assert core._lock.wait_for(lambda: replicas(engine)[rank].fault is None, 300)


def test_a_death_fails_its_requests_by_name_and_the_others_go_on() -> None:
    engine = Engine(**SETTINGS, dp_size=2)
    first, second = killed(engine)
    assert first == 40 and "replica 1 of 2 was ended by SIGKILL; its requests have ended" in second
    assert len(engine.generate(PROMPTS, PARAMS[0])) == len(PROMPTS)
    with pytest.raises(EngineDeadError, match="replica 1 of 2 has ended"):
        engine.generate("a", routed_dp_rank=1)
    children = [each.child for each in replicas(engine)]
    assert children[0] is not None
    children[0].process.kill()
    with pytest.raises(EngineDeadError):
        for _ in range(1000):
            engine.generate("a", {"max_new_tokens": 2})
    engine.shutdown()
    assert all(child is not None and child.process.poll() is not None for child in children)


def test_one_that_is_started_again_computes_the_same(again: Engine) -> None:
    for change in (partial(again.update_weights_from_tensor, []), again.begin_weight_update):
        with pytest.raises(UnsupportedFeatureError, match="would not have them"):
            change()
    want = again.generate(PROMPTS, PARAMS[0])
    assert killed(again) == [40, 40]
    came_back(again, 1)
    found = [again.generate(prompt, PARAMS[0], routed_dp_rank=1) for prompt in PROMPTS]
    assert [out["text"] for out in found] == [out["text"] for out in want]


def restarted(engine: Engine, rank: int) -> str | None:
    """Why a replica that was killed and is there again takes no requests."""
    core, replica = cast(Any, engine._parts.core), replicas(engine)[rank]
    cast(Any, replica.child).process.kill()
    with core._lock:
        assert core._lock.wait_for(lambda: replica.facts is None, 300)
        assert core._lock.wait_for(lambda: replica.facts is not None and replica.caught_up, 300)
        return replica.fault


def test_one_that_reads_other_files_than_the_rest_takes_no_requests(tmp_path: Path) -> None:
    model, adapter = tiny_checkpoints.write(tmp_path / "model", vocab_size=2048), tmp_path / "adapter"
    for name in ("tokenizer.json", "tokenizer_config.json"):  # without the latter each process imports transformers
        shutil.copy(BOX / name, model)
    tiny_adapters.random_adapter(adapter, model, 8)
    how: Any = {"lora_paths": {"a": str(adapter)}, "max_lora_rank": 8}
    ids: Any = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    with Engine(model_path=str(model), **how, max_total_tokens=600, dp_size=2, dp_restart=True) as engine:
        os.utime(model / "model.safetensors")
        assert "model.safetensors changed since" in str(restarted(engine, 1))
        with pytest.raises(EngineDeadError, match="replica 1 of 2 has not what the others have.*model.safetensors"):
            engine.generate(**ids, routed_dp_rank=1)
        assert engine.generate(**ids)
        assert engine.update_weights_from_disk(str(model)).success
        assert engine.generate(**ids, routed_dp_rank=1)
        tiny_adapters.random_adapter(adapter, model, 8, seed=1)
        assert "LoRA adapter 'a' changed since" in str(restarted(engine, 0))
        assert engine.unload_lora_adapter("a").success and replicas(engine)[0].fault is None
        values = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
        (model / "config.json").write_text(json.dumps(values))
        assert "config.json changed since" in str(restarted(engine, 0))
        told = json.loads((model / "tokenizer.json").read_text())
        vocab = told["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]  # as grammars would know them
        (model / "tokenizer.json").write_text(json.dumps(told))
        assert "tokenizer changed since" in str(restarted(engine, 1))


def test_one_that_is_started_again_holds_no_more_memory_than_the_rest(again: Engine) -> None:
    again.release_memory_occupation(["kv_cache"])
    again.release_memory_occupation(["weights"])
    again.resume_memory_occupation(["kv_cache"])
    assert restarted(again, 1) is None
    with pytest.raises(MemoryReleasedError, match="'weights' is released"):
        again.generate("a", routed_dp_rank=1)
    again.resume_memory_occupation()
    assert again.generate("a", {"max_new_tokens": 2}, routed_dp_rank=1)
    assert restarted(again, 1) is None and again.generate("a", {"max_new_tokens": 2}, routed_dp_rank=1)


def test_a_rank_of_a_replica_takes_it_along(caplog: pytest.LogCaptureFixture) -> None:
    """The replica's stream goes on where it was."""
    with Engine(**SETTINGS, dp_size=2, tp_size=2, dp_restart=True) as engine:
        want = engine.generate(PROMPTS, PARAMS[0])
        ranks = (Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in engine.get_all_child_pids())
        (rank,) = list(ranks)[1].split()
        long: Any = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
        streams = [engine.generate("One two", long, routed_dp_rank=i, stream=True) for i in range(2)]
        next(iter(streams[1]))
        os.kill(int(rank), signal.SIGKILL)
        first, second = ([out["text"] for out in stream] for stream in streams)
        assert first[-1] == second[-1] and all(map(str.startswith, second[1:], second))
        assert "replica 1 of 2 failed: rank 1 of 2 was ended by SIGKILL" in caplog.text
        came_back(engine, 1)
        again = [engine.generate(prompt, PARAMS[0], routed_dp_rank=1) for prompt in PROMPTS]
        assert [out["text"] for out in again] == [out["text"] for out in want]


def test_a_death_while_they_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Replicas._hear

    def hear(self: Replicas, replica: Replica, told: dict[str, Any]) -> None:
        if replica.rank == 0:
            own(self, replica, told)
        elif self.replicas[0].facts and replica.child is not None:
            replica.child.process.kill()

    monkeypatch.setattr(Replicas, "_hear", hear)
    with pytest.raises(EngineDeadError, match="replica 1 of 2 was ended by SIGKILL"):
        Engine(**SETTINGS, dp_size=2)


@pytest.mark.parametrize("how", ["dp_size", "tp_size"])
def test_a_fork_that_ends_takes_nothing_along(how: str, tmp_path: Path) -> None:
    """Neither folders that the other processes read from, nor their sockets, nor requests whose streams it drops."""
    tiny_adapters.random_adapter(tmp_path / "a", BOX, 8)
    settings = SETTINGS | {how: 2, "lora_paths": {"a": str(tmp_path / "a")}, "max_lora_rank": 8}
    code = (
        "import gc, os, sys, warnings\n"
        "from pathlib import Path\n"
        "from fengine import Engine\n"
        "warnings.simplefilter('ignore')  # of forks beside threads\n"
        f"with Engine(**{settings}) as engine:\n"
        "    folder = Path(engine._parts.ranks.folder.name)\n"
        "    files = sorted(path.name for path in folder.iterdir())\n"
        "    stream = engine.generate('One two', {'max_new_tokens': 400, 'ignore_eos': True}, stream=True)\n"
        "    next(stream)\n"
        "    for _ in range(2):\n"
        "        if (child := os.fork()) == 0:\n"
        "            stream, engine._parts.adapters = None, None\n"
        "            gc.collect()\n"
        "            engine.shutdown()\n"
        "            sys.exit(0)\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "    assert sorted(path.name for path in folder.iterdir()) == files\n"
        "    assert list(stream)[-1]['meta_info']['completion_tokens'] == 400\n"
        "    assert engine.generate('a', {'max_new_tokens': 2}, lora_path='a')\n"
        "assert not folder.exists()\n"
    )
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", [{"replica": 0}, {"group": ["", 1, "", [-1, -1]]}], ids=str)
def test_one_whose_first_process_ends_before_it_has_begun_removes_the_folder(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    config = to_plain(EngineConfig(model=ModelConfig(path="box")), child.NOTHING)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(json.dumps({"config": config, "folder": str(folder)} | kind).encode() + b"\n")
        ours.close()
        command = [sys.executable, "-m", child.MAIN, str(theirs.fileno())]
        with Fork(command, pass_fds=[theirs.fileno()]) as process:
            assert process.wait(120) == 0
    assert not folder.exists()


def test_one_that_was_taken_for_dead_stays_dead(again: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would remove the folder that the others read from."""
    monkeypatch.setattr(child, "SILENCE", 2.0)
    core: Any = again._parts.core
    first: Any = replicas(again)[1].child
    again.generate("a", {"max_new_tokens": 1}, routed_dp_rank=1)  # the shorter silence counts from here
    os.kill(first.process.pid, signal.SIGSTOP)
    with core._lock:
        assert core._lock.wait_for(lambda: replicas(again)[1].facts is None, 300)
    came_back(again, 1)
    assert first.process.poll() == -signal.SIGKILL and Path(core.folder.name).is_dir()


def test_a_file_that_cannot_be_read_or_written_is_told(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [("model.norm.weight", torch.ones(256, dtype=torch.complex64))]
    assert "complex64 is not supported" in two.update_weights_from_tensor(given).message
    monkeypatch.setattr(remote, "leave_tensors", lambda _, path: path.write_bytes(b"x"))
    with pytest.raises(EngineDeadError, match="SafetensorError"):
        two.update_weights_from_tensor([("model.norm.weight", torch.ones(256))])
    with pytest.raises(StorageError, match="set TMPDIR"):
        leave_tensors({"x": torch.ones(1)}, Path("/nowhere/x"))


def test_an_adapter_that_changes_while_it_is_looked_up_is_not_taken_for_the_old_one() -> None:
    class Changing:
        def resolve(self, name: str) -> Adapter:
            loads.load(name, "path", False, 2)
            return Adapter(name, 7, None)

        def load(self, *_: Any) -> None: ...

        def unload(self, name: str) -> None: ...

        def digests(self) -> dict[str, str]:
            return {"a": ""}

    loads = Replicated(cast(Any, Changing()), LoraConfig(paths=("a=path",)))
    with pytest.raises(AdapterError, match="send it again"):
        loads.of("a", 1)


def test_one_that_is_out_of_tries_does_not_end_another_that_starts() -> None:
    """Replica 0 dies and is on its way; replica 1 dies then, and is not started again. The end ends what is open."""
    with Engine(**SETTINGS, dp_size=2, dp_restart=True) as engine:
        core: Any = engine._parts.core
        first, second = replicas(engine)
        with core._lock:  # neither is heard before both are dead
            for each in (first, second):
                cast(Any, each.child).process.kill()
            second.facts, second.failures = None, 2
            assert core._lock.wait_for(lambda: first.facts is None and second.over, 300)
            assert core.inbox.end is None and not first.over
        came_back(engine, 0)
        assert engine.generate("a", {"max_new_tokens": 2})["meta_info"]["completion_tokens"] == 2
        engine.pause_generation("in_place")
        stream = engine.generate("One two", {"max_new_tokens": 4}, stream=True)
        threading.Thread(target=engine.shutdown).start()
        with pytest.raises(EngineClosedError):
            list(stream)
        with pytest.raises(EngineClosedError):
            engine.generate("a")


def test_an_interrupted_load_of_tensors_leaves_replicas_their_file(tmp_path: Path) -> None:
    """It goes with the engine's folder; that of a load which was refused at once."""

    def ask(part: str, *given: Any) -> None:
        if part == "load":
            raise fault("no")

    tensors, values = {"base_model.model.model.layers.0.x": torch.ones(1)}, {"r": 8}
    adapters = SharedAdapters(LoraConfig(enabled=True), ask, str(tmp_path))
    for fault, left in ((AdapterError, 0), (KeyboardInterrupt, 1)):
        with pytest.raises(fault):
            adapters.load_tensors("a", tensors, values)
        gc.collect()
        assert len(list(tmp_path.glob("*/adapter_model.safetensors"))) == left


@pytest.mark.parametrize("how", ["dp_size", "tp_size"])
def test_processes_know_their_folder_before_it_is_there(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that they remove it whenever the first process is killed."""
    told, settings = [], SETTINGS | {how: 2}

    def send(self: child.Child, start: Any) -> None:
        told.append((start["folder"], os.listdir(tmp_path)))
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(child.Child, "send", send)
    with pytest.raises(KeyboardInterrupt):
        Engine(**cast(Any, settings))
    ((folder, before),) = told
    assert Path(folder).parent == tmp_path and before == [] and not Path(folder).exists()
