"""The ops on logits on the CPU: draws, logprobs, edits. As `cpu.py`."""

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.ops.cpu_library import no_room, plain, schedule


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, pos: Tensor
) -> tuple[Tensor, Tensor]:
    """(token int32 [R], logprob float32 [R]); the rules stand in sampling.py."""
    logits, temperature = plain(logits, "logits"), plain(temperature, "temperature")
    top_p, min_p = plain(top_p, "top_p"), plain(min_p, "min_p")
    top_k, pos = plain(top_k, "top_k", torch.int32), plain(pos, "pos", torch.int32)
    seed = plain(seed, "seed", torch.int64)
    rows, vocab = logits.shape
    token, logprob = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.float32)
    library, threads = schedule(32 * rows * vocab)
    if library.fengine_draw(
        logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
        seed.data_ptr(), pos.data_ptr(), token.data_ptr(), logprob.data_ptr(), rows, vocab, threads,
    ):  # fmt: skip
        raise no_room("draw")
    return token, logprob


def logprobs(logits: Tensor, temperature: Tensor, id: Tensor) -> Tensor:
    """Log-probabilities float32 [R, K] of ids [R, K]; the rules stand in logprobs.py."""
    logits, temperature = plain(logits, "logits"), plain(temperature, "temperature")
    id = plain(id, "id", torch.int32)
    (rows, vocab), count = logits.shape, id.shape[1]
    out = logits.new_empty((rows, count))
    library, threads = schedule(16 * rows * vocab)
    if library.fengine_logprobs(
        logits.data_ptr(), temperature.data_ptr(), id.data_ptr(), out.data_ptr(), rows, vocab, count, threads
    ):
        raise no_room("logprobs")
    return out


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` <= V ids with the largest logits, int32 [R, count]; the rules stand in logprobs.py."""
    logits = plain(logits, "logits")
    rows, vocab = logits.shape
    id = logits.new_empty((rows, count), dtype=torch.int32)
    library, threads = schedule(rows * vocab)
    if library.fengine_top_ids(logits.data_ptr(), id.data_ptr(), rows, vocab, count, threads):
        raise no_room("top_ids")
    return id


def _editable(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise UnsupportedFeatureError(f"logits are {logits.dtype}; they must be contiguous float32 to be edited")
    return logits


def penalize_(
    logits: Tensor, slot: Tensor, frequency: Tensor, presence: Tensor, repetition: Tensor, count: Tensor
) -> None:
    """Modifies: logits, which must be contiguous float32; the rules stand in edit_logits.py."""
    logits, (rows, vocab) = _editable(logits), logits.shape
    slot, count = plain(slot, "slot", torch.int32), plain(count, "count", torch.int32)
    frequency, presence = plain(frequency, "frequency", torch.float64), plain(presence, "presence", torch.float64)
    repetition = plain(repetition, "repetition")
    schedule(rows * vocab // 4)[0].fengine_penalize(
        logits.data_ptr(), slot.data_ptr(), frequency.data_ptr(), presence.data_ptr(), repetition.data_ptr(),
        count.data_ptr(), rows, vocab, 1e30,
    )  # fmt: skip


def add_at_(logits: Tensor, slot: Tensor, id: Tensor, value: Tensor) -> None:
    """Modifies: logits, which must be contiguous float32, at the ids of each row's slot."""
    logits, (rows, vocab) = _editable(logits), logits.shape
    slot, id, value = plain(slot, "slot", torch.int32), plain(id, "id", torch.int32), plain(value, "value")
    schedule(rows * id.shape[1])[0].fengine_add_at(
        logits.data_ptr(), slot.data_ptr(), id.data_ptr(), value.data_ptr(), rows, vocab, id.shape[1], 1e30
    )


def count_(count: Tensor, slot: Tensor, token: Tensor) -> None:
    """Modifies: count [slots, V], which must be contiguous int32, at [slot, token]."""
    if count.dtype != torch.int32 or not count.is_contiguous():
        raise UnsupportedFeatureError(f"counts are {count.dtype}; they must be contiguous int32")
    slot, token = plain(slot, "slot", torch.int32), plain(token, "token", torch.int32)
    schedule(slot.shape[0])[0].fengine_count(
        count.data_ptr(), slot.data_ptr(), token.data_ptr(), slot.shape[0], count.shape[1]
    )


def apply_bitmask_(logits: Tensor, row: Tensor, mask: Tensor) -> None:
    """Modifies: logits, which must be contiguous float32, in the rows `row`; the rules stand in bitmask.py."""
    logits = _editable(logits)
    row, mask = plain(row, "row", torch.int32), plain(mask, "mask", torch.int32)
    library, _ = schedule(row.shape[0] * logits.shape[1] // 4)
    library.fengine_apply_bitmask(
        logits.data_ptr(), row.data_ptr(), mask.data_ptr(), row.shape[0], logits.shape[1], 1e30
    )
