"""Quantized checkpoints in the formats of the tools that make them, packed here by the formats' definitions alone, and
beside each the same model dequantized: what a reader and an op must equal bit for bit.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Made = tuple[dict[str, Tensor], Tensor]  # tensors by the end of their names, and the matrix they stand for


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of the last axis in int32 words, the first in the lowest bits."""
    per = 32 // bits
    grouped = codes.astype(np.uint64).reshape(*codes.shape[:-1], codes.shape[-1] // per, per)
    return (grouped << np.arange(per, dtype=np.uint64) * bits).sum(-1).astype(np.uint32).view(np.int32)


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def from_fragments(words: Tensor, scales: Tensor, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [R, K], scales [R, G], zeros) of the layout of ops/fragments.py, one weight after another."""
    blocks, chunks = words.shape[:2]
    word, scale = words.numpy().view(np.uint32), scales.numpy().view(np.uint32)
    if group == 32:  # where the bits of a word lie, told by its 32 codes' bits one by one
        home = [6, 7, 8, 15, 0, 1, 2, 9, 10, 11, 12, 19, 4, 29, 30, 5]
        home += [22, 23, 24, 31, 16, 17, 18, 25, 26, 27, 28, 3, 20, 13, 14, 21]
        word = sum((word >> np.uint32(at) & np.uint32(1)) << np.uint32(bit) for bit, at in enumerate(home))
    row, col = np.arange(blocks * 64)[:, None], np.arange(chunks * 64)[None, :]
    block, warp, eight, line = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    chunk, half, step, k3 = col // 64, col // 32 % 2, col // 16 % 2, col // 8 % 2
    at = line % 2 * 16 + col // 2 % 4 * 4 + step * 2 + half
    code = word[block, chunk, warp * 4 + line // 2, at] >> (16 * (col % 2) + 8 * eight + 4 * k3) & 15
    at = warp * 8 + line
    if group == 32:
        found = scale[block, chunk * 32 + at] >> (16 * eight + 8 * half) & 255
        exponent = np.ascontiguousarray(found[:, ::32]).astype(np.int32)
        return code, ((exponent - 126) << 23).view(np.float32), np.zeros_like(exponent)
    found = np.ascontiguousarray(scale[block, col // group * 64 + eight * 32 + at][:, ::group])
    return code, (found & 0xFFFFE000).astype(np.uint32).view(np.float32), found & 255


def from_words(words: Tensor, scales: Tensor, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of the layout of ops/int4_words.py."""
    blocks, chunks = words.shape[:2]
    word, scale = words.numpy().view(np.uint32), scales.numpy().view(np.uint32)
    row, col = np.arange(blocks * 32)[:, None], np.arange(chunks * 128)[None, :]
    at = row % 32 * 16 + col // 2 % 4 * 4 + col // 64 % 2 * 2 + col // 32 % 2
    code = word[row // 32, col // 128, at] >> (16 * (col % 2) + 8 * (col // 16 % 2) + 4 * (col // 8 % 2)) & 15
    found = np.ascontiguousarray(scale[row // 32, col // group * 32 + row % 32][:, ::group])
    return code, (found & 0xFFFFE000).astype(np.uint32).view(np.float32) / np.float32(64), found & 255


class Maker:
    """Random codes and scales. `dtype`: of scales, and of what is not quantized."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.random, self.dtype = np.random.default_rng(seed), dtype

    def scales(self, *shape: int, size: float = 0.02) -> Tensor:
        return torch.from_numpy(self.random.uniform(0.2, 1, shape) * size).to(self.dtype)

    def ordered(self, index: np.ndarray, act: bool | str) -> np.ndarray:
        """Groups of columns by activation: alike in matrices of the same inputs, as q, k and v, or with "own" not."""
        return (self.random if act == "own" else np.random.default_rng(len(index))).permutation(index) if act else index

    def value(self, code: np.ndarray, zero: np.ndarray, scale: Tensor, group: np.ndarray) -> Tensor:
        """rounded((code - zero) * scale): of int64 in float64, so there is one rounding."""
        w = (code.astype(np.int64) - zero.astype(np.int64)[:, group]) * scale.double().numpy()[:, group]
        return torch.from_numpy(w).to(self.dtype)

    def awq(self, n: int, k: int, group: int) -> Made:
        code, zero = self.random.integers(0, 16, (n, k)), self.random.integers(0, 16, (n, k // group))
        scale = self.scales(n, k // group)

        def packed(nk: np.ndarray) -> Tensor:
            columns = nk.T.reshape(nk.shape[1], n // 8, 8)
            return tensor(words(columns[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(nk.shape[1], n), 4))

        parts = {"qweight": packed(code), "qzeros": packed(zero), "scales": scale.T.contiguous()}
        return parts, self.value(code, zero, scale, np.arange(k) // group)

    def gptq(
        self, n: int, k: int, group: int, bits: int = 4, sym: bool = False, act: bool = False, v2: bool = False
    ) -> Made:
        top, group = 1 << bits, group if group > 0 else k
        code = self.random.integers(0, top, (n, k))
        zero = np.full((n, -(-k // group)), top // 2) if sym else self.random.integers(0, top, (n, -(-k // group)))
        scale, index = self.scales(n, zero.shape[1]), np.arange(k) // group
        index = self.ordered(index, act)
        less = np.int32(0 if v2 else 0x11111111 if bits == 4 else 0x01010101)  # of whole words, as GPTQModel does
        parts = {
            "qweight": tensor(words(code, bits).T), "qzeros": tensor(words(zero.T, bits) - less),
            "scales": scale.T.contiguous(), "g_idx": tensor(index.astype(np.int32)),
        }  # fmt: skip
        return parts, self.value(code, zero, scale, index)

    def packed(self, n: int, k: int, group: int, bits: int = 4, sym: bool = True,
               act: bool | str = False) -> Made:  # fmt: skip
        half, group = 1 << bits - 1, group if group > 0 else k
        code = self.random.integers(-half, half, (n, k))
        zero = np.zeros((n, k // group), np.int64) if sym else self.random.integers(-half, half, (n, k // group))
        scale, index = self.scales(n, k // group), np.arange(k) // group
        index = self.ordered(index, act)
        pad = -k % (32 // bits)
        parts = {
            "weight_packed": tensor(words(np.pad(code + half, ((0, 0), (0, pad))), bits)),
            "weight_scale": scale, "weight_shape": torch.tensor([n, k]),
        }  # fmt: skip
        if not sym:
            padded = np.pad(zero + half, ((0, -n % (32 // bits)), (0, 0)))
            parts["weight_zero_point"] = tensor(words(padded.T, bits).T)
        if act:
            parts["weight_g_idx"] = tensor(index.astype(np.int32))
        return parts, self.value(code, zero, scale, index)

    def e4m3(self, n: int, k: int) -> Tensor:
        code = self.random.integers(0, 127, (n, k)) + 128 * self.random.integers(0, 2, (n, k))  # 127 is NaN
        return torch.from_numpy(code.astype(np.uint8)).view(torch.float8_e4m3fn)

    def fp8(
        self, n: int, k: int, block: tuple[int, int] | None, name: str = "weight_scale_inv", static: bool = False
    ) -> Made:
        """Blocks of rows and columns; None: a scale for each row."""
        rows, columns = block or (1, k)
        code, scale = self.e4m3(n, k), self.scales(-(-n // rows), -(-k // columns), size=2e-4).float()
        whole = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        parts = {"weight": code, name: scale}
        parts |= {"input_scale": torch.tensor([0.5])} if static else {}
        return parts, (code.float() * whole).to(self.dtype)

    def micro(self, n: int, k: int) -> Made:
        code, power = self.random.integers(0, 16, (n, k)), self.random.integers(118, 122, (n, k // 32))
        value = E2M1[code] * np.exp2(power - 127.0).astype(np.float32).repeat(32, 1)
        parts = {
            "weight_packed": tensor((code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8)),
            "weight_scale": tensor(power.astype(np.uint8)),
        }  # fmt: skip
        return parts, torch.from_numpy(value).to(self.dtype)


Choose = Callable[[Maker, str, int, int], Made | None]


def write(
    directory: Path, config: dict[str, Any], choose: Choose, *, family: str = "llama",
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, **overrides: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """(the quantized checkpoint, the dequantized one). `choose` makes the matrix of a module, or None to keep it."""
    plain = tiny_checkpoints.write(directory / "plain", family, seed=seed, dtype=dtype, **overrides)
    tensors, maker = load_file(plain / "model.safetensors"), Maker(seed, dtype)
    few, dense = dict(tensors), dict(tensors)
    for name, matrix in tensors.items():
        module = name.removesuffix(".weight")
        if matrix.dim() != 2 or "embed" in name or (made := choose(maker, module, *matrix.shape)) is None:
            continue
        del few[name]
        few |= {f"{module}.{end}": part for end, part in made[0].items()}
        dense[name] = made[1]
    save_file(dense, plain / "model.safetensors", {"format": "pt"})
    target = directory / "quantized"
    target.mkdir()
    save_file({name: part.contiguous() for name, part in few.items()}, target / "model.safetensors", {"format": "pt"})
    told = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(told | {"quantization_config": config}))
    return target, plain
