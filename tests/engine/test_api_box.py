"""All of it end to end on the model in the box, against transformers, against solo runs, and against itself."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from books import check_scheduler
from loops import in_loop
from transformers import AutoModelForCausalLM, AutoTokenizer

import fengine as sgl
from fengine.api.call_options import CustomLogitProcessor
from fengine.errors import ConfigError, FengineError, InvalidRequestError
from fengine.worker.hub import BOX

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 3 =", "Sort: 3 1 2 ->"]
GREEDY = {"temperature": 0, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(
        model_path="box", enable_torch_compile=False, enable_return_hidden_states=True,
        enable_custom_logit_processor=True, device="cpu",
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(BOX, dtype=torch.float32), AutoTokenizer.from_pretrained(BOX)


# -- logprobs and hidden states ----------------------------------------------------------------------------------------


def test_prompt_logprobs_are_those_of_transformers_and_of_decoding(llm: sgl.Engine, reference: Any) -> None:
    model, tokenizer = reference
    ask: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids
        first = llm.generate(prompt, GREEDY, **ask, logprob_start_len=0)
        drawn, meta = first["output_ids"], first["meta_info"]
        with torch.no_grad():
            wanted = model(torch.tensor([ids + drawn])).logits[0].log_softmax(-1)
        assert [t for _, t, _ in meta["input_token_logprobs"]] == ids and meta["input_token_logprobs"][0][0] is None
        got = [lp for lp, _, _ in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
        given = (ids + drawn)[1:]
        rows = torch.arange(len(given))
        torch.testing.assert_close(torch.tensor(got), wanted[rows, torch.tensor(given)], atol=2e-4, rtol=0)
        tops = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
        assert [[t for _, t, _ in top] for top in tops] == wanted[: len(given)].topk(3).indices.tolist()
        asked = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
        assert all([t for _, t, _ in entry] == [5, 9] for entry in asked)
        at = torch.tensor([[lp for lp, _, _ in entry] for entry in asked])
        torch.testing.assert_close(at, wanted[: len(given), [5, 9]], atol=2e-4, rtol=0)
        # the same numbers, bit for bit, when what was drawn is read as a prompt
        again = llm.generate(
            input_ids=ids + drawn, sampling_params={"max_new_tokens": 0}, **ask, logprob_start_len=len(ids) - 1
        )
        rescored = again["meta_info"]
        assert rescored["input_token_logprobs"][1:] == meta["output_token_logprobs"]
        assert rescored["input_top_logprobs"][1:] == meta["output_top_logprobs"]
        assert rescored["input_token_ids_logprobs"][1:] == meta["output_token_ids_logprobs"]


def test_hidden_states_are_those_of_transformers(llm: sgl.Engine, reference: Any) -> None:
    model, tokenizer = reference
    llm.flush_cache()
    outputs = llm.generate(PROMPTS, GREEDY, return_hidden_states=True)
    lasts = llm.generate(PROMPTS, GREEDY, return_hidden_states="last")
    for prompt, output, last in zip(PROMPTS, outputs, lasts, strict=True):
        ids, states = tokenizer(prompt).input_ids, output["meta_info"]["hidden_states"]
        assert len(states) == output["meta_info"]["completion_tokens"] and len(states[0]) == len(ids)
        with torch.no_grad():
            wanted = model.model(torch.tensor([ids + output["output_ids"][:-1]])).last_hidden_state[0]
        got = torch.cat([torch.tensor(states[0]), *(torch.tensor(state)[None] for state in states[1:])])
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
        assert type(states[1][0]) is float and last["meta_info"]["hidden_states"] == states[-1]
    assert "hidden_states" not in llm.generate(PROMPTS[0], GREEDY)["meta_info"]


@pytest.mark.parametrize("stop", [{"stop": "time"}, {"stop_regex": "a [a-z]+"}])
def test_the_last_hidden_state_is_that_of_the_last_token(
    llm: sgl.Engine, stop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if further tokens were drawn before the end was found in the text."""
    full = llm.generate("Once", GREEDY | stop, return_hidden_states=True)
    text, push = llm._parts.core.requests, llm._parts.core.requests._push

    def late(state: Any, known: int) -> None:
        while state.request.finish is None and state.request.num_output < 12:
            llm.ping()
        push(state, known)

    monkeypatch.setattr(text, "_push", late)
    last = llm.generate("Once", GREEDY | stop, return_hidden_states="last")
    assert last["output_ids"] == full["output_ids"] and 1 < len(last["output_ids"]) < 12
    assert last["meta_info"]["hidden_states"] == full["meta_info"]["hidden_states"][-1]


# -- penalties, bias, bans ---------------------------------------------------------------------------------------------


def by_hand(reference: Any, prompt: str, count: int, edit: Any) -> list[int]:
    """Greedy decoding with `edit(logits, drawn)` in each step."""
    model, tokenizer = reference
    ids, drawn = tokenizer(prompt).input_ids, []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids + drawn])).logits[0, -1]
        drawn.append(int(edit(logits, drawn).argmax()))
    return drawn


def penalise(
    logits: torch.Tensor, drawn: list[int], frequency: float, presence: float, repetition: float
) -> torch.Tensor:
    for token, times in Counter(drawn).items():
        x = logits[token] - frequency * times - presence
        logits[token] = x / repetition if x > 0 else x * repetition
    return logits


@pytest.mark.parametrize(
    ("frequency", "presence", "repetition"),
    [(1.5, 0, 1), (0, 2, 1), (0, 0, 1.7), (-0.5, 0, 1), (0, 0, 0.8), (0.7, 0.4, 1.3)],
)
def test_penalties_count_drawn_tokens(
    llm: sgl.Engine, reference: Any, frequency: float, presence: float, repetition: float
) -> None:
    names = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
    for prompt in PROMPTS[1:2]:
        output = llm.generate(prompt, {**GREEDY, **names, "ignore_eos": True})
        wanted = by_hand(reference, prompt, 16, lambda x, drawn: penalise(x, drawn, frequency, presence, repetition))
        assert output["output_ids"] == wanted


def test_bias_and_minimum_length(llm: sgl.Engine, reference: Any) -> None:
    tokenizer = reference[1]
    free = llm.generate(PROMPTS[2], {"temperature": 0, "max_new_tokens": 40})
    assert free["meta_info"]["finish_reason"]["type"] == "stop"
    short = free["meta_info"]["completion_tokens"]
    longer = llm.generate(PROMPTS[2], {"temperature": 0, "max_new_tokens": 60, "min_new_tokens": short + 10})
    eos = free["output_ids"][-1]
    assert eos not in longer["output_ids"][: short + 10] and len(longer["output_ids"]) > short + 10
    assert longer["output_ids"][: short - 1] == free["output_ids"][:-1]
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    assert eos in llm.generate(PROMPTS[2], sampling)["output_ids"][:short]
    banned = llm.generate(PROMPTS[2], {**sampling, "min_new_tokens": short + 10})["output_ids"]
    assert len(banned) == 60 and banned[: short + 10] == longer["output_ids"][: short + 10]  # eos waits all the same
    more = {"stop_token_ids": [banned[0]], "min_new_tokens": 20}
    assert banned[0] not in llm.generate(PROMPTS[2], {**sampling, **more})["output_ids"][:20]
    token = tokenizer(" dog", add_special_tokens=False).input_ids[0]
    pushed = llm.generate(PROMPTS[1], {**GREEDY, "logit_bias": {str(token): 1000}, "max_new_tokens": 3})
    assert pushed["output_ids"] == [token] * 3
    first = llm.generate(PROMPTS[1], GREEDY)["output_ids"][0]
    pulled = llm.generate(PROMPTS[1], {**GREEDY, "logit_bias": {first: -1000.0}})
    assert first not in pulled["output_ids"]


def test_a_row_keeps_its_bits_beside_rows_that_use_everything(llm: sgl.Engine) -> None:
    sampling = {"temperature": 0.9, "max_new_tokens": 24, "sampling_seed": 3}
    wild: dict[str, Any] = {
        "frequency_penalty": 0.5,
        "logit_bias": {"9": 2.0},
        "min_new_tokens": 9,
        "stop_regex": "zz+",
    }
    alone = {p: llm.generate(p, sampling, return_logprob=True) for p in PROMPTS}
    solo = {p: llm.generate(p, {**sampling, **wild}, return_logprob=True, top_logprobs_num=2) for p in PROMPTS}
    both = llm.generate(
        [p for p in PROMPTS for _ in range(2)], [x for _ in PROMPTS for x in (sampling, {**sampling, **wild})],
        return_logprob=True, top_logprobs_num=[0, 2] * 4, return_hidden_states=[False, True] * 4,
    )  # fmt: skip
    for i, prompt in enumerate(PROMPTS):
        for got, want in ((both[2 * i], alone[prompt]), (both[2 * i + 1], solo[prompt])):
            assert got["text"] == want["text"] and got["output_ids"] == want["output_ids"]
            for key in ("output_token_logprobs", "output_top_logprobs"):
                assert got["meta_info"].get(key) == want["meta_info"].get(key)


# -- logit processors --------------------------------------------------------------------------------------------------


class Only:
    """Allows the token that custom_params name; writes down how often it was called for whom."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        request = params[0]["__req__"]
        self.seen.append((request.rid, len(request.output_ids)))
        logits[:] = -float("inf")
        logits[:, params[0]["token"]] = 0
        return logits


class Sevens(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, params: Any) -> torch.Tensor:
        return logits.fill_(-float("inf")).index_fill_(1, torch.tensor([7], device=logits.device), 0.0)


def test_processors_by_value_and_by_name_see_their_own_request(llm: sgl.Engine) -> None:
    only = Only()
    llm.register_logit_processor("only", only)
    sampling = [{**GREEDY, "max_new_tokens": 4, "ignore_eos": True, "custom_params": {"token": t}} for t in (5, 7, 9)]
    plain = llm.generate(PROMPTS[2], sampling[2])["output_ids"]
    outputs = llm.generate(PROMPTS[:3], sampling, custom_logit_processor=["only", only, None], rid=["a", "b", "c"])
    assert [o["output_ids"] for o in outputs] == [[5] * 4, [7] * 4, plain]
    assert sorted(only.seen) == [(rid, i) for rid in ("a", "b") for i in range(4)]
    for given in (only, Sevens.to_str(), Sevens().to_str()):  # SGLang's words for a class that stays in this process
        two = llm.generate(PROMPTS[0], {**sampling[0], "n": 2}, custom_logit_processor=given)
        assert [o["output_ids"] for o in two] == [[5 if given is only else 7] * 4] * 2


def raising(logits: torch.Tensor, params: Any) -> torch.Tensor:
    raise ZeroDivisionError("one by nothing")


def misshapen(logits: torch.Tensor, params: Any) -> torch.Tensor:
    return logits[:, :-1]


def poisoned(logits: torch.Tensor, params: Any) -> torch.Tensor:
    return logits * float("nan")


def silent(logits: torch.Tensor, params: Any) -> None:
    return None


@pytest.mark.parametrize("bad", [raising, misshapen, poisoned, silent])
def test_a_failing_processor_fails_alone(llm: sgl.Engine, bad: Any) -> None:
    sampling = {"temperature": 0.8, "sampling_seed": 5, "max_new_tokens": 12}
    alone = [llm.generate(p, sampling, return_logprob=True) for p in PROMPTS]
    with pytest.raises(FengineError) as error:
        llm.generate(PROMPTS[0], sampling, custom_logit_processor=bad)
    last: dict[int, Any] = {}
    for chunk in llm.generate(
        PROMPTS, sampling, return_logprob=True, custom_logit_processor=[None, bad, None, None], stream=True
    ):
        last[chunk["index"]] = chunk
    reason = last[1]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort" and reason["message"] == str(error.value) and reason["status_code"] == 400
    for i in (0, 2, 3):
        assert last[i]["text"] == alone[i]["text"]
        assert last[i]["meta_info"]["output_token_logprobs"] == alone[i]["meta_info"]["output_token_logprobs"]
    core = llm._parts.core
    in_loop(core, lambda: check_scheduler(core.stepper.scheduler))
    assert llm.stats()["running"] == llm.stats()["waiting"] == 0


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [r"\bE\w+", r"[.!?]", r"(?i)paris\.? the", r"never there \d"])
def test_stop_patterns_end_a_request_with_its_text_whole(llm: sgl.Engine, pattern: str) -> None:
    full = llm.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 30})
    output = llm.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 30, "stop_regex": pattern})
    if re.search(pattern, full["text"]):
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        ids = output["output_ids"]
        assert ids == full["output_ids"][: len(ids)] and output["text"] == llm.tokenizer.decode(ids)
        assert re.search(pattern, output["text"]) and not re.search(pattern, llm.tokenizer.decode(ids[:-1]))
    else:
        assert output["output_ids"] == full["output_ids"]
    streamed = list(
        llm.generate(PROMPTS[0], {"temperature": 0, "max_new_tokens": 30, "stop_regex": [pattern]}, stream=True)
    )
    assert streamed[-1]["text"] == output["text"] and streamed[-1]["output_ids"] == output["output_ids"]
    assert streamed[-1]["meta_info"]["finish_reason"] == output["meta_info"]["finish_reason"]


def test_no_stop_trim_keeps_what_matched(llm: sgl.Engine, reference: Any) -> None:
    tokenizer = reference[1]
    full = llm.generate(PROMPTS[2], {"temperature": 0, "max_new_tokens": 40})
    assert full["meta_info"]["finish_reason"]["type"] == "stop"
    shown = llm.generate(
        PROMPTS[2], {"temperature": 0, "max_new_tokens": 40, "no_stop_trim": True, "skip_special_tokens": False}
    )
    assert shown["text"] == tokenizer.decode(full["output_ids"]) != full["text"]
    text = llm.generate(PROMPTS[0], GREEDY)["text"]
    stop = text[1:4]  # which ends within a token
    for stream in (False, True):
        result: Any = llm.generate(PROMPTS[0], {**GREEDY, "stop": stop, "no_stop_trim": True}, stream=stream)
        output = list(result)[-1] if stream else result
        whole = tokenizer.decode(output["output_ids"])
        assert output["text"] == whole[: whole.index(stop) + len(stop)] != whole
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_spaces_between_special_tokens_changes_nothing_as_in_transformers(llm: sgl.Engine, reference: Any) -> None:
    tokenizer = reference[1]
    texts = set()
    for spaces in (True, False, None):
        sampling = {
            **GREEDY,
            "max_new_tokens": 40,
            "spaces_between_special_tokens": spaces,
            "skip_special_tokens": False,
        }
        output = llm.generate(PROMPTS[2], {**sampling, "no_stop_trim": True})
        texts.add(output["text"])
        assert output["text"] == tokenizer.decode(output["output_ids"], spaces_between_special_tokens=bool(spaces))
    assert len(texts) == 1


# -- chats -------------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]


def test_chat_is_generate_over_the_template(llm: sgl.Engine, reference: Any) -> None:
    tokenizer = reference[1]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert llm.apply_chat_template(MESSAGES) == text
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert llm.apply_chat_template(MESSAGES, tokenize=True) == list(ids)
    wanted = llm.generate(input_ids=list(ids), sampling_params=GREEDY)
    output = llm.chat(MESSAGES, GREEDY, return_logprob=True)
    assert output["text"] == wanted["text"] and output["output_ids"] == wanted["output_ids"]
    assert len(output["meta_info"]["output_token_logprobs"]) == len(output["output_ids"])
    several = llm.chat([MESSAGES, [{"role": "user", "content": "Hi"}]], GREEDY)
    assert several[0]["text"] == wanted["text"] and len(several) == 2
    assert list(llm.chat(MESSAGES, GREEDY, stream=True))[-1]["text"] == wanted["text"]

    async def ask() -> tuple[str, str]:
        whole: Any = await llm.async_chat(MESSAGES, GREEDY)
        stream: Any = await llm.async_chat(MESSAGES, GREEDY, stream=True)
        return whole["text"], [chunk["text"] async for chunk in stream][-1]

    assert asyncio.run(ask()) == (wanted["text"], wanted["text"])


def test_chats_that_are_refused(llm: sgl.Engine) -> None:
    for messages in ([], "hello", [{"content": "x"}], [{"role": "user"}], None):
        with pytest.raises(InvalidRequestError):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    plain = llm.chat(MESSAGES, GREEDY)["text"]
    assert llm.chat(MESSAGES, GREEDY, chat_template_kwargs={"no_such": 1})["text"] == plain  # no template reads it
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs must be a dict of values by name"):
        llm.chat(MESSAGES, GREEDY, chat_template_kwargs={1: 1})
    with pytest.raises(InvalidRequestError, match="multiple values for argument 'prompt'"):
        llm.chat(MESSAGES, GREEDY, prompt="x")
    with pytest.raises(TypeError, match="no_such"):
        llm.chat(MESSAGES, GREEDY, no_such=1)


class Unread(list):
    """A list that can be shown, and not gone through."""

    def __iter__(self) -> Any:
        raise RuntimeError("no items")


class Shut(dict):
    """The same of a dict."""

    get = keys = items = values = __iter__ = property(lambda self: self["no such"])  # type: ignore[assignment]


def test_chats_of_classes_of_ones_own(llm: sgl.Engine) -> None:
    part = {"type": "text", "text": "Hi"}
    for content in ([part], "Hi"):
        wanted = llm.chat_ids([{"role": "user", "content": content}])
        assert llm.chat_ids(Unread([Shut(role="user", content=content)])) == wanted
    for content in (Unread([part]), [Shut(part)]):
        chat: Any = [{"role": "user", "content": content}]
        assert llm.chat_ids(chat) == llm.chat_ids([{"role": "user", "content": [part]}])
        assert llm.apply_chat_template(chat) == llm.apply_chat_template([{"role": "user", "content": [part]}])
        assert llm.chat_ids(Unread([chat, chat])) == [llm.chat_ids(chat)] * 2
    tiny = "data:image/png;base64,AAAA"
    for content in (
        Unread([{"type": "image_url", "image_url": {"url": tiny}}]), Unread([Shut(type="image", image=tiny)]),
        Unread([b"Hi"]), Unread([Unread([part])]), object(), Unread(),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            llm.chat([{"role": "user", "content": content}], GREEDY)


def test_another_chat_template_and_defaults_for_its_variables(tmp_path: Any) -> None:
    source = "{{ who }}: {{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    (tmp_path / "mine.jinja").write_text(source)
    options: dict[str, Any] = {
        "chat_template": str(tmp_path / "mine.jinja"),
        "default_chat_template_kwargs": {"who": "me"},
    }
    with sgl.Engine(model_path="box", enable_torch_compile=False, device="cpu", **options) as engine:
        assert engine.apply_chat_template(MESSAGES) == "me: What is 2 + 3?"
        assert engine.apply_chat_template(MESSAGES, who="you", loud=True) == "you: What is 2 + 3?!"
        assert engine.tokenizer is not None
        again = engine.tokenizer.with_chat_template(source)
        assert again.apply_chat_template(MESSAGES, who="x") == "x: What is 2 + 3?"
        for bad in (
            {"source": "chatml"},
            {"name": "rag"},
            {"source": str(tmp_path)},
            {"source": source, "name": "default"},
        ):
            with pytest.raises(ConfigError, match="chat_template"):
                engine.tokenizer.with_chat_template(**bad)
    with pytest.raises(ConfigError, match="chat_template is 'chatml'"):
        sgl.Engine(model_path="box", enable_torch_compile=False, device="cpu", chat_template="chatml")
