"""Images on the device: the table of their embeddings, what writes it, and which tokens of a step read it."""

from collections.abc import Iterable

import numpy as np
import torch

from fengine.config import EngineConfig
from fengine.core.images import Encode, ImageRows
from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import InvariantError
from fengine.models import lookup
from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Group, share
from fengine.worker.cuda_graphs import Graphs
from fengine.worker.step_input import Arrays
from fengine.worker.tower import Tower

TABLE = "image_ED"  # in Params


def table_rows(config: EngineConfig, width: int, context: int, item_bytes: int) -> int:
    """How many embeddings of so many numbers the table holds: as many as `multimodal.cache_mib` has room for, but not
    more than 64 contexts of images. Pure."""
    return max(min(config.multimodal.cache_mib * 2**20 // (width * item_bytes), 64 * context), 16)


def image_rows(config: EngineConfig, params: Params) -> ImageRows | None:
    """The scheduler's view of the table; None: the model has none. A step encodes as many patches as it has tokens."""
    return ImageRows(len(params[TABLE]), config.scheduler.max_step_tokens or 1) if TABLE in params else None


def letters_of(spec: ModelSpec) -> str:
    """Of the fields of IMAGES that a step has. Pure."""
    return "" if spec.vision is None else "IJ" if spec.vision.bidirectional else "I"


class ImageInputs:
    """Embeddings of images, and where the tokens of running rows with images find them, stand, and look. Of a group,
    rank 0 encodes for all. Modifies: itself, and the table in Params, which it makes."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, params: Params, context: int, rows: int,
        group: Group | None = None, graphs: Graphs | None = None,
    ) -> None:  # fmt: skip
        """`graphs`: where images are captured; None: nowhere."""
        self.group = group
        family, norm_D = lookup(spec.architecture).vision, params["final_norm_D"]
        if spec.vision is None or family is None:
            raise InvariantError(f"{spec.architecture} takes no images")
        self.tower, self.params = Tower(family, params, spec, graphs), params
        self.bidirectional = spec.vision.bidirectional
        width = spec.hidden_size * (1 + spec.vision.deepstack)
        params[TABLE] = norm_D.new_zeros((table_rows(config, width, context, norm_D.itemsize), width))
        self.row_P: dict[int, np.ndarray] = {}  # by row slot: of each prompt token its row of the table, or -1
        self.pos_3P: dict[int, np.ndarray] = {}
        self.last_P: dict[int, np.ndarray] = {}  # of each prompt token the last key that it sees
        self.delta = np.zeros(rows, np.int32)  # of positions behind the prompt

    def write(self, job: Encode) -> None:
        """Encodes an image into its rows. Modifies: the table. Errors: RuntimeError if a rank is gone."""
        table_ED = self.params[TABLE]
        if self.group is None or self.group.rank == 0:
            found_ID = self.tower.encode(job.image)
        else:
            found_ID = table_ED.new_empty((len(job.rows), table_ED.shape[1]))
        if self.group is not None:
            found_ID = share(found_ID, self.group)
        rows = torch.tensor(job.rows, pin_memory=table_ED.is_cuda)
        table_ED.index_copy_(0, rows.to(table_ED.device, non_blocking=True), found_ID)

    def admit(self, new: Request) -> None:
        """Takes over what a new row brings."""
        if not new.placed:
            return
        slot = new.slot
        self.row_P[slot] = row_P = np.full(new.prompt_len, -1, np.int32)
        self.last_P[slot] = last_P = np.arange(new.prompt_len, dtype=np.int32)
        for start, rows in new.placed:
            row_P[start : start + len(rows)] = rows
            last_P[start : start + len(rows)] = start + len(rows) - 1
        if new.rope is not None:
            self.pos_3P[slot], self.delta[slot] = np.asarray(new.rope[0], np.int32), new.rope[1]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.row_P.pop(slot, None) is not None:
                self.pos_3P.pop(slot, None)
                del self.last_P[slot]
                self.delta[slot] = 0

    def fields(self, output: SchedulerOutput, pos_T: np.ndarray, row_T: np.ndarray) -> Arrays:
        at, rope_pos_3I = 0, np.repeat((pos_T + self.delta[row_T])[None], 3, 0)
        found: Arrays = {"image_row_I": np.full(len(pos_T), -1, np.int32), "rope_pos_3I": rope_pos_3I}
        if self.bidirectional:
            found["last_key_J"] = pos_T.copy()
        if self.row_P.keys().isdisjoint(output.rows):
            return found
        for slot, start, count in zip(output.rows, output.starts, output.counts, strict=True):
            if (row_P := self.row_P.get(slot)) is not None and start < len(row_P):
                known = slice(start, start + count)
                here = slice(at, at + len(row_P[known]))
                found["image_row_I"][here] = row_P[known]
                if slot in self.pos_3P:
                    found["rope_pos_3I"][:, here] = self.pos_3P[slot][:, known]
                if self.bidirectional:
                    found["last_key_J"][here] = self.last_P[slot][known]
            at += count
        return found
