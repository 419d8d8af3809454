"""The tower of Qwen2.5-VL and Qwen3-VL.

patches -> linear -> blocks -> the four patches of a square as one -> linear, gelu, linear -> embeddings
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_layers import PAGE, act, project, tiled
from fengine.ops import activations, attention, layer_norm, rms_norm, rope

EPS, THETA = 1e-6, 10000.0


@dataclass(frozen=True)
class QwenVision(VisionSpec):
    """`window` is a side in tokens; `full_layers` look beyond windows; `side` is that of the table of positions."""

    frames: int = 2
    window: int = 0
    full_layers: tuple[int, ...] = ()
    deep_layers: tuple[int, ...] = ()
    side: int = 0


class Layout(NamedTuple):
    """Where patches see each other: windows of so many, which follow each other. On the image's device."""

    slot_I: Tensor  # int32, in pages of their own
    start_B: Tensor
    length_R: Tensor
    table_RN: Tensor
    pages: int


def layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """Pure."""
    pages = [-(-length // PAGE) for length in lengths]
    first = np.cumsum([0, *pages])
    slots = [np.arange(length) + at * PAGE for length, at in zip(lengths, first, strict=False)]
    table = np.zeros((len(lengths), max(pages)), np.int32)
    for row, count in enumerate(pages):
        table[row, :count] = np.arange(first[row], first[row] + count)
    arrays = (np.concatenate(slots), np.cumsum([0, *lengths]), np.array(lengths), table)
    slot_I, start_B, length_R, table_RN = (torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays)
    return Layout(slot_I, start_B, length_R, table_RN, int(first[-1]))


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


def stretched(table_ND: Tensor, side: int, grid: Sequence[int], place_2I: np.ndarray) -> Tensor:
    """The table of positions over the image's grid, corner on corner, between its four neighbours. Pure."""
    at_2I = [torch.from_numpy(x) * ((side - 1) / max(n - 1, 1)) for x, n in zip(place_2I, grid, strict=True)]
    low = [at.long().clamp(0, side - 1) for at in at_2I]
    part = [(at - x).float() for at, x in zip(at_2I, low, strict=True)]
    total = torch.zeros(len(at_2I[0]), table_ND.shape[1], device=table_ND.device)
    for down in (0, 1):
        for right in (0, 1):
            row, column = (x + step for x, step in zip(low, (down, right), strict=True))
            index = row.clamp_max(side - 1) * side + column.clamp_max(side - 1)
            share = (part[0] if down else 1 - part[0]) * (part[1] if right else 1 - part[1])
            total = total + table_ND[index.to(table_ND.device)].float() * share[:, None].to(table_ND.device)
    return total


def norm(x_ID: Tensor, norm_D: Tensor, third: bool) -> Tensor:
    """Pure."""
    return layer_norm.layer_norm(x_ID, norm_D, EPS) if third else rms_norm.rms_norm(x_ID, norm_D, EPS)


def block(
    layer: Params, vision: QwenVision, x_ID: Tensor, rope_IK: Tensor, at: Layout, third: bool
) -> Tensor:  # fmt: skip
    """x += attention(norm(x));  x += mlp(norm(x)). Pure."""
    qkv_IC = project(norm(x_ID, layer["norm1_D"], third), layer, "qkv")
    k_PSHK, v_PSHK = (x_ID.new_zeros(at.pages, PAGE, vision.num_heads, vision.head_dim) for _ in "kv")
    pos_I = torch.arange(len(x_ID), dtype=torch.int32, device=x_ID.device)
    q_IHK, k_PSHK, v_PSHK = rope.rope_kv_write(qkv_IC, rope_IK, pos_I, at.slot_I, k_PSHK, v_PSHK, vision.num_heads)
    out_IHK = attention.attention(
        q_IHK, k_PSHK, v_PSHK, at.start_B, at.length_R, at.table_RN, vision.head_dim**-0.5, causal=False
    )
    x_ID = x_ID + project(out_IHK.flatten(1), layer, "o")
    up_IF = project(norm(x_ID, layer["norm2_D"], third), layer, "up")
    return x_ID + project(act(up_IF, vision.act) if third else activations.silu_mul(up_IF), layer, "down")


def merged(tower: Params, vision: QwenVision, x_ID: Tensor, index: int, third: bool) -> Tensor:
    """The patches of each square as one embedding, by merger `index`. Pure."""
    norm_D, squares = tower[f"merge{index}_norm_D"], "(i m) d -> i (m d)"
    x_ID = x_ID if index else norm(x_ID, norm_D, third)
    x_IK = rearrange(x_ID, squares, m=vision.merge**2)
    x_IK = norm(x_IK, norm_D, third) if index else x_IK
    return project(activations.activate(project(x_IK, tower, f"merge{index}a"), "gelu"), tower, f"merge{index}b")


def encode(params: Params, spec: ModelSpec, arrays: dict[str, Tensor], third: bool) -> Tensor:
    """The embeddings of an image, beside those that later layers add: [tokens, D * (1 + deepstack)]. Pure."""
    tower, vision = params["vision"], spec.vision
    assert isinstance(vision, QwenVision)
    grid = arrays["grid_2"].tolist()
    x_ID = project(tiled(arrays["patches_IK"].to(tower["merge0_norm_D"].dtype)), tower, "patch")
    place_2I = places(vision, grid)
    rope_IK = rope_table(vision, place_2I).to(x_ID.device)
    whole = near = layout([len(x_ID)], x_ID.device)
    if third:
        x_ID = x_ID + stretched(tower["position_ND"], vision.side, grid, place_2I).to(x_ID.dtype)
    order = np.arange(len(x_ID) // vision.merge**2)
    if vision.window:
        order, lengths = windows(vision, grid[0] // vision.merge, grid[1] // vision.merge)
        near = layout(lengths, x_ID.device)
        index = rearrange(torch.arange(len(x_ID)), "(i m) -> i m", m=vision.merge**2)[torch.from_numpy(order)].flatten()
        x_ID, rope_IK = x_ID[index.to(x_ID.device)], rope_IK[index.to(x_ID.device)]
    found = []
    for i, layer in enumerate(tower["layers"]):
        at = whole if i in vision.full_layers else near
        x_ID = block(layer, vision, x_ID, rope_IK, at, third)
        if i in vision.deep_layers:
            found.append(merged(tower, vision, x_ID, 1 + vision.deep_layers.index(i), third))
    found_ID = torch.cat([merged(tower, vision, x_ID, 0, third), *found], 1)
    return found_ID[torch.from_numpy(order.argsort()).to(x_ID.device)]
