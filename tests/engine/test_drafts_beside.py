"""Drafts of a model beside adapters, sessions, few bits, n-grams, aborts; and what peers check of logprobs with drafts.

Peers' cases are those of SGLang's test_eagle_infer (logprob_start_len, logprobs that match a re-scoring, mixed
requests, one new token, an abort) and vLLM's spec_decode logprobs tests; here nothing is close, everything is equal.
"""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny_adapters
import tiny_checkpoints
from loops import in_loop

from fengine import Engine
from fengine.core.step_trace import StepRecord
from fengine.errors import ConfigError
from fengine.speculative.ngram import ngram_proposer
from fengine.speculative.proposers import first_of
from fengine.worker.hub import resolve_model

BOX: dict[str, Any] = {"model_path": "box", "enable_torch_compile": False, "max_running_requests": 8, "page_size": 8}
SELF: dict[str, Any] = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "box",
                        "speculative_num_steps": 4, "speculative_adaptive": False}  # fmt: skip
BOX_FOLDER = str(resolve_model("box"))
PROMPTS = ["Once upon a time", "What is 2+3?", "Sort: 3 1 2", "Copy: red blue green one two -> "]


@pytest.fixture(scope="module")
def plain() -> Any:
    with Engine(**BOX) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting() -> Any:
    with Engine(**BOX, **SELF) as llm:
        yield llm


def logprobs(output: Any) -> Any:
    return output["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("start", [-1, 0, 2, 4])
def test_input_logprobs_begin_where_they_are_asked(start: int, plain: Engine, drafting: Engine) -> None:
    params: Any = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    one, two = (
        llm.generate(PROMPTS, params, return_logprob=True, logprob_start_len=start) for llm in (plain, drafting)
    )
    for want, got in zip(one, two, strict=True):
        names = ("input_token_logprobs", "output_token_logprobs", "prompt_tokens")
        assert [got["meta_info"][name] for name in names] == [want["meta_info"][name] for name in names]
        assert len(logprobs(got)) == 8


def test_what_was_drawn_behind_guesses_is_scored_alike_as_a_prompt(drafting: Engine) -> None:
    params: Any = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    ids = [drafting.tokenizer.encode(prompt) for prompt in PROMPTS]
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [4, 9]}
    drawn: Any = drafting.generate(input_ids=ids, sampling_params=params, **asked)
    whole = [prompt + output["output_ids"] for prompt, output in zip(ids, drawn, strict=True)]
    scored: Any = drafting.generate(
        input_ids=whole, sampling_params={"temperature": 0, "max_new_tokens": 0}, logprob_start_len=0, **asked
    )
    for prompt, output, again in zip(ids, drawn, scored, strict=True):
        assert output["meta_info"]["spec_num_correct_drafts"] > 8
        for kind in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
            assert again["meta_info"][f"input_{kind}"][len(prompt) :] == output["meta_info"][f"output_{kind}"], kind


def test_mixed_requests_at_once(plain: Engine, drafting: Engine) -> None:
    """Lengths 0 and 1 among them, with and without logprobs, penalties and other temperatures."""
    params: Any = [
        {"temperature": 0.4 * (i % 4), "max_new_tokens": (0, 1, 2, 9, 21)[i % 5], "ignore_eos": True,
         "sampling_seed": i, "frequency_penalty": 0.6 * (i % 3 == 1), "top_p": 0.9, "min_p": 0.01 * (i % 2)}
        for i in range(16)
    ]  # fmt: skip
    prompts, tops = [PROMPTS[i % 4] for i in range(16)], [(0, 1, 5)[i % 3] for i in range(16)]
    asked: dict[str, Any] = {"return_logprob": [i % 4 != 3 for i in range(16)], "top_logprobs_num": tops}
    names = ("output_token_logprobs", "output_top_logprobs", "finish_reason", "completion_tokens")
    found = []
    for llm in (plain, drafting):
        outputs: Any = llm.generate(prompts, params, **asked)
        found.append([(o["output_ids"], *(o["meta_info"].get(name) for name in names)) for o in outputs])
    assert found[0] == found[1]


def test_an_abort_amid_guesses_leaves_the_others_alone(plain: Engine, drafting: Engine) -> None:
    params: Any = {"temperature": 0.7, "max_new_tokens": 60, "ignore_eos": True, "sampling_seed": 3}
    want = plain.generate(PROMPTS[0], params, return_logprob=True)
    ended: list[Any] = []
    other = threading.Thread(target=lambda: ended.append(drafting.generate(PROMPTS[1], params, rid="gone")))
    other.start()
    for number, _ in enumerate(drafting.generate(PROMPTS[0], params, stream=True)):
        if number == 2:
            drafting.tokenizer_manager.abort_request("gone")
    other.join()
    assert ended and ended[0]["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert logprobs(drafting.generate(PROMPTS[0], params, return_logprob=True)) == logprobs(want)


def test_adapters_of_the_target(tmp_path: Path) -> None:
    """The draft knows no adapter: it is right less often, and no bit changes."""
    adapters = {}
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        tiny_adapters.write(folder, tiny_adapters.tensors(Path(BOX_FOLDER), 4, seed=seed, gain=0.3), 4, lora_alpha=4)
        adapters[f"a{seed}"] = str(folder)
    params: Any = {"temperature": 0.8, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 4}
    found, drafts = [], 0
    for more in ({}, SELF):
        with Engine(**BOX, **more, lora_paths=adapters) as llm:
            outputs: Any = llm.generate(PROMPTS[:3], params, lora_path=["a1", None, "a2"], return_logprob=True)
            found.append([logprobs(output) for output in outputs])
            drafts = llm.stats()["draft_tokens"]
    assert found[0] == found[1] and drafts > 10


def test_sessions(plain: Engine, drafting: Engine) -> None:
    found = []
    for llm in (plain, drafting):
        sid, ids, told, rid = str(llm.open_session(1000)), [5, 6, 7], [], None
        for turn in range(3):
            params: Any = {"temperature": 0.5, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": turn}
            output: Any = llm.generate(
                input_ids=ids, sampling_params=params, session_params={"id": sid, "rid": rid}, return_logprob=True
            )
            rid, ids = output["meta_info"]["id"], [30 + turn]
            told.append(logprobs(output))
        llm.close_session(sid)
        found.append(told)
    assert found[0] == found[1]


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_a_target_in_few_bits(algorithm: str, tmp_path: Path) -> None:
    draft = "box"
    if algorithm == "EAGLE3":
        draft = eagle_heads.write(tmp_path, json.loads((Path(BOX_FOLDER) / "config.json").read_text()))
    more: dict[str, Any] = SELF | {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}
    params: Any = {"temperature": 0.8, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 4}
    found, drafts = [], 0
    for settings in (dict[str, Any](), more):
        with Engine(**BOX, **settings, quantization="fp8") as llm:
            outputs: Any = llm.generate(PROMPTS, params, return_logprob=True)
            found.append([logprobs(output) for output in outputs])
            drafts = llm.stats()["draft_tokens"]
    assert found[0] == found[1] and drafts > 10


def test_ngrams_first_and_the_model_where_they_find_nothing(plain: Engine) -> None:
    params: Any = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    prompts = [*PROMPTS, "Copy: a b c d e f g h -> a b c d e f g h\n" * 3 + "Copy: a b c d e f g h ->"]
    want: Any = plain.generate(prompts, params, return_logprob=True)
    with Engine(**BOX, **SELF) as llm:
        scheduler = llm._parts.core.stepper.scheduler
        speculation: Any = scheduler.speculation
        asked: list[int] = []

        def model(asks: Any) -> Any:
            asked.append(len(asks))
            return speculation.propose(asks)

        both = replace(speculation, propose=first_of(ngram_proposer(4, 12), model), mixed=True)
        in_loop(llm._parts.core, lambda: setattr(scheduler, "speculation", both))
        for _ in range(2):
            got: Any = llm.generate(prompts, params, return_logprob=True)
            assert [logprobs(output) for output in got] == [logprobs(output) for output in want]
        proposed = llm.stats()["draft_tokens"]
        assert asked and proposed > 4 * len(asked)  # some tries were longer than a model's, or of more rows


def test_guesses_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """More guesses than positions are left; and a draft whose context is shorter than the target's."""
    target = str(tiny_checkpoints.write(tmp_path / "t", "qwen3", head_dim=16, max_position_embeddings=48))
    small = str(tiny_checkpoints.write(tmp_path / "s", "llama", max_position_embeddings=24))
    found = []
    for draft in (None, target, small):
        more: dict[str, Any] = {}
        if draft is not None:
            more = SELF | {"speculative_draft_model_path": draft, "speculative_num_steps": 7}
        with Engine(model_path=target, skip_tokenizer_init=True, page_size=8, **more) as llm:
            params: Any = {"temperature": 0.6, "max_new_tokens": None, "ignore_eos": True, "sampling_seed": 1}
            records: list[StepRecord] = []
            with llm.steps_told(records.append):
                outputs: Any = llm.generate(input_ids=[[5] * 9, [7] * 40], sampling_params=params, return_logprob=True)
            found.append([logprobs(output) for output in outputs])
            assert draft is None or llm.stats()["draft_tokens"] > 0
            ends = {one.starts[i] + one.counts[i] for one in records for i, n in enumerate(one.drafted) if n}
            assert draft is None or max(ends) <= (24 if draft == small else 48)  # a guess has a position
    assert found[0] == found[1] == found[2] and len(found[0][0]) > 30


def test_a_head_of_another_width_is_refused(tmp_path: Path) -> None:
    config = json.loads((Path(BOX_FOLDER) / "config.json").read_text())
    head = eagle_heads.write(tmp_path, config | {"hidden_size": 128})
    with pytest.raises(ConfigError, match="hidden_size 128, not 256"):
        Engine(**BOX, speculative_algorithm="EAGLE3", speculative_draft_model_path=head)


def test_a_draft_that_cannot_pay_guesses_where_it_is_right_and_that_is_said(
    plain: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The target as its own draft: a guess takes a whole step."""
    with Engine(**BOX | SELF | {"speculative_adaptive": True}) as llm:
        params: Any = {"temperature": 0.5, "max_new_tokens": 12, "sampling_seed": 1}
        output: Any = llm.generate(PROMPTS[0], params, return_logprob=True)
        assert logprobs(output) == logprobs(plain.generate(PROMPTS[0], params, return_logprob=True))
        meta = output["meta_info"]
        assert (
            meta["spec_accept_rate"] == 1.0 and meta["spec_accept_length"] > 2 and "than they can bring" in caplog.text
        )
