"""Cohere 2 (Command R7B, Command A): attention and MLP side by side behind one layer norm without a bias; layers with a
window have rotary embedding, in pairs of neighbours, those that see all have none; tied, scaled logits.
"""

from dataclasses import replace

from torch import Tensor

from fengine.models import layers
from fengine.models.family import Family
from fengine.models.fields import DECODER, READ, SPEED
from fengine.models.kv_state import Params, StepBatch
from fengine.models.reader import FULL, SLIDING, ConfigReader, decoder_spec, windowed
from fengine.models.rope import NONE
from fengine.models.spec import Config, LayerKind, ModelSpec
from fengine.models.weights import LayerWeights, Weight, attention_weights, decoder_weights, mlp_weights

OWN = ("attention_bias", "logit_scale", "layer_norm_eps", "sliding_window", "sliding_window_pattern", "layer_types")
FIELDS = {**DECODER, **dict.fromkeys(OWN, READ), "cache_implementation": SPEED}
DEFAULTS = {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    bias, scale = read.flag("attention_bias"), read.number("logit_scale", 0.0, 1e6, default=0.0625)
    window = None if config["sliding_window"] is None else read.size("sliding_window", 1 << 27)
    pattern = read.size("sliding_window_pattern", 1 << 12, default=4)
    eps = read.number("layer_norm_eps", 0.0, 1.0, default=1e-5)
    read.done(FAMILY.architecture)
    spec = decoder_spec(
        config | {"rms_norm_eps": eps, "head_dim": None}, FAMILY.architecture, qkv_bias=bias, o_bias=bias,
        interleaved=True, logit_scale=scale, layer_norm=True,
    )  # fmt: skip
    found = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(spec.num_layers)]
    types = config.get("layer_types") or found
    kinds = tuple(LayerKind(rope="rope_MK" if kind == SLIDING and window is not None else NONE) for kind in types)
    return windowed(replace(spec, kinds=kinds), window, types)


def layer(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: StepBatch,
    normed_TD: Tensor, residual_TD: Tensor, next_norm_D: Tensor | None,
) -> layers.LayerOut:  # fmt: skip
    """residual += attention(normed) + mlp(normed)."""
    delta_TD, k_PSGK, v_PSGK = layers.attend(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD)
    mlp_TD = layers.gated_mlp(layer, spec, batch.adapters, normed_TD)
    normed_TD, residual_TD = layers.add_norm(mlp_TD, residual_TD + delta_TD, next_norm_D, spec)
    return normed_TD, residual_TD, k_PSGK, v_PSGK


def layer_weights(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    """Pure."""
    norm = layer.norm("attn_norm_D", "input_layernorm", spec.hidden_size)
    return [norm, *attention_weights(spec, layer), *mlp_weights(spec, layer)]


def weights(spec: ModelSpec) -> list[Weight]:
    """Pure."""
    return decoder_weights(spec, layer_weights)


FAMILY = Family("Cohere2ForCausalLM", "cohere2", FIELDS, spec_from_hf, DEFAULTS, layer, weights=weights)
