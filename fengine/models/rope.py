"""Tables of rotary position embedding, by the very operations of transformers' `modeling_rope_utils`: equal bits."""

import math

import torch
from torch import Tensor

from fengine.models.spec import ModelSpec, RopeSpec

NONE = "rope_none_MK"  # the table of layers without rotary embedding: it turns by nothing
LOCAL = "rope_local_MK"  # of layers with a window, where they have their own


def rope_tables(spec: ModelSpec, length: int) -> dict[str, Tensor]:
    """The tables that the layers of a model name, float32 [length, K], for positions 0 .. length - 1. Pure."""
    width = spec.rotary_dim or spec.head_dim
    found = {"rope_MK": widened(rope_table(spec.rope, width, length), spec.head_dim)}
    if spec.rope_local is not None:
        found[LOCAL] = widened(rope_table(spec.rope_local, width, length), spec.head_dim)
    if any(kind.rope == NONE for kind in spec.kinds):
        found[NONE] = widened(torch.empty(length, 0), spec.head_dim)
    return found


def widened(table_MR: Tensor, width: int) -> Tensor:
    """A table of R columns as one of `width`, whose other columns turn by nothing. Pure."""
    cos, sin = table_MR.chunk(2, -1) if table_MR.shape[1] else (table_MR, table_MR)
    rest = cos.new_ones(len(cos), width // 2 - cos.shape[1])
    return torch.cat((cos, rest, sin, torch.zeros_like(rest)), -1)


def rope_table(rope: RopeSpec, width: int, length: int) -> Tensor:
    """float32 [length, K] on the CPU: cos in the first K/2 columns, sin in the rest. Pure. longrope takes its long
    factors where the context in force, `length`, is longer than that of pretraining."""
    frequency = inverse_frequencies(rope, width, length)
    angle_MK = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle_MK.cos(), angle_MK.sin()), -1) * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, width: int, length: int) -> Tensor:
    """float32 [K/2]. Pure."""
    exponent = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponent)
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequency)
    if rope.kind == "yarn":
        return _yarn(rope, width, rope.theta**exponent)
    return frequency


def _llama3(rope: RopeSpec, frequency: Tensor) -> Tensor:
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    wavelength = 2 * math.pi / frequency
    scaled = torch.where(wavelength > low_wavelength, frequency / rope.factor, frequency)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(medium, blended, scaled)


def _yarn(rope: RopeSpec, width: int, powers: Tensor) -> Tensor:
    """Interpolated where a dimension turns seldom over the pretraining length, as it was where it turns often."""

    def dimension(turns: float) -> float:
        return width * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
