"""Hunyuan (dense): Llama's decoder with norms on q and k, which stand behind the rotary embedding."""

from fengine.models.family import DECODER, READ, SPEED, Family, refuse_others
from fengine.models.reader import ConfigReader, decoder_spec, joined_rope
from fengine.models.spec import ModelSpec
from fengine.models.weights import LayerWeights, Weight, layer_weights

UNREAD = (
    "cla_share_factor", "dense_list", "norm_type", "use_rotary_pos_emb", "pool_type", "num_media_embeds",
    "mask_init_id", "im_start_id", "im_end_id", "im_newline_id", "image_token_id", "text_start_id",
    "text_end_id", "video_start_id", "video_end_id", "anyres_pooling_size", "max_image_size",
)  # fmt: skip
FIELDS = {
    **DECODER, "attention_bias": READ, "use_qk_norm": "transformers norms always", "org_vocab_size": "a note",
    **dict.fromkeys(("eod_token_id", "pad_id", "eod_id"), "a token's name"),
    "attention_head_dim": "transformers reads head_dim", "enable_lm_head_fp32": SPEED,
    **dict.fromkeys(UNREAD, "is not read by transformers, or names a token"),
}  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-5}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    spec = decoder_spec(stretched(read))
    refuse_others({"attention_factor": spec.rope.attention_factor}, {"attention_factor": 1.0})  # norms stand behind it
    return spec


def stretched(read: ConfigReader) -> ConfigReader:
    """A rotary embedding of type dynamic with `alpha` is an ordinary one of a larger base."""
    rope = joined_rope(read)
    if not rope.get("alpha") or "dynamic" not in (rope.get("rope_type"), rope.get("type")):
        return read
    part, width = ConfigReader(rope, read.problems), read.config.get("head_dim")
    alpha, theta = part.number("alpha", 0.0, 1e6), part.number("rope_theta", 0.0, 1e15)
    if type(width) is not int or width < 4:
        read.problems.append(f"rope_scaling with alpha needs head_dim, got {width!r}")
        width = 4
    theta *= alpha ** (width / (width - 2))
    return read.changed({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}})


def leaves(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
    norms = (("q_turned_norm_K", "self_attn.query_layernorm"), ("k_turned_norm_K", "self_attn.key_layernorm"))
    return [*layer_weights(spec, layer), *(layer.norm(key, name, spec.head_dim) for key, name in norms)]


FAMILY = Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", FIELDS, spec_from_hf, DEFAULTS, leaves=leaves)
