"""Llama (1 to 3.x): the pre-norm decoder.

    hidden = embed[token]
    per layer:  hidden += attention(rms_norm(hidden));  hidden += down(silu(gate) * up) of rms_norm(hidden)
    logits = unembed(rms_norm(hidden))

Norm weights and biases carry the activations' dtype (float32 on the CPU, the model's on CUDA); matrices keep theirs.
"""

from fengine.models.family import Family
from fengine.models.fields import DECODER, READ
from fengine.models.reader import decoder_spec, refuse_layer_types
from fengine.models.spec import Config, ModelSpec

FIELDS = {**DECODER, "attention_bias": READ, "mlp_bias": READ, "layer_types": READ}


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `reader.decoder_spec`."""
    refuse_layer_types(config)
    return decoder_spec(config)


FAMILY = Family("LlamaForCausalLM", "llama", FIELDS, spec_from_hf)
