"""The Engine over the model in the box: text, stop strings, streams, and the steps of SGLang's offline-engine guide."""

import asyncio
import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import in_loop
from transformers import AutoModelForCausalLM, AutoTokenizer

import fengine as sgl
from fengine.api.io_struct import GenerateReqInput
from fengine.api.streams import Stream
from fengine.core.request import Request, SamplingParams
from fengine.engine.request_state import RequestState
from fengine.tokenizer.detokenizer import Detokenizer
from fengine.utils import async_stream_and_merge, is_in_ci, stream_and_merge
from fengine.worker.hub import BOX

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path="box") as engine:
        yield engine


def test_the_offline_engine_guide(llm: sgl.Engine) -> None:
    """Batch, sync stream, async batch and async stream, each in an event loop of its own."""
    assert is_in_ci() in (True, False)
    importlib.import_module("fengine.test.doc_patch")
    sampling = {"temperature": 0.2, "top_p": 0.9}
    outputs = llm.generate(PROMPTS, {"temperature": 0.8, "top_p": 0.95})
    assert [type(o["text"]) for o in outputs] == [str] * 4
    merged = stream_and_merge(llm, PROMPTS[2], sampling | {"sampling_seed": 1})
    whole = llm.generate(PROMPTS[2], sampling | {"sampling_seed": 1})
    assert merged == whole["text"]

    async def batch() -> list[str]:
        return [o["text"] for o in await llm.async_generate(PROMPTS, sampling | {"sampling_seed": 1})]

    async def stream() -> list[str]:
        pieces = []
        async for chunk in async_stream_and_merge(llm, PROMPTS[2], sampling | {"sampling_seed": 1}):
            pieces.append(chunk)
        return pieces

    assert asyncio.run(batch())[2] == whole["text"] == "".join(asyncio.run(stream()))


def test_text_is_the_decoding_of_the_ids_without_the_stop_token(llm: sgl.Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BOX)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, {"temperature": 0}), strict=True):
        ids, finish = output["output_ids"], output["meta_info"]["finish_reason"]
        assert output["meta_info"]["prompt_tokens"] == len(tokenizer(prompt).input_ids)
        assert finish == {"type": "stop", "matched": ids[-1]}
        assert output["text"] == tokenizer.decode(ids[:-1])


def test_an_ordinary_stop_token_is_kept_in_the_ids_but_not_in_the_text(llm: sgl.Engine) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BOX)
    full = llm.generate(PROMPTS[2], {"temperature": 0})["output_ids"]
    stop = next(i for i in full[3:] if i not in full[:3] and tokenizer.decode([i]).strip())
    params = {"temperature": 0, "stop_token_ids": [stop]}
    chunks = list(llm.generate(PROMPTS[2], params, stream=True))
    for output in (llm.generate(PROMPTS[2], params), chunks[-1]):
        assert output["output_ids"] == full[: full.index(stop) + 1]
        assert output["text"] == tokenizer.decode(full[: full.index(stop)])
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_greedy_ids_and_logprobs_are_those_of_transformers(llm: sgl.Engine) -> None:
    model = AutoModelForCausalLM.from_pretrained(BOX, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(BOX)
    for prompt in PROMPTS:
        output = llm.generate(prompt, {"temperature": 0, "max_new_tokens": 40}, return_logprob=True)
        ids = tokenizer(prompt).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids + output["output_ids"]])).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == output["output_ids"]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output["output_ids"])[:, None])[:, 0]
        got = torch.tensor([lp for lp, _, _ in output["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stop", [" state", "head of", ["zebra", "nment"], "."])
def test_stop_strings_cut_the_text_and_end_the_request(llm: sgl.Engine, stop: str | list[str]) -> None:
    full = llm.generate(PROMPTS[1], {"temperature": 0})
    stops = [stop] if isinstance(stop, str) else stop
    at, matched = min((full["text"].find(s) + len(s), s) for s in stops if s in full["text"])
    for stream in (False, True):
        result = llm.generate(PROMPTS[1], {"temperature": 0, "stop": stop}, stream=stream)
        output = list(result)[-1] if stream else result
        assert output["text"] == full["text"][: at - len(matched)]
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        ids = output["output_ids"]
        assert ids == full["output_ids"][: len(ids)] and output["meta_info"]["completion_tokens"] == len(ids)
        assert matched in llm.tokenizer.decode(ids) and matched not in llm.tokenizer.decode(ids[:-1])
    stats = in_loop(llm._parts.core, llm.stats)  # behind the abort that the match has sent to the loop
    assert stats["running"] == stats["waiting"] == 0


def test_streams_never_take_text_back(llm: sgl.Engine) -> None:
    seen = ""
    for chunk in llm.generate("Copy: ☕ naïve 😀 ->", {"temperature": 1.5, "max_new_tokens": 60}, stream=True):
        assert chunk["text"].startswith(seen)
        seen = chunk["text"]


def test_a_seed_is_the_same_alone_and_in_company(llm: sgl.Engine) -> None:
    params = {"temperature": 0.9, "sampling_seed": 7, "max_new_tokens": 30}
    alone = llm.generate("Once upon a time", params)
    company = llm.generate([*PROMPTS, "Once upon a time"], params)
    assert company[-1]["output_ids"] == alone["output_ids"] and company[-1]["text"] == alone["text"]


def test_an_empty_prompt_starts_from_bos(llm: sgl.Engine) -> None:
    output = llm.generate("", {"temperature": 0, "max_new_tokens": 8})
    assert output["meta_info"]["prompt_tokens"] == 1 and output["text"]


def test_a_stream_shows_no_token_behind_a_stop_string(llm: sgl.Engine) -> None:
    """Several tokens may come at once, when the text thread is behind; a reader may look between any two writes."""
    assert llm.tokenizer is not None
    prompt, answer = [1, 2], llm.tokenizer.encode("one two three four five")
    params = SamplingParams.of({"stop": " two"})
    request = Request("r", 2, prompt + answer, params, seed=0, max_new_tokens=99, stop_ids=frozenset())
    seen: list[tuple[str, int]] = []

    class Watched(RequestState):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "output":
                seen.append(value[:2])
                assert value.finish is None or self.finished is not None

    state = Watched(request, Detokenizer(llm.tokenizer, params), True, lambda _: None)
    llm._parts.core.requests._push(state, len(answer))
    assert state.output.finish == {"type": "stop", "matched": " two"}
    assert [text for text, _ in seen] == ["", "one"] and 0 < seen[-1][1] < len(answer)
    assert " two" in llm.tokenizer.decode(answer[: seen[-1][1]])


def test_a_stream_whose_chunks_wait_ends_where_its_text_does(llm: sgl.Engine) -> None:
    """However late its next chunk may come, what may end a request in its text is read with every step."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    stop = llm.generate("Once", sampling | {"max_new_tokens": 30})["text"][-6:]  # type: ignore[call-overload]
    asked = GenerateReqInput("Once", sampling | {"stop": stop}, stream=True)
    collector = llm.submit(asked, deltas=True, pace=lambda: math.inf)
    *_, last = Stream(collector, llm)
    assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert collector.states[0].request.num_output < 200
