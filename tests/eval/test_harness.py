"""What the harnesses' models do without a harness: reads, generation arguments, seeds, texts, missing extras."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_adapters
from forked import run

from fengine.api.engine import Engine
from fengine.config import LoraConfig
from fengine.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    MissingExtraError,
    UnsupportedFeatureError,
)
from fengine.eval.harness import lm_eval_requests as reads
from fengine.eval.harness.engine import Texts, engine_facts
from fengine.eval.harness.lm_eval_requests import cut_text, generation_of, seeds
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import BOX


@pytest.fixture(scope="module")
def llm() -> Iterator[Engine]:
    with Engine(model_path="box", context_length=96, enable_torch_compile=False) as engine:
        yield engine


# -- reads -------------------------------------------------------------------------------------------------------------


def score(llm: Engine, pairs: list[Any], window: int) -> list[tuple[float, bool]]:
    found: list[Any] = [(0.0, True)] * len(pairs)
    todo, _ = reads.plan(pairs, window)
    outputs: Any = llm.generate(**reads.arguments(todo)) if todo else []
    for read, output in zip(todo, outputs, strict=True):
        for index, answer in reads.scores(read, output["meta_info"]):
            found[index] = answer
    return found


def test_reads_give_the_prompt_logprobs_of_the_whole(llm: Engine) -> None:
    """The oracle: context and continuation as one prompt, every logprob of it, the likeliest ids beside."""
    draw = random.Random(1)
    greedy: Any = llm.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 6})
    context = llm.tokenizer.encode("The capital of France is")  # type: ignore[union-attr]
    pairs: list[Any] = [(context, greedy["output_ids"]), (context, greedy["output_ids"][:1])]
    for _ in range(12):
        ids = [draw.randrange(10, 2000) for _ in range(draw.randrange(2, 60))]
        at = draw.randrange(1, len(ids))
        pairs += [(ids[:at], ids[at:]), (ids[:at], [*ids[at:-1], 11]), (ids[:-1], ids[-1:])]
    found = score(llm, pairs, 96)
    assert len(reads.plan(pairs, 96)[0]) < len(pairs)  # some share a read
    for (before, after), (total, is_greedy) in zip(pairs, found, strict=True):
        output: Any = llm.generate(
            input_ids=[*before, *after],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
        meta = output["meta_info"]
        inside = [entry[0] for entry in meta["input_token_logprobs"][len(before) :]]
        likeliest = [entry[0][1] for entry in meta["input_top_logprobs"][len(before) :]]
        assert total == math.fsum(inside) and is_greedy == (likeliest == list(after))
    assert found[0][1] and found[1][1] and not all(is_greedy for _, is_greedy in found)
    for size in (1, 3):  # the same bits in any company
        assert found == [x for i in range(0, len(pairs), size) for x in score(llm, pairs[i : i + size], 96)]


def test_windows_cut_contexts_from_the_left(llm: Engine) -> None:
    ids = list(range(10, 150))
    todo, cut = reads.plan([(ids[:-2], ids[-2:]), (ids[:90], [5]), (ids[:96], [5, 6]), (ids[:3], [])], 96)
    assert [len(read.ids) for read in todo] == [96, 90, 96] and cut == 2
    assert todo[0].ids == tuple(ids[-97:-1]) and todo[0].start == 95 and todo[1].start == 90
    full = score(llm, [(ids[:-2], ids[-2:]), (ids[-97:-2], ids[-2:]), ([1], [])], 96)
    assert full[0] == full[1] and full[2] == (0.0, True)
    with pytest.raises(InvalidRequestError, match="the continuation has 97 tokens, more than max_length=96"):
        reads.plan([([1], ids[:97])], 96)
    with pytest.raises(InvalidRequestError, match="request 1: a continuation needs at least one token of context"):
        reads.plan([([1], [2]), ([], [2])], 96)


def test_a_prompt_that_is_only_read_may_fill_the_context(llm: Engine) -> None:
    ids = list(range(10, 106))
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    output: Any = llm.generate(input_ids=ids, sampling_params={"max_new_tokens": 0}, **asked)
    assert len(output["meta_info"]["input_token_logprobs"]) == 96 and output["output_ids"] == []
    for prompt, new in ((ids, 1), (ids, None), ([*ids, 5], 0)):
        with pytest.raises(ContextLengthError):
            llm.generate(input_ids=prompt, sampling_params={"max_new_tokens": new}, **asked)


# -- generation arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sampling", "until", "most"),
    [
        ({}, {"temperature": 0.0}, ("<e>",), 256),
        ({"until": "\n"}, {"temperature": 0.0}, ("\n", "<e>"), 256),
        ({"until": ["a", "", "<e>", "a"], "stop": "b"}, {"temperature": 0.0}, ("a", "<e>", "b"), 256),
        ({"max_new_tokens": 9, "max_gen_toks": 7}, {"temperature": 0.0}, ("<e>",), 7),
        ({"max_completion_tokens": 9, "until": None}, {"temperature": 0.0}, ("<e>",), 9),
        ({"temperature": 0.7, "do_sample": False, "num_beams": 1}, {"temperature": 0.0}, ("<e>",), 256),
        ({"temperature": 0.7, "top_k": 0, "use_cache": True}, {"temperature": 0.7}, ("<e>",), 256),
        ({"do_sample": True, "top_p": 0.9, "top_k": 5}, {"top_p": 0.9, "top_k": 5}, ("<e>",), 256),
        (
            {"do_sample": True, "temperature": 0, "min_tokens": 2},
            {"temperature": 0, "min_new_tokens": 2},
            ("<e>",),
            256,
        ),
        ({"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "sampling_seed": 3}, ("<e>",), 256),
    ],
)
def test_generation_arguments(given: dict[str, Any], sampling: dict[str, Any], until: Any, most: int) -> None:
    before = repr(given)
    found = generation_of(given, "<e>", 256)
    assert (found.sampling, found.until, found.max_gen_toks) == (sampling, until, most) and repr(given) == before


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (None, InvalidRequestError, "must be a dict"),
        ({"until": [1]}, InvalidRequestError, "until must be a string or a list of strings"),
        ({"until": {"a": 1}}, InvalidRequestError, "until"),
        ({"max_gen_toks": 0}, InvalidRequestError, "max_gen_toks must be at least 1"),
        ({"max_gen_toks": "many"}, InvalidRequestError, "max_gen_toks must be an integer"),
        ({"temperature": "hot"}, InvalidRequestError, "temperature must be a number"),
        ({"do_sample": "yes"}, InvalidRequestError, "do_sample must be True or False"),
        ({"max_length": 20}, UnsupportedFeatureError, "max_length"),
        ({"num_beams": 4}, UnsupportedFeatureError, "num_beams other than 1"),
    ],
)
def test_wrong_generation_arguments(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        generation_of(given, None, 256)


def test_seeds_belong_to_requests() -> None:
    one, two = ("a", {"temperature": 1}), ("b", {"temperature": 1})
    found = list(seeds([one, two, one, one], 0))
    assert len(set(found)) == 4 and found == list(seeds([one, two, one, one], 0))
    assert list(seeds([two, one, one], 0)) == [found[1], found[0], found[2]]  # whatever stands around them
    assert not set(found) & set(seeds([one, two, one, one], 1))
    own = list(seeds([("a", {"seed": 7}), ("a", {"seed": 7}), ("b", {"seed": 7})], 0))
    assert own[0] == own[2] == 7 != own[1]


def test_cut_text() -> None:
    assert cut_text("ab\ncd", ["\n", "b"]) == "a" and cut_text("abc", []) == "abc"
    assert cut_text("<think>\nso</think>\n\nyes\nno", ["\n"], "</think>") == "yes"
    assert cut_text("no end", ["e"], "</think>") == "no "


# -- texts -------------------------------------------------------------------------------------------------------------


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer.from_directory(BOX)
    bos, text = tokenizer.bos_id, tokenizer.special_tokens["bos_token"]
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    for add, wanted in ((None, [bos, *plain]), (True, [bos, *plain]), (False, plain)):
        texts = Texts(tokenizer, add)
        assert texts.encode("Hello") == wanted and texts.encode(text + "Hello") == [bos, *plain]
        assert texts.encode("Hello", add_special_tokens=False) == plain
        assert texts.first() == bos and Texts(tokenizer, add, 7).first() == 7
    assert len(Texts(tokenizer).encode("word " * 50_000)) > 50_000  # documents longer than any context


def test_chats(llm: Engine) -> None:
    assert llm.tokenizer is not None
    texts = Texts(llm.tokenizer)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, and"}]
    assert texts.chat(turns[:1], True) == llm.apply_chat_template(turns[:1])
    assert texts.chat(turns, False).endswith("Yes, and")
    assert (
        texts.template(True) == texts.template("default") == llm.tokenizer.chat_templates["default"]
        and texts.template(False) is None
    )
    with pytest.raises(ConfigError, match="hf_chat_template_name=other; there are: default"):
        texts.template("other")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
    strict = Texts(llm.tokenizer.with_chat_template(refusing))
    assert strict.chat([{"role": "system", "content": "Be brief."}, *turns[:1]], True) == "Hi"


def test_facts_name_weights_numerics_and_adapter(llm: Engine, tmp_path: Path) -> None:
    given = LoraConfig(paths=(f"a={tiny_adapters.random_adapter(tmp_path, BOX, 2)}",))
    adapted: Any = SimpleNamespace(**{name: getattr(llm, name) for name in ("get_model_info", "get_server_info")})
    adapted.server_args, adapted.config = llm.server_args, replace(llm.config, lora=given)
    told = engine_facts(adapted, "a")["fengine"]
    assert told["adapter"] == "a" and len(told["adapters"]["a"]["files"]["adapter_model.safetensors"]) == 64
    facts = engine_facts(llm)
    assert "adapters" not in facts["fengine"]
    assert facts["model_num_parameters"] > 3e6 and facts["fengine"]["numerics"] == "exact"
    assert len(facts["model_sha"]) == 64 and "model.safetensors" in facts["fengine"]["model_files"]


# -- what is not installed ---------------------------------------------------------------------------------------------


WITHOUT = """
import importlib, sys
sys.modules.update(lm_eval=None, inspect_ai=None)
for module in ("lm_eval_model", "inspect_model", "inspect_registry"):
    try:
        importlib.import_module(f"fengine.eval.harness.{module}")
    except ImportError as error:
        print(error)
"""


def test_a_missing_library_is_named() -> None:
    done = run(WITHOUT)
    told = [line.partition(" needs ")[2] for line in done.stdout.splitlines()]
    names = ("lm_eval", "lm-eval"), ("inspect_ai", "inspect-ai"), ("inspect_ai", "inspect-ai")
    found = [f"{library}, which is not installed: pip install 'fengine[{extra}]'" for library, extra in names]
    assert [line[: len(wanted)] for line, wanted in zip(told, found, strict=True)] == found, done.stderr
    assert issubclass(MissingExtraError, ImportError)


# -- generation options ------------------------------------------------------------------------------------------------
