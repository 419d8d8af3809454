"""BERT, RoBERTa and XLM-R: encoders, all of whose tokens see each other. Learned positions, layer norms with biases
that stand behind attention and MLP, no rotary embedding; the head of a classifier looks at the first token.

Names are those of decoders. The norm behind a layer is the one in front of the next: so a layer is

    x = mlp_norm(x + attention(x));  x = next_norm(x + mlp(x))"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from torch import Tensor

from fengine.models import layers
from fengine.models.family import COMMON, OUTPUTS, READ, TRAINING, Family, refuse_others
from fengine.models.kv_state import Params, Tensors
from fengine.models.reader import GELU_ALL, ConfigReader, decoder_spec
from fengine.models.rope import NONE
from fengine.models.sources import Source
from fengine.models.spec import LayerKind, ModelSpec
from fengine.models.weights import EMBEDDING, Weight, decoder_weights, layer_weights, plain_mlp

OWN = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "position_embedding_type",
)  # fmt: skip
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
POOLER = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type",
)  # fmt: skip
FIELDS = {
    **{key: why for key, why in COMMON.items() if key != "is_decoder"}, **dict.fromkeys(OWN, READ),
    **dict.fromkeys(DROPOUTS, TRAINING), "tie_word_embeddings": "of a head that is not built", "output_past": OUTPUTS,
    **dict.fromkeys(POOLER, "is not read by transformers"),
}  # fmt: skip
DEFAULTS = {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu"}
PARTS: Mapping[str, str] = MappingProxyType({
    "embeddings.word_embeddings": EMBEDDING.removesuffix(".weight"),
    "embeddings.position_embeddings": "model.positions", "embeddings.token_type_embeddings": "model.types",
    "embeddings.LayerNorm": "model.layers.0.input_layernorm", "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj", "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj", "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj", "output.dense": "mlp.down_proj",
})  # fmt: skip


def spec_from_hf(read: ConfigReader, padded: bool) -> ModelSpec:
    """`padded`: the first token's position is behind that of padding; a padding token inside a text is one like any
    other, for which transformers does not count on."""
    refuse_others(read.config, {"position_embedding_type": "absolute"})
    offset = read.size("pad_token_id", 1 << 24, default=1, least=0) + 1 if padded else 0
    rows = read.size("max_position_embeddings", 1 << 24)
    if rows <= offset:
        read.problems.append(f"max_position_embeddings ({rows}) leaves no position behind that of padding ({offset})")
    spec = decoder_spec(
        read.changed({"max_position_embeddings": rows - offset}), norm_eps="layer_norm_eps",
        activation=("hidden_act", GELU_ALL), causal=False, generates=False, layer_norm=True, norm_bias=True,
        embed_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True, positions=rows, position_offset=offset,
        token_types=read.size("type_vocab_size", 1 << 10), score_pool="cls",
    )  # fmt: skip
    return replace(spec, kinds=(LayerKind(rope=NONE),) * spec.num_layers)


def layer(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors,
    normed_TD: Tensor, residual_TD: Tensor, next_norm: layers.Norm | None,
) -> layers.LayerOut:  # fmt: skip
    """As the file says; the stream is what was normed."""
    delta_TD, k_PSGK, v_PSGK = layers.attend(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD)
    normed_TD, _ = layers.add_norm(delta_TD, normed_TD, (layer["mlp_norm_D"], 0), spec)
    delta_TD = layers.mlp(layer, spec, layers.adapters_of(batch), normed_TD)
    normed_TD, _ = layers.add_norm(delta_TD, normed_TD, next_norm, spec)
    return normed_TD, normed_TD, k_PSGK, v_PSGK


def rename(spec: ModelSpec, name: str, head: str) -> str:
    """The name that a tensor would have in a decoder. `head`: the dense layer of a classifier, which with RoBERTa is
    not the pooler, though its first classifiers hold one. Pure."""
    name = re.sub(r"^(bert|roberta)\.", "", name)  # the first BERTs, and what is trained from them, have other norms
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    module, _, kind = name.rpartition(".")
    found = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", module)
    if found is None:
        heads = {head: "score_dense", "classifier.out_proj": "score", "classifier": "score"} if spec.num_labels else {}
        ours = {**PARTS, **heads}.get(module)
        return _unread(name) if ours is None else f"{ours}.{kind}"
    index, part = int(found[1]), found[2]
    if part == "output.LayerNorm":
        last = index == spec.num_layers - 1
        return f"model.norm.{kind}" if last else f"model.layers.{index + 1}.input_layernorm.{kind}"
    return f"model.layers.{index}.{PARTS.get(part, part)}.{kind}"


def _unread(name: str) -> str:
    """What no model here needs: a pooler that is no head, one that tells masked tokens."""
    return "" if name.startswith(("pooler.", "cls.", "lm_head.")) else name


def weights(spec: ModelSpec) -> list[Weight]:
    tables = (("position_ND", "model.positions", spec.positions), ("type_ND", "model.types", spec.token_types))
    found = decoder_weights(spec, partial(layer_weights, mlp=plain_mlp))
    found += [
        Weight((key,), (Source(f"{name}.weight", (rows, spec.hidden_size)),), "ND", fill="small")
        for key, name, rows in tables
    ]
    return found + (head_weights(spec, bias=True) if spec.num_labels else [])


def head_weights(spec: ModelSpec, bias: bool) -> list[Weight]:
    """The dense layer in front of a classifier's last. Pure."""
    size = spec.hidden_size
    dense = Weight(("score_dense",), (Source("score_dense.weight", (size, size)),), "DD")
    added = Weight(("score_dense_bias_D",), (Source("score_dense.bias", (size,)),), "D", fill="small")
    return [dense, added] if bias else [dense]


def _family(base: str, model_type: str, padded: bool, head: str) -> Family:
    return Family(
        f"{base}ForMaskedLM", model_type, FIELDS, partial(spec_from_hf, padded=padded), DEFAULTS, layer, base=base,
        weights=weights, rename=partial(rename, head=head),
    )  # fmt: skip


FAMILY = _family("Bert", "bert", False, "pooler.dense")
ROBERTA = _family("Roberta", "roberta", True, "classifier.dense")
XLM_R = _family("XLMRoberta", "xlm-roberta", True, "classifier.dense")
