"""Qwen2.5-VL and Qwen3-VL: images of any size, in patches whose rotary embedding turns by row and column.

In Qwen2.5 most blocks look within windows only, and norms have no mean. In Qwen3 a learned table of positions is added,
stretched over the image, and what comes out of some blocks is added behind the decoder's first layers. In the decoder a
token of an image stands at its own row and column."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fengine.errors import ModelLoadError, UnsupportedArchitectureError
from fengine.models import qwen
from fengine.models.family import COMMON, READ, SPEED, Piece, Vision, refuse_others
from fengine.models.reader import GELU_ALL, SILU, ConfigReader
from fengine.models.sources import Source
from fengine.models.spec import Config, ModelSpec, VisionSpec
from fengine.models.vision_family import WHOLE, VisionFamily, renamed, tower
from fengine.models.vision_layers import matrix, patch_matrix, vector
from fengine.models.vision_qwen_tower import EPS, THETA, QwenVision, encode
from fengine.models.weights import Weight

TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
FIELDS = {**qwen.FIELDS, **WHOLE, **dict.fromkeys(TOKENS, READ), "video_token_id": "of videos, which are not built"}
VISION_FIELDS = {
    **COMMON, **dict.fromkeys(("depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "in_chans",
    "patch_size", "spatial_merge_size", "temporal_patch_size", "hidden_act", "out_hidden_size", "rope_parameters",
    "window_size", "fullatt_block_indexes", "deepstack_visual_indexes", "num_position_embeddings"), READ),
    "tokens_per_second": "of videos, which are not built", "spatial_patch_size": "the same as patch_size",
    "attn_implementation": SPEED,
}  # fmt: skip
TEXT_2 = qwen.QWEN2._replace(
    fields={**qwen.QWEN2.fields, **FIELDS}, defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
)
TEXT_3 = qwen.QWEN3._replace(fields={**qwen.QWEN3.fields, **FIELDS}, defaults={"rope_theta": 5e5})


class QwenFamily(VisionFamily):
    """Older configs have the decoder's keys beside the others."""

    def parts(self, config: Config) -> tuple[Config, Config]:
        """Pure. Errors: ModelLoadError, UnsupportedArchitectureError."""
        text = config.get("text_config")
        if text is None:
            text = {key: value for key, value in config.items() if key not in WHOLE}
            text["model_type"] = next(iter(self.texts))
        text, vision = super().parts(config | {"text_config": text})
        outer = objects(config, "rope_scaling")
        if outer != text.get("rope_scaling") and outer.get("rope_type", outer.get("type", "mrope")) not in DEFAULT:
            raise UnsupportedArchitectureError(
                f"rope_scaling = {outer!r:.80} is not read beside text_config: put it there."
            )
        scaling, ropes = (
            {key: value for key, value in found.items() if key not in AXES}
            for found in (objects(text, "rope_scaling"), objects(text, "rope_parameters"))
        )
        scaling |= {key: "default" for key in ("type", "rope_type") if scaling.get(key) == "mrope"}
        return text | {"rope_scaling": scaling or None, "rope_parameters": ropes or None}, vision


def objects(config: Config, name: str) -> Config:
    """The object under a key; {} where there is none. Pure. Errors: ModelLoadError."""
    if not isinstance(found := config.get(name) or {}, dict):
        raise ModelLoadError(f"config.json: {name} must be an object or null, got {found!r:.80}.")
    return found


def _layers(read: ConfigReader, name: str, count: int) -> list[int]:
    """Layers of the tower by number, in order."""
    found = read.config.get(name) or []
    if isinstance(found, list) and all(type(i) is int and 0 <= i < count for i in found) and sorted({*found}) == found:
        return found
    read.problems.append(f"{name} must be a list of layers from 0 to {count - 1} in order, got {found!r:.80}")
    return []


AXES, DEFAULT = ("mrope_section", "mrope_interleaved"), ("default", "mrope")


def sections(config: Config, spec: ModelSpec, third: bool) -> tuple[int, ...]:
    """The axis of each rotary pair: in blocks, or, in Qwen3, taking turns. As in transformers, `mrope_interleaved` does
    not tell which. Pure. Errors: ModelLoadError."""
    text = config.get("text_config") or config
    found = {**objects(text, "rope_scaling"), **objects(text, "rope_parameters")}
    counts, pairs = found.get("mrope_section"), spec.head_dim // 2
    if not isinstance(counts, list) or len(counts) != 3 or not all(type(c) is int and c > 0 for c in counts):
        raise ModelLoadError(f"config.json: mrope_section must be three numbers, got {counts!r:.80}.")
    if third:
        axes = [0] * pairs
        for axis in (1, 2):
            axes[axis : 3 * counts[axis] : 3] = [axis] * len(range(pairs)[axis : 3 * counts[axis] : 3])
    else:
        axes = [axis for axis, count in enumerate(counts) for _ in range(count)]
    if len(axes) != pairs or sum(counts) != pairs:
        raise ModelLoadError(f"config.json: mrope_section {counts} does not add up to {pairs} pairs of a head.")
    return tuple(axes)


def read(whole: ConfigReader, part: ConfigReader, spec: ModelSpec, third: bool) -> ModelSpec:
    refuse_others({"use_sliding_window": third and bool(spec.window)}, {"use_sliding_window": False})
    named = {"num_hidden_layers": "depth", "num_attention_heads": "num_heads", "num_channels": "in_channels"}
    facts = {ours: part.config.get(theirs) for ours, theirs in named.items()} | {"layer_norm_eps": EPS}
    facts["num_channels"] = facts["num_channels"] or part.config.get("in_chans")
    part, turned = part.changed(facts), objects(part.config, "rope_parameters")
    if turned.get("rope_theta", THETA) != THETA or turned.get("rope_type", "axial") != "axial":
        raise UnsupportedArchitectureError(f"vision_config.rope_parameters = {turned!r:.80} are not supported.")
    found = tower(part, whole.size("image_token_id", 1 << 24), GELU_ALL if third else SILU)
    merge = part.size("spatial_merge_size", 16, default=2)
    full, deep = (
        _layers(part, name, found.num_layers) for name in ("fullatt_block_indexes", "deepstack_visual_indexes")
    )
    rows = part.size("num_position_embeddings", 1 << 20) if third else 0
    more: dict[str, Any] = {
        "merge": merge, "frames": part.size("temporal_patch_size", 16, default=2), "full_layers": tuple(full),
        "deep_layers": tuple(deep), "deepstack": len(deep), "side": int(rows**0.5),
        "window": 0 if third else part.size("window_size", 1 << 14, default=112) // merge // max(found.patch, 1),
    }  # fmt: skip
    if part.size("out_hidden_size", 1 << 20) != spec.hidden_size:
        part.problems.append(f"out_hidden_size is not the decoder's hidden_size ({spec.hidden_size})")
    if not third and not more["window"]:
        part.problems.append("window_size holds no token")
    made = QwenVision(**{**vars(found), **more})
    return replace(spec, vision=made, rope_sections=sections(whole.config, spec, third))


def weights(hidden: int, vision: QwenVision, third: bool) -> list[Weight]:
    width, squares = vision.width, vision.width * vision.merge**2
    found = patch_matrix("visual.patch_embed.proj", vision, (vision.frames,), bias=third)
    if third:
        table = Source("visual.pos_embed.weight", (vision.side**2, width))
        found.append(Weight(("vision", "position_ND"), (table,), "ND", fill="small"))
    for i in range(vision.num_layers):
        name, above = f"visual.blocks.{i}", ("layers", i)
        ups = ["linear_fc1"] if third else ["gate_proj", "up_proj"]
        down = "linear_fc2" if third else "down_proj"
        found += [
            *(vector(f"norm{n}_D", f"{name}.norm{n}", width, *above, norm=True, bias=third) for n in (1, 2)),
            *matrix("qkv", [f"{name}.attn.qkv"], 3 * width, width, *above),
            *matrix("o", [f"{name}.attn.proj"], width, width, *above),
            *matrix("up", [f"{name}.mlp.{up}" for up in ups], vision.mlp_size, width, *above, inner="rows"),
            *matrix("down", [f"{name}.mlp.{down}"], width, vision.mlp_size, *above, inner="columns"),
        ]
    lists = [f"visual.deepstack_merger_list.{i}" for i in range(vision.deepstack)]
    for i, name in enumerate(["visual.merger", *lists]):
        first, second = ("linear_fc1", "linear_fc2") if third else ("mlp.0", "mlp.2")
        size = squares if i else width
        found += [
            vector(f"merge{i}_norm_D", f"{name}.{'norm' if third else 'ln_q'}", size, norm=True, bias=third),
            *matrix(f"merge{i}a", [f"{name}.{first}"], squares, squares),
            *matrix(f"merge{i}b", [f"{name}.{second}"], hidden, squares),
        ]
    return found


def pieces(vision: VisionSpec, features: dict[str, Any]) -> list[Piece]:
    (_, height, width), patches_IK = features["image_grid_thw"][0].tolist(), features["pixel_values"]
    arrays = {"patches_IK": patches_IK.astype(np.float32), "grid_2": np.array([height, width])}
    return [Piece(arrays, len(patches_IK) // vision.merge**2, len(patches_IK))]


def positions(vision: VisionSpec, count: int, spans: Sequence[Any]) -> tuple[np.ndarray, int]:
    """Where the tokens of a prompt stand, [3, count], and how far those behind it are from their index: words go on
    along all axes; an image's tokens stand at its row and column, and take as many steps as its longer side. Pure."""
    found, at, here = np.zeros((3, count), np.int32), 0, 0
    for start, image in spans:
        found[:, at:start] = np.arange(start - at) + here
        here += start - at
        height, width = (int(side) // vision.merge for side in image.arrays["grid_2"])
        at = start + height * width
        found[:, start:at] = np.indices((1, height, width)).reshape(3, -1) + here
        here += max(height, width)
    found[:, at:] = np.arange(count - at) + here
    return found, here + (count - at) - count


rename = partial(renamed, {"model.visual.": "visual.", "model.language_model.": "model."})


def _family(architecture: str, model_type: str, text: dict[str, Any], third: bool, defaults: Config) -> QwenFamily:
    return QwenFamily(
        architecture, model_type, FIELDS, VISION_FIELDS, partial(read, third=third), partial(weights, third=third),
        Vision(partial(encode, third=third), pieces, positions), rename, text, vision_defaults=defaults,
        text_ties=not third,
    )  # fmt: skip


FAMILY = _family(
    "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {"qwen2_5_vl_text": TEXT_2}, False,
    {"hidden_act": "silu", "patch_size": 14, "intermediate_size": 3420, "fullatt_block_indexes": [7, 15, 23, 31],
     "depth": 32, "num_heads": 16},
)  # fmt: skip
QWEN3 = _family(
    "Qwen3VLForConditionalGeneration", "qwen3_vl", {"qwen3_vl_text": TEXT_3}, True,
    {"hidden_act": "gelu_pytorch_tanh", "patch_size": 16},
)  # fmt: skip
