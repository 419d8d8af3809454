"""Gemma 3 with images: SigLIP's tower, whose patches are averaged in squares, normed and projected. In the decoder the
tokens of an image see each other: each has the image's last as its last key."""

from dataclasses import replace
from functools import partial
from typing import Any

from einops import rearrange, reduce
from torch import Tensor

from fengine.errors import InvalidRequestError
from fengine.models import gemma
from fengine.models.family import READ, Piece, Vision, refuse_others
from fengine.models.kv_state import Params
from fengine.models.reader import ConfigReader
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_family import WHOLE, VisionFamily, renamed
from fengine.models.vision_layers import laid, project, vector
from fengine.models.vision_tower import FIELDS as VISION_FIELDS
from fengine.models.vision_tower import PREFIXES, SIGLIP, features, square, weights
from fengine.models.weights import Weight
from fengine.ops import rms_norm

FIELDS = {
    **WHOLE, "mm_tokens_per_image": READ, "boi_token_index": READ, "eoi_token_index": READ, "image_token_index": READ,
}  # fmt: skip
TEXT = {  # what transformers' Gemma3TextConfig assumes, and the hub's checkpoints leave out
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec) -> ModelSpec:
    unread = {"final_logit_softcapping": spec.logit_cap, "use_bidirectional_attention": not spec.causal}
    refuse_others(unread, dict.fromkeys(unread, 0))  # by transformers, where there are images
    count = whole.size("mm_tokens_per_image", 1 << 16, default=256)
    side = part.size("image_size", 1 << 14) // max(part.size("patch_size", 1 << 10), 1)
    merge = side // max(round(count**0.5), 1)
    if merge * round(count**0.5) != side or round(count**0.5) ** 2 != count:
        whole.problems.append(f"mm_tokens_per_image ({count}) makes no squares of {side} × {side} patches")
    found = square(part, whole.size("image_token_index", 1 << 24, default=262144), max(merge, 1), bidirectional=True,
                   begin=whole.size("boi_token_index", 1 << 24, default=255999))  # fmt: skip
    return replace(spec, vision=found)


def all_weights(hidden: int, vision: VisionSpec) -> list[Weight]:
    stored = vision.width, hidden
    matrix = laid("projector.mm_input_projection_weight", stored, *stored[::-1], turned=True)
    return [
        *weights(vision),
        vector("norm_D", "projector.mm_soft_emb_norm", vision.width, norm=True),
        Weight(("vision", "wproject"), (matrix,), "CD"),
    ]


def encode(leaves: Params, vision: VisionSpec, arrays: dict[str, Tensor]) -> Tensor:
    """The embeddings of an image, [tokens, D], from pixels_CHW. Pure."""
    x_ID, m = features(leaves, vision, arrays["pixels_CHW"]), vision.merge
    x_ID = rearrange(x_ID, "(h w) d -> h w d", h=vision.image_size // vision.patch)
    x_ID = reduce(x_ID, "(h a) (w b) d -> (h w) d", "mean", a=m, b=m)
    return project(rms_norm.rms_norm(x_ID, leaves["norm_D"], vision.eps, 1.0), leaves, "project")


def pieces(vision: VisionSpec, features: dict[str, Any]) -> list[Piece]:
    """The image as a whole. Pure. Errors: InvalidRequestError for crops."""
    if len(features["pixel_values"]) > 1:
        raise InvalidRequestError("its processor has do_pan_and_scan on, which is not built; set it to false")
    patches = (vision.image_size // vision.patch) ** 2
    texts = "\n\n<start_of_image>", "<end_of_image>\n\n"
    return [Piece({"pixels_CHW": features["pixel_values"][0]}, patches // vision.merge**2, patches, *texts)]


FAMILY = VisionFamily(
    "Gemma3ForConditionalGeneration", "gemma3", FIELDS, VISION_FIELDS, read, all_weights, Vision(encode, pieces),
    partial(renamed, PREFIXES), {"gemma3_text": gemma.GEMMA3}, text_defaults=TEXT, vision_defaults=SIGLIP,
    leaves=gemma.GEMMA3.leaves,
)  # fmt: skip
