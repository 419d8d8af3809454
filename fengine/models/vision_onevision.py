"""LLaVA-OneVision: an image as a whole, and cut into tiles, each through SigLIP by itself; the tiles' patches are put
together again, without what only pads them, fewer where they are too many, and each row ends in a learned embedding.
whole, tiles -> SigLIP's layers -> linear, gelu, linear -> the whole's patches, then the tiles' row by row"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate

from fengine.errors import InvalidRequestError, UnsupportedArchitectureError
from fengine.models import vision_llava as llava
from fengine.models import vision_tower as tower
from fengine.models.family import READ, Piece, Vision, refuse_others
from fengine.models.kv_state import Params
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec, VisionSpec
from fengine.models.vision_family import VisionFamily
from fengine.models.vision_layers import projected, projector, vector
from fengine.models.weights import Weight

ONLY = {
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True, "use_image_newline_parameter": True,
}  # fmt: skip
FIELDS = {
    **llava.FIELDS, **dict.fromkeys((*ONLY, "image_grid_pinpoints", "vision_aspect_ratio"), READ),
    **dict.fromkeys(("video_token_index", "video_token_id"), "videos are refused"),
}  # fmt: skip
TEXT = {"vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SIDES = range(384, 2305, 384)


@dataclass(frozen=True)
class OneVision(VisionSpec):
    """`tile`: pixels of a side; `sizes`: height and width of what an image may be resized to; `most`: as many patches
    as so many tiles have are kept of an image."""

    tile: int = 384
    sizes: tuple[tuple[int, int], ...] = ()
    most: int = 9

    @property
    def pixels(self) -> tuple[int, ...]:
        return self.channels, self.tile, self.tile


class Cut(NamedTuple):
    """Of an image: rows and columns of tiles; of their patches the part that is not padding, and how many are kept."""

    tiles: tuple[int, int]
    rows: slice
    columns: slice
    kept: tuple[int, int]


def most_tiles(config: Config, vision: Config) -> int:
    """Of an image, over which it is shrunk. Pure. Errors: UnsupportedArchitectureError for what is not built."""
    refuse_others(vision, {"model_type": "siglip_vision_model"})
    refuse_others(config, ONLY)
    if not (most := re.fullmatch(r"anyres_max_([1-9]\d?)", str(config.get("vision_aspect_ratio", "anyres_max_9")))):
        raise UnsupportedArchitectureError(f"vision_aspect_ratio = {config['vision_aspect_ratio']!r:.80}: anyres_max_N")
    return int(most[1])


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec) -> ModelSpec:
    most = most_tiles(whole.config, part.config)
    tile, patch = (part.size(name, 1 << 14) for name in ("image_size", "patch_size"))
    part = part.changed({"image_size": tile - tile % patch})  # what is over is not read
    found = tower.square(part, llava.image_token(whole, 151646))
    sizes = whole.config.get("image_grid_pinpoints") or [[h, w] for h in SIDES for w in SIDES]
    if not isinstance(sizes, list) or not all(
        isinstance(s, list) and len(s) == 2 and all(type(n) is int and n >= tile for n in s) for s in sizes
    ):
        whole.problems.append(f"image_grid_pinpoints must be pairs of at least image_size ({tile}), got {sizes!r:.200}")
        sizes = []
    facts = vars(found) | {"tile": tile, "most": most, "sizes": tuple((h, w) for h, w in sizes)}
    return replace(spec, vision=OneVision(**facts))


def weights(hidden: int, vision: VisionSpec) -> list[Weight]:
    newline = vector("newline_D", "image_newline", hidden)
    return [*tower.weights(vision, last_norm=False), *projector(hidden, vision.width), newline]


def cut(vision: OneVision, height: int, width: int) -> Cut:
    """How an image of so many pixels is cut: to the size that keeps most of them with least beside them. Pure."""

    def fit(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, -(size[0] * size[1] - used)

    size, side = max(vision.sizes, key=fit), vision.image_size // vision.patch
    tiles = size[0] // vision.tile, size[1] // vision.tile
    rows, columns = tiles[0] * side, tiles[1] * side
    above = left = 0
    if width / height > columns / rows:
        above = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    kept = rows - 2 * above, columns - 2 * left
    ratio = math.sqrt(kept[0] * kept[1] / (vision.most * side**2))
    kept = (int(kept[0] // ratio), int(kept[1] // ratio)) if ratio > 1.1 else kept
    return Cut(tiles, slice(above, rows - above), slice(left, columns - left), kept)


def encode(leaves: Params, vision: OneVision, arrays: dict[str, Tensor]) -> Tensor:
    """The embeddings of an image, [tokens, D], from pixels_NCHW, the whole first, and size_2. Pure."""
    pixels_NCHW = arrays["pixels_NCHW"]
    at, side = cut(vision, *arrays["size_2"].tolist()), vision.image_size
    seen = (tower.features(leaves, vision, pixels_CHW[:, :side, :side]) for pixels_CHW in pixels_NCHW)
    whole_ID, *tiles = (projected(x_ID, leaves) for x_ID in seen)
    n = side // vision.patch
    x_HWD = rearrange(torch.stack(tiles), "(a b) (h w) d -> (a h) (b w) d", a=at.tiles[0], h=n)[at.rows, at.columns]
    if x_HWD.shape[:2] != at.kept:
        x_DHW = interpolate(rearrange(x_HWD, "h w d -> 1 d h w").float(), at.kept, mode="bilinear")[0]
        x_HWD = rearrange(x_DHW, "d h w -> h w d").to(whole_ID.dtype)
    ends_HD = leaves["newline_D"].to(whole_ID.dtype).expand(len(x_HWD), 1, -1)
    return torch.cat((whole_ID, torch.cat((x_HWD, ends_HD), 1).flatten(0, 1)))


def pieces(vision: OneVision, features: dict[str, Any]) -> list[Piece]:
    """The image, as one. Pure. Errors: InvalidRequestError if its processor cuts as the model does not."""
    pixels_NCHW, size_2 = features["pixel_values"][0], features["image_sizes"][0]
    at, patches = cut(vision, *size_2.tolist()), (vision.image_size // vision.patch) ** 2
    if len(pixels_NCHW) != 1 + at.tiles[0] * at.tiles[1]:
        raise InvalidRequestError("the image_grid_pinpoints of its processor are not those of config.json")
    tokens = patches + at.kept[0] * (at.kept[1] + 1)
    return [Piece({"pixels_NCHW": pixels_NCHW, "size_2": size_2}, tokens, patches * len(pixels_NCHW))]


def rename(name: str) -> str:
    return llava.rename(name.removeprefix("model.") if name.endswith("image_newline") else name)


FAMILY = VisionFamily(
    "LlavaOnevisionForConditionalGeneration", "llava_onevision", FIELDS, tower.FIELDS, read, weights,
    Vision(encode, pieces), rename, text_defaults=TEXT, vision_defaults=tower.SIGLIP, text_ties=True,
)  # fmt: skip
