"""Embeddings and classification heads against transformers, pooling against sentence-transformers' rules by hand."""

import asyncio
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_checkpoints
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from fengine.api.encode import rerank_scores
from fengine.api.engine import Engine
from fengine.core.request import Request
from fengine.core.sampling_params import SamplingParams
from fengine.core.scheduler_output import SchedulerOutput, Span, StepOutput
from fengine.engine.readout import record
from fengine.engine.request_state import RequestState
from fengine.errors import (
    CapacityError,
    ContextLengthError,
    CorruptCheckpointError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from fengine.worker import hub
from fengine.worker.chunks import Chunk
from fengine.worker.extras import hidden_wanted
from fengine.worker.hub import BOX
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.pooling import Pooling, check_dimensions, finish_vector, read_pooling
from fengine.worker.safetensors_file import read_config

pytestmark = pytest.mark.usefixtures("one_thread")
BODIES = {"llama": LlamaModel, "qwen2": Qwen2Model, "qwen3": Qwen3Model}
CLASSIFIERS = {
    "llama": LlamaForSequenceClassification,
    "qwen2": Qwen2ForSequenceClassification,
    "qwen3": Qwen3ForSequenceClassification,
}
SIZE = tiny_checkpoints.SIZES["hidden_size"]


def write(directory: Path, family: str, model_class: Any, seed: int = 0, **overrides: Any) -> Path:
    """A tiny random checkpoint of `model_class`, as transformers saves it, with the box's tokenizer beside it."""
    config_class, _ = tiny_checkpoints.CLASSES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(tiny_checkpoints.SIZES | {"vocab_size": 4096} | overrides)))
        for name, parameter in model.named_parameters():
            tiny_checkpoints._fill(name, parameter.data)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((BOX / name).read_bytes())
    return directory


def write_modules(directory: Path, pooling: dict[str, Any], *kinds: str, where: str = "1_Pooling") -> None:
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": where if kind == "Pooling" else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


# -- what a step's hidden states become -------------------------------------------------------------------------------


def test_a_state_that_is_not_finite_fails_the_request_whose_vector_it_would_be_part_of() -> None:
    def recorded(rows_HD: np.ndarray) -> tuple[float, Any]:
        request = Request("r", 3, [1, 2, 3], SamplingParams(pool="mean"), 0, 0, frozenset())
        state = RequestState(request, None, False, lambda state: None)
        step = SchedulerOutput(0, rows=[0], starts=[0], counts=[3], samples=[True], requests=[request])
        out = StepOutput([0], [0.0], hidden=[Span(0, 0, 3, 0)], hidden_HD=rows_HD, pooled=[0])
        record({"r": state}, step, out, lambda pooled: pooled)
        return out.logprobs[0], state.embedding

    rows_HD = np.arange(6, dtype=np.float32).reshape(3, 2)
    logprob, vector = recorded(rows_HD)
    assert logprob == 0.0 and vector.tolist() == [2.0, 3.0]
    rows_HD[1, 0] = np.inf
    assert np.isnan(recorded(rows_HD)[0])


def test_the_first_state_is_asked_for_once_also_where_a_prompt_is_computed_again() -> None:
    new = Request("r", 3, [1, 2, 3], SamplingParams(pool="cls"), 0, 0, frozenset())
    for seen, spans in ((0, [Span(0, 0, 1, 0)]), (1, [])):
        new.num_seen = seen
        assert hidden_wanted([Chunk(0, new, 0, 2, 0, False, 2, None)])[0] == spans


# -- what the checkpoint says ------------------------------------------------------------------------------------------

OLD = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        (OLD | {"pooling_mode_lasttoken": True, "word_embedding_dimension": 8, "include_prompt": True}, "last"),
        (OLD | {"pooling_mode_mean_tokens": True}, "mean"),
        (OLD | {"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode": ["weightedmean", "cls"]}, "weightedmean+cls"),
        (OLD | {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "cls+last"),
        ({}, "mean"),
    ],
)
def test_the_checkpoints_pooling(tmp_path: Path, pooling: dict[str, Any], pool: str) -> None:
    write_modules(tmp_path, pooling, "Transformer", "Pooling", "Normalize")
    assert read_pooling(tmp_path, {"hidden_size": 8}) == Pooling(pool, True)
    write_modules(tmp_path, pooling, "Transformer", "Pooling")
    assert read_pooling(tmp_path, {"hidden_size": 8}) == Pooling(pool, False)


def test_what_is_done_to_texts_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As sentence-transformers: the default prompt, lower case, and at most so many tokens, special ones included."""
    directory = write(tmp_path, "llama", LlamaModel)
    write_modules(directory, {"pooling_mode": "mean"}, "Transformer", "Pooling", "Normalize")
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Find: ", "none": ""}, "default_prompt_name": "query"})
    )
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 9, "do_lower_case": true}')
    texts = ["Short", "A LONG text about Many things and more of them", ""]
    hf = AutoTokenizer.from_pretrained(directory)
    with Engine(model_path=str(directory), is_embedding=True, device="cpu") as engine:
        for text in texts:
            ids = hf("find: " + text.lower(), truncation=True, max_length=9).input_ids
            assert engine.encode(text)["meta_info"]["prompt_tokens"] == len(ids) <= 9
            assert engine.encode(text)["embedding"] == engine.encode(ids)["embedding"]
        together = [output["embedding"] for output in engine.encode(texts)]
        assert together == [engine.encode(text)["embedding"] for text in texts]
    (directory / "sentence_bert_config.json").unlink()  # then as much counts as the model has positions for
    with Engine(model_path=str(directory), is_embedding=True, device="cpu", context_length=20) as engine:
        with caplog.at_level("INFO", "fengine"):
            assert engine.encode("a text " * 9999)["meta_info"]["prompt_tokens"] == 20
        ids = hf("Find: " + "a text " * 9999, truncation=True, max_length=20).input_ids
        assert engine.encode("a text " * 9999)["embedding"] == engine.encode(ids)["embedding"]
        assert "tokens is cut to 20" in caplog.text
    (directory / "sentence_bert_config.json").write_text("{}")
    for file, bad in (
        ("sentence_bert_config.json", {"max_seq_length": 0}),
        ("sentence_bert_config.json", {"do_lower_case": "yes"}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}),
    ):
        good = (directory / file).read_text()
        (directory / file).write_text(json.dumps(bad))
        with pytest.raises(ModelLoadError, match=file):
            read_pooling(directory, {"hidden_size": SIZE})
        (directory / file).write_text(good)
    for pool, left in (("mean", False), ("cls", None), ("mean", 0)):
        write_modules(directory, {"pooling_mode": pool, "include_prompt": left}, "Transformer", "Pooling")
        with pytest.raises(UnsupportedFeatureError, match="include_prompt"):
            read_pooling(directory, {"hidden_size": SIZE})


def test_without_a_word_the_last_token_is_taken_and_normalised(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, {"hidden_size": 8}) == Pooling("last", True)
    assert read_pooling(tmp_path, {"matryoshka_dimensions": [4, 8]}).sizes == (4, 8)


@pytest.mark.parametrize(
    ("pooling", "error", "message"),
    [
        (OLD | {"pooling_mode_min_tokens": True}, UnsupportedFeatureError, "min_tokens"),
        ({"pooling_mode": ["mean", "min"]}, UnsupportedFeatureError, "min"),
        ({"pooling_mode": []}, UnsupportedFeatureError, r"\[\]"),
        ({"pooling_mode": 5}, UnsupportedFeatureError, "5"),
        ({"pooling_mode": "mean", "word_embedding_dimension": 9}, ModelLoadError, "vectors of 9, the model has 8"),
        ([], ModelLoadError, "expected a JSON object"),
    ],
)
def test_pooling_that_is_not_built(tmp_path: Path, pooling: Any, error: type[Exception], message: str) -> None:
    write_modules(tmp_path, pooling, "Transformer", "Pooling", "Normalize")
    with pytest.raises(error, match=message):
        read_pooling(tmp_path, {"hidden_size": 8})


def test_bad_modules(tmp_path: Path) -> None:
    write_modules(tmp_path, {}, "Transformer", "Pooling")
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean", "pooling_mode": "max"}')
    with pytest.raises(ModelLoadError, match="key 'pooling_mode' occurs twice"):
        read_pooling(tmp_path, {"hidden_size": 8})
    write_modules(tmp_path, {}, "Transformer", "Pooling", "LayerNorm", "Normalize")
    with pytest.raises(UnsupportedFeatureError, match="LayerNorm are not built"):
        read_pooling(tmp_path, {"hidden_size": 8})
    write_modules(tmp_path, {}, "Transformer", "Dense", "Pooling")
    with pytest.raises(ModelLoadError, match="expected Transformer, Pooling, perhaps Dense"):
        read_pooling(tmp_path, {"hidden_size": 8})
    write_modules(tmp_path, {}, "Pooling", "Transformer")
    with pytest.raises(ModelLoadError, match="expected Transformer, Pooling"):
        read_pooling(tmp_path, {"hidden_size": 8})
    write_modules(tmp_path, {}, "Transformer", "Pooling", where="../elsewhere")
    with pytest.raises(ModelLoadError, match="leaves the model's directory"):
        read_pooling(tmp_path, {"hidden_size": 8})
    write_modules(tmp_path, {}, "Transformer", "Pooling", where="2_Pooling")
    with pytest.raises(ModelLoadError, match="2_Pooling.*is missing"):
        read_pooling(tmp_path, {"hidden_size": 8})
    for text in ("{", "5", "[5]", '[{"type": 5}]', "[" * 100_000, None):
        (tmp_path / "modules.json").unlink()
        os.mkfifo(tmp_path / "modules.json") if text is None else (tmp_path / "modules.json").write_text(text)
        with pytest.raises(ModelLoadError, match="modules.json"):
            read_pooling(tmp_path, {"hidden_size": 8})


def write_dense(folder: Path, weight: torch.Tensor, bias: torch.Tensor | None, **config: Any) -> None:
    folder.mkdir(exist_ok=True)
    (outs, ins), least = weight.shape, {"bias": False} if bias is None else {}
    sizes = {"in_features": ins, "out_features": outs} | least  # it has one by default
    (folder / "config.json").write_text(json.dumps(sizes | config))
    tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def test_dense_layers_behind_pooling(tmp_path: Path) -> None:
    """As in EmbeddingGemma: two of them, then the length; against torch."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Dense", "3_Dense")]
    names = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    write_modules(tmp_path, {"pooling_mode": "mean"}, "Transformer", "Pooling")
    (tmp_path / "modules.json").write_text(json.dumps([*names, {"type": "x.Normalize", "path": ""}]))
    up, down, bias, x = (torch.randn(*shape) for shape in ((12, 8), (6, 12), (6,), (8,)))
    places = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    write_dense(tmp_path / "2_Dense", up, None, activation_function="torch.nn.modules.linear.Identity", **places)
    write_dense(tmp_path / "3_Dense", down, bias)
    pooling = read_pooling(tmp_path, {"hidden_size": 8})
    want = torch.tanh(down @ (up @ x) + bias)
    for size in (None, 3):
        expected = torch.nn.functional.normalize(want[:size], dim=0).tolist()
        assert finish_vector(x.numpy(), pooling, size) == pytest.approx(expected, abs=1e-6)
    assert check_dimensions(6, pooling, 8) == 6
    with pytest.raises(InvalidRequestError, match="from 1 to 6"):
        check_dimensions(7, pooling, 8)
    for change, message in (
        ({"activation_function": "torch.nn.GELU"}, "'GELU' is not built"),
        ({"in_features": 9}, "in_features is 9"),
        ({"out_features": 5}, r"expected .*\(5, 12\)"),
        ({"dropout": 0.5}, "dropout = 0.5"),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
    ):
        write_dense(tmp_path / "3_Dense", down, bias, **change)
        with pytest.raises((ModelLoadError, UnsupportedFeatureError), match=message):
            read_pooling(tmp_path, {"hidden_size": 8})
    write_dense(tmp_path / "3_Dense", down, bias)
    (tmp_path / "3_Dense" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelLoadError, match="header of .*: not usable JSON"):
        read_pooling(tmp_path, {"hidden_size": 8})


def test_cut_first_then_bring_to_length_one() -> None:
    vector = np.array([3.0, 4.0, 12.0], np.float32)
    assert finish_vector(vector, Pooling(), 2) == pytest.approx([0.6, 0.8])
    assert finish_vector(vector, Pooling(), None) == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    assert finish_vector(vector, Pooling(normalize=False), 2) == [3.0, 4.0]
    assert finish_vector(np.zeros(2, np.float32), Pooling(), None) == [0.0, 0.0]


@pytest.mark.parametrize("bad", [0, -1, 9, 1.0, True, "4"])
def test_bad_dimensions(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="dimensions must be a whole number from 1 to 8"):
        check_dimensions(bad, Pooling(), 8)
    with pytest.raises(InvalidRequestError, match=r"one of \[2, 4\]"):
        check_dimensions(3, Pooling(sizes=(2, 4)), 8)
    assert check_dimensions(4, Pooling(sizes=(2, 4)), 8) == 4 and check_dimensions(None, Pooling(), 8) is None


def test_the_hub_brings_what_describes_pooling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.resolve_model("some-org/an-embedding-model") == tmp_path
    files = [
        "config.json",
        "modules.json",
        "model.safetensors",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "merges.txt",
        "tokenizer.json",
    ]
    others = ["onnx/model.onnx", "onnx/config.json", "1_X/model.safetensors", "original/params.json", "model.bin"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files + others, **patterns)) == files


# -- architectures and weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", BODIES)
def test_heads_and_bodies_load(tmp_path: Path, family: str) -> None:
    body = write(tmp_path / "body", family, BODIES[family])
    spec = spec_from_config(read_config(body))
    assert spec.architecture == BODIES[family].__name__ and not spec.generates and spec.num_labels is None
    params = load_params(body, spec)
    assert params["unembed"] is params["embed"] and "score" not in params
    for labels in (1, 2, 3):
        head = write(tmp_path / f"head{labels}", family, CLASSIFIERS[family], num_labels=labels)
        spec = spec_from_config(read_config(head))
        assert spec.num_labels == labels and not spec.generates
        params = load_params(head, spec)
        assert "score" in params and "score_bias_C" not in params


def test_label_counts_and_bad_heads(tmp_path: Path) -> None:
    head = write(tmp_path, "llama", LlamaForSequenceClassification, num_labels=3)
    config = read_config(head)
    assert spec_from_config(config | {"id2label": None, "num_labels": 5}).num_labels == 5
    assert spec_from_config(config | {"id2label": None}).num_labels == 2  # transformers' default is not written
    for changes in ({"id2label": ["a"]}, {"id2label": None, "num_labels": 0}, {"id2label": {}, "num_labels": "2"}):
        with pytest.raises(ModelLoadError, match="id2label|num_labels"):
            spec_from_config(config | changes)
    with pytest.raises(CorruptCheckpointError, match=r"'score.weight': expected shape \[4, 64\], got \[3, 64\]"):
        load_params(head, spec_from_config(config | {"id2label": {str(i): "" for i in range(4)}}))
    with pytest.raises(CorruptCheckpointError, match="'score.weight' is not part of LlamaForCausalLM"):
        load_params(head, spec_from_config(config | {"architectures": ["LlamaForCausalLM"]}))


# -- over the engine ---------------------------------------------------------------------------------------------------


def engine(directory: Path, **options: Any) -> Engine:
    return Engine(model_path=str(directory), device="cpu", enable_torch_compile=False, **options)


def hidden_states(directory: Path, ids: list[int]) -> torch.Tensor:
    """transformers' hidden states [T, D] behind the final norm."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 4096, count).tolist()


PROMPTS = [prompt(seed, count) for seed, count in enumerate((1, 2, 17, 40, 16, 33))]


@pytest.mark.parametrize(
    ("family", "pools"),
    [
        ("llama", ["lasttoken"]),
        ("llama", ["mean_tokens"]),
        ("llama", ["cls_token"]),
        ("llama", ["max_tokens"]),
        ("llama", ["weightedmean_tokens", "mean_sqrt_len_tokens", "max_tokens", "cls_token", "lasttoken"]),
        ("qwen2", ["lasttoken"]),
        ("qwen2", ["mean_sqrt_len_tokens"]),
        ("qwen3", ["mean_tokens"]),
        ("qwen3", ["weightedmean_tokens"]),
    ],
)
def test_embeddings_equal_transformers(tmp_path: Path, family: str, pools: list[str]) -> None:
    directory = write(tmp_path, family, BODIES[family])
    config = OLD | {f"pooling_mode_{pool}": True for pool in pools}
    write_modules(tmp_path, config, "Transformer", "Pooling", "Normalize")
    with engine(directory, chunked_prefill_size=7) as llm:
        outputs = llm.encode(PROMPTS)
        assert len(llm.encode(PROMPTS[2], dimensions=SIZE * len(pools))["embedding"]) == SIZE * len(pools)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        states = hidden_states(directory, ids)
        weight = torch.arange(1, len(ids) + 1)[:, None]
        each = {  # in the order in which sentence-transformers joins them, whatever the file's
            "cls_token": states[0], "max_tokens": states.amax(0), "mean_tokens": states.mean(0),
            "mean_sqrt_len_tokens": states.sum(0) / len(ids) ** 0.5,
            "weightedmean_tokens": (states * weight).sum(0) / weight.sum(), "lasttoken": states[-1],
        }  # fmt: skip
        pooled = torch.cat([vector for pool, vector in each.items() if pool in pools])
        expected = torch.nn.functional.normalize(pooled, dim=-1)
        assert output["embedding"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert output["meta_info"]["prompt_tokens"] == len(ids) and "completion_tokens" not in output["meta_info"]
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_a_language_model_as_embedding_model(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, "qwen3", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((BOX / name).read_bytes())
    with engine(directory) as llm, pytest.raises(InvalidRequestError, match="does not appear to be an embedding model"):
        llm.encode("text")
    with engine(directory, is_embedding=True) as llm:
        text = "What is the capital of China?"
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text)
        expected = torch.nn.functional.normalize(hidden_states(directory, ids)[-1], dim=-1).tolist()
        by_text, by_ids, batch = llm.encode(text), llm.encode(ids), llm.encode([text, "Hello"])
        assert by_text["embedding"] == pytest.approx(expected, abs=1e-5)
        assert by_text["embedding"] == by_ids["embedding"] == batch[0]["embedding"] and len(batch) == 2
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.generate("Hello")
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.score("q", ["a"], [5])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_model_that_looks_both_ways(tmp_path: Path, family: str) -> None:
    """`is_causal: false`, as in gte-Qwen2: against transformers; and a vector does not depend on its neighbours."""
    directory = write(tmp_path, family, BODIES[family], is_causal=False)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 2000) for _ in range(length)] for length in (7, 1, 40, 23, 64)]
    reference = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    causal = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", is_causal=True)
    with Engine(model_path=str(directory), device="cpu", is_embedding=True, chunked_prefill_size=64) as engine:
        together = [out["embedding"] for out in engine.encode(prompts)]
        for prompt, got in zip(prompts, together, strict=True):
            assert engine.encode(prompt)["embedding"] == got
            with torch.no_grad():
                want, other = (m(torch.tensor([prompt])).last_hidden_state[0, -1] for m in (reference, causal.eval()))
            assert torch.allclose(torch.tensor(got), want / want.norm(), atol=1e-5)
            assert len(prompt) == 1 or not torch.allclose(torch.tensor(got), other / other.norm(), atol=1e-2)
        with pytest.raises(CapacityError, match="65 tokens, which see each other.*raise max_step_tokens"):
            engine.encode([5] * 65)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("Model", "ForCausalLM")]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match="is_causal = false.*is_embedding=True"):
        Engine(model_path=str(directory), device="cpu", load_format="dummy")


def test_dimensions_are_cut_and_normalised_again(tmp_path: Path) -> None:
    with engine(write(tmp_path, "llama", LlamaModel)) as llm:
        whole = np.array(llm.encode(PROMPTS[2])["embedding"])
        for size in (1, 7, SIZE):
            expected = whole[:size] / np.linalg.norm(whole[:size])
            assert llm.encode(PROMPTS[2], dimensions=size)["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
        with pytest.raises(InvalidRequestError, match="dimensions must be a whole number from 1 to 64, .* got 65"):
            llm.encode(PROMPTS[2], dimensions=65)


@pytest.mark.parametrize("pool", ["lasttoken", "mean_tokens", "weightedmean_tokens"])
def test_the_bits_belong_to_the_prompt(tmp_path: Path, pool: str) -> None:
    """Alone or in a batch, whole or in chunks, with a cached prefix or without."""
    directory = write(tmp_path, "qwen2", Qwen2Model)
    write_modules(tmp_path, OLD | {f"pooling_mode_{pool}": True}, "Transformer", "Pooling")
    with engine(directory, disable_radix_cache=True) as llm:
        alone = [llm.encode(ids)["embedding"] for ids in PROMPTS]
        assert [output["embedding"] for output in llm.encode(PROMPTS)] == alone
        assert [output["embedding"] for output in llm.encode(PROMPTS[::-1] * 3)] == alone[::-1] * 3
    with engine(directory, chunked_prefill_size=7, page_size=4, max_running_requests=3) as llm:
        for _ in range(2):  # the second time with cached prefixes where the pooling allows it
            assert [output["embedding"] for output in llm.encode(PROMPTS)] == alone
        longer = llm.encode(PROMPTS[3] + PROMPTS[2])
    with engine(directory, disable_radix_cache=True) as llm:
        assert llm.encode(PROMPTS[3] + PROMPTS[2])["embedding"] == longer["embedding"]


@pytest.mark.parametrize(("family", "labels"), [("llama", 1), ("qwen2", 3), ("qwen3", 1)])
def test_heads_equal_transformers(tmp_path: Path, family: str, labels: int) -> None:
    directory = write(tmp_path, family, CLASSIFIERS[family], num_labels=labels)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with engine(directory) as llm:
        outputs = llm.encode(PROMPTS)
        assert [llm.encode(ids)["embedding"] for ids in PROMPTS] == [output["embedding"] for output in outputs]
        with pytest.raises(InvalidRequestError, match="dimensions is for embedding models"):
            llm.encode(PROMPTS, dimensions=1)
        with pytest.raises(InvalidRequestError, match="normalize is for embedding models"):
            llm.encode(PROMPTS, normalize=True)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].tolist()
        assert len(expected) == labels and output["embedding"] == pytest.approx(expected, abs=1e-4)


def test_a_head_with_a_bias(tmp_path: Path) -> None:
    directory = write(tmp_path, "qwen3", Qwen3ForSequenceClassification, num_labels=2)
    with engine(directory) as llm:
        before = llm.encode(PROMPTS[3])["embedding"]
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    safetensors.torch.save_file(tensors | {"score.bias": torch.tensor([2.0, -0.5])}, directory / "model.safetensors")
    with engine(directory) as llm:
        assert llm.encode(PROMPTS[3])["embedding"] == pytest.approx([before[0] + 2.0, before[1] - 0.5], abs=1e-5)


def test_async_and_bad_arguments(tmp_path: Path) -> None:
    with engine(write(tmp_path, "llama", LlamaModel), context_length=64) as llm:
        expected = [output["embedding"] for output in llm.encode(PROMPTS)]

        async def several() -> list[Any]:
            return await asyncio.gather(*(llm.async_encode(ids, rid=f"r{i}") for i, ids in enumerate(PROMPTS)))

        outputs = asyncio.run(several())
        assert [output["embedding"] for output in outputs] == expected
        assert [output["meta_info"]["id"] for output in outputs] == [f"r{i}" for i in range(len(PROMPTS))]
        assert llm.encode([]) == []
        bad: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"prompt": None}, InvalidRequestError, "Either text, input_ids"),
            ({"prompt": 5}, InvalidRequestError, "must be a string or a list of strings, got int"),
            ({"prompt": ["a", None]}, InvalidRequestError, r"prompt 1.*must be a string, got NoneType"),
            (
                {"prompt": [3, 4096]},
                InvalidRequestError,
                r"input_ids\[1\] is 4096, out-of-vocabulary; .* in \[0, 4095\]",
            ),
            ({"prompt": [[3], [-1]]}, InvalidRequestError, "prompt 1: input_ids"),
            ({"prompt": [3] * 65}, ContextLengthError, r"65 tokens\).* \(64 tokens\); shorten"),
            ({"prompt": "a", "normalize": 1}, InvalidRequestError, "normalize is True or False, got 1"),
            ({"prompt": "a", "image_data": "x"}, InvalidRequestError, "image_data"),
            ({"prompt": "a", "lora_path": "x"}, InvalidRequestError, "LoRA"),
            ({"prompt": "a", "embed_overrides": [1]}, UnsupportedFeatureError, "embed_overrides"),
            ({"prompt": ["a", "b"], "rid": ["x", "x"]}, InvalidRequestError, "Duplicate request IDs"),
        ]
        for arguments, error, message in bad:
            with pytest.raises(error, match=message):
                llm.encode(**arguments)
        assert llm.encode(PROMPTS[0])["embedding"] == expected[0]
        assert llm.encode([3] * 64)["meta_info"]["prompt_tokens"] == 64  # nothing is drawn behind it
        raw = np.array(llm.encode(PROMPTS[0], normalize=False)["embedding"])
        assert (raw / np.linalg.norm(raw)).tolist() == pytest.approx(expected[0], abs=1e-6) != raw.tolist()
        with pytest.raises(InvalidRequestError, match="rerank needs a cross-encoder"):
            llm.rerank([["q", "d"]])


def test_an_aborted_prompt_has_no_embedding_and_its_neighbours_have_theirs(tmp_path: Path) -> None:
    with engine(write(tmp_path, "llama", LlamaModel)) as llm:
        expected = llm.encode(PROMPTS[1])["embedding"]

        async def main() -> Any:
            llm.pause_generation("in_place")
            task = asyncio.create_task(llm.async_encode(PROMPTS[:2], rid=["gone", "stays"]))
            await asyncio.sleep(0)  # it is queued now
            llm.abort("gone")
            llm.continue_generation()
            return await task

        gone, stays = asyncio.run(main())
        assert gone["embedding"] is None and gone["meta_info"]["finish_reason"]["type"] == "abort"
        assert stays["embedding"] == expected and rerank_scores([gone]) == [gone]
