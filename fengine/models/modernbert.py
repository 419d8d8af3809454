"""ModernBERT: an encoder with norms in front of attention and MLP, rotary embedding, gated MLPs and, in two of three
layers, a window to both sides. Names are those of decoders; the norm of the embeddings is the first layer's."""

import re
from functools import partial

from fengine.errors import UnsupportedArchitectureError
from fengine.models.bert import DROPOUTS, head_weights
from fengine.models.family import COMMON, READ, SPEED, TRAINING, Family, refuse_others
from fengine.models.gemma import UNREAD, ropes_by_type
from fengine.models.reader import FULL, GELU_ALL, SLIDING, ConfigReader, decoder_spec, rope_spec, windowed
from fengine.models.rope import LOCAL
from fengine.models.sources import Source
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, Weight, decoder_weights, joined_mlp, layer_weights, with_bias

OWN = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_activation",
    "max_position_embeddings", "norm_eps", "norm_bias", "attention_bias", "mlp_bias", "layer_types", "rope_parameters",
    "local_attention", "sliding_window", "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers",
    "classifier_pooling", "classifier_bias", "classifier_activation",
)  # fmt: skip
HEADS = ("decoder_bias", "tie_word_embeddings", "sparse_prediction", "sparse_pred_ignore_index")
FIELDS = {
    **{key: why for key, why in COMMON.items() if key != "is_decoder"}, **dict.fromkeys(OWN, READ),
    **dict.fromkeys((*DROPOUTS, "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor"), TRAINING),
    **dict.fromkeys(HEADS, "of a head that is not built"), "position_embedding_type": "is not read by transformers",
    **dict.fromkeys(("deterministic_flash_attn", "reference_compile", "repad_logits_with_grad"), SPEED),
    "layer_norm_eps": "is not read by transformers", "hidden_act": "is not read by transformers",
}  # fmt: skip
DEFAULTS = {
    "norm_eps": 1e-5, "hidden_activation": "gelu", "local_attention": 128, "classifier_activation": "gelu",
    "classifier_pooling": "cls",
}  # fmt: skip
EPS = 1e-5  # of the head's norm


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    config, pool = read.config, read.config["classifier_pooling"]
    if pool not in ("cls", "mean"):
        raise UnsupportedArchitectureError(f"classifier_pooling = {pool!r} is not supported; 'cls' and 'mean' are.")
    if config["architectures"][0].endswith("Classification"):
        refuse_others(config, {"classifier_activation": "gelu", "norm_eps": EPS})
    both_sides = read.size("local_attention", 1 << 27, least=2)
    reach = read.size("sliding_window", 1 << 27, default=both_sides // 2)  # another way to say it
    interval = read.size("global_attn_every_n_layers", 1 << 12, default=3)
    far, near = ropes_by_type(
        config | {"rope_theta": config.get("global_rope_theta") or 160_000.0},
        160_000.0, config.get("local_rope_theta") or 10_000.0,
    )  # fmt: skip
    spec = decoder_spec(
        read.changed({"rope_parameters": far} | UNREAD), norm_eps="norm_eps",
        activation=("hidden_activation", GELU_ALL), causal=False, generates=False, layer_norm=True, embed_norm=True,
        score_pool=pool, norm_bias=read.flag("norm_bias"), score_bias=read.flag("classifier_bias"),
        rope_local=rope_spec(ConfigReader({"rope_parameters": near}, read.problems), 2, 1),
    )  # fmt: skip
    types = config.get("layer_types") or [SLIDING if i % interval else FULL for i in range(spec.num_layers)]
    return windowed(spec, reach + 1, types, near=LOCAL, both_ways=True)


def rename(spec: ModelSpec, name: str) -> str:
    """The name that a tensor would have in a decoder. Pure."""
    name = name.removeprefix("model.")
    if name.startswith(("head.", "decoder.")) and not spec.num_labels:
        return ""
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(\w+)", name)
    parts = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn.Wqkv": "self_attn.qkv_proj",
             "attn.Wo": "self_attn.o_proj", "mlp.Wi": "mlp.gate_up_proj", "mlp.Wo": "mlp.down_proj"}  # fmt: skip
    if found is not None:
        return f"model.layers.{found[1]}.{parts.get(found[2], found[2])}.{found[3]}"
    wholes = {"embeddings.tok_embeddings": EMBEDDING.removesuffix(".weight"), "final_norm": "model.norm",
              "embeddings.norm": "model.layers.0.input_layernorm", "head.dense": "score_dense",
              "head.norm": "score_norm", "classifier": "score"}  # fmt: skip
    module, _, kind = name.rpartition(".")
    return f"{wholes.get(module, module)}.{kind}"


def weights(spec: ModelSpec) -> list[Weight]:
    found = decoder_weights(spec, partial(layer_weights, fused_qkv=True, mlp=joined_mlp))
    norm = Weight(("score_norm_D",), (Source("score_norm.weight", (spec.hidden_size,)),), "D", fill="one")
    norm = with_bias(norm) if spec.norm_bias else norm
    return found + ([*head_weights(spec, bias=spec.score_bias), norm] if spec.num_labels else [])


FAMILY = Family(
    "ModernBertForMaskedLM", "modernbert", FIELDS, spec_from_hf, DEFAULTS, base="ModernBert", weights=weights,
    rename=rename,
)  # fmt: skip
