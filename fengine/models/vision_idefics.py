"""Idefics 3 and SmolVLM: an image is cut into tiles beside the whole, each through SigLIP's tower by itself.

    patches -> layers -> norm -> the patches of a square as one -> linear -> embeddings of a tile

In the prompt each tile stands behind a token that says which one it is."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from fengine.errors import InvalidRequestError
from fengine.models import llama
from fengine.models import vision_tower as tower
from fengine.models.family import NAMES, READ, Piece, Vision
from fengine.models.kv_state import Params
from fengine.models.reader import ConfigReader
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_family import WHOLE, VisionFamily, renamed
from fengine.models.vision_layers import matrix, project
from fengine.models.weights import Weight

OLD = ("perceiver_config", "use_resampler", "qk_layer_norms", "neftune_noise_alpha", "is_llama_config",
       "pixel_shuffle_factor", "rope_interleaved", "use_base_siglip", "size",
       "max_image_size", "image_seq_len", "freeze_vision_layers", "freeze_text_layers", "vocab_size",
       "additional_vocab_size")  # fmt: skip
FIELDS = {
    **dict.fromkeys(OLD, "is not read by transformers"), **WHOLE, "image_token_id": READ, "scale_factor": READ,
    "transformers.js_config": NAMES, "_pad_token_id": "padding is never computed",
}  # fmt: skip
VISION_FIELDS = {**tower.FIELDS, **dict.fromkeys(OLD, "is not read by transformers")}
TEXT = llama.FAMILY._replace(
    fields={**dict.fromkeys(OLD, "is not read by transformers"), "transformers.js_config": NAMES, **llama.FAMILY.fields}
)
SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec) -> ModelSpec:
    merge = whole.size("scale_factor", 64, default=2)
    found = tower.square(part, whole.size("image_token_id", 1 << 24, default=128257), merge)
    return replace(spec, vision=found)


def weights(hidden: int, vision: VisionSpec) -> list[Weight]:
    columns = vision.width * vision.merge**2
    return [*tower.weights(vision), *matrix("project", ["projector"], hidden, columns, bias=False)]


def buckets(count: int, side: int) -> Tensor:
    """Which of `side` learned positions each of so many patches of a side takes, as transformers rounds. Pure."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    at = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(at, bounds, right=True)


@lru_cache(maxsize=32)
def places(height: int, width: int, side: int, device: torch.device) -> Tensor:
    """Of so many rows and columns of patches, each one's learned position. Pure; kept, as tiles have one size."""
    return (buckets(height, side)[:, None] * side + buckets(width, side)).flatten().to(device)


def encode(leaves: Params, vision: VisionSpec, arrays: dict[str, Tensor]) -> Tensor:
    """The embeddings of a tile, [tokens, D], from pixels_CHW. Pure."""
    pixels_CHW = arrays["pixels_CHW"]
    height, width = (size // vision.patch for size in pixels_CHW.shape[1:])
    side, m = vision.image_size // vision.patch, vision.merge
    x_ID = tower.features(leaves, vision, pixels_CHW, places(height, width, side, pixels_CHW.device))
    squares_IK = rearrange(x_ID, "(h a w b) d -> (h w) (a b d)", h=height // m, a=m, b=m)
    return project(squares_IK, leaves, "project")


def pieces(vision: VisionSpec, features: dict[str, Any]) -> list[Piece]:
    """The tiles row by row, then the whole; in front of each what says so. Pure. Errors: InvalidRequestError."""
    tiles, mask = features["pixel_values"][0], features["pixel_attention_mask"][0]
    rows, columns = (int(np.asarray(features[name]).flatten()[0]) for name in ("rows", "cols"))
    if not mask.all():
        raise InvalidRequestError("its processor leaves part of a tile empty, which is not built")
    fake, patches = "<fake_token_around_image>", (vision.image_size // vision.patch) ** 2
    found = []
    for i, tile in enumerate(tiles[: rows * columns + 1]):
        last = i == rows * columns
        name = "<global-img>" if last else f"<row_{i // columns + 1}_col_{i % columns + 1}>"
        line = "" if not i else "\n\n" if last else "\n" if i % columns == 0 else ""
        after = fake if last else ""
        found.append(Piece({"pixels_CHW": tile}, patches // vision.merge**2, patches, line + fake + name, after))
    return found


PREFIXES = {
    "model.vision_model.": "vision.", "model.text_model.": "model.",
    "model.connector.modality_projection.proj.": "projector.",
}  # fmt: skip


def _family(architecture: str, model_type: str) -> VisionFamily:
    vision = Vision(encode, pieces, options=(("return_row_col_info", True),))
    return VisionFamily(
        architecture, model_type, FIELDS, VISION_FIELDS, read, weights, vision, partial(renamed, PREFIXES),
        {"llama": TEXT}, vision_defaults=SIGLIP,
    )  # fmt: skip


FAMILY = _family("Idefics3ForConditionalGeneration", "idefics3")
SMOLVLM = _family("SmolVLMForConditionalGeneration", "smolvlm")
