"""InternVL 3: tiles of an image and the whole, each through InternViT by itself; squares of patches are projected.
InternViT is CLIP's tower with scales behind attention and MLP, and no norm in front."""

import re
from dataclasses import dataclass, replace
from typing import Any

from einops import rearrange
from torch import Tensor

from fengine.errors import UnsupportedArchitectureError
from fengine.models import vision_tower as tower
from fengine.models.family import READ, TRAINING, Piece, Vision, refuse_others
from fengine.models.kv_state import Params
from fengine.models.reader import ConfigReader
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_family import WHOLE, VisionFamily, renamed
from fengine.models.vision_layers import projected, projector, vector
from fengine.models.weights import Weight
from fengine.ops import layer_norm

ONLY = {  # what is built of a setting
    "norm_type": "layer_norm", "use_absolute_position_embeddings": True, "use_qk_norm": False, "use_mean_pooling": True,
    "use_mask_token": False,
}  # fmt: skip
WHOLE_ONLY = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
FIELDS = {
    **WHOLE, **dict.fromkeys(("image_token_id", "downsample_ratio", *WHOLE_ONLY), READ),
    "image_seq_length": "follows from the size of images",
}  # fmt: skip
VISION_FIELDS = {
    **tower.FIELDS, **dict.fromkeys(ONLY, READ), "attention_bias": READ, "layer_scale_init_value": TRAINING,
    **dict.fromkeys(("dropout", "hidden_dropout_prob", "projection_dropout"), TRAINING),
}  # fmt: skip
DEFAULTS = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "hidden_act": "gelu", "layer_norm_eps": 1e-6, "image_size": 448, "patch_size": 14,
}  # fmt: skip
EPS = 1e-5  # of the projector's norm


@dataclass(frozen=True)
class InternVision(VisionSpec):
    """`qkv_bias`: q, k and v have biases."""

    qkv_bias: bool = False


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec) -> ModelSpec:
    refuse_others(part.config, ONLY)
    refuse_others(whole.config, WHOLE_ONLY)
    for name in ("image_size", "patch_size"):
        sides = part.config[name] if isinstance(part.config[name], list) else [part.config[name]]
        if len(set(map(str, sides))) != 1:
            raise UnsupportedArchitectureError(f"vision_config.{name} = {sides!r:.80} is no square's.")
        part = part.changed({name: sides[0]})
    merge = round(1 / whole.number("downsample_ratio", 0.01, 1.0, default=0.5))
    found = tower.square(part, whole.size("image_token_id", 1 << 24, default=151667), merge)
    return replace(spec, vision=InternVision(**vars(found), qkv_bias=part.flag("attention_bias")))


def weights(hidden: int, vision: InternVision) -> list[Weight]:
    columns = vision.width * vision.merge**2
    return [
        *tower.weights(vision, last_norm=False, intern=True, qkv_bias=vision.qkv_bias),
        vector("norm_D", "projector.layer_norm", columns, norm=True, bias=True),
        *projector(hidden, columns),
    ]


def encode(leaves: Params, vision: VisionSpec, arrays: dict[str, Tensor]) -> Tensor:
    """The embeddings of a tile, [tokens, D], from pixels_CHW. Pure."""
    side, m = vision.image_size // vision.patch // vision.merge, vision.merge
    x_ID = tower.features(leaves, vision, arrays["pixels_CHW"])
    x_IK = rearrange(x_ID, "(h a w b) d -> (h w) (a b d)", h=side, a=m, b=m)
    return projected(layer_norm.layer_norm(x_IK, leaves["norm_D"], EPS), leaves)


def pieces(vision: VisionSpec, features: dict[str, Any]) -> list[Piece]:
    """The tiles, and behind several the whole; around them all what says so. Pure."""
    patches, tiles = (vision.image_size // vision.patch) ** 2, features["pixel_values"]
    around = [("<img>" * (i == 0), "</img>" * (i == len(tiles) - 1)) for i in range(len(tiles))]
    return [
        Piece({"pixels_CHW": tile}, patches // vision.merge**2, patches, *texts)
        for tile, texts in zip(tiles, around, strict=True)
    ]


NAMES = (
    (r"encoder\.layer\.(\d+)\.attention\.projection_layer\.", r"encoder.layers.\1.self_attn.out_proj."),
    (r"encoder\.layer\.(\d+)\.attention\.", r"encoder.layers.\1.self_attn."),
    (r"encoder\.layer\.(\d+)\.layernorm_before\.", r"encoder.layers.\1.layer_norm1."),
    (r"encoder\.layer\.(\d+)\.layernorm_after\.", r"encoder.layers.\1.layer_norm2."),
    (r"encoder\.layer\.", "encoder.layers."), (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding.weight"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
)  # fmt: skip


def rename(name: str) -> str:
    """As CLIP's. Pure."""
    name = renamed({prefix: ours for prefix, ours in tower.PREFIXES.items() if "vision_model" not in prefix}, name)
    for pattern, ours in NAMES if name.startswith("vision.") else ():
        name = re.sub(pattern, ours, name)
    return name


FAMILY = VisionFamily(
    "InternVLForConditionalGeneration", "internvl", FIELDS, VISION_FIELDS, read, weights,
    Vision(encode, pieces, options=(("crop_to_patches", True),)), rename, vision_defaults=DEFAULTS,
)  # fmt: skip
