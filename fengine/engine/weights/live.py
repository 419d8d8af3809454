"""`LiveWeights`: the parameters that a process computes with, by the checkpoint's names: checked, written, read. A
change goes to the storage that is there: no address changes, nothing is compiled or captured again."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from fengine import models
from fengine.engine.weights.incoming import Change, Origin, check, read_directory, read_spec
from fengine.engine.weights.places import few_bits_of, fused_names, places_of
from fengine.errors import UnsupportedFeatureError
from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Group
from fengine.worker.process_group import least, swap


class LiveWeights:
    """Modifies: the parameters' storage; itself."""

    def __init__(
        self, params: Params, spec: ModelSpec, model_dir: Path, origin: Origin | None, group: Group | None = None
    ) -> None:
        """`origin`: whose parameters these are. `group`: they are a rank's part."""
        self.params, self.spec, self.group = params, spec, group
        self.origin = origin  # where the live weights can be read again
        self.writes = 0  # of values that come from no files, since they came from an origin
        weights = models.lookup(spec.architecture).weights(spec)
        self.places = places_of(params, weights, group)
        self.few_bits = few_bits_of(params, weights)  # of matrices that are in no place
        self.fused = fused_names(weights)
        self._told = read_spec(model_dir) if weights and (model_dir / "config.json").exists() else spec

    def close(self) -> None:
        self.params, self.places, self.few_bits = {}, {}, {}

    def refuse_few_bits(self, what: str) -> None:
        """Errors: UnsupportedFeatureError where the checkpoint's tensors are not those that run."""
        if self.spec.quantization is not None:
            raise UnsupportedFeatureError(f"quantized weights cannot be {what}: start another engine, or use 16 bits.")

    def check(self, tensors: Iterable[tuple[str, Tensor]], seen: set[str]) -> list[Change]:
        """As `incoming.check`. Errors: UnsupportedFeatureError too."""
        self.refuse_few_bits("updated")
        return check(self.spec, self.places, self.fused, tensors, seen)

    def read_origin(self, origin: Origin) -> list[tuple[str, Tensor]]:
        """Errors: ModelLoadError and its kinds, UnsupportedFeatureError."""
        self.refuse_few_bits("updated")
        return read_directory(origin.directory, self._told, self.spec, self.places)

    def source(self) -> tuple[str | None, int]:
        """The directory of the origin, and how many updates have come from no files since. Pure."""
        return None if self.origin is None else str(self.origin.directory), self.writes

    # -- between two steps ---------------------------------------------------------------------------------------------

    def write(self, changes: list[Change], origin: Origin | None) -> None:
        """Copies checked tensors into the live ones; on the device nothing is allocated."""
        for change in changes:
            change.place.write(change.tensor)
        if changes and changes[0].place.leaf.is_cuda:
            torch.cuda.synchronize(changes[0].place.leaf.device)  # the caller may reuse its tensors
        self.origin = origin if changes else self.origin
        self.writes = self.writes + bool(changes) if origin is None else 0

    def read_again(self) -> bool:
        """Writes what the origin holds, if there is one that has not changed. Errors: as `read_origin`."""
        origin = self.origin
        if origin is None or Origin.of(origin.directory) != origin:
            return False
        self.write(self.check(self.read_origin(origin), set()), origin)
        return True

    def agreed(self, held: bool) -> bool:
        """Whether all ranks say so. Errors: RankGoneError."""
        return held if self.group is None else bool(least(held, self.group))

    def read(self, name: str, rows: int | None) -> Tensor:
        """The first rows of a tensor, or all, on the CPU. Of a group every rank reads. Errors: RankGoneError."""
        place = self.places[name]
        if place.cut is None or self.group is None:
            return place.read(rows)
        part, plain = place.held.read(), place.source.plain
        if missing := place.cut.count(0) - place.cut.count(place.cut.rank):
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        return place.source.theirs(place.cut.joined(swap(part, self.group), plain.shape))[:rows]

    def nbytes(self) -> int:
        leaves = {id(tensor): tensor for tensor in self.tensors()}.values()
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves)

    def tensors(self) -> list[Tensor]:
        """Those that hold the parameters; one of several places comes as often. Pure."""
        return [place.leaf for place in self.places.values()] + sum(self.few_bits.values(), [])
