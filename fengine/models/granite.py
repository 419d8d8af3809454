"""Granite 3: Llama's decoder whose embeddings, attention scores, residual additions and logits are scaled; dense, or
with experts that renormalise, each kind of which is one tensor of the checkpoint."""

from fengine.models.family import DECODER, OTHERS, READ, Family
from fengine.models.moe import EXPERT_FIELDS, expert_stacks, moe_layer, with_experts
from fengine.models.reader import LEAST, MOST, ConfigReader, decoder_spec
from fengine.models.spec import ModelSpec

SCALES = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
FIELDS = {**DECODER, "attention_bias": READ, "mlp_bias": READ, **dict.fromkeys(SCALES, READ)}

BLOCK = "block_sparse_moe"
NAMES = (f"{BLOCK}.router.layer", f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight")


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    embed, logits, residual, attention = (read.number(name, LEAST, MOST, default=1.0) for name in SCALES)
    return decoder_spec(
        read, embed_scale=embed, logit_scale=1.0 / logits, residual_scale=residual, attention_scale=attention
    )


def moe_spec(read: ConfigReader) -> ModelSpec:
    return with_experts(read, spec_from_hf(read.changed({"mlp_bias": False})), renormalise=True)


FAMILY = Family("GraniteForCausalLM", "granite", FIELDS, spec_from_hf)
MOE = Family(
    "GraniteMoeForCausalLM", "granitemoe", {**FIELDS, **EXPERT_FIELDS, "mlp_bias": OTHERS}, moe_spec,
    leaves=moe_layer(expert_stacks(*NAMES)),
)  # fmt: skip
