"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with experts, and one more that every token uses behind a gate."""

from dataclasses import replace

from fengine.models import qwen2
from fengine.models.family import Family
from fengine.models.fields import READ
from fengine.models.moe import SPARSE_FIELDS, moe_layer, with_sparse_layers
from fengine.models.reader import ConfigReader, decoder_spec, qwen_windows
from fengine.models.spec import Config, ModelSpec

FIELDS = {**qwen2.FIELDS, **SPARSE_FIELDS, "shared_expert_intermediate_size": READ, "qkv_bias": READ}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    read = ConfigReader(config)
    spec = decoder_spec(config, qkv_bias=read.flag("qkv_bias", default=True))
    shared = read.size("shared_expert_intermediate_size", 1 << 22)
    spec = qwen_windows(config, with_sparse_layers(read, spec), alternate=True)
    return replace(spec, experts=replace(spec.experts, shared_size=shared)) if spec.experts else spec


FAMILY = Family("Qwen2MoeForCausalLM", "qwen2_moe", FIELDS, spec_from_hf, leaves=moe_layer())
