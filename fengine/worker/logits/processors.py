"""A request's own Python function on its row of logits. Steps with one run outside of graphs, one row at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fengine.errors import FengineError, LogitProcessorError
from fengine.models.kv_state import Tensors
from fengine.ops.edit_logits import BAN
from fengine.worker.chunks import Chunk
from fengine.worker.step_input import LogitsStage, StepInput


@dataclass(frozen=True, slots=True)
class ProcessorRequest:
    """What a logit processor may know about its request: `custom_params["__req__"]`, a copy made for each call."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int]


class Call(NamedTuple):
    """A row's function, and the one dict it is called with."""

    row: int
    function: Any
    params: dict[str, Any]


class Processors(LogitsStage):
    """The functions of one step. Modifies: itself, "__req__" of the functions' own dicts."""

    name, host = "processor", True

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.calls = calls
        self.failed: dict[int, FengineError] = {}

    def stage(self, step: StepInput, draws_R: np.ndarray) -> LogitsStage | None:
        calls = [_call(chunk) for chunk in step.chunks if chunk.draws and chunk.new.params.processor is not None]
        return Processors(calls) if calls else None

    def apply(self, logits_RV: Tensor, tensors: Tensors) -> Tensor:
        for call in self.calls:
            row_1V = logits_RV[call.row : call.row + 1]
            try:
                row_1V.copy_(processed(call, row_1V))
            except BaseException as error:  # whatever it raises ends its own request: not its neighbours, not the loop
                if not isinstance(error, LogitProcessorError):
                    told = LogitProcessorError(f"custom_logit_processor raised {type(error).__name__}: {error!s:.500}")
                    told.__cause__ = error
                    error = told
                self.failed[call.row] = error
        return logits_RV

    def drawn(self, logits_RV: Tensor, token_R: Tensor, tensors: Tensors) -> None:
        """Sees what a mask has left of what the functions returned."""
        for row, function in {call.row: call.function for call in self.calls if call.row not in self.failed}.items():
            if not bool(((logits_RV[row] > -BAN) | ~logits_RV[row].isfinite()).any()):
                self.failed[row] = _nothing_left(function)

    def errors(self) -> dict[int, FengineError]:
        return self.failed


def _nothing_left(function: Any) -> FengineError:
    """One of the server's own tells by what name a request asked for it."""
    if (own := getattr(type(function), "nothing_left", None)) is not None:
        return own(function)
    return LogitProcessorError("custom_logit_processor returned -inf for every token that may be drawn")


def _call(chunk: Chunk) -> Call:
    new = chunk.new
    params = {} if new.params.custom_params is None else new.params.custom_params
    params["__req__"] = ProcessorRequest(new.rid, new.token_ids[: new.prompt_len], new.output_ids)
    return Call(chunk.row, new.params.processor, params)


def processed(call: Call, row_1V: Tensor) -> Tensor:
    """What the function makes of a copy of the row, checked; banned ids are -inf for it and for what it returns.
    Errors: LogitProcessorError, and whatever the function raises."""
    if not bool(row_1V.isfinite().all()):
        return row_1V  # the model's fault, and `draw` will say so
    shown_1V = torch.where(row_1V <= -BAN, -torch.inf, row_1V)
    with torch.cuda.device_of(row_1V):  # whichever device the function leaves behind as this thread's
        result = call.function(shown_1V, [call.params])
    if not isinstance(result, Tensor) or result.shape != row_1V.shape or not result.is_floating_point():
        got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        raise LogitProcessorError(
            f"custom_logit_processor returned {got}; it must return a floating-point tensor of shape "
            f"{tuple(row_1V.shape)}, as it got"
        )
    result = result.detach().to(row_1V)
    if bool((result.isnan() | (result == torch.inf)).any()):
        raise LogitProcessorError("custom_logit_processor returned NaN or +inf; logits must be finite, or -inf")
    return result.clamp(-BAN, BAN)
