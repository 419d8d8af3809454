"""`WeightUpdates`: every way to give an engine new weights, and to read those that it has.

    tensors, a directory, a broadcast  --checked, in the caller's thread-->  changes  --one call of the loop-->  live

A change is all or nothing, and happens between two steps. What the old weights computed is forgotten: the prefix cache
is emptied, and requests that run go back to the queue and are computed again from their tokens, so they go on as the
new weights would from there. Between `begin` and `end` changes are collected in CPU memory and take effect together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine import models
from fengine.engine.engine_core import EngineCore
from fengine.engine.parallel.ranks import Ranks
from fengine.engine.weights.group import GroupError, Groups, buffers
from fengine.engine.weights.incoming import FORMATS, Change, Origin, settle_head, tensors_of
from fengine.engine.weights.live import LiveWeights
from fengine.engine.weights.save import save_weights
from fengine.errors import (
    ConfigError,
    EngineBusyError,
    InvalidRequestError,
    MemoryReleasedError,
    ModelLoadError,
    OutOfMemoryError,
    UnsupportedFeatureError,
)
from fengine.models.weights import EMBEDDING, HEAD
from fengine.worker.hub import resolve_model

Reader = Callable[[], list[tuple[str, Tensor]]]
SELECTORS = ("all", "target")
LOST = "the weights are incomplete"  # the key of a refusal


class UpdateResult(NamedTuple):
    """SGLang's answer to everything that concerns weights. Without success, nothing was changed."""

    success: bool
    message: str


@dataclass
class Session:
    """What came between `begin` and `end`, and what its parts asked of the whole: the last label, and whether requests
    are aborted. `fault`: why all of it will be refused."""

    changes: list[Change] = field(default_factory=list)
    version: str | None = None
    abort: bool = False
    fault: str | None = None


class WeightUpdates:
    """Modifies: itself, and in the loop's thread the live weights. Updates answer with an UpdateResult. They raise only
    what says nothing about the weights: InvalidRequestError for a malformed call, UnsupportedFeatureError,
    EngineClosedError, EngineDeadError."""

    def __init__(self, live: LiveWeights, core: EngineCore, ranks: Ranks | None, cache_dir: str | None) -> None:
        self.live, self.core, self.ranks, self.cache_dir = live, core, ranks, cache_dir
        self.missing: set[str] = set()  # tensors whose values were lost
        self._session: Session | None = None
        self.groups = Groups(next((str(place.leaf.device) for place in live.places.values()), "cpu"))
        self._lock = threading.Lock()  # see `alone`
        core.handlers |= {"update_weights": self._replace, "read_weights": self._read}

    def close(self) -> None:
        self.groups.close()
        self._session = None

    def update_from_disk(
        self, path: Any, load_format: Any, *, version: str | None = None, abort: bool = False
    ) -> UpdateResult:
        """Every tensor of a checkpoint directory or hub id, read into CPU memory before anything changes."""
        if load_format not in (None, "auto", "safetensors"):
            raise UnsupportedFeatureError(f"load_format={load_format!r:.80} is not built; use 'auto' or 'safetensors'.")
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidRequestError(f"model_path must be a directory or a hub id, got {path!r:.80}.")
        try:
            origin = Origin.of(resolve_model(str(path), cache_dir=self.cache_dir))
        except (ModelLoadError, ConfigError, OSError) as error:
            return self._refused(error)
        return self._update(lambda: self.live.read_origin(origin), version, abort, origin)

    def update_from_tensor(
        self, named_tensors: Any, load_format: Any, *, version: str | None = None, abort: bool = False
    ) -> UpdateResult:
        """Some or all tensors by name, from any device. They are copied before the call returns."""
        given = tensors_of(named_tensors, load_format)
        return self._update(lambda: given, version, abort)

    def update_from_distributed(
        self, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: Any, *, version: str | None = None,
        abort: bool = False,
    ) -> UpdateResult:  # fmt: skip
        """What rank 0 of a group broadcasts, one tensor after another. It is received whole, then checked."""
        if load_format not in FORMATS:
            raise UnsupportedFeatureError(
                f"load_format={load_format!r:.80} is not built: None or 'flattened_bucket' are."
            )
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InvalidRequestError(f"names must be a list of tensor names, got {names!r:.80}.")
        self.core.call("ping")  # a closed engine has left its groups
        try:
            device = self.groups.device(group_name)
        except GroupError as error:
            return UpdateResult(False, str(error))
        received, tensors = buffers(dtypes, shapes, len(names), device, load_format == "flattened_bucket")

        def receive() -> list[tuple[str, Tensor]]:
            self.groups.receive(group_name, received)
            return list(zip(names, tensors, strict=True))

        return self._update(receive, version, abort)

    def _update(self, read: Reader, version: str | None, abort: bool, origin: Origin | None = None) -> UpdateResult:
        """Reads, checks and commits; in a session: reads, checks and collects."""
        self._check_version(version)
        self.core.call("ping")  # a closed engine is told before anything is read
        with self.alone():
            session = self._session
            seen = {change.name for change in session.changes} if session else set()
            try:
                changes = self.live.check(read(), seen)
                if session is None:
                    return self._commit(self._settled(changes), version, abort, origin)
            except (
                ModelLoadError, ConfigError, InvalidRequestError, OutOfMemoryError, MemoryReleasedError, GroupError,
                torch.OutOfMemoryError,
            ) as error:  # fmt: skip
                return self._refused(error)
            session.changes += [change.kept() for change in changes]
            session.version, session.abort = version or session.version, abort or session.abort
            return UpdateResult(True, f"{len(changes)} tensors wait for end_weight_update()")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One update at a time. A logit processor, called by the loop, must not wait: who is ahead waits for the loop.
        Errors: EngineBusyError."""
        in_loop = self.core.owns_thread()
        if not self._lock.acquire(blocking=not in_loop):
            raise EngineBusyError("another weight update waits for this very step: update the weights from outside it")
        try:
            yield
        finally:
            self._lock.release()

    def _refused(self, error: Exception) -> UpdateResult:
        """Nothing changes; in a session, nothing of the session will."""
        if self._session is not None and self._session.fault is None:
            self._session.fault = str(error)
        return UpdateResult(False, str(error))

    def begin(self, selector: Any) -> UpdateResult:
        """From here to `end`, updates are collected."""
        if selector not in SELECTORS:
            raise InvalidRequestError(f"selector must be 'all' or 'target', got {selector!r:.80}.")
        self.core.call("ping")
        with self.alone():
            if self._session is not None:
                return UpdateResult(False, "a weight update has begun already: end it with end_weight_update() first")
            self._session = Session()
            return UpdateResult(True, "the weight update has begun")

    def end(self, *, version: str | None = None, abort: bool = False) -> UpdateResult:
        """All that was collected takes effect, or, if one part of it was refused, nothing."""
        self._check_version(version)
        self.core.call("ping")
        with self.alone():
            session, self._session = self._session, None
            if session is None:
                return UpdateResult(False, "no weight update has begun: call begin_weight_update() first")
            if session.fault is not None:
                return UpdateResult(False, f"nothing was changed, for a part was refused: {session.fault}")
            try:
                changes = self._settled(session.changes)
                return self._commit(changes, version or session.version, abort or session.abort)
            except (InvalidRequestError, MemoryReleasedError) as error:
                return UpdateResult(False, str(error))

    def _settled(self, changes: list[Change]) -> list[Change]:
        """As `incoming.settle_head`. The live embedding, if it is needed, is read by the loop, which may release it."""
        return settle_head(self.live.spec, changes, lambda: self.read_tensor(EMBEDDING))

    def _check_version(self, version: str | None) -> None:
        if version is not None and (not isinstance(version, str) or not version):
            raise InvalidRequestError(f"weight_version must be a string that is not empty, got {version!r:.80}.")

    def _commit(
        self, changes: list[Change], version: str | None, abort: bool, origin: Origin | None = None
    ) -> UpdateResult:
        if abort:
            self.core.abort_rids(None)
        names = [change.name for change in changes]
        retracted = self.core.call("update_weights", (changes, origin), names=names, version=version)
        again = f"; {retracted} running requests go on with the new weights" if retracted else ""
        return UpdateResult(True, f"{len(changes)} tensors were updated, the prefix cache is empty{again}")

    # -- what the weights are ------------------------------------------------------------------------------------------

    def read(self, name: Any, rows: Any) -> list[Any] | None:
        """The first `rows` rows of a tensor as nested lists of floats; None for a name that the model has not. Errors:
        InvalidRequestError, UnsupportedFeatureError, MemoryReleasedError, EngineClosedError."""
        if not isinstance(name, str):
            raise InvalidRequestError(f"name must be the name of a tensor, got {name!r:.80}.")
        if type(rows) is not int or rows < 0:
            raise InvalidRequestError(f"truncate_size must be a whole number of rows, got {rows!r:.80}.")
        spec = self.live.spec
        name = models.lookup(spec.architecture).rename(spec, name)
        name = EMBEDDING if spec.tie_embeddings and name == HEAD else name
        out: list[Any] = []
        for part in self.live.fused.get(name, (name,)):
            found = self.read_tensor(part, rows - len(out))
            if found is None and {part, f"{part.rpartition('.')[0]}.weight"} & self.live.few_bits.keys():
                raise UnsupportedFeatureError(f"{part!r} is in few bits: read it from the files of the checkpoint.")
            if found is None:
                return None
            out += found.float().tolist()
        return out

    def read_tensor(self, tensor: str, rows: int | None = None) -> Tensor | None:
        """The first rows of a live tensor, or all; None for a name that the model has not. Errors: as `read`."""
        return self.core.call("read_weights", tensor=tensor, rows=rows)

    def save(self, model_dir: Path | str, overrides: str, path: Any, pattern: Any, max_size: Any) -> None:
        """As `save_weights`, while no update comes."""
        with self.alone():
            self.core.call("ping")  # a closed engine has let its weights go
            save_weights(self.live, self.read_tensor, Path(model_dir), overrides, path, pattern, max_size)

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _read(self, tensor: str, rows: int | None) -> Tensor | None:
        """Errors: MemoryReleasedError where there are no values."""
        if tensor not in self.live.places:
            return None
        reason = self.core.refusals.get("weights") or (self.core.refusals.get(LOST) if tensor in self.missing else None)
        if reason is not None:
            raise MemoryReleasedError(reason)
        if self.ranks is None or self.live.places[tensor].cut is None:
            return self.live.read(tensor, rows)
        with self.ranks.told("read_weights", name=tensor, rows=None):
            return self.live.read(tensor, rows)

    def _replace(self, attached: tuple[list[Change], Origin | None], names: Sequence[str], version: str | None) -> int:
        """Forgets what the old weights computed, then writes. Returns how many requests go on with the new. Errors:
        MemoryReleasedError."""
        changes, origin = attached
        if (reason := self.core.refusals.get("weights")) is not None:
            raise MemoryReleasedError(reason)
        if self.ranks is not None:
            self.ranks.update({change.name: change.tensor for change in changes}, origin)
        retracted = self.core.stepper.forget_weights()
        self._write(changes, origin)
        if version is not None:
            self.core.label_weights(version)
        return retracted

    def _write(self, changes: list[Change], origin: Origin | None) -> None:
        """Should a copy fail, nobody may compute with the mixture: what runs is aborted, and requests are refused until
        every tensor has been given again. Those that come meanwhile wait for the loop."""
        names = {change.name for change in changes}
        try:
            self.live.write(changes, origin)
        except Exception:
            self.live.origin = None
            self.lose(self.missing | names)
            self.core.abort_rids(None)  # before the next step
            raise
        self.lose(self.missing - names)

    def lose(self, names: set[str]) -> None:
        """Sets which tensors hold no values; while there are any, requests are refused."""
        self.missing = names
        if not names:
            return self.core.allow(LOST)
        shown = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
        self.core.refuse({
            LOST: f"{LOST}: {len(names)} tensors hold no values ({shown}); give them with update_weights_from_disk or "
            "update_weights_from_tensor"
        })  # fmt: skip
