"""`score` and `rerank`: the arithmetic by hand, the results against transformers, the bits alone and in batches."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_checkpoints
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from fengine.api.engine import Engine
from fengine.api.score import ScoreReqInput, ScoreResult, Scoring, check_labels, join
from fengine.errors import AbortedError, FengineError, InvalidRequestError, UnsupportedFeatureError
from fengine.worker.hub import BOX

DEFAULTS: dict[str, Any] = {"query": "q", "items": ["a", "b"], "label_token_ids": [3, 5]}


def scoring(generates: bool = True, **changes: Any) -> Scoring:
    return Scoring.of(ScoreReqInput(**(DEFAULTS | changes)), generates=generates, vocab_size=10)


def answer(*logprobs: float, tokens: int = 7) -> dict[str, Any]:
    row = [(value, label, None) for value, label in zip(logprobs, (3, 5), strict=True)]
    return {"meta_info": {"output_token_ids_logprobs": [row], "prompt_tokens": tokens}}


def test_prompts_are_joined() -> None:
    assert join("q", ["a", "b"], False) == ["qa", "qb"] and join("q", ["a", "b"], True) == ["aq", "bq"]
    assert join("q", "abc", False) == ["qabc"] and join("", ["a"], False) == ["a"]
    assert join([1, 2], [[3], [4, 5]], False) == [[1, 2, 3], [1, 2, 4, 5]]
    assert join([1, 2], ([3], (4, 5)), True) == [[3, 1, 2], [4, 5, 1, 2]] and join([], [[3]], False) == [[3]]
    assert join("q", [], False) == [] == join(None, [], False)


@pytest.mark.parametrize(
    ("query", "items"),
    [("q", [[3]]), ([3], ["a"]), ([3], "a"), (None, ["a"]), ("q", ["a", [3]]), (b"q", ["a"]), ("q", [5])],
)
def test_query_and_items_are_of_one_kind(query: Any, items: Any) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid combination of query/items types for score_request"):
        join(query, items, False)


def test_scores_are_probabilities_or_a_softmax_over_the_labels() -> None:
    outputs = [answer(-1.0, -2.0), answer(-0.5, -40.0, tokens=4)]
    plain = scoring().result(outputs)
    assert plain == [[math.exp(-1), math.exp(-2)], [math.exp(-0.5), math.exp(-40)]] and plain.token_logprobs is None
    assert isinstance(plain, list) and plain.scores is plain and len(plain) == 2 and plain.prompt_tokens == 11
    kept = scoring(return_token_logprobs=True).result(outputs)
    assert kept.token_logprobs == [[-1.0, -2.0], [-0.5, -40.0]] and kept.pooled_hidden_states is None
    for temperature in (1.0, 0.25, 3):
        soft = scoring(apply_softmax=True, temperature=temperature).result(outputs)
        for row, logprobs in zip(soft, ([-1.0, -2.0], [-0.5, -40.0]), strict=True):
            powers = [math.exp(value / temperature) for value in logprobs]
            assert row == pytest.approx([power / sum(powers) for power in powers]) and sum(row) == pytest.approx(1)
    tiny = scoring(apply_softmax=True, temperature=1e-6).result(outputs)
    assert tiny == [[1.0, 0.0], [1.0, 0.0]]


def test_a_classifier_gives_its_logits() -> None:
    heads = [{"embedding": [1.0, -3.0, i], "meta_info": {"prompt_tokens": 6}} for i in (0.5, 2.0)]
    hidden = [{"embedding": [i] * 4, "meta_info": {"prompt_tokens": 6}} for i in (0.25, 0.75)]
    plain = scoring(generates=False, label_token_ids=None).result(heads)
    assert plain == [[1.0, -3.0, 0.5], [1.0, -3.0, 2.0]]
    assert plain.prompt_tokens == 12 and plain.pooled_hidden_states is None
    soft = scoring(generates=False, apply_softmax=True, return_pooled_hidden_states=True).result(heads + hidden)
    powers = [math.exp(value) for value in (1.0, -3.0, 0.5)]
    assert soft[0] == pytest.approx([power / sum(powers) for power in powers])
    assert [one.tolist() for one in soft.pooled_hidden_states] == [[0.25] * 4, [0.75] * 4]
    assert soft.prompt_tokens == 12
    aborted = {"meta_info": {"prompt_tokens": 6, "finish_reason": {"type": "abort"}}}
    for i in range(4):
        outputs = [one | (aborted if i == j else {}) for j, one in enumerate(heads + hidden)]
        with pytest.raises(AbortedError):
            scoring(generates=False, return_pooled_hidden_states=True).result(outputs)


def test_what_generate_is_asked() -> None:
    asked: Any = scoring(return_token_logprobs=True).input()
    assert asked.text == ["qa", "qb"] and asked.input_ids is None
    assert asked.token_ids_logprob == [[3, 5], [3, 5]] and asked.sampling_params.max_new_tokens == 0
    asked = scoring(query=[1], items=[[2], [3]], label_token_ids=[[4], (6, 5)], item_first=True).input()
    assert asked.text is None and asked.input_ids == [[2, 1], [3, 1]]
    assert asked.token_ids_logprob == [[4], [6, 5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_token_ids": None}, "label_token_ids is required for generation"),
        ({"items": None}, "items must be provided"),
        ({"items": {"a": 1}}, "items must be a string or a list"),
        ({"label_token_ids": []}, "label_token_ids must be a nonempty list"),
        ({"label_token_ids": 5}, "label_token_ids must be a nonempty list"),
        ({"label_token_ids": [[3], [4], [5]]}, "one list per item.*3 entries for 2 items"),
        ({"label_token_ids": [[3], []]}, "one list per item, none empty"),
        ({"label_token_ids": [[3], 4]}, "one list per item"),
        ({"label_token_ids": [3, -1]}, "nonnegative integers, got -1"),
        ({"label_token_ids": [3, True]}, "nonnegative integers, got True"),
        ({"label_token_ids": [3, 1.0]}, "nonnegative integers, got 1.0"),
        ({"label_token_ids": [3, "4"]}, "nonnegative integers, got '4'"),
        ({"label_token_ids": [3, 3]}, "must not contain duplicate tokens"),
        ({"label_token_ids": [3, 10]}, r"Token ID 10 is out of vocabulary \(vocab size: 10\)"),
        ({"label_token_ids": [2**63]}, "out of vocabulary"),
        ({"temperature": 0, "apply_softmax": True}, "temperature must be finite and greater than zero"),
        ({"temperature": float("nan"), "apply_softmax": True}, "temperature must be finite"),
        ({"temperature": "1", "apply_softmax": True}, "temperature must be finite"),
        ({"temperature": 0.5}, "temperature requires apply_softmax=True"),
        ({"apply_softmax": 1}, "apply_softmax must be True or False"),
        ({"item_first": None}, "item_first must be True or False"),
        ({"return_pooled_hidden_states": True}, "not supported for CausalLM models"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        scoring(**changes)


def test_what_is_not_built_is_refused_by_name() -> None:
    for name in (
        "embed_override_token_id",
        "query_embed_overrides",
        "item_embed_overrides",
        "score_extraction_token_id",
    ):
        with pytest.raises(UnsupportedFeatureError, match=name):
            scoring(**{name: 3})
    with pytest.raises(FengineError, match="a classifier scores no tokens"):
        scoring(generates=False, return_token_logprobs=True)


def test_labels_are_copied_for_each_prompt() -> None:
    assert check_labels([3, 4], 2, 10) == [[3, 4], [3, 4]] and check_labels(([3], [4, 5]), 2, 10) == [[3], [4, 5]]
    assert ScoreResult() == [] and ScoreResult().prompt_tokens == 0


# -- over the engine ---------------------------------------------------------------------------------------------------

QUERY, ITEMS = "The capital of France is", [" Paris", " a city on the river", "", " Paris, and of Italy it is"]


def next_logprobs(directory: Path, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities of what follows `ids`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_checkpoints.write(tmp_path_factory.mktemp("lm"), "qwen3", vocab_size=4096)
    return with_tokenizer(directory)


def with_tokenizer(directory: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((BOX / name).read_bytes())
    return directory


def engine(directory: Path, **options: Any) -> Engine:
    return Engine(model_path=str(directory), device="cpu", enable_torch_compile=False, **options)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Engine]:
    with engine(checkpoint) as one:
        yield one


def test_scores_equal_transformers(llm: Engine, checkpoint: Path) -> None:
    labels = [7, 4095, 300]
    assert llm.tokenizer is not None
    for item_first in (False, True):
        scores = llm.score(QUERY, ITEMS, labels, item_first=item_first)
        soft = llm.score(QUERY, ITEMS, labels, apply_softmax=True, temperature=0.5, item_first=item_first)
        prompts = [llm.tokenizer.encode(item + QUERY if item_first else QUERY + item) for item in ITEMS]
        assert scores.prompt_tokens == sum(map(len, prompts)) and len(scores) == len(ITEMS)
        for ids, row, soft_row in zip(prompts, scores, soft, strict=True):
            expected = next_logprobs(checkpoint, ids)[labels]
            assert [math.log(value) for value in row] == pytest.approx(expected.tolist(), abs=1e-4)
            assert soft_row == pytest.approx((expected / 0.5).softmax(-1).tolist(), abs=1e-5)


def test_scores_have_the_same_bits_in_any_batch(llm: Engine) -> None:
    labels = [[7, 9], [300], [5, 6, 7, 8], [9, 7]]
    alone = [llm.score(QUERY, [item], [row])[0] for item, row in zip(ITEMS, labels, strict=True)]
    assert llm.score(QUERY, ITEMS, labels) == alone
    assert llm.score(QUERY, ITEMS[::-1] * 5, labels[::-1] * 5) == alone[::-1] * 5
    llm.flush_cache()
    assert llm.score(QUERY, ITEMS, labels) == alone
    assert alone[0][0] != alone[3][1]  # other items have other scores

    async def several() -> list[ScoreResult]:
        one_by_one = (llm.async_score(QUERY, [item], [row]) for item, row in zip(ITEMS, labels, strict=True))
        return await asyncio.gather(*one_by_one)

    assert [result[0] for result in asyncio.run(several())] == alone


def test_ids_and_logprobs(llm: Engine) -> None:
    assert llm.tokenizer is not None
    query, item = llm.tokenizer.encode(QUERY), llm.tokenizer.encode(ITEMS[0], add_special_tokens=False)
    result = llm.score(query, [item], [7, 9], return_token_logprobs=True)
    output: Any = llm.generate(
        input_ids=query + item,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        token_ids_logprob=[7, 9],
    )
    logprobs = [entry[0] for entry in output["meta_info"]["output_token_ids_logprobs"][0]]
    assert result.token_logprobs == [logprobs] and result == [[math.exp(value) for value in logprobs]]
    assert llm.score(QUERY, [], [7]) == [] and llm.score(QUERY, [], [7]).prompt_tokens == 0


def test_bad_calls_leave_the_engine_as_it_was(llm: Engine) -> None:
    before = llm.score(QUERY, ITEMS, [7])
    for changes, message in (
        ({"label_token_ids": None}, "label_token_ids is required"),
        ({"label_token_ids": [4096]}, r"Token ID 4096 is out of vocabulary \(vocab size: 4096\)"),
        ({"items": ["a", "b" * 20_000]}, "prompt 1"),
        ({"query": [1], "items": [[5000]]}, "token ids must be in"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.score(**({"query": QUERY, "items": ITEMS, "label_token_ids": [7]} | changes))
    with pytest.raises(InvalidRequestError, match="does not appear to be an embedding model"):
        llm.rerank([["q", "d"]])
    assert llm.score(QUERY, ITEMS, [7]) == before


def test_preferred_sampling_parameters_have_no_say_in_scores(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.score(QUERY, ITEMS, [7, 9])
    preferred = {"logit_bias": {"7": 5.0}, "n": 2, "min_new_tokens": 3, "temperature": 2.0}
    monkeypatch.setattr(llm, "_context", replace(llm._context, preferred=preferred))
    assert llm.score(QUERY, ITEMS, [7, 9]) == before


def test_scores_of_aborted_requests_are_not_made_up(llm: Engine) -> None:
    async def main() -> None:
        llm.pause_generation("in_place")
        task = asyncio.create_task(llm.async_score(QUERY, ITEMS, [7, 9]))
        await asyncio.sleep(0)  # it is queued now
        llm.abort(abort_all=True)
        with pytest.raises(AbortedError, match="call it again"):
            await task

    asyncio.run(main())
    llm.continue_generation()
    assert len(llm.score(QUERY, ITEMS, [7])) == len(ITEMS)


def test_temperatures_may_be_scalars_of_numpy_and_torch() -> None:
    for value in (np.float32(2), torch.tensor(2.0), np.int64(2), 2):
        assert scoring(temperature=value, apply_softmax=True).temperature == 2.0


# -- classifiers -------------------------------------------------------------------------------------------------------


def write_classifier(directory: Path, labels: int) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(labels)
        sizes = tiny_checkpoints.SIZES | {"vocab_size": 4096, "num_labels": labels}
        model = LlamaForSequenceClassification(LlamaConfig(**sizes))
        for name, parameter in model.named_parameters():
            tiny_checkpoints._fill(name, parameter.data)
    model.save_pretrained(directory)
    return with_tokenizer(directory)


def test_a_classifier_scores_and_reranks(tmp_path: Path) -> None:
    one, three = write_classifier(tmp_path / "1", 1), write_classifier(tmp_path / "3", 3)
    pairs = [["What is it?", "It is a cat."], ["What is it?", ""], ["Who?", "Nobody knows."]]
    with engine(one) as llm:
        assert llm.tokenizer is not None
        hf = PreTrainedTokenizerFast.from_pretrained(one)
        model = AutoModelForSequenceClassification.from_pretrained(one, dtype=torch.float32).eval()
        outputs = llm.rerank(pairs)
        for pair, output in zip(pairs, outputs, strict=True):
            ids = hf([pair])["input_ids"][0]
            with torch.no_grad():
                expected = model(torch.tensor([ids])).logits[0, 0].item()
            assert output["embedding"] == pytest.approx(expected, abs=1e-4)
            assert output["meta_info"]["prompt_tokens"] == len(ids)
        assert [llm.rerank([pair])[0]["embedding"] for pair in pairs] == [output["embedding"] for output in outputs]
        assert llm.rerank([]) == []
        for bad in ("text", [["one"]], ["qd"], [["q", "d", "e"]], [["q", 5]]):
            with pytest.raises(InvalidRequestError, match="prompt"):
                llm.rerank(bad)
    with engine(three) as llm:
        logits = llm.score(QUERY, ITEMS, return_pooled_hidden_states=True)
        assert logits == [output["embedding"] for output in llm.encode([QUERY + item for item in ITEMS])]
        assert logits.pooled_hidden_states is not None
        score = safetensors.torch.load_file(three / "model.safetensors")["score.weight"]
        hidden = torch.stack(logits.pooled_hidden_states)
        assert torch.allclose(hidden @ score.T, torch.tensor(logits), atol=1e-5)
        soft = asyncio.run(llm.async_score(QUERY, ITEMS, apply_softmax=True))
        assert torch.allclose(torch.tensor(soft), torch.tensor(logits).softmax(-1), atol=1e-6)
        assert len(llm.rerank(pairs)[0]["embedding"]) == 3
