"""The tower of CLIP, SigLIP and InternViT, for images of one size. patches -> linear, a class token but for SigLIP,
positions, with CLIP a norm -> layers -> given out"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fengine.models.family import COMMON, READ, TRAINING, Fields
from fengine.models.kv_state import Params
from fengine.models.reader import GELU_ALL, ConfigReader
from fengine.models.spec import VisionSpec
from fengine.models.vision_family import tower
from fengine.models.vision_layers import act, attend, laid, matrix, patch_matrix, project, tiled, vector
from fengine.models.weights import Weight
from fengine.ops import layer_norm

FIELDS: Fields = {
    **COMMON, **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "image_size", "patch_size", "hidden_act", "layer_norm_eps", "num_channels"), READ),
    "projection_dim": "of a head that is not built", "vision_use_head": "of a head that is not built",
    "vocab_size": "of CLIP's text", "initializer_factor": TRAINING, "tie_word_embeddings": "a tower has no words",
}  # fmt: skip
SIGLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip

PREFIXES = {
    "model.vision_tower.vision_model.": "vision.", "vision_tower.vision_model.": "vision.",
    "model.vision_tower.": "vision.", "vision_tower.": "vision.", "model.multi_modal_projector.": "projector.",
    "multi_modal_projector.": "projector.", "language_model.lm_head.": "lm_head.", "language_model.model.": "model.",
    "model.language_model.": "model.", "language_model.": "model.",
}  # fmt: skip


def square(read: ConfigReader, token: int, merge: int = 1, **facts: Any) -> VisionSpec:
    """The facts of a tower for images of `image_size`, whose patches become tokens `merge` by `merge`. Problems are
    collected by `read`."""
    side = read.size("image_size", 1 << 14)
    found = tower(read, token, {"quick_gelu": "quick_gelu", **GELU_ALL}, merge=merge, image_size=side, **facts)
    if side % (found.patch * merge):
        read.problems.append(f"image_size ({side}) is no multiple of patch_size ({found.patch}) times {merge}")
    return found


def weights(
    vision: VisionSpec, clip: bool = False, last_norm: bool = True, intern: bool = False, qkv_bias: bool = True
) -> list[Weight]:
    """SigLIP's, unless `clip` or `intern`. Pure."""
    width, prefix, found = vision.width, "vision.embeddings", list[Weight]()
    rows, ones = (vision.image_size // vision.patch) ** 2 + (clip or intern), (1,) * intern
    table = laid(f"{prefix}.position_embedding.weight", (*ones, rows, width), rows, width)
    if clip or intern:
        one = laid(f"{prefix}.class_embedding", (*ones, *ones, width), width)
        found.append(Weight(("vision", "class_D"), (one,), "D", fill="small"))
    if clip:
        found.append(vector("first_norm_D", "vision.pre_layrnorm", width, norm=True, bias=True))
    if last_norm:
        found.append(vector("last_norm_D", "vision.post_layernorm", width, norm=True, bias=True))
    found += patch_matrix(f"{prefix}.patch_embedding", vision, bias=not clip)
    found.append(Weight(("vision", "position_ND"), (table,), "ND", fill="small"))
    for i in range(vision.num_layers):
        name, above = f"vision.encoder.layers.{i}", ("layers", i)
        qkv = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        found += [
            *(vector(f"norm{n}_D", f"{name}.layer_norm{n}", width, *above, norm=True, bias=True) for n in (1, 2)),
            *matrix("qkv", qkv, width, width, *above, bias=qkv_bias),
            *(vector(f"scale{n}_D", f"{name}.lambda_{n}", width, *above) for n in (1, 2) if intern),
            *matrix("o", [f"{name}.self_attn.out_proj"], width, width, *above),
            *matrix("up", [f"{name}.mlp.fc1"], vision.mlp_size, width, *above, inner="rows"),
            *matrix("down", [f"{name}.mlp.fc2"], width, vision.mlp_size, *above, inner="columns"),
        ]
    return found


def features(tower: Params, vision: VisionSpec, pixels_CHW: Tensor, index: Tensor | None = None) -> Tensor:
    """What `feature_layers` make of each patch, side by side, or the last layer. `index`: each patch's row of the table
    of positions; None: all in order. Pure."""
    table_ND, class_D = tower["position_ND"], tower.get("class_D")
    x_IK = rearrange(pixels_CHW, "c (h p) (w q) -> (h w) (c p q)", p=vision.patch, q=vision.patch)
    x_ID = project(tiled(x_IK.to(table_ND.dtype)), tower, "patch")
    x_ID = x_ID if class_D is None else torch.cat((class_D[None], x_ID))
    x_ID = x_ID + (table_ND if index is None else table_ND[index])
    if (norm_D := tower.get("first_norm_D")) is not None:
        x_ID = layer_norm.layer_norm(x_ID, norm_D, vision.eps)
    wanted, given = vision.feature_layers or (vision.num_layers,), {}
    for i in range(max(wanted) + 1):
        if i in wanted:
            given[i] = x_ID if class_D is None else x_ID[1:]
        if i < max(wanted):
            x_ID = encoder_layer(tower["layers"][i], vision, x_ID)
    x_ID = torch.cat([given[i] for i in wanted], 1)
    norm_D = tower.get("last_norm_D")
    return x_ID if norm_D is None else layer_norm.layer_norm(x_ID, norm_D, vision.eps)


def encoder_layer(layer: Params, vision: VisionSpec, x_ID: Tensor) -> Tensor:
    """x += attention(norm(x));  x += mlp(norm(x)). Pure."""
    qkv_IC = project(layer_norm.layer_norm(x_ID, layer["norm1_D"], vision.eps), layer, "qkv")
    q_IHK, k_IHK, v_IHK = rearrange(qkv_IC, "i (part h k) -> part i h k", part=3, h=vision.num_heads)
    x_ID = x_ID + project(attend(q_IHK, k_IHK, v_IHK).flatten(1), layer, "o") * layer.get("scale1_D", 1.0)
    up_IF = project(layer_norm.layer_norm(x_ID, layer["norm2_D"], vision.eps), layer, "up")
    return x_ID + project(act(up_IF, vision.act), layer, "down") * layer.get("scale2_D", 1.0)
