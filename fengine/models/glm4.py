"""GLM-4: half of each head turns, in pairs of neighbours; that of 2025 (0414) has norms before and behind attention and
MLP, that of 2024 (glm-4-9b-chat-hf) before them."""

from functools import partial

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import decoder_spec
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import prenorm_layer, sandwich_layer

FIELDS = {**DECODER, "attention_bias": READ}
DEFAULTS = {
    "rms_norm_eps": 1.5625e-7, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True,
    "partial_rotary_factor": 0.5,
}  # fmt: skip

NORMS = ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    return decoder_spec(config, o_bias=False, partial_rotary=True, interleaved=True)


FAMILY = Family(
    "Glm4ForCausalLM", "glm4", FIELDS, spec_from_hf, DEFAULTS,
    leaves=partial(sandwich_layer, names=NORMS, fused_mlp=True),
)  # fmt: skip
FIRST = Family("GlmForCausalLM", "glm", FIELDS, spec_from_hf, DEFAULTS, leaves=partial(prenorm_layer, fused_mlp=True))
