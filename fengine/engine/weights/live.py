"""`LiveWeights`: the parameters that steps run with, as the loop's thread writes, loses and reads them.

A change happens between two steps, into the storage that is there: no address changes, nothing is compiled or captured
again. What the old weights computed is forgotten: the prefix cache is emptied, and requests that run go back to the
queue and are computed again from their tokens, so they go on as the new weights would from there.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fengine import models
from fengine.engine.engine_core import EngineCore
from fengine.engine.weights.incoming import Change, Origin, check, read_directory, read_spec
from fengine.engine.weights.places import Place, few_bits_of, fused_names, places_of
from fengine.errors import InvalidRequestError, MemoryReleasedError, UnsupportedFeatureError
from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, HEAD
from fengine.ops.columns import Group


class RankCommands(Protocol):
    """What weights and memory need where several processes hold the model: each does the same, in the same order."""

    @property
    def group(self) -> Group: ...

    def tell(self, name: str, **arguments: Any) -> None:
        """Has the other ranks execute a command of this name."""
        ...

    def update(self, tensors: dict[str, Tensor], origin: Origin | None, version: str | None) -> None:
        """Has the other ranks write checked tensors."""
        ...

    def swap(self, part: Tensor) -> Tensor:
        """The parts of all ranks, of one size, on the CPU."""
        ...


LOST = "the weights are incomplete"  # the key of a refusal


class LiveWeights:
    """Modifies, in the loop's thread: the parameters' storage; itself."""

    def __init__(
        self, params: Params, spec: ModelSpec, core: EngineCore, model_dir: Path, from_disk: bool,
        ranks: RankCommands | None = None,
    ) -> None:  # fmt: skip
        """`from_disk`: the parameters are those of the checkpoint in `model_dir`. `ranks`: they are a rank's part."""
        self.params, self.spec, self.core, self.ranks = params, spec, core, ranks
        self.origin = Origin.of(model_dir) if from_disk else None  # where the live weights can be read again
        weights = models.lookup(spec.architecture).weights(spec)
        self.places: dict[str, Place] = places_of(params, weights, None if ranks is None else ranks.group)
        self.few_bits = few_bits_of(params, weights)  # of matrices that are in no place
        self._fused = fused_names(weights)
        self.missing: set[str] = set()  # tensors whose values were lost
        core.handlers |= {"update_weights": self.update, "read_weights": self._read}
        self._told = read_spec(model_dir) if weights and (model_dir / "config.json").exists() else spec

    def close(self) -> None:
        """Drops the parameters."""
        self.params, self.places, self.few_bits = {}, {}, []

    # -- in any thread -------------------------------------------------------------------------------------------------

    def check(self, tensors: Iterable[tuple[str, Tensor]], seen: set[str]) -> list[Change]:
        """As `incoming.check`. Errors: UnsupportedFeatureError too."""
        self.refuse_few_bits("updated")
        return check(self.spec, self.places, self._fused, tensors, seen)

    def read_origin(self, origin: Origin) -> list[tuple[str, Tensor]]:
        """Errors: ModelLoadError and its kinds, UnsupportedFeatureError."""
        self.refuse_few_bits("updated")
        return read_directory(origin.directory, self._told, self.spec, self.places)

    def refuse_few_bits(self, what: str) -> None:
        """Errors: UnsupportedFeatureError where the checkpoint's tensors are not those that run."""
        if self.spec.quantization is not None:
            raise UnsupportedFeatureError(f"quantized weights cannot be {what}: start another engine, or use 16 bits.")

    def read(self, name: Any, rows: Any) -> list[Any] | None:
        """The first `rows` rows of a tensor as nested lists of floats; None for a name that the model has not.

        Errors: InvalidRequestError, MemoryReleasedError, EngineClosedError.
        """
        if not isinstance(name, str):
            raise InvalidRequestError(f"name must be the name of a tensor, got {name!r:.80}.")
        if type(rows) is not int or rows < 0:
            raise InvalidRequestError(f"truncate_size must be a whole number of rows, got {rows!r:.80}.")
        name = models.lookup(self.spec.architecture).rename(self.spec, name)
        tied = self.spec.tie_embeddings and name == HEAD
        out: list[Any] = []
        for part in (EMBEDDING,) if tied else self._fused.get(name, (name,)):
            found = self.read_tensor(part, rows - len(out))
            if found is None:
                return None
            out += found.float().tolist()
        return out

    def replace(self, changes: list[Change], version: str | None, origin: Origin | None) -> int:
        """Has the loop forget what the old weights computed, then write. Returns how many requests go on with the new.

        Errors: MemoryReleasedError, EngineClosedError, EngineDeadError.
        """
        names = [change.name for change in changes]
        return self.core.call("update_weights", (changes, origin), names=names, version=version)

    def read_tensor(self, tensor: str, rows: int | None = None) -> Tensor | None:
        """The first rows of a live tensor, or all; None for a name that the model has not. Errors: as `replace`."""
        return self.core.call("read_weights", tensor=tensor, rows=rows)

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def update(self, attached: tuple[list[Change], Origin | None], names: Sequence[str], version: str | None) -> int:
        """Errors: MemoryReleasedError."""
        changes, origin = attached
        if (reason := self.core.refusal("weights")) is not None:
            raise MemoryReleasedError(reason)
        if self.ranks is not None:
            self.ranks.update({change.name: change.tensor for change in changes}, origin, version)
        retracted = self.core.stepper.forget_weights()
        self.write(changes)
        if changes:
            self.origin = origin
        if version is not None:
            self.core.label_weights(version)
        return retracted

    def write(self, changes: list[Change]) -> None:
        """Copies checked tensors into the live ones; on the device nothing is allocated.

        Should a copy fail all the same, nobody may compute with the mixture: what runs is aborted, and requests are
        refused until every tensor has been given again.
        """
        names = {change.name for change in changes}
        self.lose(self.missing | names)
        try:
            for change in changes:
                change.place.write(change.tensor)
            if changes and changes[0].place.leaf.is_cuda:
                torch.cuda.synchronize(changes[0].place.leaf.device)  # the caller may reuse its tensors
        except Exception:
            self.origin = None
            self.core.abort_rids(None)  # before the next step
            raise
        self.lose(self.missing - names)

    def lose(self, names: set[str]) -> None:
        """Sets which tensors hold no values; while there are any, requests are refused."""
        self.missing = names
        if names:
            shown = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
            reason = (
                f"{LOST}: {len(names)} tensors hold no values ({shown}); give them with update_weights_from_disk or "
            )
            self.core.refuse({LOST: reason + "update_weights_from_tensor"})
        else:
            self.core.allow(LOST)

    def _read(self, tensor: str, rows: int | None) -> Tensor | None:
        """Errors: MemoryReleasedError where there are no values."""
        if tensor not in self.places:
            return None
        reason = self.core.refusal("weights") or (self.core.refusal(LOST) if tensor in self.missing else None)
        if reason is not None:
            raise MemoryReleasedError(reason)
        place = self.places[tensor]
        if place.cut is None or self.ranks is None:
            return place.read(rows)
        self.ranks.tell("read_weights", tensor=tensor, rows=None)
        part, plain = place.held.read(), place.source.plain
        if missing := place.cut.count(0) - place.cut.count(place.cut.rank):
            part = torch.cat((part, part.new_zeros(missing, *part.shape[1:])))
        parts = self.ranks.swap(part)
        return place.source.theirs(place.cut.joined(parts, plain.shape))[:rows]

    def nbytes(self) -> int:
        """Bytes that the parameters take. Pure."""
        leaves = {id(tensor): tensor for tensor in self.tensors()}.values()
        return sum(leaf.untyped_storage().nbytes() for leaf in leaves)

    def tensors(self) -> list[Tensor]:
        """Those that hold the parameters; one of several places comes as often. Pure."""
        return [place.leaf for place in self.places.values()] + self.few_bits
