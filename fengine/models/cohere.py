"""Cohere (Command R, R+) and Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one layer norm
without a bias; rotary embedding in pairs of neighbours, tied, scaled logits. The first may norm each head with a weight
of its own; in the second most layers have a window, and those that see all have no rotary embedding."""

from functools import partial

from torch import Tensor

from fengine.models import layers
from fengine.models.family import DECODER, READ, SPEED, Family
from fengine.models.kv_state import Params, Tensors
from fengine.models.reader import ConfigReader, decoder_spec, every, sliding_window, windowed
from fengine.models.rope import NONE
from fengine.models.spec import ModelSpec
from fengine.models.weights import layer_weights

OWN = ("attention_bias", "logit_scale", "layer_norm_eps", "use_qk_norm")
WINDOWS = ("sliding_window", "sliding_window_pattern", "layer_types")
FIELDS = {**DECODER, **dict.fromkeys(OWN, READ)}
SHAPES = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
)  # fmt: skip
FIELDS2 = {
    **DECODER, **dict.fromkeys((*OWN[:3], *WINDOWS), READ), "cache_implementation": SPEED,
    "_sliding_window_pattern": "what layer_types was made of",
    **dict.fromkeys(SHAPES, "is not read by transformers, which builds one shape only"),
}  # fmt: skip
DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 500000.0, "layer_norm_eps": 1e-5}
DEFAULTS2 = {
    "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_norm_eps": 1e-5,
}  # fmt: skip


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    return decoder_spec(
        read, norm_eps="layer_norm_eps", interleaved=True, layer_norm=True, qk_norm=read.flag("use_qk_norm"),
        logit_scale=read.number("logit_scale", 0.0, 1e6, default=0.0625),
    )  # fmt: skip


def spec2_from_hf(read: ConfigReader) -> ModelSpec:
    spec, window = spec_from_hf(read), sliding_window(read)
    pattern = read.size("sliding_window_pattern", 1 << 12, default=4)
    types = read.config.get("layer_types") or every(pattern, spec.num_layers)
    return windowed(spec, window, types, near=NONE if window is None else None, far=NONE)


def layer(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors,
    normed_TD: Tensor, residual_TD: Tensor, next_norm: layers.Norm | None,
) -> layers.LayerOut:  # fmt: skip
    """residual += attention(normed) + mlp(normed)."""
    delta_TD, k_PSGK, v_PSGK = layers.attend(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD)
    mlp_TD = layers.gated_mlp(layer, spec, layers.adapters_of(batch), normed_TD)
    normed_TD, residual_TD = layers.add_norm(mlp_TD, residual_TD + delta_TD, next_norm, spec)
    return normed_TD, residual_TD, k_PSGK, v_PSGK


leaves = partial(layer_weights, norms=("input_layernorm", None, None, None))
FAMILY = Family("CohereForCausalLM", "cohere", FIELDS, spec_from_hf, DEFAULTS, layer, leaves=leaves)
FAMILY2 = Family("Cohere2ForCausalLM", "cohere2", FIELDS2, spec2_from_hf, DEFAULTS2, layer, leaves=leaves)
