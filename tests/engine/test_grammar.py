"""Grammars in the engine: valid whenever they stop, the same bits in any company, and nobody else's trouble."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fengine
from fengine import Engine
from fengine.core.request import SamplingParams
from fengine.errors import EngineClosedError, GrammarError, InvalidRequestError, LogitProcessorError
from fengine.structured_output.backend import COMPILERS, Grammars, Source, Whitespace
from fengine.tokenizer.trial import LIMITS, Limits, Trials

jsonschema = pytest.importorskip("jsonschema")

DATA = Path(fengine.__file__).parents[1] / "conf" / "task" / "data" / "json_filling.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()[:12]]
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"},
          "city": {"type": "string"}, "job": {"enum": ["gardener", "driver", "astronomer", "cook"]}},
          "required": ["name", "age", "city", "job"]}  # fmt: skip
STORY = "Once upon a time"
TOOLS = json.dumps({"structures": [{"begin": "<add>", "schema": {"type": "integer"}, "end": "</add>"}],
                    "triggers": ["<add>"]})  # fmt: skip
EBNF = 'root ::= "(" root ")" | word (" " word)*\nword ::= [a-z]{1,8}'
Drawn = tuple[list[int], list[float], Any]


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(
        model_path="box", enable_torch_compile=False, max_running_requests=16, enable_custom_logit_processor=True
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def pressed() -> Iterator[Engine]:
    """Small pages, chunks and pool, steps overlapped, other rows speculating."""
    with Engine(
        model_path="box", enable_torch_compile=False, max_running_requests=8, page_size=4, max_total_tokens=240,
        chunked_prefill_size=16, disable_overlap_schedule=False, speculative_algorithm="NGRAM",
    ) as engine:  # fmt: skip
        yield engine


def work() -> list[tuple[str, dict[str, Any]]]:
    """Grammars of all kinds, greedy and sampled, between requests without one, some of which are edited."""
    asks: list[tuple[str, dict[str, Any]]] = [
        (ROWS[0]["prompt"], {"temperature": 0, "json_schema": json.dumps(PERSON)}),
        (STORY, {}),
        (ROWS[1]["prompt"], {"temperature": 1.2, "json_schema": PERSON, "top_k": 40}),
        (STORY, {"temperature": 1.5, "regex": r"[A-Z][a-z]{2,9}( [a-z]+){1,4}\."}),
        ("2 + 3 =", {"ebnf": EBNF, "frequency_penalty": 0.5}),
        (STORY, {"structural_tag": TOOLS, "logit_bias": {"31": 2.0}}),
        (STORY, {"temperature": 0, "repetition_penalty": 1.3}),
        (ROWS[2]["prompt"], {"regex": r"[0-9]{3,40}", "min_new_tokens": 6, "ignore_eos": True}),
        (STORY * 8, {"temperature": 0.9, "json_schema": {"type": "array", "items": {"type": "number"}, "minItems": 2}}),
        (STORY, {"temperature": 0.7, "top_p": 0.8}),
    ]
    return [(p, {"max_new_tokens": 48, "sampling_seed": i, **params}) for i, (p, params) in enumerate(asks)]


def drawn(output: dict[str, Any]) -> Drawn:
    meta = output["meta_info"]
    return output["output_ids"], [x for x, _, _ in meta["output_token_logprobs"]], meta["finish_reason"]


def together(engine: Any, asks: list[tuple[str, dict[str, Any]]]) -> list[Drawn]:
    prompts, params = map(list, zip(*asks, strict=True))
    return [drawn(output) for output in engine.generate(prompts, params, return_logprob=True)]


@pytest.fixture(scope="module")
def alone(llm: Any) -> list[Drawn]:
    return [together(llm, [ask])[0] for ask in work()]


# -- right outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_of_a_schema_is_always_valid(llm: Any, temperature: float) -> None:
    params = {"temperature": temperature, "max_new_tokens": 96, "json_schema": json.dumps(PERSON)}
    for row, output in zip(ROWS, llm.generate([row["prompt"] for row in ROWS], params), strict=True):
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            jsonschema.validate(json.loads(output["text"]), PERSON)
        if not temperature:
            assert json.loads(output["text"])["name"] == row["answer"]["name"]


def test_every_kind_in_one_batch(llm: Any, alone: list[Drawn]) -> None:
    texts = [llm.tokenizer.decode(ids) for ids, _, _ in alone]
    assert {finish["type"] for _, _, finish in alone} == {"stop", "length"}
    for (_, params), text, (_, _, finish) in zip(work(), texts, alone, strict=True):
        if finish["type"] != "stop":
            continue
        if "regex" in params:
            assert re.fullmatch(params["regex"], text)
        if "ebnf" in params:
            assert re.fullmatch(r"\(*[a-z]{1,8}( [a-z]{1,8})*\)*", text) and text.count("(") == text.count(")")
        if "json_schema" in params:
            schema = params["json_schema"]
            jsonschema.validate(json.loads(text), json.loads(schema) if isinstance(schema, str) else schema)


def test_any_json(llm: Any) -> None:
    for seed in range(6):
        output = llm.generate(STORY, {"json_schema": "$$ANY$$", "sampling_seed": seed, "max_new_tokens": 64})
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            json.loads(output["text"])


def test_logprobs_are_of_what_is_allowed(llm: Any) -> None:
    """As SGLang's: behind the mask. Those of barred tokens are -inf; a mass of 1 is left to the allowed ones."""
    output = llm.generate(
        STORY, {"regex": "[ab]0"}, return_logprob=True, top_logprobs_num=5, token_ids_logprob=list(range(2048))
    )
    meta = output["meta_info"]
    for logprobs in meta["output_token_ids_logprobs"]:
        assert sum(math.exp(logprob) for logprob, _, _ in logprobs) == pytest.approx(1, abs=1e-5)
    possible = [id for logprob, id, _ in meta["output_token_ids_logprobs"][0] if logprob > -math.inf]
    assert len(possible) < 5 and all(llm.tokenizer.decode([id])[0] in "ab" for id in possible)
    assert sum(logprob > -math.inf for logprob, _, _ in meta["output_top_logprobs"][0]) == len(possible)
    ends = [id for logprob, id, _ in meta["output_token_ids_logprobs"][-1] if logprob > -math.inf]
    assert set(ends) == llm.tokenizer.eos_ids


# -- exactness ---------------------------------------------------------------------------------------------------------


def test_the_same_bits_alone_and_in_a_batch(llm: Any, alone: list[Drawn]) -> None:
    assert together(llm, work()) == alone
    assert together(llm, work()[::-1]) == alone[::-1]  # now with a warm prefix cache


def test_the_same_bits_under_pressure(pressed: Any, alone: list[Drawn]) -> None:
    """Chunks, pages of 4 tokens, preemption, overlapped steps, speculating neighbours."""
    before = pressed.stats()["preemptions"]
    assert together(pressed, work()) == alone
    assert together(pressed, work()[::-1]) == alone[::-1]
    assert pressed.stats()["preemptions"] > before and pressed.stats()["pages_used"] == 0


def test_the_same_bits_streamed_and_sampled_several_times(llm: Any, pressed: Any, alone: list[Drawn]) -> None:
    prompt, params = work()[3]
    *_, last = llm.generate(prompt, params, stream=True, return_logprob=True)
    assert drawn(last) == alone[3]
    several = [[drawn(o) for o in engine.generate(prompt, params | {"n": 3}, return_logprob=True)]
               for engine in (llm, pressed)]  # fmt: skip
    assert several[0] == several[1] and several[0][0] == alone[3]
    assert len({tuple(ids) for ids, _, _ in several[0]}) == 3


def test_a_control_that_must_differ(llm: Any, alone: list[Drawn]) -> None:
    prompt, params = work()[3]
    assert together(llm, [(prompt, params | {"regex": "[a-z]+"})])[0] != alone[3]
    assert together(llm, [(prompt, {k: v for k, v in params.items() if k != "regex"})])[0] != alone[3]


# -- ends --------------------------------------------------------------------------------------------------------------


def test_where_a_text_ends(llm: Any) -> None:
    def run(**params: Any) -> tuple[str, dict[str, Any]]:
        output = llm.generate(STORY, {"temperature": 0, "max_new_tokens": 24, **params})
        return output["text"], output["meta_info"]["finish_reason"]

    text, finish = run(regex="[a-z]{4}", ignore_eos=True)
    assert len(text) == 4 and finish["type"] == "stop"  # it cannot go on
    assert len(run(regex="[a-z]{1,60}", ignore_eos=True)[0]) > len(run(regex="[a-z]{1,60}")[0])
    text, finish = run(regex="[ab]{1,9}", min_new_tokens=5)
    assert finish["type"] == "stop" and re.fullmatch("[ab]{5,9}", text)
    text, finish = run(regex="[a-z ]{400}")
    assert finish == {"type": "length", "length": 24}
    comma = llm.tokenizer.encode(",", add_special_tokens=False)[0]
    text, finish = run(regex="[a-c]{2}(,[a-c]{2})*", stop_token_ids=[comma], logit_bias={str(comma): 50.0})
    assert re.fullmatch("[a-c]{2}", text) and finish == {"type": "stop", "matched": comma}


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "object", "properties": {"q": {}}} for i in range(900)}}


@pytest.mark.parametrize(
    "params,error,told",
    [
        ({"regex": "[ab]", "min_new_tokens": 5}, GrammarError, "min_new_tokens is not reached"),
        ({"regex": "(a+)+b", "logit_bias": {"2": -1e30}, "stop": "x"}, InvalidRequestError, "cannot be combined"),
        ({"regex": "a", "stop_regex": "x"}, InvalidRequestError, "cannot be combined"),
        ({"regex": "(a{1,99}){90,99}b", "max_new_tokens": 400}, GrammarError, "too many|too complex"),
        ({"json_schema": WIDE}, GrammarError, "after 1 tokens.*items"),  # between two steps
        ({"regex": "a", "json_schema": "{}"}, InvalidRequestError, "Only one of"),
        ({"regex": 5}, InvalidRequestError, "regex must be a string"),
        ({"regex": ["a"]}, InvalidRequestError, "regex must be a string"),
        ({"json_schema": "{"}, GrammarError, "Failed to compile json grammar"),
        ({"json_schema": {"contains": {}}}, GrammarError, "'contains' at # is not supported"),
        ({"json_schema": {"a": object()}}, GrammarError, "cannot be written as JSON"),
        ({"ebnf": "root ::= x"}, GrammarError, "Failed to compile ebnf grammar"),
        ({"structural_tag": "{}"}, GrammarError, "Failed to compile structural tag grammar"),
    ],
)
def test_a_request_that_fails_fails_alone(
    llm: Any, alone: list[Drawn], params: dict[str, Any], error: type[Exception], told: str
) -> None:
    asks = work()[:2]
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(together, llm, asks)
        with pytest.raises(error, match=told):
            llm.generate(STORY, {"temperature": 0, "max_new_tokens": 24, **params})
        assert good.result() == alone[:2]
    assert llm.stats()["pages_used"] == 0 and llm.stats()["running"] == 0


def test_what_no_count_limits_ends_the_process_that_tries_it_and_holds_nobody_up(
    llm: Any, alone: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher would take a minute for each of these, and there are more than are compiled at once."""
    assert LIMITS.seconds <= 2
    trials = Trials("fengine.structured_output.backend", COMPILERS, Limits(0.12))
    monkeypatch.setattr(llm._context.grammars, "_trials", trials)
    endless = [
        {"allOf": [{"multipleOf": n} for n in (997, 991, 983, 977, 971 - i)]} for i in range(COMPILERS)
    ]  # fmt: skip
    with ThreadPoolExecutor(COMPILERS) as pool:
        refused = [pool.submit(llm.generate, STORY, {"json_schema": schema}) for schema in endless]
        assert llm.generate(STORY, {"regex": "no (one|body) waits", "temperature": 0})["text"].endswith("waits")
        assert together(llm, work()[:2]) == alone[:2]
        for failed in refused:
            with pytest.raises(GrammarError, match="too complex.*more time than 0.12 s"):
                failed.result()
    for child in filter(None, trials.children):
        child.kill()
        child.wait()
    for word in ("again", "anew"):  # another child starts
        assert llm.generate(STORY, {"regex": word})["text"] == word
    trials.close()


def test_engines_of_a_process_share_their_children(llm: Any) -> None:
    llm.generate(STORY, {"regex": "here"})
    children = [*llm._context.grammars._trials.children]
    with closing(Grammars(lambda: ([b"a", b"b"], False), Whitespace())) as others:
        others.compile(Source("regex", "[ab]+"))
    assert others._trials.children == children != [None] * COMPILERS
    assert llm.generate(STORY, {"regex": "there"})["text"] == "there"  # those that are closed close nobody else's


def test_nothing_left_to_draw(llm: Any) -> None:
    only = {str(id): -1e30 for id in range(2048) if llm.tokenizer.decode([id])[:1] in ("a", "b")}
    with pytest.raises(GrammarError, match="logit_bias considered"):
        llm.generate(STORY, {"regex": "[ab]+", "logit_bias": only})
    strong = dict.fromkeys(only, -1e29)
    assert re.fullmatch("[ab]+", llm.generate(STORY, {"regex": "[ab]{2}", "logit_bias": strong})["text"])

    def wants_c(logits: Any, params: Any) -> Any:
        logits.fill_(-math.inf)
        logits[:, llm.tokenizer.encode("c", add_special_tokens=False)[0]] = 1.0
        logits[:, list(llm.tokenizer.eos_ids)] = 1.0
        return logits

    with pytest.raises(LogitProcessorError, match="every token that may be drawn"):
        llm.generate(STORY, {"regex": "[ab]+"}, custom_logit_processor=wants_c)
    assert llm.generate(STORY, {"regex": "[c]{3}"}, custom_logit_processor=wants_c)["text"] == "ccc"


def test_a_stream_of_a_failing_request_ends_with_an_abort(llm: Any) -> None:
    *_, last = llm.generate(STORY, {"regex": "[ab]", "min_new_tokens": 5, "temperature": 0}, stream=True)
    finish = last["meta_info"]["finish_reason"]
    assert finish["type"] == "abort" and finish["status_code"] == 400 and "min_new_tokens" in finish["message"]


# -- the doors ---------------------------------------------------------------------------------------------------------


def test_async_calls_share_what_is_compiled(llm: Any, alone: list[Drawn]) -> None:
    async def run() -> list[Any]:
        calls = [llm.async_generate(prompt, params, return_logprob=True) for prompt, params in work()]
        bad = llm.async_generate(STORY, {"regex": "("})
        return await asyncio.gather(*calls, bad, return_exceptions=True)

    *outputs, failed = asyncio.run(run())
    assert [drawn(output) for output in outputs] == alone
    assert isinstance(failed, GrammarError)


def test_settings() -> None:
    params = SamplingParams.of({"json_schema": {"type": "null"}, "regex": "", "ebnf": None})
    assert params.grammar_key == ("json_schema", '{"type": "null"}') and SamplingParams.of(params) == params
    with Engine(model_path="box", enable_torch_compile=False, grammar_backend="none") as engine:
        with pytest.raises(GrammarError, match="grammar_backend='none'"):
            engine.generate(STORY, {"regex": "a"})
    with Engine(
        model_path="box", enable_torch_compile=False, constrained_json_disable_any_whitespace=True,
        preferred_sampling_params={"json_schema": json.dumps({"type": "array", "items": {"type": "boolean"}})},
    ) as engine:  # fmt: skip
        text = engine.generate(STORY, {"max_new_tokens": 40, "temperature": 2.0})["text"]
        assert re.fullmatch(r"\[((true|false)(, (true|false))*)?(\]|,? ?[a-z]*)", text)
    with pytest.raises(EngineClosedError):
        engine.generate(STORY, {"json_schema": "{}"})
