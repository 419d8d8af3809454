"""OLMo 2 and 3: norms stand behind attention and MLP, not before; q and k are normed over all their heads at once. In
OLMo 3 three of four layers have a window, and may have a rotary embedding of their own. OLMoE: norms before attention
and experts, which are in every layer; q and k as in the others."""

from functools import partial

from fengine.models.family import DECODER, READ, Family, refuse_others
from fengine.models.gemma import UNREAD, gemma_windows, ropes_by_type
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import ConfigReader, decoder_spec
from fengine.models.spec import ModelSpec
from fengine.models.weights import layer_weights

FIELDS = {**DECODER, "attention_bias": READ}
FIELDS3 = {**FIELDS, "sliding_window": READ, "layer_types": READ}
DEFAULTS = {"rms_norm_eps": 1e-5}
THETA3 = 500000.0
DEFAULTS3 = {**DEFAULTS, "rope_theta": THETA3, "sliding_window": 4096}


def spec3_from_hf(read: ConfigReader) -> ModelSpec:
    refuse_others(read.config, {"rope_theta": THETA3})  # of sliding layers, too, in transformers 4 alone
    far, near = ropes_by_type(read.config, THETA3, THETA3)
    spec = spec_from_hf(read.changed({"rope_parameters": far} | UNREAD))
    return gemma_windows(read, spec, near, 4)


def moe_spec(read: ConfigReader) -> ModelSpec:
    return with_experts(read, spec_from_hf(read), read.flag("norm_topk_prob"))


spec_from_hf = partial(decoder_spec, qk_norm=True, qk_norm_whole=True)
leaves = partial(layer_weights, norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"))
OLMO2 = Family("Olmo2ForCausalLM", "olmo2", FIELDS, spec_from_hf, DEFAULTS, leaves=leaves)
OLMO3 = Family("Olmo3ForCausalLM", "olmo3", FIELDS3, spec3_from_hf, DEFAULTS3, leaves=leaves)
OLMOE = Family(
    "OlmoeForCausalLM", "olmoe", {**FIELDS, **EXPERT_FIELDS, "norm_topk_prob": READ}, moe_spec, DEFAULTS,
    leaves=moe_layer(),
)  # fmt: skip
