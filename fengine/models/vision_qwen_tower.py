"""The tower of Qwen2.5-VL and Qwen3-VL. patches -> linear -> blocks -> the four patches of a square as one -> linear,
gelu, linear -> embeddings"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from fengine.models.kv_state import Params
from fengine.models.spec import VisionSpec
from fengine.models.vision_layers import Layout, act, layout, project, tiled
from fengine.ops import activations, layer_norm, linear, patch_attention, rms_norm

EPS, THETA = 1e-6, 10000.0


@dataclass(frozen=True)
class QwenVision(VisionSpec):
    """`window` is a side in tokens; `full_layers` look beyond windows; `side` is that of the table of positions."""

    frames: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    deep_layers: tuple[int, ...] = ()
    side: int = 0

    @property
    def pixels(self) -> tuple[int, ...]:
        return (self.channels * self.frames * self.patch**2,)


def windows(vision: QwenVision, height: int, width: int) -> tuple[np.ndarray, list[int]]:
    """The order of an image's squares window by window, and how many patches each window has. Pure."""
    squares, side, order, lengths = np.arange(height * width).reshape(height, width), vision.window, [], []
    for top in range(0, height, side):
        for left in range(0, width, side):
            inside = squares[top : top + side, left : left + side].flatten()
            order.append(inside)
            lengths.append(len(inside) * vision.merge**2)
    return np.concatenate(order), lengths


def places(vision: QwenVision, grid: Sequence[int]) -> np.ndarray:
    """Row and column of each patch, [2, I], square by square. Pure."""
    rows, columns = np.indices((grid[0], grid[1]))
    pattern, m = "(h p) (w q) -> (h w p q)", vision.merge
    return np.stack([rearrange(x, pattern, p=m, q=m) for x in (rows, columns)])


def rope_table(vision: QwenVision, place_2I: np.ndarray) -> Tensor:
    """cos and sin of each patch, float32 [I, K]: the first half of pairs turns by row, the second by column. Pure."""
    half = vision.head_dim // 2
    frequency = 1.0 / (THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    angle_2IK = torch.from_numpy(place_2I)[..., None].float() * frequency
    angle_IK = torch.cat((angle_2IK[0], angle_2IK[1]), -1)
    return torch.cat((angle_IK.cos(), angle_IK.sin()), -1)


def neighbours(side: int, grid: Sequence[int], place_2I: np.ndarray) -> list[tuple[Tensor, Tensor]]:
    """Of the table of positions, corner on corner with the image's grid: the rows of each patch's four neighbours, and
    how much of them it takes. Pure."""
    at_2I = [torch.from_numpy(x) * ((side - 1) / max(n - 1, 1)) for x, n in zip(place_2I, grid, strict=True)]
    low = [at.long().clamp(0, side - 1) for at in at_2I]
    part, found = [(at - x).float() for at, x in zip(at_2I, low, strict=True)], []
    for down in (0, 1):
        for right in (0, 1):
            row, column = (x + step for x, step in zip(low, (down, right), strict=True))
            index_I = row.clamp_max(side - 1) * side + column.clamp_max(side - 1)
            found.append((index_I, (part[0] if down else 1 - part[0]) * (part[1] if right else 1 - part[1])))
    return found


def stretched(table_ND: Tensor, shares: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The table of positions over the image's grid, float32. Pure."""
    parts = [table_ND[index_I].float() * share_I[:, None] for index_I, share_I in shares]
    return parts[0] + parts[1] + parts[2] + parts[3]


class Plan(NamedTuple):
    """What of an image its grid alone decides. On the image's device."""

    rope_IK: Tensor
    neighbours: list[tuple[Tensor, Tensor]]  # none without a table of positions
    order_I: Tensor  # of patches, window by window
    back_N: Tensor  # of embeddings, from windows to rows
    near: tuple[int, ...]  # patches of each window


@lru_cache(maxsize=32)
def plan(vision: QwenVision, grid: tuple[int, int], device: torch.device) -> Plan:
    """Pure; kept, since images come in few sizes and this takes a CPU longer than the tower a GPU."""
    place_2I, square = places(vision, grid), vision.merge**2
    order, lengths = np.arange(place_2I.shape[1] // square), [place_2I.shape[1]]
    if vision.window:
        order, lengths = windows(vision, grid[0] // vision.merge, grid[1] // vision.merge)
    order_I = torch.from_numpy((order[:, None] * square + np.arange(square)).flatten())
    shares = neighbours(vision.side, grid, place_2I) if vision.side else []
    return Plan(
        rope_table(vision, place_2I)[order_I].to(device), [(i.to(device), x.to(device)) for i, x in shares],
        order_I.to(device), torch.from_numpy(order.argsort()).to(device), tuple(lengths),
    )  # fmt: skip


def norm(x_ID: Tensor, norm_D: Tensor, third: bool) -> Tensor:
    return layer_norm.layer_norm(x_ID, norm_D, EPS) if third else rms_norm.rms_norm(x_ID, norm_D, EPS)


def sum_and_norm(delta_ID: Tensor, x_ID: Tensor, norm_D: Tensor, third: bool) -> tuple[Tensor, Tensor]:
    """(norm(x + delta), x + delta). Pure."""
    if third:
        return layer_norm.layer_norm(x_ID + delta_ID, norm_D, EPS), x_ID + delta_ID
    return rms_norm.add_rms_norm(delta_ID, x_ID, norm_D, EPS)


def block(
    layer: Params, vision: QwenVision, normed_ID: Tensor, x_ID: Tensor, rope_IK: Tensor, at: Layout, third: bool
) -> tuple[Tensor, Tensor]:
    """x += attention(norm(x));  x += mlp(norm(x)), as (what is still to be added, x). Pure."""
    qkv_IC = project(normed_ID, layer, "qkv")
    o_IHK = patch_attention.patch_attention(qkv_IC, rope_IK, *at, vision.num_heads)
    delta_ID = project(o_IHK.flatten(1), layer, "o")
    normed_ID, x_ID = sum_and_norm(delta_ID, x_ID, layer["norm2_D"], third)
    if third:
        return project(act(project(normed_ID, layer, "up"), vision.act), layer, "down"), x_ID
    return project(linear.gated_linear(normed_ID, layer["wup"], layer.get("bup_C")), layer, "down"), x_ID


def merged(tower: Params, vision: QwenVision, x_ID: Tensor, index: int, third: bool) -> Tensor:
    """The patches of each square as one embedding, by merger `index`. Pure."""
    norm_D, squares = tower[f"merge{index}_norm_D"], "(i m) d -> i (m d)"
    x_ID = x_ID if index else norm(x_ID, norm_D, third)
    x_IK = rearrange(x_ID, squares, m=vision.merge**2)
    x_IK = norm(x_IK, norm_D, third) if index else x_IK
    return project(activations.activate(project(x_IK, tower, f"merge{index}a"), "gelu"), tower, f"merge{index}b")


def encode(tower: Params, vision: QwenVision, arrays: dict[str, Tensor], third: bool) -> Tensor:
    """The embeddings of an image, beside those that later layers add: [tokens, D * (1 + deepstack)]. Pure."""
    rows, columns = arrays["grid_2"].tolist()
    x_ID = project(tiled(arrays["patches_IK"].to(tower["merge0_norm_D"].dtype)), tower, "patch")
    known = plan(vision, (rows, columns), x_ID.device)
    if third:
        x_ID = x_ID + stretched(tower["position_ND"], known.neighbours).to(x_ID.dtype)
    x_ID = x_ID[known.order_I] if vision.window else x_ID
    near, whole = layout(known.near, x_ID.device), layout((len(x_ID),), x_ID.device)
    found, delta_ID = [], None
    for i, layer in enumerate(tower["layers"]):
        if delta_ID is None:
            normed_ID = norm(x_ID, layer["norm1_D"], third)
        else:
            normed_ID, x_ID = sum_and_norm(delta_ID, x_ID, layer["norm1_D"], third)
        at = whole if i in vision.full_layers else near
        delta_ID, x_ID = block(layer, vision, normed_ID, x_ID, known.rope_IK, at, third)
        if i in vision.deep_layers:
            found.append(merged(tower, vision, x_ID + delta_ID, 1 + vision.deep_layers.index(i), third))
    x_ID = x_ID if delta_ID is None else x_ID + delta_ID
    found_ID = torch.cat([merged(tower, vision, x_ID, 0, third), *found], 1)
    return found_ID[known.back_N] if vision.window else found_ID
