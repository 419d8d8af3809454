"""The sizes that CUDA steps are padded to, and how a step's input lies in one packed buffer. Pure."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.models.kv_state import AdapterBatch, SamplingBatch, StepBatch
from fengine.worker.input_batch import Staged
from fengine.worker.step import Feed

GRAPH_TOKENS = 8192  # larger steps gain nothing from a graph
FORWARD_TOKENS = 1024  # nor do larger extended steps from one of their forward pass: its kernels outlast their launches
SHORT_ROWS = (
    64  # decode steps of so many rows are short: they are captured over both inputs, so that none waits for a copy
)


class Bucket(NamedTuple):
    """A padded step size. `graph` says whether it is captured, `adapters` whether some row has an adapter."""

    tokens: int
    rows: int
    graph: bool
    adapters: bool = False


def decode_buckets(rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 to 64, of 64 beyond; the last one is `rows`. Tiles are of 64 rows: 80 rows take as
    long as 128, or longer."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 4096, 64)]
    return [s for s in sizes if s < rows] + [rows]


def token_buckets(tokens: int) -> list[int]:
    """Steps with prompt chunks: from 256 on at most 1.25x apart, multiples of 16."""
    small = [16, 32, 64, 128, 192]
    large = [base * eighths // 8 for base in (256, 512, 1024, 2048, 4096, 8192) for eighths in (8, 10, 12, 14)]
    return [s for s in (*small, *large, 16384) if s < tokens] + [tokens]


class Slot(NamedTuple):
    """One field's place in the packed input: offset and length in bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def short(bucket: Bucket) -> bool:
    """Whether the bucket is captured over both inputs. Pure."""
    return bucket.graph and bucket.tokens == bucket.rows <= SHORT_ROWS


def packed_layout(tokens: int, rows: int, width: int, adapter_slots: int = 0) -> list[Slot]:
    """Where each field of Staged lies in one packed byte buffer; 16-byte aligned."""
    sizes = {"T": (tokens,), "R": (rows,), "B": (rows + 1,), "RN": (rows, width), "A": (0,), "S": (0,)}
    if adapter_slots:
        sizes |= {"A": (tokens,), "S": (adapter_slots + 1,)}
    special = {"seed_R": torch.int64, "feed_from_T": torch.bool}
    special |= dict.fromkeys(("temperature_R", "top_p_R", "min_p_R"), torch.float32)
    slots, at = [], 0
    for name in Staged._fields:
        shape = sizes[name.rsplit("_", 1)[1]]
        dtype = special.get(name, torch.int32)
        size = int(np.prod(shape)) * dtype.itemsize
        slots.append(Slot(name, dtype, shape, at, size))
        at += -(-size // 16) * 16
    return slots


def views(buffer: Tensor, layout: list[Slot]) -> list[Tensor]:
    """Typed views of a packed byte buffer, one per field. Pure."""
    return [buffer[s.start : s.start + s.size].view(s.dtype).view(s.shape) for s in layout]


BATCH = len(StepBatch._fields) - 1  # where in Staged the fields of SamplingBatch begin, of Feed, and of AdapterBatch
SAMPLING = BATCH + len(SamplingBatch._fields)
PLAIN = SAMPLING + len(Feed._fields) - 1


def inputs(fields: list[Tensor], last_token_R: Tensor) -> tuple[StepBatch, SamplingBatch, Feed]:
    """The step's arguments from tensors in the order of Staged's fields, those of adapters or not. Pure."""
    adapters = AdapterBatch(*fields[PLAIN:]) if len(fields) > PLAIN and fields[-1].numel() else None
    batch = StepBatch(*fields[:BATCH], adapters=adapters)
    return batch, SamplingBatch(*fields[BATCH:SAMPLING]), Feed(last_token_R, *fields[SAMPLING:PLAIN])
