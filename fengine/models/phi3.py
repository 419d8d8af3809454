"""Phi-3, Phi-3.5 and Phi-4: Llama's decoder with q, k, v and gate, up joined in the checkpoint; long contexts by
longrope, whose long factors hold for the whole of a context longer than that of pretraining; Phi-4-mini turns a part of
each head."""

from functools import partial

from fengine.errors import UnsupportedArchitectureError
from fengine.models.family import DECODER, READ, TRAINING, Family
from fengine.models.reader import ConfigReader, decoder_spec, sliding_window, windowed
from fengine.models.spec import ModelSpec
from fengine.models.weights import joined_mlp, layer_weights

FIELDS = {**DECODER, "sliding_window": READ, "resid_pdrop": TRAINING, "embd_pdrop": TRAINING,
          **dict.fromkeys(("full_attn_mod", "interpolate_factor"), "is not read by transformers")}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    spec = decoder_spec(read, partial_rotary=True)
    if spec.rope.kind not in ("default", "longrope"):
        raise UnsupportedArchitectureError(f"rope_type = {spec.rope.kind!r} is not one of Phi-3; longrope is.")
    return windowed(spec, sliding_window(read))


FAMILY = Family(
    "Phi3ForCausalLM", "phi3", FIELDS, spec_from_hf, DEFAULTS,
    leaves=partial(layer_weights, fused_qkv=True, mlp=joined_mlp),
)  # fmt: skip
