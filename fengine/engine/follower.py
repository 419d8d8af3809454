"""The steps of one of the other ranks of an engine: its part of every step that rank 0 tells of."""

import zlib
from typing import Any, cast

import numpy as np

from fengine.core.plain import Handles, from_plain
from fengine.core.scheduler_output import SchedulerOutput
from fengine.engine.child import Link
from fengine.engine.stepper import Runner
from fengine.models.kv_state import KVState
from fengine.worker.input_batch import InputBatch
from fengine.worker.process_group import checksum
from fengine.worker.step import Result

NOTHING = Handles({}, lambda kind, text: None, lambda name, number: cast(Any, None))


def follow_steps(link: Link, runner: Runner, input_batch: InputBatch, kv: KVState) -> None:
    """Until the process ends."""
    pending: tuple[int, int, Result] | None = None  # the step whose result is not read yet
    while True:
        output = from_plain(SchedulerOutput, link.told.get(), NOTHING)
        step = input_batch.stage(output)
        step.stages, step.top, step.hidden_H = (), None, None  # rank 0's alone
        kv, result = runner.launch(kv, step)
        if pending is not None:
            _land(link, *pending)
        pending = output.step, checksum(step), result
        if link.told.empty():
            _land(link, *pending)
            pending = None


def _land(link: Link, number: int, digest: int, result: Result) -> None:
    link.say(step=number, sum=zlib.crc32(np.array(result().tokens, np.int32).tobytes(), digest))
