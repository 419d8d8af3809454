"""LLaVA 1.5: CLIP's tower, a projector of two layers, and a decoder. patches -> CLIP's layers, one of the last given
out without its class token -> linear, gelu, linear -> embeddings"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fengine.models import vision_tower as tower
from fengine.models.family import READ, TRAINING, Piece, Vision, refuse_others
from fengine.models.kv_state import Params
from fengine.models.reader import ConfigReader
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_family import WHOLE, VisionFamily, renamed
from fengine.models.vision_layers import projected, projector
from fengine.models.weights import Weight

FIELDS = {
    **WHOLE, "image_token_index": READ, "image_token_id": READ, "projector_hidden_act": READ, "vocab_size": READ,
    "vision_feature_layer": READ, "vision_feature_select_strategy": READ, "multimodal_projector_bias": READ,
    "image_seq_length": "follows from the size of images", "ignore_index": TRAINING,
}  # fmt: skip
ONLY = {"vision_feature_select_strategy": "default", "projector_hidden_act": "gelu", "multimodal_projector_bias": True}
CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
TEXT = {  # what transformers' LlamaConfig assumes, and the hub's LLaVA leaves out
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip


def image_token(whole: ConfigReader, default: int) -> int:
    return whole.size("image_token_id", 1 << 24, default=whole.size("image_token_index", 1 << 24, default=default))


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec) -> ModelSpec:
    refuse_others(part.config, {"model_type": "clip_vision_model"})
    refuse_others(whole.config, ONLY)
    found = tower.square(part, image_token(whole, 32000))
    chosen = whole.config.get("vision_feature_layer", -2)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    places = [at + found.num_layers + 1 if type(at) is int and at < 0 else at for at in chosen]
    if not all(type(at) is int and 0 <= at <= found.num_layers for at in places):
        whole.problems.append(f"vision_feature_layer = {chosen!r:.80} names no layer of {found.num_layers}")
    return replace(spec, vision=replace(found, feature_layers=tuple(places)))


def weights(hidden: int, vision: VisionSpec) -> list[Weight]:
    columns = vision.width * len(vision.feature_layers)
    return [*tower.weights(vision, clip=True, last_norm=False), *projector(hidden, columns)]


def encode(leaves: Params, vision: VisionSpec, arrays: dict[str, Tensor]) -> Tensor:
    """The embeddings of an image, [tokens, D], from pixels_CHW. Pure."""
    return projected(tower.features(leaves, vision, arrays["pixels_CHW"]), leaves)


def pieces(vision: VisionSpec, features: dict[str, Any]) -> list[Piece]:
    patches = (vision.image_size // vision.patch) ** 2
    return [Piece({"pixels_CHW": pixels_CHW}, patches, patches + 1) for pixels_CHW in features["pixel_values"]]


def rename(name: str) -> str:
    """Of the tower what stands behind the last layer is not read. Pure."""
    name = renamed(tower.PREFIXES, name)
    return "" if name.startswith("vision.post_layernorm") else name


FAMILY = VisionFamily(
    "LlavaForConditionalGeneration", "llava", FIELDS, tower.FIELDS, read, weights, Vision(encode, pieces), rename,
    text_defaults=TEXT, vision_defaults=CLIP, text_ties=True,
)  # fmt: skip
