"""Speculation changes no bit: any proposer, any schedule, any end of a request. And it pays where text repeats."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from checksum import VOCAB, checksum_engine, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Case, Job, make_scheduler, random_case, simulate

from fengine import Engine
from fengine.api.server_args import ServerArgs
from fengine.config import Algorithm, EngineConfig, Hardware, SpeculationConfig, resolve
from fengine.core.request import Drafting, Request, SamplingParams
from fengine.core.scheduler_output import Drafts, SchedulerOutput, Scores, StepOutput
from fengine.core.speculation import Ask, Proposer, drafting_of
from fengine.core.step_trace import StepRecord
from fengine.engine import readout
from fengine.engine.request_state import RequestState
from fengine.errors import ConfigError, GrammarError, UnsupportedFeatureError
from fengine.speculative import ngram
from fengine.speculative.ngram import CANDIDATES, PATIENCE, REST, Lookup, NgramIndex, Trust, follow, ngram_proposer
from fengine.worker.extras import Extras
from fengine.worker.input_batch import InputBatch

NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}

# -- the proposal function --------------------------------------------------------------------------------------------


def brute_force(ids: list[int], least: int, most: int) -> tuple[int, int] | None:
    """The longest of the latest CANDIDATES earlier copies of the last tokens, by definition."""
    ends = [e for e in range(least, len(ids)) if ids[e - least : e] == ids[len(ids) - least :]]
    found = []
    for end in ends[::-1][:CANDIDATES]:
        length = max(n for n in range(least, min(most, end) + 1) if ids[end - n : end] == ids[len(ids) - n :])
        found.append((length, end))
    return max(found) if found else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_the_index_finds_what_a_search_through_all_tokens_finds(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 4))
    most = data.draw(st.integers(least, 8))
    ids = data.draw(st.lists(st.integers(0, data.draw(st.sampled_from([0, 1, 3]))), max_size=60))
    index, known = NgramIndex(least, most), 0
    while known < len(ids):  # it grows in pieces, and is asked after each
        known = min(len(ids), known + data.draw(st.integers(1, 9)))
        index.extend(ids, known)
        assert index.match(ids[:known]) == brute_force(ids[:known], least, most)


def test_what_follows_goes_on_in_circles_where_the_tokens_end() -> None:
    assert follow([1, 2, 3, 4, 5, 3], 3, 2) == [4, 5]
    assert follow([7, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert follow([5, 5], 1, 5) == [5] * 5


def request_of(ids: list[int], new: int = 100) -> Request:
    request = Request("r", len(ids), ids, SamplingParams(), 0, new, frozenset())
    request.drafting = drafting_of(request)
    return request


def ask(request: Request, most: int, skip: int = 0) -> Ask:
    assert request.drafting is not None
    return Ask(0, request, request.drafting, skip, 1, most)


def test_a_copy_is_followed_further_the_longer_it_is_and_a_pending_token_is_left_out() -> None:
    text = list(range(30))
    propose = ngram_proposer(2, 12)
    assert propose([ask(request_of(text + [99]), 15)]) == [[]]
    assert propose([ask(request_of(text + [3, 4]), 15)]) == [[5, 6, 7]]
    assert propose([ask(request_of(text + [3, 4]), 15, skip=1)]) == [[6, 7, 8]]
    assert propose([ask(request_of(text + [3, 4, 5, 6]), 15)]) == [text[7:11]]
    assert propose([ask(request_of(text + text[3:11]), 15)]) == [text[11:26]]
    assert propose([ask(request_of(text + text[3:11]), 4)]) == [text[11:15]]


def test_what_fails_is_tried_less_and_less_often() -> None:
    trust = Trust(3)
    for misses in range(1, PATIENCE + 3):
        trust.learn(trust.size, 0, known=100)
        assert trust.size == 1 and trust.resume_at == 100 + 2 ** min(misses, PATIENCE)
    trust.learn(1, 1, known=300)
    assert (trust.size, trust.misses, trust.resume_at) == (3, 0, 0)
    trust.learn(3, 3, known=303)
    trust.learn(1, 1, known=305)  # no more was asked for: that tells nothing against seven
    assert trust.size == 7
    trust.learn(3, 2, known=310)
    assert (trust.size, trust.misses) == (2, 0)


def test_a_success_speaks_for_longer_copies_and_a_failure_against_shorter_ones() -> None:
    lookup = Lookup(1, 4, 0)
    for trust in lookup.trusts:
        trust.learn(1, 0, known=50)
    lookup.level = 1
    lookup._learn(3, 3, 60)
    assert [(t.size, t.misses, t.resume_at) for t in lookup.trusts] == [(1, 1, 52), (7, 0, 0), (7, 0, 0), (7, 0, 0)]
    lookup._learn(7, 0, 70)
    assert [(t.size, t.misses, t.resume_at) for t in lookup.trusts] == [(1, 2, 74), (3, 1, 72), (7, 0, 0), (7, 0, 0)]


def test_random_tokens_cost_few_drafts() -> None:
    """A token in five repeats by chance, nothing follows: drafts stay below 3 % of the tokens."""
    draw, request, propose, drafts = random.Random(0), request_of([0]), ngram_proposer(1, 12), 0
    assert request.drafting is not None
    for _ in range(2000):
        request.token_ids.append(draw.randrange(50))
        (found,) = propose([ask(request, 15)])
        if found:
            drafts += len(found)
            request.drafting.last = len(found), 0
    assert 5 < drafts < 60


@pytest.mark.parametrize("skip", [0, 1])
def test_who_repeats_nothing_is_looked_at_ever_less_often_until_it_does(skip: int) -> None:
    request, propose, asks = request_of(list(range(1000, 1100))), ngram_proposer(2, 12), []
    assert request.drafting is not None
    for known in range(101, 301):
        request.token_ids.append(known)
        if known - 1 + skip >= request.drafting.rest_until:
            asks.append(known)
            assert propose([ask(request, 15, skip)]) == [[]]
    assert asks[:8] == list(range(101, 109)) and asks[-1] - asks[-2] == 1 + REST and 35 < len(asks) < 45
    request.token_ids += range(1000, 1010)  # a copy: the next look, at most REST tokens later, finds it
    assert propose([ask(request, 15, skip)]) == [list(range(1010 + skip, 1025 + skip))]


# -- the scheduler, against the hash device ---------------------------------------------------------------------------

GUESSES = ["right", "wrong", "mixed", "foreign", "long", "ngram"]


@pytest.mark.parametrize("guess", GUESSES)
def test_any_proposer_gives_each_request_its_solo_tokens(guess: str) -> None:
    """Each seed with one lag; tests/slow has both."""
    drafts = correct = preemptions = 0
    for seed in range(25):
        run = simulate(random_case(random.Random(f"{guess} {seed}"), guess=guess, lag=seed % 2))
        counters = run.scheduler.counters()
        drafts, correct = drafts + counters["drafts"], correct + counters["correct_drafts"]
        preemptions += counters["preemptions"]
    assert drafts > 50 and (correct > 10) == (guess != "wrong") and preemptions > 0


def test_drafts_never_preempt_and_never_take_a_step_from_others() -> None:
    """With guesses that are all wrong the plans are those without speculation, but for the drafts themselves."""
    preemptions = 0
    for seed in range(20):
        draw = random.Random(seed)
        some = [
            Job([draw.randrange(50) for _ in range(draw.randrange(1, 9))], draw.randrange(20, 40)) for _ in "123456"
        ]
        case = Case(some, 4, 16, 6, 64, vocab=50, cached=False, draft_room=64)
        without, with_wrong = simulate(case), simulate(replace(case, guess="wrong"))
        assert with_wrong.scheduler.counters()["drafts"] > 0
        assert with_wrong.scheduler.counters()["preemptions"] == without.scheduler.counters()["preemptions"]
        assert len(with_wrong.log) == len(without.log)
        preemptions += without.scheduler.counters()["preemptions"]
    assert preemptions > 10


def test_right_guesses_save_steps() -> None:
    case = Case([Job([1, 2, 3], 40)], vocab=50, budget=64)
    assert len(simulate(case).log) == 40 and len(simulate(replace(case, guess="right")).log) == 1 + 6  # 7 + 5 x 7 > 39
    assert make_scheduler(case).speculation is None


# -- the engine, against the checksum model's oracle ------------------------------------------------------------------


def knowing(llm: Engine, answers: dict[tuple[int, ...], list[int]], kind: str = "right") -> None:
    """Gives the engine a proposer that knows what each prompt's answer will be."""

    def one(ask: Ask) -> list[int]:
        ids, start = ask.request.token_ids, ask.request.prompt_len
        rest = answers[tuple(ids[:start])][len(ids) - start + ask.skip :]
        return rest if kind == "right" or len(ids) % 3 else [*rest[:2], 0, *rest[3:]]

    propose_with(llm, lambda asks: [one(ask) for ask in asks])


def propose_with(llm: Engine, propose: Proposer) -> None:
    scheduler = llm._parts.core.stepper.scheduler
    assert scheduler.speculation is not None
    scheduler.speculation = replace(scheduler.speculation, propose=propose)


def greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": count, **more}


@contextmanager
def oracle_engine(prompts: Sequence[list[int]], count: int, **options: Any) -> Iterator[Engine]:
    with checksum_engine(speculation=SpeculationConfig(Algorithm.ngram), **options) as llm:
        knowing(llm, {tuple(p): expected(p, count) for p in prompts})
        yield llm


PROMPTS = [[i, 2 * i % VOCAB, 5] for i in range(1, 8)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_in_the_middle_of_right_drafts_drops_what_was_drawn_behind_it(overlap: bool) -> None:
    with oracle_engine(PROMPTS, 40, overlap=overlap) as llm:
        for prompt in PROMPTS:
            answer = expected(prompt, 40)
            for at in (1, 3, 6, 20):
                stop = answer[at]
                output = llm.generate(input_ids=prompt, sampling_params=greedy(40, stop_token_ids=[stop]),
                                      return_logprob=True)  # fmt: skip
                assert output["output_ids"] == answer[: answer.index(stop) + 1]  # type: ignore[call-overload]
                meta = output["meta_info"]  # type: ignore[call-overload]
                assert meta["finish_reason"] == {"type": "stop", "matched": stop}
                assert [i for _, i, _ in meta["output_token_logprobs"]] == answer[: answer.index(stop) + 1]


@pytest.mark.parametrize("overlap", [False, True])
def test_lengths_pages_and_the_end_of_the_context(overlap: bool) -> None:
    with oracle_engine(PROMPTS, 61, overlap=overlap, context=64, pool=64, page_size=4) as llm:
        for count in (0, 1, 2, 3, 8, 17, 60, 61):
            output: Any = llm.generate(input_ids=PROMPTS[0], sampling_params=greedy(count, ignore_eos=True))
            assert output["output_ids"] == expected(PROMPTS[0], count)
            assert output["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        assert llm.stats()["correct_draft_tokens"] > 100


def test_a_draft_page_that_was_given_back_unblocks_who_waits_for_it() -> None:
    """A pool that is always too small, right and wrong drafts in flight, many more requests than rows."""
    prompts = [[i, i + 1, i + 2] for i in range(24)]
    with oracle_engine(prompts, 21, overlap=True, pool=100, page_size=2, rows=4, prefix_cache=False) as llm:
        knowing(llm, {tuple(p): expected(p, 21) for p in prompts}, kind="mixed")
        outputs: Any = llm.generate(input_ids=prompts, sampling_params=greedy(20))
        assert [o["output_ids"] for o in outputs] == [expected(p, 20) for p in prompts]


def test_rows_with_edits_and_more_logprobs_speculate_and_keep_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    known, release = list[list[int]](), Extras.release  # what the worker has come to know of the rows that ask for more
    monkeypatch.setattr(Extras, "release", lambda e, row: known.append(e.rows[row].token_ids) or release(e, row))
    with oracle_engine(PROMPTS, 40, overlap=True, rows=8, tokens=64) as llm:
        some: list[dict[str, Any]] = [
            {}, {"frequency_penalty": 0.5}, {"logit_bias": {"3": 1.0}}, {}, {"presence_penalty": 1.0}, {}, {},
        ]  # fmt: skip
        params = [greedy(30, **more) for more in some]
        alone: Any = [llm.generate(input_ids=p, sampling_params=q) for p, q in zip(PROMPTS, params, strict=True)]
        top = [0, 0, 2, 0, 0, 3, 0]
        batch: Any = llm.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True, top_logprobs_num=top)
        for solo, output, prompt, more, asked in zip(alone, batch, PROMPTS, some, top, strict=True):
            assert output["output_ids"] == solo["output_ids"]
            plain = not set(more) & {"frequency_penalty", "presence_penalty", "logit_bias"}
            assert not plain or output["output_ids"] == expected(prompt, 30)
            assert not plain or output["meta_info"]["spec_num_correct_drafts"] > 5
            found = output["meta_info"].get("output_top_logprobs", [])
            assert [len(entry) for entry in found] == [asked] * (30 if asked else 0)
    whole = [prompt + output["output_ids"] for prompt, output in zip(PROMPTS, batch, strict=True)]
    assert len(known) == 2 and all(any(ids == one[: len(ids)] for one in whole) for ids in known)


def test_a_guess_behind_which_nothing_can_be_drawn_tells_no_logprobs() -> None:
    params = SamplingParams(return_logprob=True, top_logprobs=1)
    request = Request("r", 2, [5, 6], params, 0, 9, frozenset())
    state = RequestState(request, None, False, print)
    step = SchedulerOutput(0, rows=[0], samples=[True], drafts=[Drafts(0, [7, 8])], requests=[request])
    tops = Scores(np.zeros((3, 0)), np.array([[-1.0], [-2.0], [-3.0]]), np.array([[7], [8], [9]]))
    out = StepOutput([7, 8, 9], [-1.0, float("nan"), -3.0], {1: GrammarError("stuck")}, tops)
    assert readout.record({"r": state}, step, out, lambda pooled: pooled) == {}
    assert out.tokens == [7, -1, 9] and state.fault is None and state.output_top == [[(-1.0, 7)]]


def test_the_keys_of_meta_info_add_up() -> None:
    with oracle_engine(PROMPTS, 40) as llm:
        knowing(llm, {tuple(p): expected(p, 40) for p in PROMPTS}, kind="mixed")
        meta: Any = llm.generate(input_ids=PROMPTS[0], sampling_params=greedy(40))["meta_info"]  # type: ignore[call-overload]
        histogram, steps = meta["spec_correct_drafts_histogram"], meta["spec_verify_ct"]
        assert sum(histogram) == steps < 39
        assert sum(n * count for n, count in enumerate(histogram)) == meta["spec_num_correct_drafts"] == 39 - steps
        assert meta["spec_accept_length"] == 40 / steps > 1.5
        assert meta["spec_accept_rate"] == meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"] < 1
        stats = llm.stats()
        assert (stats["output_tokens"], stats["steps"]) == (40, steps + 1)
        assert (stats["draft_tokens"], stats["correct_draft_tokens"]) == (meta["spec_num_proposed_drafts"], 39 - steps)
        assert llm.get_server_info()["internal_states"][0]["avg_spec_accept_length"] == 40 / (steps + 1)
    with checksum_engine() as llm:
        meta = llm.generate(input_ids=PROMPTS[0], sampling_params=greedy(4))["meta_info"]  # type: ignore[call-overload]
        assert not [key for key in meta if key.startswith("spec")]


def test_a_stream_gets_every_token_once_and_an_abort_leaves_nothing_behind() -> None:
    with oracle_engine(PROMPTS, 100, overlap=True) as llm:
        seen: list[int] = []
        for chunk in llm.generate(input_ids=PROMPTS[0], sampling_params=greedy(100), stream=True):
            assert chunk["output_ids"][: len(seen)] == seen and len(chunk["output_ids"]) >= len(seen)
            seen = list(chunk["output_ids"])
        assert seen == expected(PROMPTS[0], 100)
        for taken in range(1, 4):
            stream = llm.generate(input_ids=PROMPTS[1], sampling_params=greedy(100), stream=True)
            for _ in zip(range(taken), stream, strict=False):  # a slow reader finds fewer chunks
                pass
            del stream
        after: Any = llm.generate(input_ids=PROMPTS[1], sampling_params=greedy(50))
        assert after["output_ids"] == expected(PROMPTS[1], 50)
        assert llm.stats()["pages_used"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_tell_of_guesses_and_of_the_pages_that_come_back(overlap: bool) -> None:
    with oracle_engine(PROMPTS, 40, overlap=overlap, page_size=2, rows=8, tokens=64) as llm:
        knowing(llm, {tuple(p): expected(p, 40) for p in PROMPTS}, kind="mixed")
        records: list[StepRecord] = []
        with llm.steps_told(records.append):
            llm.generate(input_ids=PROMPTS, sampling_params=greedy(40))
        assert sum(sum(r.drafted) for r in records) == (stats := llm.stats())["draft_tokens"] > 100
        wrong = stats["draft_tokens"] - stats["correct_draft_tokens"]  # they do not count
        assert wrong > 0 and stats["computed_tokens"] == sum(sum(r.counts) for r in records) - wrong
    holding: dict[str, tuple[int, ...]] = {}
    for record in records:
        assert all(d < c for d, c in zip(record.drafted, record.counts, strict=False))
        for rid in record.released:
            del holding[rid]
        for rid, kept in record.shrunk:
            assert kept < len(holding[rid])
            holding[rid] = holding[rid][:kept]
        for new in record.new_pages:
            assert new.first == len(holding.get(new.rid, ()))
            holding[new.rid] = (*holding.get(new.rid, ()), *new.pages)
        pages = [page for held in holding.values() for page in held]
        assert record.held == len(set(pages)) == len(pages)
    assert sum(len(record.shrunk) for record in records) > 5


# -- the model in the box: bits ----------------------------------------------------------------------------------------

COPY = "Copy: x q seven 4 river blue 7 cat dog one two six ->"
TEXTS = [
    COPY, f"{COPY} x q seven 4 river blue 7 cat dog one two six\n{COPY}", "Once upon a time",
    "Sentence: Maria, 34, lives in Oslo and works as a nurse.\nJSON:", "12 12 12 12 12 12 12 12", "The capital of",
]  # fmt: skip
Answers = list[tuple[list[int], list[float]]]


def asked(temperature: float) -> list[dict[str, Any]]:
    return [
        {"temperature": temperature, "sampling_seed": i, "max_new_tokens": 14 + 5 * i, "ignore_eos": True}
        | ({"top_p": 0.9, "top_k": 40} if i % 2 else {})
        for i in range(len(TEXTS))
    ]


def answers(outputs: Any) -> Answers:
    return [(o["output_ids"], [lp for lp, _, _ in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


def box(**options: Any) -> Engine:
    return Engine(model_path="box", enable_torch_compile=False, **options)


@pytest.fixture(scope="module")
def reference() -> dict[float, Answers]:
    """Alone, without speculation."""
    with box(disable_radix_cache=True) as llm:
        return {
            t: answers([llm.generate(p, q, return_logprob=True) for p, q in zip(TEXTS, asked(t), strict=True)])
            for t in (0.0, 0.7)
        }


LAYOUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "overlapped": {"disable_overlap_schedule": False},
    "small chunks and pages": {"chunked_prefill_size": 9, "page_size": 1, "max_running_requests": 3},
    "two rows": {"max_running_requests": 2, "disable_overlap_schedule": False},
    "one row": {"max_running_requests": 1, "speculative_num_draft_tokens": 30},
    "preempted": {"max_total_tokens": 288, "page_size": 4, "disable_overlap_schedule": False},
    "long matches only": {"speculative_ngram_min_match_window_size": 6, "speculative_num_draft_tokens": 2},
}


def check_layout(reference: dict[float, Answers], options: dict[str, Any], rounds: int = 1) -> None:
    """In the first round the cache is cold for one temperature and warm for the other; tests/slow has another."""
    with box(**NGRAM, **options) as llm:
        for _, (temperature, want) in product(range(rounds), reference.items()):
            order = random.Random(len(options)).sample(range(len(TEXTS)), len(TEXTS))
            params = asked(temperature)
            got = llm.generate([TEXTS[i] for i in order], [params[i] for i in order], return_logprob=True)  # type: ignore[arg-type]
            assert answers(got) == [want[i] for i in order]
        assert llm.stats()["correct_draft_tokens"] > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_without_speculation(reference: dict[float, Answers], layout: str) -> None:
    check_layout(reference, LAYOUTS[layout])


def test_a_draw_at_a_wrong_position_is_caught(reference: dict[float, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: drafts that are drawn behind with the noise of the position in front."""

    arrays = InputBatch._arrays

    def careless(batch: Any, output: Any) -> Any:
        found = arrays(batch, output)
        wrong = found["pos_R"] - (found["pos_R"] != found["kv_len_R"].max())
        return found | {"pos_R": wrong} if output.drafts else found

    monkeypatch.setattr(InputBatch, "_arrays", careless)
    with pytest.raises(AssertionError):
        check_layout(reference, {})


def test_ends_inside_accepted_tokens_cut_text_tokens_and_logprobs_alike() -> None:
    ends: list[dict[str, Any]] = [
        {"stop": "seven"}, {"stop": " 4 r"}, {"stop": ["nine", "blue 7"]}, {"stop_regex": "[0-9] c"},
        {"min_new_tokens": 20}, {"min_new_tokens": 8, "stop": "dog"}, {"n": 2, "sampling_seed": 5, "temperature": 0.3},
    ]  # fmt: skip
    results = []
    for options in ({}, NGRAM, NGRAM | {"disable_overlap_schedule": False}):
        with box(**options) as llm:
            outputs: Any = [llm.generate(TEXTS[1], greedy(24) | end, return_logprob=True) for end in ends]
            outputs = [o for output in outputs for o in (output if isinstance(output, list) else [output])]
            results.append([
                (o["text"], o["output_ids"], o["meta_info"]["output_token_logprobs"], o["meta_info"]["finish_reason"])
                for o in outputs
            ])  # fmt: skip
            assert (llm.stats()["correct_draft_tokens"] > 20) == bool(options)
    assert results[0] == results[1] == results[2]
    assert [finish["type"] for *_, finish in results[0][:4]] == ["stop"] * 4


def test_copies_take_a_third_of_the_steps() -> None:
    with box(**NGRAM) as llm:
        meta: Any = llm.generate(TEXTS[1], greedy(13))["meta_info"]  # type: ignore[call-overload]
        assert meta["completion_tokens"] == 13 and meta["spec_verify_ct"] <= 4


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "DFLASH", "ngrams", ""])
def test_other_algorithms_are_refused_by_name(algorithm: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"algorithm='{algorithm}'.*NGRAM, STANDALONE, EAGLE3"):
        ServerArgs(model_path="box", speculative_algorithm=algorithm).to_config()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"num_draft_tokens": 1}, "num_draft_tokens must be at least 2"),
        ({"num_draft_tokens": -5}, "num_draft_tokens"),
        ({"step_tokens": 0}, "step_tokens must be at least 1"),
        ({"step_tokens": 10**9}, "step_tokens must be at most"),
        ({"ngram_min_match": 0}, "ngram_min_match must be at least 1"),
        ({"ngram_min_match": 5, "ngram_max_match": 4}, "ngram_max_match"),
    ],
)
def test_wrong_settings_are_refused_with_name_and_value(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"speculation.{name}"):
        resolve(EngineConfig(speculation=SpeculationConfig(Algorithm.ngram, **wrong)), Hardware("cpu"))


def test_steps_never_outgrow_the_budget() -> None:
    speculation = SpeculationConfig(Algorithm.ngram, step_tokens=100)
    config = EngineConfig(speculation=speculation)
    config = replace(config, scheduler=replace(config.scheduler, max_step_tokens=7))
    assert resolve(config, Hardware("cpu")).speculation.step_tokens == 7


def test_a_new_record_is_empty() -> None:
    assert drafting_of(request_of([1])) == Drafting()


def test_a_long_prompt_is_indexed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is proposed before all of it is; what is proposed then is what an index made at once finds."""
    monkeypatch.setattr(ngram, "CATCH_UP", 8)
    request = Request("r", 40, [1, 2, 3, 4, 5] * 8, SamplingParams(), 0, 20, frozenset())
    request.drafting = Drafting()
    propose = ngram_proposer(1, 4)
    found = [propose([ask(request, 4)])[0] for _ in range(5)]
    assert found[:4] == [[]] * 4 and found[4] == [1, 2, 3, 4][: len(found[4])] != []
