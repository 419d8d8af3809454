"""Drafts beside everything that edits, masks, ends or tells of a draw: no bit changes, and guesses are edited alike.

The draft is the target itself: where its guesses go through the same edits and masks, every one of them is right.
"""

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
from fake_cuda import use_draft_graphs, use_graphs
from loops import in_loop
from torch import Tensor

from fengine import Engine
from fengine.core.scheduler_output import SchedulerOutput, Watcher
from fengine.core.speculation import Late
from fengine.worker.hub import resolve_model

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"]}  # fmt: skip
STORY = "Once upon a time"
BOX: dict[str, Any] = {"model_path": "box", "enable_torch_compile": False, "max_running_requests": 4, "page_size": 8,
                       "chunked_prefill_size": 64, "max_total_tokens": 1024}  # fmt: skip
SELF: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "box",
                        "speculative_num_steps": 4, "speculative_adaptive": False}  # fmt: skip
WORK: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "temperature": 0.8},
    "greedy penalties": {"frequency_penalty": 1.5, "temperature": 0, "logit_bias": {"0": 14.0}, "ignore_eos": True},
    "bias": {"logit_bias": {"31": 4.0, "60": -3.0}, "temperature": 0.9},
    "least": {"min_new_tokens": 9, "stop_token_ids": list(range(200, 900)), "temperature": 0.9},
    "schema": {"json_schema": json.dumps(PERSON), "temperature": 0.7},
    "regex": {"regex": "[A-Z][a-z]{2,9}( [a-z]+){1,4}\\.", "temperature": 1.2, "frequency_penalty": 0.5},
    "never ends": {"regex": "(ab|cd)*", "ignore_eos": True, "temperature": 0.6},
    "stop": {"stop": [" the", "and"], "temperature": 0.8},
}


def answers(llm: Engine, count: int | None = None) -> list[dict[str, Any]]:
    """Of the first `count` requests of WORK."""
    params: Any = [{"max_new_tokens": 24, "sampling_seed": i} | each for i, each in enumerate(WORK.values())][:count]
    outputs: Any = llm.generate(
        [STORY] * len(params), params, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[5, 6],
        logprob_start_len=1,
    )  # fmt: skip
    return outputs


def told(output: dict[str, Any]) -> dict[str, Any]:
    """All that does not depend on the schedule."""
    names = ("finish_reason", "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
             "input_token_logprobs", "input_top_logprobs")  # fmt: skip
    return {"text": output["text"]} | {name: output["meta_info"][name] for name in names}


@pytest.fixture(scope="module")
def want() -> list[dict[str, Any]]:
    with Engine(**BOX) as llm:
        return answers(llm)


@pytest.fixture(scope="module")
def own() -> Iterator[Engine]:
    with Engine(**BOX, **SELF, enable_custom_logit_processor=True, enable_return_hidden_states=True) as llm:
        yield llm


@contextmanager
def with_graphs(settings: dict[str, Any]) -> Iterator[Engine]:
    """Warming up takes most of the time of these tests."""
    with pytest.MonkeyPatch.context() as patch, Engine(**settings) as llm:
        use_graphs(llm._parts, patch)
        use_draft_graphs(llm._parts, patch)
        yield llm


@pytest.fixture(scope="module")
def graphed() -> Iterator[Engine]:
    with with_graphs(BOX | SELF | {"disable_overlap_schedule": False}) as llm:
        yield llm


def test_no_bit_changes_and_every_guess_is_edited_as_the_draw(own: Engine, want: list[dict[str, Any]]) -> None:
    outputs = answers(own)
    for name, output, expected in zip(WORK, outputs, want, strict=True):
        assert told(output) == told(expected), name
        meta = output["meta_info"]
        if meta["completion_tokens"] > 8:
            assert meta["spec_num_correct_drafts"] > 3, name
        if "stop" not in name and name != "least":  # what ends a request ends it amid its guesses
            cut = 4 if name in ("schema", "regex") else 0  # behind the end of a text nothing is guessed or kept
            assert meta["spec_num_proposed_drafts"] - meta["spec_num_correct_drafts"] <= cut, name


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "NGRAM"},
        SELF | {"disable_overlap_schedule": False},
        SELF | {"max_total_tokens": 160, "page_size": 8},
        {key: value for key, value in SELF.items() if key != "speculative_adaptive"},
    ],
    ids=["ngram", "overlap", "preempted", "adaptive"],
)
def test_no_bit_changes_under_other_proposers_and_schedules(
    settings: dict[str, Any], want: list[dict[str, Any]]
) -> None:
    with Engine(**BOX | settings) as llm:
        assert [told(output) for output in answers(llm)] == [told(output) for output in want]


def test_chains_of_guesses_as_graphs(graphed: Engine, want: list[dict[str, Any]]) -> None:
    """Also those of edits, captured when they come; grammars are masked guess by guess."""
    speculation: Any = graphed._parts.core.stepper.scheduler.speculation
    graphs = speculation.propose.chain.graphs
    ready: Any = dict(graphs.captured)
    assert [told(output) for output in answers(graphed)] == [told(output) for output in want]
    for _ in range(2):
        outputs = answers(graphed, 4)
        assert [told(output) for output in outputs] == [told(output) for output in want[:4]]
    late: Any = graphs.captured.keys() - ready.keys()
    assert len(ready) > 2 and any(key[2] for key in late)
    assert sum(graph.replays for graph in graphs.captured.values()) > 3
    for name, output in zip(WORK, outputs, strict=False):
        meta = output["meta_info"]
        assert 8 < meta["spec_num_correct_drafts"] >= meta["spec_num_proposed_drafts"] - 4, name  # it ends amid guesses


def eagle(folder: Path) -> dict[str, Any]:
    config = json.loads((resolve_model("box") / "config.json").read_text())
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": eagle_heads.write(folder, config)}


def test_graphs_of_guesses_and_their_keys_go_with_what_is_released(tmp_path: Path) -> None:
    """They name the target's embedding; and none is captured before its weights are back."""
    params: Any = {"max_new_tokens": 12, "temperature": 0}
    every: list[list[str] | None] = [["weights"], ["cuda_graph"], ["kv_cache"], None]
    with with_graphs(BOX | SELF | eagle(tmp_path) | {"max_running_requests": 2}) as llm:
        model: Any = llm._parts.core.stepper.scheduler.speculation
        model, before = model.propose, llm.generate(STORY, params)["output_ids"]
        for tags in every:
            chain = model.chain
            kept = [weakref.ref(tensor) for tensor in chain.kv.tensors]
            assert chain.graphs.captured
            llm.release_memory_occupation(tags)
            gone = tags is None or "kv_cache" in tags
            assert not chain.graphs.captured and all(x() is None for x in kept) == gone, tags
            if gone:
                llm.resume_memory_occupation(["kv_cache"])
                assert bool(model.chain.graphs.captured) == (tags is not None), tags
            if tags is None or not gone:
                llm.resume_memory_occupation()
            assert model.chain.graphs.captured and llm.generate(STORY, params)["output_ids"] == before, tags


@pytest.mark.parametrize("draft", ["box", "EAGLE3"])
def test_steps_are_fed_with_guesses_that_the_host_does_not_know(draft: str, tmp_path: Path) -> None:
    """Of rows whose logits nobody edits, some preempted while they are verified; beside one that is edited."""
    params: Any = [{"max_new_tokens": 24, "sampling_seed": i, "temperature": 0.7 * (i % 3)} for i in range(6)]
    params[4] |= {"frequency_penalty": 0.6, "max_new_tokens": 9}
    settings: dict[str, Any] = BOX | {"max_total_tokens": 104, "disable_overlap_schedule": False}
    with Engine(**settings) as llm:
        expected: Any = llm.generate([STORY] * 6, params, return_logprob=True)
    settings |= SELF | (eagle(tmp_path) if draft == "EAGLE3" else {})
    with with_graphs(settings) as llm:
        told, scheduler = [], llm._parts.core.stepper.scheduler
        speculation: Any = scheduler.speculation

        def propose(asks: Any) -> Any:
            found = speculation.propose(asks)
            told.extend(guess for guess in found if guess)
            return found

        in_loop(llm._parts.core, lambda: setattr(scheduler, "speculation", replace(speculation, propose=propose)))
        for _ in range(2):
            found: Any = llm.generate([STORY] * 6, params, return_logprob=True)
            assert [o["meta_info"]["output_token_logprobs"] for o in found] == [
                o["meta_info"]["output_token_logprobs"] for o in expected
            ]
        stats = llm.stats()
    late = [guess for guess in told if isinstance(guess, Late)]
    assert len(late) > 10 and not any(map(any, late)) and stats["preemptions"] > 0
    assert len(late) < len(told)
    if draft == "box":
        assert stats["correct_draft_tokens"] > 0.9 * stats["draft_tokens"]


@pytest.mark.parametrize("draft", ["box", "EAGLE3"])
def test_chains_that_go_on_before_a_step_is_read_guess_the_same(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of rows that begin and end at different steps, over page edges, beside prompts that leave no room for guesses.
    The oracle begins every chain when all tokens are known. The draft's temperature is another, so that of a try any
    number is right."""
    settings: dict[str, Any] = BOX | SELF | {"disable_overlap_schedule": False}
    params: Any = [{"max_new_tokens": 12 + 4 * i, "sampling_seed": i, "temperature": 0.5 * (i % 3)} for i in range(6)]
    params[4]["max_new_tokens"] = 1
    edited = [*params[:5], params[5] | {"max_new_tokens": 6, "frequency_penalty": 0.6}]  # beside it nothing goes on
    prompts = [STORY] * 4 + [STORY * 30] * 2  # the long ones come where others end, and fill steps
    found, taken = [], Counter[bool]()
    with ExitStack() as stack:
        llm: Engine = (
            stack.enter_context(with_graphs(settings | eagle(tmp_path)))
            if draft == "EAGLE3"
            else request.getfixturevalue("graphed")
        )
        scheduler = llm._parts.core.stepper.scheduler
        speculation: Any = scheduler.speculation
        model = speculation.propose
        sampled, run_behind = model._sampled, model.chain.run_behind

        def warmer(slots: list[int]) -> Any:
            arrays = sampled(slots)
            return arrays | {"temperature_R": arrays["temperature_R"] * 2}

        def counted(*args: Any) -> Any:
            taken[False] += 1
            guesses = run_behind(*args)
            return lambda: (taken.update([True]), guesses())[1]

        monkeypatch.setattr(model, "_sampled", warmer)
        monkeypatch.setattr(model.chain, "run_behind", counted)
        for ahead in (False, True):
            one = speculation if ahead else replace(speculation, go_ahead=lambda output: None)
            in_loop(llm._parts.core, lambda one=one: setattr(scheduler, "speculation", one))
            llm.flush_cache()
            outputs: Any = [llm.generate(prompts[: len(some)], some, return_logprob=True)
                            for some in (params[:1], params, edited)]  # fmt: skip
            found.append([
                (told["output_token_logprobs"], {name: told[name] for name in told if name.startswith("spec_")})
                for output in outputs for told in (each["meta_info"] for each in output)
            ])  # fmt: skip
            assert bool(taken) == ahead
        in_loop(llm._parts.core, lambda: setattr(scheduler, "speculation", speculation))
        monkeypatch.undo()
    assert found[0] == found[1] and taken[True] > 7
    tries = zip_longest(*(told.get("spec_correct_drafts_histogram", []) for _, told in found[0]), fillvalue=0)
    assert draft == "EAGLE3" or list(map(any, tries)) == [True] * 5


class Ends(Watcher):
    """Ends request "0" when its guesses are in flight, for the third time."""

    def __init__(self, llm: Engine) -> None:
        self.llm, self.left = llm, 3

    def launched(self, output: SchedulerOutput) -> None:
        self.left -= any(output.requests[index].rid == "0" for index, _ in output.drafts)
        if self.left == 0:
            self.left = -1
            self.llm._parts.core.requests.abort(["0"], None)


def test_who_ends_while_its_guesses_are_in_flight_leaves_the_others_theirs(graphed: Engine) -> None:
    params: Any = [{"max_new_tokens": 24, "sampling_seed": i, "temperature": 0.5 * i} for i in range(3)]
    rids, stepper = ["0", "1", "2"], graphed._parts.core.stepper
    with Engine(**BOX) as llm:
        expected: Any = llm.generate([STORY] * 3, params, return_logprob=True)
    in_loop(graphed._parts.core, lambda: stepper.watch(Ends(graphed)))
    found: Any = graphed.generate([STORY] * 3, params, return_logprob=True, rid=rids)
    ended, *others = [output["meta_info"] for output in found]
    assert ended["finish_reason"]["type"] == "abort" and 0 < ended["completion_tokens"] < 24
    want = [output["meta_info"]["output_token_logprobs"] for output in expected]
    assert [ended["output_token_logprobs"], *(told["output_token_logprobs"] for told in others)] == [
        want[0][: ended["completion_tokens"]], *want[1:]
    ]  # fmt: skip
    assert all(told["spec_num_correct_drafts"] > 12 for told in others)


def same(logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
    return logits


def test_a_request_that_python_edits_or_that_shows_hidden_states_has_no_drafts(
    own: Engine, want: list[dict[str, Any]]
) -> None:
    params: Any = {"max_new_tokens": 24, "sampling_seed": 0}
    edited: Any = own.generate(STORY, params, return_logprob=True, custom_logit_processor=same)
    shown: Any = own.generate(STORY, params, return_logprob=True, return_hidden_states=True)
    for output in (edited, shown):
        assert output["meta_info"]["output_token_logprobs"] == want[0]["meta_info"]["output_token_logprobs"]
        assert not [key for key in output["meta_info"] if key.startswith("spec_")]
