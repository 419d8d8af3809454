"""What an engine writes about its requests, how many may wait, and hostile arguments that change nothing."""

# pyright: reportArgumentType=false, reportCallIssue=false

import asyncio
import gc
import json
import logging
import re
import stat
import weakref
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checksum import checksum_engine, expected

from fengine.api.engine import Engine
from fengine.api.io_struct import EncodeReqInput, GenerateReqInput
from fengine.api.server_args import ServerArgs
from fengine.engine.deadlines import Deadlines
from fengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
    QueueFullError,
    TimedOutError,
    UnsupportedFeatureError,
)
from fengine.worker.device import refuse_forked

GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_requests_are_logged_as_far_as_the_level_says(level: int, caplog: pytest.LogCaptureFixture) -> None:
    with checksum_engine() as made:
        args = ServerArgs("x", log_requests=True, log_requests_level=level)
        with caplog.at_level(logging.INFO, logger="fengine"):
            engine = Engine.from_parts(made._parts, args)
            engine.generate(input_ids=[5, 6], sampling_params=GREEDY, rid="r", cache_salt="secret")
    received, finished = (json.loads(line.partition(": ")[2]) for line in caplog.messages)
    assert received["rid"] == finished["rid"] == "r" and received["prompt_tokens"] == 2
    assert finished["completion_tokens"] == 4 and finished["finish_reason"]["type"] == "length"
    assert ("sampling_params" in received) == (level >= 1) and ("text" in finished) == (level >= 2)
    assert "secret" not in caplog.text
    if level >= 2:
        assert received["text"] == "[5, 6]" and finished["text"] == str(expected([5, 6], 4))


def test_nothing_is_logged_unasked(caplog: pytest.LogCaptureFixture) -> None:
    with checksum_engine() as engine, caplog.at_level(logging.DEBUG, logger="fengine"):
        engine.generate(input_ids=[5], sampling_params=GREEDY)
    assert not caplog.messages


def test_the_last_requests_are_written_when_the_engine_dies(tmp_path: Path) -> None:
    with checksum_engine() as made:
        args = ServerArgs("x", crash_dump_folder=str(tmp_path / "dumps"), api_key="SECRET-key")  # type: ignore[call-arg]
        engine = Engine.from_parts(made._parts, args)
        engine.generate(input_ids=[5, 6], sampling_params=GREEDY, rid="good", cache_salt="SECRET-salt")
        core = engine._parts.core

        def broken(*_: Any) -> None:
            raise MemoryError("none left")

        core.stepper.scheduler.schedule = broken  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="none left"):
            engine.generate(input_ids=[7], sampling_params={"custom_params": {"a": "SECRET-param"}}, rid="last")
        core.call = lambda *_: None  # type: ignore[method-assign]
    (file,) = (tmp_path / "dumps").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    found = json.loads(text)
    assert [row["rid"] for row in found["requests"]] == ["good", "last"] and "none left" in found["error"]
    assert found["requests"][0]["output_ids"] == expected([5, 6], 4) and found["requests"][0]["finished"]
    assert "SECRET" not in text


def test_no_folder_is_named_as_a_home() -> None:
    with pytest.raises(ConfigError, match="crash_dump_folder='~nobody' begins with ~"):
        ServerArgs("x", crash_dump_folder="~nobody").to_config()


def test_as_many_requests_wait_as_may(tmp_path: Path) -> None:
    with checksum_engine(rows=2) as engine:
        engine._parts.core.stepper.scheduler._waiting.most = 3
        engine.pause_generation("in_place")
        streams = [engine.generate(input_ids=[i], sampling_params=GREEDY, stream=True) for i in range(5)]
        engine.get_load()
        with pytest.raises(QueueFullError, match="max_queued_requests is 3"):
            engine.generate(input_ids=[9], sampling_params=GREEDY)
        engine.continue_generation()
        assert [list(stream)[-1]["output_ids"] for stream in streams] == [expected([i], 4) for i in range(5)]
        assert engine.generate(input_ids=[9], sampling_params=GREEDY)["output_ids"] == expected([9], 4)


def test_what_waits_or_runs_for_too_long_ends_with_an_error() -> None:
    with checksum_engine(rows=1) as engine:
        core = engine._parts.core
        core.stepper.watch(limits := Deadlines(core.requests, 1e-9, None))
        engine.pause_generation("in_place")
        streams = [engine.generate(input_ids=[i], sampling_params=GREEDY, stream=True) for i in range(2)]
        engine.get_load()
        engine.continue_generation()
        assert list(streams[0])[-1]["output_ids"] == expected([0], 4)
        reason: Any = list(streams[1])[-1]["meta_info"]["finish_reason"]
        assert (reason["type"], reason["status_code"]) == ("abort", 503)
        assert "waited" in reason["message"] and "scheduler.waiting_timeout is 1e-09 seconds" in reason["message"]
        limits.waiting, limits.running = None, 1e-9
        with pytest.raises(TimedOutError, match=r"has run for .* scheduler.running_timeout"):
            engine.generate(input_ids=[5], sampling_params=GREEDY)
        core.stepper.unwatch(limits)
        assert engine.generate(input_ids=[9], sampling_params=GREEDY)["output_ids"] == expected([9], 4)


# -- hostile and wrong arguments ---------------------------------------------------------------------------------------


def raising(base: type) -> type:
    """A subclass whose methods all raise."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a method ran")

    names = [n for n in dir(base) if callable(getattr(base, n)) and n not in (
        "__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__init_subclass__",
        "__subclasshook__", "__class_getitem__", "__del__",
    )]  # fmt: skip
    return type(f"Bad{base.__name__}", (base,), dict.fromkeys(names, fail))


def test_subclasses_whose_methods_raise_are_read_as_their_bases() -> None:
    text, items, pairs = raising(str), raising(list), raising(dict)
    with checksum_engine() as engine:
        good = engine.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]
        for given in (items([5, 6]), [items([5, 6])], items([items([5, 6])])):
            output = engine.generate(input_ids=given, sampling_params=pairs(GREEDY), rid=None)
            assert (output if isinstance(output, dict) else output[0])["output_ids"] == good
        for bad in (
            {"prompt": text("x")}, {"prompt": items([text("x")])}, {"input_ids": [5], "rid": items([5])},
            {"input_ids": [5], "sampling_params": pairs({"temprature": 1})},
            {"input_ids": [5], "sampling_params": {"stop": items([text("a")])}},
            {"input_ids": [5], "session_params": pairs({"id": text("nobody")})},
            {"input_ids": [5], "image_data": items([text("x")])},
            {"input_ids": [5], "lora_path": text("nobody")}, {"input_ids": [5], "custom_logit_processor": text("no")},
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError):
                engine.generate(**bad)
        assert engine.stats()["finished"] == 4 and engine.stats()["running"] == engine.stats()["waiting"] == 0
        deep: Any = []
        deep += [deep, deep]
        shared: Any = []
        for _ in range(60):
            shared = [shared, shared]
        for odd in (deep, shared):
            with pytest.raises(InvalidRequestError):
                engine.generate(input_ids=[5], sampling_params={"custom_params": {"x": odd}})


class Unreadable:
    """What raises at every look."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Endless(list):
    """What can be shown, and not gone through."""

    def __iter__(self) -> Any:
        raise RuntimeError("no items")


DEEP = reduce(lambda inner, _: [inner], range(100_000), [])
ODD = {
    "whole": raising(int)(5), "number": raising(float)(0.5), "huge": 10**5000, "deep": DEEP, "object": Unreadable(),
    "list": raising(list)([1.5]), "table": np.ones((2, 2)), "no text": np.void(b"abc"),
    "meta": torch.ones(3, device="meta"), "no items": Endless([1.5]),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_values_that_cannot_be_read_or_told_are_refused_by_name(odd: Any) -> None:
    with checksum_engine() as engine:
        for call, name in (
            *((partial(engine.generate, input_ids=[5], **{name: odd}), name) for name in (
                "lora_path", "rid", "image_data", "audio_data", "stream", "routed_dp_rank", "token_ids_logprob",
                "return_hidden_states", "priority", "cache_salt", "session_id",
            )),
            *((partial(engine.generate, input_ids=[5], sampling_params={name: odd}), name) for name in (
                "max_new_tokens", "regex", "logit_bias", "stop_regex", "ignore_eos", "top_k",
            )),
            (partial(engine.abort, abort_all=odd), "abort_all"),
            (partial(engine.pause_generation, mode=odd), "mode"),
            (partial(engine.release_memory_occupation, odd), "tags"),
            (partial(engine.update_weights_from_tensor, {}, abort_all_requests=odd), "abort_all_requests"),
            (partial(engine.update_weights_from_tensor, {}, load_format=odd), "load_format"),
            (partial(engine.begin_weight_update, odd), "selector"),
            (partial(engine.chat_ids, [{}], continue_final_message=odd), "continue_final_message"),
            (partial(engine.save_sharded_model, odd), "path"),
        ):  # fmt: skip
            with suppress(UnsupportedFeatureError), pytest.raises(InvalidRequestError, match=name.removesuffix("_id")):
                call()
        assert engine.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"] == expected([5, 6], 4)
        assert engine.stats()["finished"] == 1


@pytest.mark.parametrize("name", ["tp_size", "dtype", "base_gpu_id", "page_size", "device", "log_level", "lora_paths"])
def test_settings_that_cannot_be_told_are_refused(name: str) -> None:
    for odd in ODD.values():
        with pytest.raises(ConfigError, match="schedule|" + name):
            ServerArgs("box", **{name: odd}).to_config()


def test_a_flag_is_a_flag() -> None:
    """A text that says false would be as good as true."""
    with checksum_engine() as engine:
        for call in (
            partial(engine.abort, abort_all="false"), partial(engine.chat, [], stream=1),
            partial(engine.update_weights_from_tensor, {}, flush_cache=0),
            partial(engine.apply_chat_template, [], tokenize="no"),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match="must be True or False"):
                call()


def test_wrong_arguments_are_told_with_the_nearest_name() -> None:
    with checksum_engine() as engine:
        assert re.fullmatch(r"Engine\('.*', cpu, KV cache of [\d,]+ tokens\)", repr(engine))
        for call, words in (
            (lambda: engine.generate(input_id=[1]), "unknown argument 'input_id'. Did you mean 'input_ids'"),
            (lambda: engine.generate(text="x"), "unknown argument 'text'"),
            (lambda: engine.generate("x", temprature=0), "sampling_params={'temperature'"),
            (lambda: engine.generate("x", logprobs=2), "It is 'return_logprob' here"),
            (lambda: engine.generate("x", {"seed": 1}), "Did you mean 'sampling_seed'"),
            (
                lambda: engine.generate("x", {"logprobs": 1}),
                "an argument of the call: return_logprob=True, top_logprobs",
            ),
            (lambda: engine.rerank(0), "does not appear to be an embedding model"),
            (lambda: engine.score(querry="x"), "Did you mean 'query'"),
            (lambda: engine.open_session(), "missing a required argument: 'capacity_of_str_len'"),
            (lambda: engine.close_session(1, 2), "too many positional arguments; its arguments are session_id"),
            (lambda: engine.encode(), "missing a required argument: 'prompt'"),
            (lambda: engine.load_lora_adapter("a"), "missing a required argument: 'lora_path'"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                call()
        assert engine.generate(input_ids=[5], sampling_params=GREEDY, kv_router_hint={"a": 1}, routed_dp_rank=0)


def test_programs_reach_requests_through_the_tokenizer_manager() -> None:
    async def ask(engine: Engine) -> list[Any]:
        manager = engine.tokenizer_manager
        one = GenerateReqInput(input_ids=[5, 6], sampling_params=GREEDY)
        stream = GenerateReqInput(input_ids=[5, 6], sampling_params=GREEDY, stream=True)
        found = [[chunk async for chunk in manager.generate_request(req, None)] for req in (one, stream)]
        with pytest.raises(InvalidRequestError, match="embedding"):
            [_ async for _ in manager.generate_request(EncodeReqInput([1, 2]))]
        return [found, await manager.flush_cache(), manager.model_config]

    with checksum_engine() as engine:
        (single, chunks), flushed, config = asyncio.run(ask(engine))
        assert [o["output_ids"] for o in single] == [expected([5, 6], 4)]
        assert chunks[-1]["output_ids"] == expected([5, 6], 4) and flushed.success
        assert (config.context_len, config.vocab_size, config.is_generation) == (256, 97, True)


def test_an_engine_that_is_dropped_ends_by_itself() -> None:
    engine = Engine(model_path="box")
    threads, gone = engine._parts.core.threads, weakref.ref(engine)
    stream = engine.generate("Hello", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    del engine
    gc.collect()
    assert gone() is not None  # its stream holds it
    assert next(stream, "read to its end")  # on a slow machine there was one chunk
    stream.close()  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_hidden_states_in_every_output_where_the_engine_says_so() -> None:
    with Engine(model_path="box", return_hidden_states=True) as engine:
        first, *rest = engine.generate("Hello", GREEDY)["meta_info"]["hidden_states"]
        assert first.ndim == 2 and all(state.shape == first.shape[1:] for state in rest) and len(rest) == 3


def test_chats_are_encoded_through_the_template() -> None:
    chat = [{"role": "user", "content": "What is 2 + 2?"}]
    with Engine(model_path="box", is_embedding=True) as engine:
        ids = engine.chat_ids(chat)
        wanted = engine.encode(ids)["embedding"]
        assert engine.encode(chat)["embedding"] == wanted  # type: ignore[arg-type]
        assert [o["embedding"] for o in engine.encode([chat, chat])] == [wanted] * 2  # type: ignore[arg-type]
        for encoded in (engine.chat_ids, engine.apply_chat_template):
            with pytest.raises(InvalidRequestError, match="place of an image, but this model takes none"):
                encoded([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}])


def test_memory_that_ends_in_a_call_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*args: Any) -> None:
        raise MemoryError

    with Engine(model_path="box") as engine:
        wanted = engine.generate("Hello", GREEDY)["output_ids"]
        with monkeypatch.context() as patch:
            patch.setattr("fengine.api.engine.process_input", ends)
            with pytest.raises(OutOfMemoryError, match="memory ended during the call"):
                engine.generate("Hello", GREEDY)
        assert engine.generate("Hello", GREEDY)["output_ids"] == wanted


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with checksum_engine() as engine:
        with monkeypatch.context() as patch:
            refuse_forked()
            patch.setattr("os.getpid", lambda: 1)
            for call in (engine.stats, lambda: engine.open_session(1), lambda: engine.abort("x"), engine.get_load):
                with pytest.raises(EngineClosedError, match="a fork has none of its threads"):
                    call()
            patch.setattr(torch, "get_num_threads", lambda: 2)
            with pytest.raises(ConfigError, match="forked from one that has an Engine, .* by .*'spawn'"):
                Engine(model_path="box")
