"""Encoders against transformers in float32: hidden states, heads, and bits that do not know their neighbours."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fengine import models
from fengine.api.encode import pair_ids
from fengine.api.engine import Engine
from fengine.errors import InvalidRequestError, ModelLoadError, UnsupportedArchitectureError, UnsupportedFeatureError
from fengine.models.kv_pages import init_kv
from fengine.models.kv_state import BATCH
from fengine.models.spec import ModelSpec
from fengine.worker.hub import BOX
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.pooling import Pooling, read_pooling
from fengine.worker.safetensors_file import read_config

TOLERANCE = 1e-4
VOCAB = 311
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 200, "pad_token_id": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert, tanh form": ("Bert", {"hidden_act": "gelu_new", "pad_token_id": 0, "layer_norm_eps": 1e-6}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-r": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 5}),
    "modernbert": ("ModernBert", {"local_attention": 22, "num_hidden_layers": 5, "pad_token_id": 0}),
    "modernbert, biases": (
        "ModernBert",
        {"local_attention": 9, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
         "classifier_pooling": "mean", "pad_token_id": 0},
    ),
    "embeddinggemma": (
        "Gemma3Text",
        {"use_bidirectional_attention": True, "sliding_window": 20, "head_dim": 16, "num_key_value_heads": 2,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 20},
    ),
}  # fmt: skip


def write(directory: Path, name: str, kind: str = "Model", **more: Any) -> Any:
    """A tiny random checkpoint with the box's tokenizer, and transformers' model of it."""
    base, overrides = CASES[name]
    model_class = getattr(transformers, f"{base}{kind}")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(model_class.config_class(**(SIZES | overrides | more)))
        for key, parameter in model.named_parameters():
            tiny_checkpoints._fill(key, parameter.data, shift=1.0 if base.startswith("Gemma") else 0.0)
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (directory / file).write_bytes((BOX / file).read_bytes())
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def prompts(lengths: tuple[int, ...] = (150, 1, 33, 64), vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(12, vocab) for _ in range(length)] for length in lengths]


def hidden(directory: Path, spec: ModelSpec, rows: list[list[int]]) -> list[Tensor]:
    """Hidden states of whole rows, in one step."""
    model, params = models.lookup(spec.architecture), load_params(directory, spec)
    size, counts = 16, [-(-len(row) // 16) for row in rows]
    pages = [list(range(1 + sum(counts[:i]), 1 + sum(counts[: i + 1]))) for i in range(len(rows))]
    table = [own + [0] * (max(counts) - len(own)) for own in pages]
    pos = [p for row in rows for p in range(len(row))]
    slot = [own[p // size] * size + p % size for own, row in zip(pages, rows, strict=True) for p in range(len(row))]
    start = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    fields = ([t for row in rows for t in row], pos, slot, start, [len(row) for row in rows], table, start[1:])
    batch = dict(zip(BATCH, (torch.tensor(field, dtype=torch.int32) for field in fields), strict=True))
    kv = init_kv(spec, sum(counts) + 1, size, torch.float32, "cpu")
    _, hidden_TD = model.forward(params, spec, kv, batch)
    return list(hidden_TD.split([len(row) for row in rows]))


@pytest.mark.parametrize("name", [*CASES, "bert of masked tokens", "modernbert of masked tokens"])
@torch.no_grad()
def test_hidden_states_equal_transformers(name: str, tmp_path: Path) -> None:
    name, of, _ = name.partition(" of masked tokens")  # whose head nothing reads
    reference, rows = write(tmp_path, name, "ForMaskedLM" if of else "Model").base_model, prompts()
    spec = spec_from_config(read_config(tmp_path))
    assert not spec.causal and not spec.generates
    together = hidden(tmp_path, spec, rows)
    for row, got in zip(rows, together, strict=True):
        want = reference(torch.tensor([row])).last_hidden_state[0]
        assert (got - want).abs().max() < TOLERANCE
        assert torch.equal(hidden(tmp_path, spec, [row])[0], got)


def test_norms_under_their_first_names(tmp_path: Path) -> None:
    """transformers gives a model made of bert-base-uncased the names that this has."""
    write(tmp_path, "bert")
    spec, path = spec_from_config(read_config(tmp_path)), tmp_path / "model.safetensors"
    [want], tensors = hidden(tmp_path, spec, prompts((9,))), load_file(path)
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(hidden(tmp_path, spec, prompts((9,)))[0], want)


@torch.no_grad()
def test_types_of_tokens(tmp_path: Path) -> None:
    reference, [row] = write(tmp_path, "bert", type_vocab_size=3), prompts((40,))
    types = [0] * 10 + [1] * 20 + [2] * 10
    spec = spec_from_config(read_config(tmp_path))
    got = hidden(tmp_path, spec, [[token + kind * VOCAB for token, kind in zip(row, types, strict=True)]])[0]
    want = reference(torch.tensor([row]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", [name for name in CASES if name != "embeddinggemma"])
def test_heads_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, name, "ForSequenceClassification", num_labels=3, vocab_size=4096)
    rows, path = prompts((30, 7)), tmp_path / "model.safetensors"
    if name == "roberta":  # the hub's classifiers hold a pooler, too, which nothing reads, and a table of positions
        unread = {"pooler.dense.weight": torch.ones(48, 48), "embeddings.position_ids": torch.arange(200)[None]}
        save_file(load_file(path) | {f"roberta.{key}": x for key, x in unread.items()}, path, {"format": "pt"})
    with pytest.raises(UnsupportedFeatureError, match=f"LoRA of an encoder .{CASES[name][0]}"):
        Engine(model_path=str(tmp_path), device="cpu", enable_lora=True)
    with Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False) as llm:
        outputs = llm.encode(rows)
        assert llm.update_weights_from_disk(str(tmp_path)).success
        assert llm.encode(rows[0])["embedding"] == outputs[0]["embedding"]
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.generate("Hello")
    for row, output in zip(rows, outputs, strict=True):
        with torch.no_grad():
            want = reference(torch.tensor([row])).logits[0].tolist()
        assert output["embedding"] == pytest.approx(want, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "pool"), [("bert", "cls"), ("xlm-r", "mean"), ("modernbert", "mean"), ("embeddinggemma", "mean")]
)
def test_embeddings_through_the_engine(name: str, pool: str, tmp_path: Path) -> None:
    """Pooled as sentence-transformers' files say, alone and in a batch the same bits."""
    reference, rows = write(tmp_path, name, vocab_size=4096), prompts((90, 4, 33))
    modules = [
        {"type": "x.Transformer", "path": ""},
        {"type": "x.Pooling", "path": "1_Pooling"},
        {"type": "x.Normalize"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pool}))
    with Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False) as llm:
        outputs = llm.encode(rows)
        assert [llm.encode(row)["embedding"] for row in rows] == [output["embedding"] for output in outputs]
    for row, output in zip(rows, outputs, strict=True):
        with torch.no_grad():
            states = reference(torch.tensor([row])).last_hidden_state[0]
        want = torch.nn.functional.normalize(states[0] if pool == "cls" else states.mean(0), dim=0)
        assert output["embedding"] == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize("more", [["token_type_ids"], [], None])  # None: as the class of BERT's tokenizer
def test_rerank_tells_query_and_document_apart(more: list[str] | None, tmp_path: Path) -> None:
    """Through a tokenizer that gives the second text another type, as BERT's does; but not where its config leaves
    types out of what a model gets."""
    reference = write(tmp_path, "bert", "ForSequenceClassification", num_labels=1, vocab_size=4096)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": pair[:1], "pair": pair, "special_tokens": {},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    told["model_input_names"] = None if more is None else ["input_ids", "attention_mask", *more]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in told.items() if v is not None}))
    pairs = [["What is it?", "A small model."], ["Hello", "The capital of France is Paris."]]
    with Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False) as llm:
        outputs = llm.rerank(pairs)
        assert llm.tokenizer is not None
        ids = [[llm.tokenizer.encode(text) for text in both] for both in pairs]
    if more is not None:
        hf = transformers.AutoTokenizer.from_pretrained(tmp_path)(*pairs[0])
        assert ("token_type_ids" in hf) == bool(more)
    for (first, second), output in zip(ids, outputs, strict=True):
        types = torch.tensor([[0] * len(first) + [int(more != [])] * len(second)])
        with torch.no_grad():
            want = reference(torch.tensor([first + second]), token_type_ids=types).logits[0, 0]
        assert output["embedding"] == pytest.approx(float(want), abs=TOLERANCE)


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_cut_as_transformers_cuts_them(side: str, tmp_path: Path) -> None:
    """The longest first, as sentence-transformers' CrossEncoder asks it to, and only pairs."""
    write(tmp_path, "bert", "ForSequenceClassification", num_labels=1, vocab_size=4096)
    tokenizer, told = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    mark = {"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}}
    parts = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    ids = [transformers.AutoTokenizer.from_pretrained(BOX).convert_tokens_to_ids("<|end_of_text|>")]
    processor = {
        "type": "TemplateProcessing", "single": [mark, parts[0]], "pair": [mark, parts[0], mark, parts[1], mark],
        "special_tokens": {"<|end_of_text|>": {"id": "<|end_of_text|>", "ids": ids, "tokens": ["<|end_of_text|>"]}},
    }  # fmt: skip
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"post_processor": processor}))
    told.write_text(json.dumps(json.loads(told.read_text()) | {"model_max_length": 13, "truncation_side": side}))
    hf, text = transformers.AutoTokenizer.from_pretrained(tmp_path), "A somewhat longer text about nothing at all, see."
    pairs = [[text, "No"], ["No", text], [text, text[2:]], [text[2:], text], ["Hi", "No"], ["", text]]
    with Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False) as llm:
        assert llm.tokenizer is not None
        for pair, most in itertools.product(pairs, (4, 13, 16, 99)):
            want = hf(*pair, truncation="longest_first", max_length=most, return_token_type_ids=True)
            got = llm.tokenizer.encode_pair(*pair, most)
            assert (got.ids, got.type_ids) == (want.input_ids, want.token_type_ids)
        assert [len(ids) for ids in pair_ids(llm._context, [[text * 40, text], ["Hi", "No"]])] == [13, 6]
        assert llm.encode(text)["meta_info"]["prompt_tokens"] > 13


def test_a_pair_is_no_longer_than_the_context(tmp_path: Path) -> None:
    write(tmp_path, "bert", "ForSequenceClassification", num_labels=1, vocab_size=4096)
    told = tmp_path / "tokenizer_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"model_max_length": int(1e30)}))
    with Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False) as llm:
        assert len(llm.rerank([["Many words. " * 999, "No"]])) == 1
        assert len(pair_ids(llm._context, [["Many words. " * 99] * 2])[0]) == SIZES["max_position_embeddings"]
    told.write_text(json.dumps(json.loads(told.read_text()) | {"truncation_side": "middle"}))
    with pytest.raises(ModelLoadError, match="truncation_side must be 'left' or 'right', got 'middle'"):
        Engine(model_path=str(tmp_path), device="cpu", enable_torch_compile=False)


def test_the_files_of_a_cross_encoder(tmp_path: Path) -> None:
    """As sentence-transformers writes them: one module."""
    config = {"hidden_size": 48, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "x.Transformer"}]')
    run = {"text": {"method": "forward", "method_output_name": "logits"}}
    said = {"transformer_task": "sequence-classification", "modality_config": run, "module_output_name": "scores"}
    whole = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None, "activation_fn": "torch.Sigmoid"}
    files = {"sentence_bert_config.json": said | {"max_seq_length": 30}, "config_sentence_transformers.json": whole}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_pooling(tmp_path, config) == Pooling(max_length=30, activation="torch.Sigmoid")
    for name, change in (
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}),
        ("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "a"}),
    ):
        (tmp_path / name).write_text(json.dumps(files[name] | change))
        with pytest.raises(UnsupportedFeatureError, match=list(change)[-1]):
            read_pooling(tmp_path, config)
        (tmp_path / name).write_text(json.dumps(files[name]))
    (tmp_path / "sentence_bert_config.json").unlink()
    modules = [{"path": "1_Pooling" * n, "type": f"x.{kind}"} for n, kind in enumerate(("Transformer", "Pooling"))]
    (tmp_path / "modules.json").write_text(json.dumps(modules))  # which a classifier does not need
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert read_pooling(tmp_path, config).activation == "torch.Sigmoid"


@pytest.mark.parametrize(("name", "key"), [("bert", "hidden_act"), ("modernbert", "hidden_activation")])
def test_null_is_the_default_activation(name: str, key: str) -> None:
    base, overrides = CASES[name]
    config = getattr(transformers, f"{base}Config")(**(SIZES | overrides)).to_dict() | {
        "architectures": [f"{base}Model"]
    }
    assert spec_from_config(config | {key: None}) == spec_from_config(config)


def test_windows_of_modernbert_by_their_other_name() -> None:
    base, overrides = CASES["modernbert"]
    config = getattr(transformers, f"{base}Config")(**(SIZES | overrides))
    found = config.to_dict() | {"architectures": [f"{base}Model"]}
    config.sliding_window = 5
    assert spec_from_config(found | {"sliding_window": 5}) == spec_from_config(
        found | {"local_attention": config.local_attention}
    )
    with pytest.raises(ModelLoadError, match="sliding_window"):
        spec_from_config(found | {"sliding_window": False})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ("bert", {"is_decoder": True}, "is_decoder"),
    ("bert", {"hidden_act": "relu"}, "hidden_act"),
    ("bert", {"hidden_act": ["gelu"]}, "hidden_act"),
    ("modernbert", {"hidden_activation": "relu"}, "hidden_activation"),
    ("modernbert", {"hidden_activation": {"a": 1}}, "hidden_activation"),
    ("embeddinggemma", {"is_causal": False}, "is_causal = False"),
    ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_is_not_built_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    base, overrides = CASES[name]
    config = getattr(transformers, f"{base}Config")(**(SIZES | overrides)).to_dict() | change
    with pytest.raises(UnsupportedArchitectureError, match=message):
        spec_from_config(config | {"architectures": [f"{base}Model"]})


@pytest.mark.parametrize("name", ["bert", "xlm-r", "modernbert"])
@torch.no_grad()
def test_a_changed_field_is_honoured_or_refused(name: str, tmp_path: Path) -> None:
    """As test_config_fields.py, on hidden states."""
    reference, [row] = write(tmp_path, name), prompts((40,))
    base, state = json.loads((tmp_path / "config.json").read_text()), reference.state_dict()
    compared = changed = 0
    for key, value in base.items():
        if key in ("architectures", "model_type", "dtype", "transformers_version", "rope_parameters", "layer_types"):
            continue
        kind = type(value)
        others: list[Any] = [None, *([not value] if kind is bool else [value + 1, 2 * value] if kind is int else
                             [value * 1.5 + 0.1] if kind is float else [f"{value}x", "gelu_new"])]  # fmt: skip
        for other in others:
            config = base | {key: other}
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                model = type(reference)(type(reference.config).from_dict(config)).eval()
                model.load_state_dict(state)
                want = model(torch.tensor([row])).last_hidden_state[0]
                got = hidden(tmp_path, spec_from_config(read_config(tmp_path)), [row])[0]
            except Exception:  # refused by one of both
                continue
            compared += 1
            changed += not torch.equal(want, reference(torch.tensor([row])).last_hidden_state[0])
            assert (got - want).abs().max() < TOLERANCE, (key, other)
    assert compared > 10 and changed >= 1
