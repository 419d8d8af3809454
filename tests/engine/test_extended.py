"""Params of requests: against transformers, and bit for bit against the same request alone."""

import gc
import math
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from books import check_scheduler
from extended_cases import Ask, outcome, run, running
from tiny_checkpoints import SIZES, write
from torch import Tensor
from transformers import AutoModelForCausalLM

from fengine.core.kv_pages import PagePool
from fengine.core.request import Request
from fengine.core.sampling_params import SamplingParams as Params
from fengine.core.scheduler import Scheduler
from fengine.engine.parts import Parts
from fengine.engine.request_state import RequestState
from fengine.errors import ConfigError, LogitProcessorError, NumericsError
from fengine.ops import linear
from fengine.worker.chunks import PromptRows
from fengine.worker.input_batch import InputBatch
from fengine.worker.logits import logits_stages
from fengine.worker.logits.bias import LogitBias
from fengine.worker.logits.logprobs import ASKED, SLICE, score_prompts
from fengine.worker.logits.penalties import Table, rounded
from fengine.worker.logits.processors import ProcessorRequest
from fengine.worker.pooling import apply_head
from fengine.worker.static_buffers import pack, target_of
from fengine.worker.step_input import INPUTS, StepInput, blank
from fengine.worker.warm_up import warm_stages

VOCAB = SIZES["vocab_size"]
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> Any:
    with running(checkpoint, tokens=24, overlap=True, cached=False) as found:
        yield found


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def record_of(request: Any) -> RequestState:
    assert request.finish["type"] != "abort" and request.record.fault is None
    return request.record


def close(got: list[tuple[float, int]], want: Tensor) -> None:
    """(logprob, id) pairs against a vector of logprobs over the vocabulary."""
    torch.testing.assert_close(torch.tensor([lp for lp, _ in got]), want[[i for _, i in got]], **CLOSE)


# -- against transformers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 30, 68, 69])
def test_prompt_logprobs(parts: Parts, model: Any, start: int) -> None:
    ids = prompt(70)
    asked = Params(logprob_start=start, top_logprobs=4, logprob_ids=(9, 4, 9))
    (request,) = run(parts, [Ask(ids, asked, new=1)])
    record, want = record_of(request), logits_of(model, ids).log_softmax(-1)
    assert [token for _, token in record.input_logprobs] == ids[start:]
    assert record.input_logprobs[0][0] is None and record.input_top[0] is None and record.input_ids[0] is None
    assert len(record.input_top) == len(record.input_ids) == 70 - start
    for position in range(start + 1, 70):
        entry, behind = position - start, want[position - 1]
        top, chosen = record.input_top[entry], record.input_ids[entry]
        assert top is not None and chosen is not None and [i for _, i in chosen] == [9, 4, 9]
        assert [i for _, i in top] == behind.topk(4).indices.tolist()
        for got in ([record.input_logprobs[entry]], top, chosen):
            close(got, behind)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "entries"), [(0, [(None, 7)]), (1, [])])
def test_prompts_that_have_nothing_to_score(parts: Parts, start: int, entries: list[Any]) -> None:
    (request,) = run(parts, [Ask([7], Params(logprob_start=start, top_logprobs=1), new=3)])
    record = record_of(request)
    assert record.input_logprobs == entries and record.input_top == [None] * len(entries)
    assert len(record.output_top) == 3


def test_prompt_logprobs_do_not_know_temperature_or_edits(parts: Parts) -> None:
    ids, plain = prompt(20), Params(logprob_start=0)
    edited = replace(plain, logit_bias=((5, 9.0),), presence_penalty=1.0)
    hot = {"temperature": 1.7, "top_k": 5}
    first, second = run(parts, [Ask(ids, plain), Ask(ids, edited, params=hot)])
    assert record_of(first).input_logprobs == record_of(second).input_logprobs


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}], ids=str)
def test_output_logprobs(parts: Parts, model: Any, params: dict[str, float]) -> None:
    """Before top-p, after temperature; of a greedy row the first of the likeliest is the drawn token, bit for bit."""
    (request,) = run(parts, [Ask(prompt(11), Params(top_logprobs=3, logprob_ids=(7,)), new=6, seed=3, params=params)])
    record, drawn = record_of(request), request.token_ids[11:]
    want = (logits_of(model, request.token_ids) / (params["temperature"] or 1.0)).log_softmax(-1)
    assert len(record.output_top) == len(record.output_ids) == len(drawn) == 6
    for i, (top, chosen) in enumerate(zip(record.output_top, record.output_ids, strict=True)):
        close([*top, *chosen, (request.logprobs[i], drawn[i])], want[10 + i])
        assert [token for _, token in top] == want[10 + i].topk(3).indices.tolist()
        if not params["temperature"]:
            assert top[0] == (request.logprobs[i], drawn[i])


def test_decode_logprobs_are_rescored_bit_for_bit(parts: Parts) -> None:
    for params in ({"temperature": 0}, {"temperature": 1.0}):
        (drawn,) = run(parts, [Ask(prompt(9), new=20, params=params)])
        (scored,) = run(parts, [Ask(drawn.token_ids, Params(logprob_start=8), new=0)])
        assert [lp for lp, _ in record_of(scored).input_logprobs[1:]] == drawn.logprobs


def edited(logits: np.ndarray, drawn: list[int], asked: Params, banned: list[int]) -> np.ndarray:
    """SGLang's rules in numpy: additive penalties, the repetition penalty, then the bias."""
    x = logits.astype(np.float64)
    count = np.bincount(drawn, minlength=VOCAB)
    x = x - count * asked.frequency_penalty - (count > 0) * asked.presence_penalty
    x[banned] = -np.inf
    scaled = np.where(x < 0, x * asked.repetition_penalty, x / asked.repetition_penalty)
    x = np.where(count > 0, scaled, x)
    for i, bias in asked.logit_bias:
        x[i] += bias
    return x


PENALTIES = {
    "frequency": Params(frequency_penalty=2.0),
    "presence": Params(presence_penalty=-2.0),
    "repetition": Params(repetition_penalty=1.8),
    "repetition below one": Params(repetition_penalty=0.3),
    "bias": Params(logit_bias=((8, 3.0), (20, -100.0), (33, 4.0))),
    "all": Params(
        frequency_penalty=0.5,
        presence_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((8, 6.0), (9, 6.0)),
        min_new_tokens=9,
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_and_biases(parts: Parts, model: Any, name: str) -> None:
    asked = replace(PENALTIES[name], top_logprobs=2)
    stops = [8, 40] if asked.min_new_tokens else []
    (request,) = run(parts, [Ask(prompt(9), asked, new=60, stop_ids=frozenset(stops))])
    ids, record = request.token_ids, record_of(request)
    raw = logits_of(model, ids).numpy()
    moved = 0
    for i in range(len(ids) - 9):
        want = edited(raw[8 + i], ids[9 : 9 + i], asked, stops if i < asked.min_new_tokens else [])
        logprob = torch.tensor(want).float().log_softmax(-1)
        assert ids[9 + i] == int(want.argmax())
        close(record.output_top[i], logprob)
        moved += int(raw[8 + i].argmax() != want.argmax())
    assert moved, "the edits change nothing: the case is too easy"
    (plain,) = run(parts, [Ask(prompt(9), new=60)])
    assert plain.token_ids != ids


def test_what_is_banned_stays_so_however_hot_it_is(parts: Parts) -> None:
    banned = frozenset(range(VOCAB)) - {5, 7}
    (request,) = run(
        parts, [Ask(prompt(6), Params(min_new_tokens=12), 12, stop_ids=banned, params={"temperature": 3e38})]
    )
    assert len(request.output_ids) == 12 and not banned & {*request.output_ids[:-1]}


def test_ends_that_are_ignored_wait_for_min_new_tokens_too(parts: Parts) -> None:
    early = frozenset(range(0, VOCAB, 2))

    class Early(Ask):
        def request(self, rid: str) -> Request:
            request = super().request(rid)
            request.early_ids = early
            return request

    (request,) = run(parts, [Early(prompt(6), Params(min_new_tokens=8), 12, params={"temperature": 3e38})])
    assert not early & {*request.output_ids[:8]} and early & {*request.output_ids[8:]}


def test_stop_ids_wait_for_min_new_tokens(parts: Parts) -> None:
    """Ids that the model does not have may be among them."""
    (free,) = run(parts, [Ask(prompt(6), new=12)])
    first = free.token_ids[6]
    everything = [Ask(prompt(6), Params(min_new_tokens=n, logprob_ids=(first,)), 12, stop_ids=frozenset({first, 10**6}))
                  for n in (0, 1, 5)]  # fmt: skip
    stopped, once, late = run(parts, everything)
    assert stopped.finish == {"type": "stop", "matched": first} and stopped.num_output == 1
    for request, n in ((once, 1), (late, 5)):
        assert first not in request.token_ids[6 : 6 + n]
        chosen = [entry[0][0] for entry in record_of(request).output_ids]
        assert chosen[:n] == [-math.inf] * n and all(map(math.isfinite, chosen[n:]))


def test_hidden_states(parts: Parts, model: Any) -> None:
    ids = prompt(40)
    full, last = run(parts, [Ask(ids, Params(hidden="full"), new=5), Ask(ids, Params(hidden="last"), new=5)])
    hidden = record_of(full).hidden
    assert [h.shape for h in hidden] == [(40, 64)] + [(64,)] * 4
    with torch.no_grad():
        want = model(torch.tensor([full.token_ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    got = torch.from_numpy(np.concatenate([hidden[0], np.stack(hidden[1:])]))
    torch.testing.assert_close(got, want, **CLOSE)
    (only,) = record_of(last).hidden
    assert only.tobytes() == hidden[-1].tobytes()


@pytest.mark.parametrize("pool", ["last", "mean", "cls"])
def test_pooling(parts: Parts, model: Any, pool: str) -> None:
    ids = prompt(50)
    (request,) = run(parts, [Ask(ids, Params(pool=pool), new=0)])
    with torch.no_grad():
        want = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    vector = {"last": want[-1], "mean": want.mean(0), "cls": want[0]}[pool]
    got = record_of(request).embedding
    assert got is not None and got.dtype == np.float32 and request.token_ids == ids
    torch.testing.assert_close(torch.from_numpy(got), vector, **CLOSE)


@pytest.mark.parametrize("bias", [False, True])
def test_heads(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(*shape, generator=generator) for shape in ((3, 64), (3,), (64,)))
    params = {"score": linear.pack(w), "final_norm_D": torch.ones(64)} | ({"score_bias_C": b} if bias else {})
    got = torch.from_numpy(apply_head(params, x.numpy()))
    torch.testing.assert_close(got, w @ x + (b if bias else 0))


def test_what_max_new_tokens_0_drew_is_told(parts: Parts) -> None:
    one, none = run(parts, [Ask(prompt(9), new=1), Ask(prompt(9), Params(logprob_ids=(3, 4)), new=0)])
    record = record_of(none)
    assert none.unasked == (one.logprobs[0], one.token_ids[-1]) and none.num_output == 0
    assert len(record.output_ids) == 1 and [i for _, i in record.output_ids[0]] == [3, 4]


# -- bits --------------------------------------------------------------------------------------------------------------


def sharpen(logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
    """A processor that looks at the drawn tokens and keeps a state of its own."""
    mine = params[0]
    mine["calls"] = mine.get("calls", 0) + 1
    request = mine["__req__"]
    assert isinstance(request, ProcessorRequest) and len(request.output_ids) == mine["calls"] - 1
    for token in request.output_ids[-2:]:
        logits[:, token] -= 4.0
    return logits


def work() -> list[Ask]:
    """Every extra beside rows that use nothing; shared heads; lengths at page edges."""
    head = prompt(21, seed=7)
    kinds = [
        None,
        Params(logprob_start=0, top_logprobs=3),
        Params(frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.3, logit_bias=((5, 2.0),)),
        None,
        Params(hidden="full"),
        Params(processor=sharpen, top_logprobs=2),
        Params(logprob_start=22, logprob_ids=(4, 8, 15)),
        Params(pool="mean"),
        Params(min_new_tokens=4, hidden="last"),
        None,
        Params(pool="last"),
        Params(frequency_penalty=0.4, hidden="full", logprob_start=5, top_logprobs=1),
        Params(pool="cls"),
    ]
    asks = []
    for i, asked in enumerate(kinds):
        ids = (head if i % 2 else []) + prompt((3, 40, 16, 65, 33, 8)[i % 6], seed=i)
        params = ({"temperature": 0}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.8, "top_k": 20})[i % 3]
        new = 0 if asked is not None and asked.pool is not None else 26 + i
        asks.append(Ask(ids, asked, new, i, frozenset({ids[0]} if i == 8 else ()), params))
    return asks


def fresh(asks: list[Ask]) -> list[Ask]:
    """Each request has a dict of its own for its processor."""
    own = [replace(a.asked, custom_params={}) if a.asked and a.asked.processor else a.asked for a in asks]
    return [replace(a, asked=e) for a, e in zip(asks, own, strict=True)]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[Any]:
    with running(checkpoint, cached=False, tokens=256) as found:
        return [run(found, [ask])[0] for ask in fresh(work())]


LAYOUTS: dict[str, dict[str, Any]] = {
    "in a batch": {"cached": False},
    "overlapped": {"cached": False, "overlap": True},
    "chunks of 7": {"cached": False, "tokens": 7, "rows": 5, "overlap": True},
    "page size 1": {"cached": False, "page_size": 1},
    "preempted": {"cached": False, "pool": 132, "tokens": 24},
    "preempted, overlapped": {"cached": False, "pool": 132, "tokens": 24, "overlap": True},
    "cached": {},
    "cached, overlapped, chunks": {"tokens": 19, "overlap": True},
    "cached, preempted": {"pool": 132, "tokens": 24, "overlap": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_the_layout(checkpoint: Path, alone: list[Any], layout: str) -> None:
    check_layout(checkpoint, alone, **LAYOUTS[layout])


def check_layout(checkpoint: Path, alone: list[Any], **options: Any) -> None:
    order, cached = list(range(len(alone))), options.get("cached", True)
    with running(checkpoint, **options) as found:
        compiles = found.stats()["compiles"]
        for turn in range(1 + cached):  # the second time the cache is warm
            random.Random(turn).shuffle(order)
            asks = fresh(work())
            for i, request in zip(order, run(found, [asks[i] for i in order]), strict=True):
                compare(request, alone[i])
        assert found.stats()["compiles"] == compiles
        assert "pool" not in options or found.stats()["preemptions"] > 2
        assert not cached or found.stats()["cached_tokens"] > 50


def compare(got: Any, want: Any) -> None:
    """Hidden states leave cached tokens out; everything else is the same."""
    if got.record is not None and got.record.hidden and got.params.hidden == "full":
        first, *others = got.record.hidden
        whole, *decoded = want.record.hidden
        assert len(first) == got.prompt_len - got.num_cached
        got.record.hidden = [whole, *others]
        assert whole[got.num_cached :].tobytes() == first.tobytes() and len(others) == len(decoded)
    assert outcome(got) == outcome(want)


def test_padding_changes_no_bits(checkpoint: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA runner pads: tokens behind the last row's, rows without tokens, columns of the null page."""
    with running(checkpoint, cached=False) as found:
        runner: Any = found.core.stepper.runner
        stages = found.core.stepper.input_batch.stages.values()
        fields = (*INPUTS, ASKED, *(field for stage in stages for field in stage.fields))
        inner, steps = runner.launch, []

        def with_padding(kv: Any, step: StepInput) -> Any:
            """Every T and R seven longer, N two wider."""
            rows, arrays = step.rows + 7, {}
            sizes = {"T": step.tokens + 7, "R": rows, "B": rows + 1, "N": step.arrays["page_table_RN"].shape[1] + 2}
            sizes["K"] = step.arrays[ASKED.name].shape[1] if ASKED.name in step.arrays else 0
            for field in fields:
                if field.name in step.arrays:
                    arrays[field.name] = blank(field, sizes)
                    pack(step.arrays, [target_of(field, arrays[field.name])])
            assert arrays.keys() == step.arrays.keys()
            steps.append(bool(step.stages))
            return inner(kv, replace(step, arrays=arrays))

        monkeypatch.setattr(runner, "launch", with_padding)
        assert [outcome(request) for request in run(found, fresh(work()))] == [outcome(request) for request in alone]
        assert len(steps) > sum(steps) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_on_a_gpu(checkpoint: Path, dtype: str) -> None:
    """Under graphs, of which an extended step leaves one out; cached, chunked, preempted."""
    place: dict[str, Any] = {"device": "cuda", "dtype": dtype, "overlap": True}
    with running(checkpoint, cached=False, tokens=256, **place) as found:
        want = [run(found, [ask])[0] for ask in fresh(work())]
    for layout in ({"cached": False}, {"tokens": 7, "rows": 5}, {"pool": 132, "tokens": 24}):
        with running(checkpoint, **place, **layout) as found:
            for _ in range(2):
                for got, expected in zip(run(found, fresh(work())), want, strict=True):
                    compare(got, expected)


@pytest.mark.parametrize(("overlap", "cached"), [(False, False), (True, False), (True, True)])
def test_a_prompt_preempted_between_its_chunks_is_recorded_once(
    checkpoint: Path, overlap: bool, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of one token: rows that decode soon need those that a long prompt has taken."""
    wanted = [Params(logprob_start=0, top_logprobs=2), Params(pool="mean"), Params(hidden="full"), Params(pool="cls")]
    early = [Ask(prompt(2, seed=i), new=20) for i in range(3)]
    late = [Ask(prompt(26 + i, seed=9 + i), e, 0 if e.pool else 5) for i, e in enumerate(wanted)]
    with running(checkpoint, cached=False) as found:
        want = [run(found, [ask])[0] for ask in early + late]
    halfway: list[str] = []
    preempt = Scheduler._preempt

    def noted(scheduler: Scheduler, plan: Any, victim: Any) -> None:
        if not victim.params.bare and 0 < victim.num_computed < victim.prompt_len:
            halfway.append(victim.rid)
        preempt(scheduler, plan, victim)

    monkeypatch.setattr(Scheduler, "_preempt", noted)
    for _ in range(4):  # each of the late ones comes first once
        late = late[1:] + late[:1]
        want = want[:3] + want[4:] + want[3:4]
        options = {"page_size": 1, "tokens": 5, "pool": 54, "rows": 4, "overlap": overlap, "cached": cached}
        with running(checkpoint, **options) as found:
            for got, expected in zip(run(found, early + late), want, strict=True):
                compare(got, expected)
    assert len(halfway) >= 4


def test_what_comes_after_a_stop_is_not_recorded(parts: Parts) -> None:
    """With overlap one more step is under way when the stop token becomes known."""
    (free,) = run(parts, [Ask(prompt(9))])
    stop = free.token_ids[9 + 4]
    assert stop not in free.token_ids[9 : 9 + 4]
    asked = Params(top_logprobs=1, logprob_ids=(3,), hidden="full")
    (request,) = run(parts, [Ask(prompt(9), asked, stop_ids=frozenset({stop}))])
    record = record_of(request)
    assert request.finish == {"type": "stop", "matched": stop}
    assert request.num_output == len(record.output_top) == len(record.output_ids) == len(record.hidden) == 5


def test_a_request_that_asks_for_nothing_has_the_bits_of_a_plain_one(parts: Parts) -> None:
    plain, empty = run(parts, [Ask(prompt(9)), Ask(prompt(9), Params())])
    assert outcome(plain) == outcome(empty)


def test_prefix_hits_stop_where_something_is_wanted(checkpoint: Path) -> None:
    ids = prompt(40)
    wanted = {
        None: 36, Params(top_logprobs=1): 36, Params(logprob_start=39): 36, Params(logprob_start=22): 20,
        Params(logprob_start=0): 0, Params(hidden="full"): 36, Params(pool="mean"): 0, Params(pool="last"): 36,
        Params(pool="cls"): 0,
    }  # fmt: skip
    with running(checkpoint) as found:
        run(found, [Ask(ids, new=1)])
        for asked, hit in wanted.items():
            new = 0 if asked and asked.pool else 1
            assert run(found, [Ask(ids, asked, new=new)])[0].num_cached == hit, asked


# -- processors --------------------------------------------------------------------------------------------------------


def test_a_processor_has_the_last_word_and_may_ban(parts: Parts, model: Any) -> None:
    seen: list[Tensor] = []

    def only_42(logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
        seen.append(logits.clone())
        out = torch.full_like(logits, -math.inf)
        out[:, 42] = 0.0
        return out.double()

    asked = Params(processor=only_42, logit_bias=((5, 2.0),), min_new_tokens=2, top_logprobs=2)
    (request,) = run(parts, [Ask(prompt(9), asked, new=3, stop_ids=frozenset({17}))])
    raw = logits_of(model, request.token_ids)
    assert request.token_ids[9:] == [42] * 3 and request.logprobs == [0.0] * 3
    assert record_of(request).output_top[0] == [(0.0, 42), (-math.inf, 0)]
    assert [shown.shape for shown in seen] == [(1, VOCAB)] * 3
    assert seen[0][0, 17] == -math.inf and seen[2][0, 17].isfinite()
    torch.testing.assert_close(seen[0][0, 5], raw[8, 5] + 2.0, **CLOSE)


def returns(make: Callable[[Tensor], Any], at: int) -> Callable[..., Any]:
    """A processor that behaves until its request has `at` tokens, and then returns what `make` makes."""
    return lambda logits, params: make(logits) if len(params[0]["__req__"].output_ids) == at else logits


def raises(error: BaseException) -> Callable[[Tensor], Any]:
    def fail(logits: Tensor) -> Any:
        raise error

    return fail


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "raises": (raises(KeyError("lost")), "raised KeyError"),
    "exits": (raises(SystemExit(3)), "raised SystemExit"),
    "NaN": (lambda x: x.index_fill(1, torch.tensor([3]), math.nan), "NaN or \\+inf"),
    "inf": (lambda x: x + math.inf, "NaN or \\+inf"),
    "overflow": (lambda x: x.double() + 1e300, "NaN or \\+inf"),
    "all banned": (lambda x: x * 0 - math.inf, "every token"),
    "too narrow": (lambda x: x[:, :-1], "shape"),
    "flat": (lambda x: x[0], "shape"),
    "integers": (lambda x: x.long(), "int64"),
    "None": (lambda x: None, "NoneType"),
    "a list": (lambda x: x.tolist(), "list"),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_processor_ends_its_own_request_alone(
    checkpoint: Path, alone: list[Any], overlap: bool, at: int
) -> None:
    asks = fresh(work())
    bad = [Ask(prompt(30), Params(processor=returns(make, at), top_logprobs=2)) for make, _ in FAULTS.values()]
    with running(checkpoint, overlap=overlap, rows=6, cached=False) as found:
        requests: list[Any] = run(found, [*asks[:3], *bad, *asks[3:]])
        good = requests[:3] + requests[3 + len(bad) :]
        assert [outcome(r) for r in good] == [outcome(r) for r in alone]
        for request, (_, told) in zip(requests[3:], FAULTS.values(), strict=False):
            error = request.record.fault
            assert isinstance(error, LogitProcessorError) and request.finish == {"type": "abort", "message": str(error)}
            with pytest.raises(LogitProcessorError, match=told):
                raise error
            assert request.num_output == at == len(request.logprobs) == len(request.record.output_top)


def test_ids_that_a_draft_does_not_have_are_not_biased() -> None:
    bias = LogitBias(2, 8, torch.device("cpu"))
    request = Request("r", 1, [5], Params(logit_bias=((7, 1.0), (8, 2.0), (9, 3.0))), 0, 9, frozenset())
    for change in bias.admit(1, request):
        change()
    assert bias.id_SK.lines is not None and set(bias.id_SK.lines[1].tolist()) == {7, -1}


def test_a_failing_processor_costs_nobody_the_prefix_cache(checkpoint: Path) -> None:
    ids = prompt(40)
    with running(checkpoint) as found:
        banned = tuple((id, -1e30) for id in range(VOCAB))
        (failed,) = run(found, [Ask(ids, Params(processor=returns(raises(ValueError()), 0), logit_bias=banned))])
        assert "raised ValueError" in str(failed.record.fault)  # whatever else is left of its row
        assert run(found, [Ask(ids)])[0].num_cached == 36


def test_a_row_of_nan_is_the_models_fault_also_with_a_processor(checkpoint: Path) -> None:
    calls = []
    with running(checkpoint) as found:
        weights = found.core.stepper.runner.params  # type: ignore[attr-defined]
        weights["final_norm_D"][0] = math.nan
        noting = Params(processor=lambda x, _: calls.append(1) or x)
        requests: list[Any] = run(found, [Ask(prompt(9), noting), Ask(prompt(9), Params(pool="mean"), new=0)])
    for request in requests:
        assert request.finish["type"] == "abort" and "non-finite" in request.finish["message"]
        assert request.record.fault is None or type(request.record.fault) is NumericsError  # a server says 500
    assert not calls


# -- memory, steps -----------------------------------------------------------------------------------------------------


def test_prompts_are_unembedded_in_slices() -> None:
    """No more rows of logits at once than SLICE, each row once."""
    rows = []

    def unembed(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return hidden @ torch.eye(8)

    hidden = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    index = np.arange(599, -1, -1).astype(np.int32)
    scores = score_prompts(unembed, hidden, PromptRows(index, np.full((600, 1), 5, np.int32), 2, []))()
    assert rows == [SLICE, SLICE, 600 - 2 * SLICE]
    want = hidden.flip(0).log_softmax(-1)
    torch.testing.assert_close(torch.from_numpy(scores.logprob_PK[:, 0]), want[:, 5])
    torch.testing.assert_close(torch.from_numpy(scores.top_logprob_PX), want.topk(2).values)


def test_many_ids_of_one_request_do_not_widen_its_neighbours() -> None:
    wanted = [Params(logprob_start=0, logprob_ids=tuple(range(many))) for many in (0, 500, 0)]
    asks = [Ask(list(range(length)), asked) for length, asked in zip((300, 2, 40), wanted, strict=True)]
    scheduler = Scheduler(PagePool(99), None, page_size=4, max_running_requests=3, max_step_tokens=512)
    for i, ask in enumerate(asks):
        scheduler.add(ask.request(str(i)))
    output = scheduler.schedule()
    assert output is not None
    prompts = InputBatch(3, 128, 4).stage(output).prompts
    assert sorted(rows.id_PK.shape for rows in prompts) == [(1, 501), (338, 1)]
    assert sum(rows.id_PK.size for rows in prompts) < 1000


def test_warm_up_changes_nothing() -> None:
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    warm_stages(logits)
    assert torch.equal(logits, before)


def test_nothing_depends_on_torchs_default_dtype(parts: Parts) -> None:
    """It is the whole process's, and callers set it."""
    asks = [Ask(prompt(30), Params(logprob_start=0, top_logprobs=2), new=4), Ask(prompt(9), Params(pool="mean"), new=0)]
    before = [outcome(request) for ask in asks for request in run(parts, [ask])]
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            after = [outcome(request) for ask in asks for request in run(parts, [ask])]
        finally:
            torch.set_default_dtype(torch.float32)
        assert after == before


def test_torchs_default_device_is_refused_at_the_start_and_harmless_later(checkpoint: Path) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="default device is meta"), running(checkpoint):
        pass
    with running(checkpoint) as found:
        asks = [Ask(prompt(9), Params(logprob_start=0, hidden="full", frequency_penalty=1.0))]
        before = outcome(run(found, asks)[0])
        with torch.device("meta"):
            assert found.updates.update_from_disk(checkpoint, None).success
            assert outcome(run(found, asks)[0]) == before


@pytest.mark.parametrize("ending", ["finished", "aborted"])
def test_an_idle_engine_keeps_no_records(checkpoint: Path, ending: str) -> None:
    asks = [Ask(prompt(20, seed), Params(hidden="full"), new=200) for seed in range(3)]
    with running(checkpoint, overlap=True) as found:
        if ending == "finished":
            requests = run(found, [replace(ask, new=3) for ask in asks])
        else:
            schedule, seen = found.core.stepper.scheduler.schedule, []

            def scheduling() -> Any:
                seen.append(1)
                if len(seen) == 9:
                    found.core.abort_rids(None)
                return schedule()

            found.core.stepper.scheduler.schedule = scheduling  # type: ignore[method-assign]
            requests = run(found, asks)
        arrays = [weakref.ref(record.hidden[0]) for record in (request.record for request in requests) if record.hidden]
        del requests
        late = time.monotonic() + 20  # the text thread has told its callers, and is about to forget
        while any(array() is not None for array in arrays) and time.monotonic() < late:
            gc.collect()
        assert len(arrays) == 3 and all(array() is None for array in arrays)


def test_a_step_does_only_what_is_wanted_of_it(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the prompt is scored, or the ban is over, a row decodes in steps that only draw."""
    runner: Any = parts.core.stepper.runner
    inner, steps = runner.launch, []

    def noted(kv: Any, step: StepInput) -> Any:
        if step.stages or step.prompts or step.top is not None:
            steps.append(1)
        return inner(kv, step)

    monkeypatch.setattr(runner, "launch", noted)
    for asked, count in (
        (Params(logprob_start=0), 1),
        (Params(min_new_tokens=3), 3),
        (Params(top_logprobs=1), 8),
        (Params(frequency_penalty=1.0), 8),
    ):
        steps.clear()
        run(parts, [Ask(prompt(20), asked, stop_ids=frozenset({1}))])
        assert len(steps) == count


def test_counts_of_a_slot_are_those_of_its_request() -> None:
    """What was drawn before a preemption counts; what another request drew in the slot does not."""
    stages = logits_stages(2, VOCAB, torch.device("cpu"))
    scheduler = Scheduler(PagePool(64), None, page_size=4, max_running_requests=2, max_step_tokens=64)
    batch = InputBatch(2, 16, 4, stages)
    penalties: Any = stages[0]
    for turn, rid in enumerate("abc"):
        scheduler.add(Ask(prompt(5), Params(presence_penalty=1.0), new=4).request(rid))
        for _ in range(4):
            output = scheduler.schedule()
            assert output is not None
            step = batch.stage(output)
            assert step.stages == (penalties,)
            for write_table in step.writes:
                write_table()
            slot, tensors = output.rows[0], {k: torch.from_numpy(v) for k, v in step.arrays.items()}
            penalties.drawn(torch.zeros(1, VOCAB), torch.tensor([turn + 7], dtype=torch.int32), tensors)
            scheduler.update(output, [turn + 7], [-1.0])
        assert penalties.count_SV.lines[slot].nonzero().tolist() == [[turn + 7]]
        assert penalties.count_SV.lines[slot, turn + 7] == 4


def test_nothing_is_left_of_a_longer_line_and_a_shorter_one_stays_where_lines_grow() -> None:
    table = Table(2, -1, torch.int32, torch.device("cpu"))
    for slot, count, width in ((1, 20, 32), (0, 40, 64), (0, 3, 64), (0, 0, 64)):
        table.write(slot, np.arange(count), rounded(count))
        assert table.lines is not None and table.lines[slot].tolist() == [*range(count)] + [-1] * (width - count)
    assert table.lines is not None and table.lines[1].tolist() == [*range(20)] + [-1] * 44


def test_a_lockstep_row_is_planned_only_when_its_token_is_known() -> None:
    """Its neighbours go on; and the budget keeps a place for it."""
    scheduler = Scheduler(PagePool(64), None, page_size=4, max_running_requests=8, max_step_tokens=4)
    kinds = (
        Params(processor=sharpen),
        None,
        Params(processor=sharpen, presence_penalty=1.0),
        Params(min_new_tokens=3, presence_penalty=1.0),
    )
    for rid, asked in zip("abcd", kinds, strict=True):
        scheduler.add(Ask([1], asked, new=9).request(rid))
    scheduler.add(Ask([1], new=9).request("late"))
    landing = []
    for expected in ("abcd", "bd", "abcd", "bd"):  # update lags by one step
        plan = scheduler.schedule()
        check_scheduler(scheduler)
        assert plan is not None and "".join(sorted(r.rid for r in plan.requests)) == expected
        landing.append(plan)
        if len(landing) > 1:
            done = landing.pop(0)
            scheduler.update(done, [2] * len(done.rows), [-1.0] * len(done.rows))
            check_scheduler(scheduler)
