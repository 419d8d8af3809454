"""The Engine over the checksum model: every schedule gives the oracle's tokens, every door its documented answer."""

import asyncio
import random
import threading

import checksum
import pytest
import torch
from books import check_scheduler
from checksum import VOCAB, checksum_engine, expected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loops import in_loop

from fengine.api.engine import Engine
from fengine.api.server_args import ServerArgs
from fengine.errors import (
    CapacityError,
    ContextLengthError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NumericsError,
    UnknownParameterError,
    UnsupportedFeatureError,
)


def greedy(count: int, **more: object) -> dict:
    return {"temperature": 0, "max_new_tokens": count, **more}


def prompts(seed: int, count: int, shared: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    head = [draw.randrange(VOCAB) for _ in range(shared)]
    return [head + [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    page_size=st.sampled_from([1, 4, 16]),
    rows=st.integers(1, 5),
    tokens=st.integers(5, 40),
    pool=st.integers(96, 300),
    policy=st.sampled_from(["fcfs", "lpm"]),
    overlap=st.booleans(),
    prefix_cache=st.booleans(),
)
def test_any_schedule_gives_the_oracles_tokens(seed: int, rows: int, tokens: int, **options: object) -> None:
    work = prompts(seed, 8, shared=seed % 20)
    counts = [random.Random(seed + i).randint(1, 25) for i in range(len(work))]
    with checksum_engine(rows=rows, tokens=max(rows, tokens), **options) as engine:
        outputs = engine.generate(input_ids=work, sampling_params=[greedy(n) for n in counts])
        assert [o["output_ids"] for o in outputs] == [expected(p, n) for p, n in zip(work, counts, strict=True)]


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_changes_nothing(overlap: bool) -> None:
    work = prompts(3, 6, longest=20)
    with checksum_engine(rows=6, tokens=32, pool=80, page_size=4, overlap=overlap, prefix_cache=False) as engine:
        outputs = engine.generate(input_ids=work, sampling_params=greedy(30))
        assert [o["output_ids"] for o in outputs] == [expected(p, 30) for p in work]
        assert sum(o["meta_info"]["num_retractions"] for o in outputs) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_tokens_end_a_request_and_nothing_runs_on(overlap: bool) -> None:
    work = prompts(5, 5)
    stops = [expected(p, 12)[7] for p in work]
    with checksum_engine(overlap=overlap) as engine:
        outputs = engine.generate(input_ids=work, sampling_params=[greedy(12, stop_token_ids=[s]) for s in stops])
        for prompt, stop, output in zip(work, stops, outputs, strict=True):
            assert output["output_ids"] == expected(prompt, 12, frozenset({stop}))
            assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        again = engine.generate(
            input_ids=work[0], sampling_params=greedy(12, stop_token_ids=[stops[0]], ignore_eos=True)
        )
        assert again["output_ids"] == expected(work[0], 12)  # ignore_eos also switches stop_token_ids off, as SGLang


def test_output_shape_of_single_batch_and_empty() -> None:
    with checksum_engine() as engine:
        one = engine.generate(input_ids=[1, 2, 3], sampling_params=greedy(4), return_logprob=True, rid="r1")
        assert set(one) == {"output_ids", "meta_info"}  # no text without a tokenizer
        meta = one["meta_info"]
        assert meta["id"] == "r1" and meta["prompt_tokens"] == 3 and meta["completion_tokens"] == 4
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert meta["e2e_latency"] > 0 and meta["cached_tokens"] == 0
        assert [t[1:] for t in meta["output_token_logprobs"]] == [(i, None) for i in one["output_ids"]]
        assert all(t[0] < 0 for t in meta["output_token_logprobs"])
        many = engine.generate(input_ids=[[1, 2], [3]], sampling_params=[greedy(1), greedy(2)], rid="b")
        assert [o["meta_info"]["id"] for o in many] == ["b_0", "b_1"]
        assert [len(o["output_ids"]) for o in many] == [1, 2]
        assert engine.generate([]) == [] and engine.generate([], stream=False) == []
        nothing = engine.generate(input_ids=[1, 2], sampling_params=greedy(0))
        assert nothing["output_ids"] == [] and nothing["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_prefix_hits_are_reported_and_exact() -> None:
    head = list(range(40))
    with checksum_engine(page_size=4) as engine:
        first = engine.generate(input_ids=[*head, 1], sampling_params=greedy(6))
        second = engine.generate(input_ids=[*head, 2], sampling_params=greedy(6))
        assert first["meta_info"]["cached_tokens"] == 0 and second["meta_info"]["cached_tokens"] == 40
        assert second["output_ids"] == expected([*head, 2], 6)
        assert engine.flush_cache().success
        third = engine.generate(input_ids=[*head, 2], sampling_params=greedy(6))
        assert third["meta_info"]["cached_tokens"] == 0 and third["output_ids"] == second["output_ids"]


@pytest.mark.parametrize("incremental", [False, True])
def test_streams_cover_everything(incremental: bool) -> None:
    prompt = [5, 6, 7]
    with checksum_engine() as engine:
        engine.server_args.incremental_streaming_output = incremental
        chunks = list(engine.generate(input_ids=prompt, sampling_params=greedy(20), stream=True))
        assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])
        ids = sum((c["output_ids"] for c in chunks), []) if incremental else chunks[-1]["output_ids"]
        assert ids == expected(prompt, 20)
        lengths = [c["meta_info"]["completion_tokens"] for c in chunks]
        assert lengths == sorted(lengths)
        work = prompts(9, 4)
        seen: dict[int, list[int]] = {}
        for chunk in engine.generate(input_ids=work, sampling_params=greedy(9), stream=True):
            had = seen.get(chunk["index"], []) if incremental else []
            seen[chunk["index"]] = had + chunk["output_ids"]
        assert [seen[i] for i in range(4)] == [expected(p, 9) for p in work]


def test_async_in_several_loops_and_inside_a_running_loop() -> None:
    prompt = [8, 9]

    async def ask(engine: Engine) -> list[int]:
        done = await engine.async_generate(input_ids=prompt, sampling_params=greedy(5))
        ids: list[int] = []
        async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=greedy(5), stream=True):
            ids = chunk["output_ids"]
        sync = engine.generate(input_ids=prompt, sampling_params=greedy(5))  # inside a running loop
        assert done["output_ids"] == ids == sync["output_ids"]
        both = await asyncio.gather(
            *(engine.async_generate(input_ids=[i], sampling_params=greedy(3)) for i in range(9))
        )
        assert [o["output_ids"] for o in both] == [expected([i], 3) for i in range(9)]
        return ids

    with checksum_engine() as engine:
        assert asyncio.run(ask(engine)) == asyncio.run(ask(engine)) == expected(prompt, 5)


def test_many_threads_share_an_engine() -> None:
    answers: dict[int, list[int]] = {}
    with checksum_engine(rows=8) as engine:

        def work(i: int) -> None:
            answers[i] = engine.generate(input_ids=[i, i + 1], sampling_params=greedy(6))["output_ids"]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {i: expected([i, i + 1], 6) for i in range(32)}


def test_abandoned_streams_and_cancelled_tasks_free_their_rows() -> None:
    with checksum_engine(rows=2, context=256, pool=512) as engine:
        stream = engine.generate(input_ids=[1], sampling_params=greedy(200), stream=True)
        next(stream)
        stream.close()
        engine.generate(input_ids=[2], sampling_params=greedy(200), stream=True)  # dropped without reading

        async def cancel() -> None:
            task = asyncio.ensure_future(engine.async_generate(input_ids=[3], sampling_params=greedy(200)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert engine.generate(input_ids=[4], sampling_params=greedy(5))["output_ids"] == expected([4], 5)
        stats = engine.stats()
        assert stats["running"] == stats["waiting"] == 0


BAD = [
    ({}, InvalidRequestError, "should be provided"),
    ({"prompt": "x", "input_ids": [1]}, InvalidRequestError, "both"),
    ({"prompt": "x"}, InvalidRequestError, "skip_tokenizer_init"),
    ({"prompt": b"x"}, InvalidRequestError, "bytes"),
    ({"prompt": 5}, InvalidRequestError, "int"),
    ({"input_ids": []}, InvalidRequestError, "empty"),
    ({"input_ids": [-1]}, InvalidRequestError, r"\[0, 96\]"),
    ({"input_ids": [VOCAB]}, InvalidRequestError, r"\[0, 96\]"),
    ({"input_ids": [2**63]}, InvalidRequestError, r"\[0, 96\]"),
    ({"input_ids": [1.0]}, InvalidRequestError, "integer"),
    ({"input_ids": [True]}, InvalidRequestError, "integer"),
    ({"input_ids": ["1"]}, InvalidRequestError, "integer"),
    ({"input_ids": [[1], [VOCAB], [-3]]}, InvalidRequestError, "(?s)prompt 1.*prompt 2"),
    ({"input_ids": [[[1]]]}, InvalidRequestError, "integer"),
    ({"input_ids": [1] * 256}, ContextLengthError, "256 tokens"),
    ({"input_ids": [1] * 200, "sampling_params": greedy(57)}, ContextLengthError, "257"),
    ({"input_ids": [1] * 120}, CapacityError, "max_total_tokens"),
    ({"input_ids": [1], "sampling_params": {"temprature": 1}}, UnknownParameterError, "temperature"),
    ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, InvalidRequestError, "nan"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, InvalidRequestError, "-1"),
    ({"input_ids": [1], "sampling_params": {"temperature": "0.5"}}, InvalidRequestError, "number"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, InvalidRequestError, r"\(0, 1\]"),
    ({"input_ids": [1], "sampling_params": {"top_p": float("nan")}}, InvalidRequestError, "nan"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, InvalidRequestError, "top_k"),
    ({"input_ids": [1], "sampling_params": {"top_k": True}}, InvalidRequestError, "integer"),
    ({"input_ids": [1], "sampling_params": {"min_p": 1.5}}, InvalidRequestError, "min_p"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, InvalidRequestError, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, InvalidRequestError, "integer"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, InvalidRequestError, "2\\*\\*63"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 1.5}}, InvalidRequestError, "float"),
    ({"input_ids": [1], "sampling_params": {"stop": ""}}, InvalidRequestError, "empty string"),
    ({"input_ids": [1], "sampling_params": {"stop": "x"}}, InvalidRequestError, "skip_tokenizer_init"),
    ({"input_ids": [1], "sampling_params": {"stop": ["a"] * 33}}, InvalidRequestError, "32"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [2**31]}}, InvalidRequestError, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"beam_width": 2}}, UnsupportedFeatureError, "'beam_width'"),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, InvalidRequestError, "json_schema is unavailable"),
    ({"input_ids": [1], "sampling_params": []}, InvalidRequestError, "0 entries"),
    ({"input_ids": [1], "sampling_params": 5}, InvalidRequestError, "dict"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, InvalidRequestError, "1 entries for 2"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, InvalidRequestError, "Duplicate"),
    ({"input_ids": [1], "image_data": "x.png"}, InvalidRequestError, "takes no images"),
    ({"input_ids": [1], "lora_path": "a"}, InvalidRequestError, "LoRA adapter 'a' was requested"),
    ({"input_ids": [1], "return_logprob": 1}, InvalidRequestError, "return_logprob"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD, ids=[str(b[0])[:60] for b in BAD])
def test_bad_input_is_refused_at_the_door(arguments: dict, kind: type, message: str) -> None:
    with checksum_engine(pool=104) as engine:
        with pytest.raises(kind, match=message):
            engine.generate(**arguments)
        with pytest.raises(kind, match=message):
            engine.generate(**arguments, stream=True)
        with pytest.raises(kind, match=message):
            asyncio.run(engine.async_generate(**arguments))
        assert engine.generate(input_ids=[1], sampling_params=greedy(2))["output_ids"] == expected([1], 2)


def test_a_rid_in_use_is_refused_and_free_again_afterwards() -> None:
    with checksum_engine(context=256, pool=1024) as engine:
        stream = engine.generate(input_ids=[1], sampling_params=greedy(200), stream=True, rid="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is in use"):
            engine.generate(input_ids=[[1], [2]], rid=["other", "mine"])
        assert len(list(stream)[-1]["output_ids"]) == 200
        assert engine.generate(input_ids=[2], sampling_params=greedy(3), rid="mine")["output_ids"] == expected([2], 3)
        assert engine.generate(input_ids=[2], sampling_params=greedy(3), rid="other")["output_ids"] == expected([2], 3)


def test_default_length_is_clamped_but_an_explicit_one_is_not() -> None:
    with checksum_engine(context=64, pool=256) as engine:
        out = engine.generate(input_ids=[1] * 60, sampling_params={"temperature": 0})
        assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        out = engine.generate(input_ids=[1] * 60, sampling_params=greedy(None))  # type: ignore[arg-type]
        assert len(out["output_ids"]) == 4


def test_unset_seeds_derive_from_the_engines_seed_and_set_ones_are_kept() -> None:
    warm = {"temperature": 50.0, "max_new_tokens": 8}

    def run(seed: int) -> tuple[list[list[int]], list[int]]:
        with checksum_engine(seed=seed) as engine:
            outputs = engine.generate(input_ids=[[1, 2]] * 3, sampling_params=warm)
            fixed = engine.generate(input_ids=[1, 2], sampling_params={**warm, "sampling_seed": 5})
            alone = engine.generate(input_ids=[[1, 2]] * 2, sampling_params={**warm, "sampling_seed": 5})
            assert fixed["output_ids"] == alone[0]["output_ids"] == alone[1]["output_ids"]
            return [o["output_ids"] for o in outputs], fixed["output_ids"]

    first, second, other = run(0), run(0), run(1)
    assert first == second and first[1] == other[1]
    assert len({tuple(o) for o in first[0]}) == 3 and first[0] != other[0]


def test_shutdown_is_idempotent_and_ends_waiting_calls() -> None:
    results: list[BaseException] = []
    with checksum_engine(context=256, pool=512) as engine:
        stream = engine.generate(input_ids=[1], sampling_params=greedy(250), stream=True)
        next(stream)

        def read() -> None:
            try:
                list(stream)
            except EngineClosedError as error:
                results.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        engine.shutdown()
        engine.shutdown()
        reader.join()
        with pytest.raises(EngineClosedError):
            engine.generate(input_ids=[1])
        engine._parts.core.call = lambda command, attached=None: (
            attached()
        )  # the loop is gone; the pool is still to be balanced
    assert len(results) <= 1  # the stream may have ended before the shutdown


def test_a_failing_step_fails_every_call_loudly_and_for_good() -> None:
    def failing(params, spec, kv, batch):  # noqa: ANN001, ANN202
        if len(params["calls"]) == 7:
            raise RuntimeError("boom")
        return checksum.forward(params, spec, kv, batch)

    before = checksum.models.MODELS
    checksum.models.MODELS = {
        checksum.SPEC.architecture: checksum.Model(lambda _: checksum.SPEC, failing, checksum.unembed, lambda _: [])
    }
    try:
        with Engine.from_parts(checksum.checksum_parts()) as engine:
            with pytest.raises(EngineDeadError, match="boom"):
                engine.generate(input_ids=[[1], [2]], sampling_params=greedy(50))
            with pytest.raises(EngineDeadError, match="boom"):
                engine.generate(input_ids=[1])
    finally:
        checksum.models.MODELS = before


def test_a_row_with_nan_logits_fails_alone() -> None:
    def unembed(params, spec, hidden_RD):  # noqa: ANN001, ANN202
        logits = checksum.unembed(params, spec, hidden_RD)
        bad = torch_nan_rows(hidden_RD, params)
        logits[bad] = float("nan")
        return logits

    def torch_nan_rows(hidden_RD, params):  # noqa: ANN001, ANN202
        target = checksum.digest([checksum.mark(t, p) for p, t in enumerate(params.get("poison", []))])
        return hidden_RD[:, 0].long() == target

    poison = [11, 12, 13]
    before = checksum.models.MODELS
    checksum.models.MODELS = {
        checksum.SPEC.architecture: checksum.Model(lambda _: checksum.SPEC, checksum.forward, unembed, lambda _: [])
    }
    try:
        parts = checksum.checksum_parts()
        parts.core.stepper.runner.params["poison"] = poison  # type: ignore[attr-defined]
        with Engine.from_parts(parts) as engine:
            outcome: dict[str, object] = {}

            def ask(name: str, ids: list[int]) -> None:
                try:
                    outcome[name] = engine.generate(input_ids=ids, sampling_params=greedy(10))["output_ids"]
                except NumericsError as error:
                    outcome[name] = error

            threads = [threading.Thread(target=ask, args=a) for a in (("bad", poison), ("a", [1, 2]), ("b", [3]))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert isinstance(outcome["bad"], NumericsError)
            assert outcome["a"] == expected([1, 2], 10) and outcome["b"] == expected([3], 10)
            in_loop(parts.core, lambda: check_scheduler(parts.core.stepper.scheduler))
    finally:
        checksum.models.MODELS = before


def test_server_args_are_honoured_or_refused_by_name() -> None:
    with pytest.raises(TypeError, match="no_such"):
        ServerArgs(model_path="x", no_such=1)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedFeatureError, match="pp_size=2.*quantization|quantization.*pp_size=2"):
        ServerArgs(model_path="x", pp_size=2, quantization="gguf").to_config()
    config = ServerArgs(model_path="x", page_size=4, chunked_prefill_size=-1, disable_radix_cache=True).to_config()
    assert config.cache.page_size == 4 and not config.cache.prefix_cache
    assert config.scheduler.max_step_tokens is None


@pytest.mark.parametrize("ids", [[1, torch.tensor(1.5)], [torch.tensor(True)], torch.zeros(1, device="meta"), [1, [2]]])
def test_tensors_that_are_no_ids_are_refused(ids: object) -> None:
    with checksum_engine() as engine:
        with pytest.raises(InvalidRequestError, match="input_ids"):
            engine.generate(input_ids=ids)  # type: ignore[arg-type]
        assert engine.generate(input_ids=torch.tensor([1, 2]), sampling_params=greedy(3))["output_ids"] == (  # type: ignore[arg-type]
            expected([1, 2], 3)
        )
