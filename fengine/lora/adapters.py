"""`Adapters`: the LoRA adapters of an engine by name; loaded, unloaded and reloaded in the callers' threads.

A loaded adapter is a checked image in CPU memory; the scheduler has it copied to one of the device's slots when a
request needs it (`core/lora_slots.py`). Requests refer to the load itself, so one that is unloaded, or loaded anew
under its name, goes on for those that came before. Beyond `max_loaded` the one that was asked for longest ago loses its
image; it is read again when it is asked for, if its files are what they were.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fengine.config import DEFAULT_RANK, MAX_RANK, LoraConfig
from fengine.core.owned import finalize
from fengine.core.request import Adapter
from fengine.core.scalars import told
from fengine.errors import AdapterError, ConfigError, InvalidRequestError, ModelLoadError, OutOfMemoryError
from fengine.lora.layout import PIECE, Layout, all_finite, all_sites, fits, kinds_of, rest
from fengine.lora.peft_config import read_config
from fengine.lora.peft_files import Limits, Read, check_arguments, check_name, from_tensors, read_adapter, sha256_of
from fengine.models import lookup
from fengine.models.kv_state import Params
from fengine.models.spec import ModelSpec
from fengine.ops.columns import Group
from fengine.worker.hub import resolve_model


def open_adapters(
    config: LoraConfig, spec: ModelSpec, params: Params, base: str, group: Group | None = None
) -> "Adapters | RankAdapters | None":
    """The adapters of an engine, those of `config.paths` loaded, with memory for the slots. None: no LoRA. Of a group
    rank 0 reads them, and leaves each other rank its part in a file.

    Modifies: params, whose layers get the slots' stacks. Errors: ConfigError, AdapterError, OutOfMemoryError.
    """
    if not config.on:
        return None
    weight = params["final_norm_D"]  # in the activations' dtype
    known = kinds_of(spec)
    kinds = known if config.target_modules is None else config.target_modules
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(
            f"lora.target_modules has {', '.join(unknown)}; linear layers of this model are {', '.join(known)}."
        )
    rename = str if spec.vision is None else partial(lookup(spec.architecture).rename, spec)
    limits = Limits(all_sites(spec), kinds, config.max_lora_rank or _largest_rank(config), rename)
    how = (spec, limits.max_rank, kinds, weight.dtype, weight.device)
    layout = Layout.of(*how, group)
    slots = config.max_loras_per_batch
    try:
        memory = layout.memory(slots)
    except (RuntimeError, MemoryError) as error:
        raise OutOfMemoryError(
            f"no memory for {slots} LoRA adapters of rank {limits.max_rank} ({slots * layout.size / 2**20:.0f} MiB): "
            f"{str(error).partition('.')[0]}. Lower lora.max_loras_per_batch or lora.max_lora_rank."
        ) from None
    layout.attach(params, memory)
    if group is not None and group.rank:
        return RankAdapters(memory, group)
    adapters = Adapters(layout, limits, memory, config.max_loaded_loras, base)
    if group is not None:
        parts = [group._replace(rank=rank) for rank in range(1, group.size)]
        adapters.parts = [(Layout.of(*how, part), part) for part in parts]
    for name, path in config.named():
        adapters.load(name, path, name in config.pinned)
    return adapters


def part_file(group: Group, number: int) -> Path:
    """Where a rank finds its part of a load. Pure."""
    return Path(group.folder) / f"adapter-{number}-{group.rank}"


class RankAdapters:
    """The slots of another rank than 0. Modifies: itself."""

    def __init__(self, memory: Tensor, group: Group) -> None:
        self.memory, self.group, self.slots = memory, group, len(memory)

    def write(self, slot: int, number: int) -> None:
        """As `Adapters.write`, from what rank 0 has left."""
        self.memory[slot].copy_(torch.from_numpy(np.fromfile(part_file(self.group, number), np.uint8)))


def _largest_rank(config: LoraConfig) -> int:
    """Of the adapters that are loaded at the start. Errors: AdapterError, ConfigError."""
    found = [read_config(adapter_directory(path)) for _, path in config.named()]
    rank = max((rank for one in found for rank in (one.r, *one.rank_pattern.values())), default=DEFAULT_RANK)
    if rank > MAX_RANK:
        raise ConfigError(f"an adapter of lora.paths has rank {rank}; at most {MAX_RANK} is supported.")
    return rank


def adapter_directory(path: str) -> Path:
    """Of a directory or hub id. Errors: AdapterError."""
    try:
        return resolve_model(path)
    except ModelLoadError as error:
        raise AdapterError(f"LoRA adapter: {error}") from None


@dataclass(slots=True, eq=False)
class Entry:
    """An adapter that was loaded. `load` None: its image was given up, it is read again from `directory`."""

    path: str  # as the caller gave it; "" for tensors
    directory: Path | None
    sha256: str
    load: Adapter | None
    pinned: bool


class Adapters:
    """Thread-safe. Modifies: itself."""

    def __init__(self, layout: Layout, limits: Limits, memory: Tensor, max_loaded: int | None, base: str) -> None:
        """`memory`: that of the device's slots. `base`: the name of the engine's model, for a warning."""
        self.layout, self.limits, self.memory, self.max_loaded, self.base = layout, limits, memory, max_loaded, base
        self.slots = len(memory)
        self.parts: list[tuple[Layout, Group]] = []  # of the other ranks
        self._entries: dict[str, Entry] = {}  # in the order of use
        self._numbers = count(1)
        self._loads: WeakValueDictionary[int, Adapter] = WeakValueDictionary()  # requests hold theirs
        self._lock = threading.Lock()  # of the entries; never held while files are read
        self._loading = threading.RLock()  # one load at a time

    def close(self) -> None:
        """Drops the slots' memory, and the images: nothing can be written any more."""
        self.memory = torch.empty(0)
        for load in list(self._loads.values()):
            load.image = None

    def paths(self) -> dict[str, str]:
        """The path of every adapter that requests may name."""
        with self._lock:
            return {name: entry.path for name, entry in sorted(self._entries.items())}

    def digests(self) -> dict[str, str]:
        """The sha256 of what every adapter was read from."""
        with self._lock:
            return {name: entry.sha256 for name, entry in sorted(self._entries.items())}

    def resolve(self, name: Any) -> Adapter:
        """The adapter that a request names. Errors: InvalidRequestError, AdapterError if it cannot be read again."""
        if not isinstance(name, str):
            raise InvalidRequestError(f"lora_path must be the name of a loaded adapter or None, got {told(name)}.")
        if (load := self._used(name)) is not None:
            return load
        with self._loading:
            return self._used(name) or self._reload(name)

    def write(self, slot: int, number: int) -> None:
        """Copies a load that some request refers to into a slot, on CUDA after the steps that were launched.

        Modifies: the device memory of the slots.
        """
        for place, piece in zip(self.memory[slot].split(PIECE), self._loads[number].image, strict=True):
            place.copy_(piece, non_blocking=True)

    def given_up(self, names: Any) -> list[str]:
        """Of one name, or a list of them, those whose adapter must be read again. Pure."""
        wanted = {name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)}
        with self._lock:
            return [name for name, entry in self._entries.items() if entry.load is None and name in wanted]

    def load(self, name: Any, path: Any, pinned: Any = False) -> None:
        """Reads an adapter's directory, or hub repository, and gives it a name.

        Errors: InvalidRequestError for arguments, AdapterError for a name that is taken and whatever is wrong with it.
        """
        if not isinstance(path, (str, Path)) or not str(path):
            raise InvalidRequestError(f"lora_path must be a directory or a hub id, got {told(path)}.")
        self._add(name, pinned, str(path), lambda directory: read_adapter(directory, self.limits))

    def load_tensors(self, name: Any, tensors: Any, values: Any, pinned: Any = False) -> None:
        """As `load`, from tensors by PEFT's names and the values of its config. Such an adapter keeps its image."""
        check_arguments(tensors, values)
        self._add(name, pinned, "", lambda _: from_tensors(tensors, values, name, self.limits))

    def unload(self, name: Any) -> None:
        """Forgets a name. Requests that came before finish with it. Errors: AdapterError if there is none."""
        with self._loading, self._lock:
            entry = self._entries.pop(name, None) if isinstance(name, str) else None
            if entry is None:
                raise AdapterError(f"LoRA adapter {told(name)} does not exist. Loaded adapters: {list(self._entries)}")
            if entry.load is not None:
                entry.load.pinned = False  # its slot may go to another

    # -- inside --------------------------------------------------------------------------------------------------------

    def _used(self, name: str) -> Adapter | None:
        """The load of a known name, which is now the last one used. Errors: InvalidRequestError."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                known = ", ".join(map(repr, sorted(self._entries))) or "none"
                raise InvalidRequestError(
                    f"Got LoRA adapter that has never been loaded: {told(name)}. Loaded: {known}. Load it with "
                    "load_lora_adapter(name, path), or leave lora_path out."
                )
            self._entries[name] = entry
            return entry.load

    def _reload(self, name: str) -> Adapter:
        """Reads an adapter again that had lost its image. In `_loading`."""
        entry = self._entries[name]
        assert entry.directory is not None
        if sha256_of(entry.directory) != entry.sha256:
            raise AdapterError(
                f"LoRA adapter {name!r} must be read again, but {entry.directory} has changed since it was loaded; "
                "unload it and load it anew."
            )
        entry.load = self._laid_out(name, read_adapter(entry.directory, self.limits), entry.pinned)
        self._give_up(keep=name)
        return entry.load

    def _add(self, name: Any, pinned: Any, path: str, read: Callable[[Any], Read]) -> None:
        """Errors: InvalidRequestError, AdapterError."""
        check_name(name, pinned)
        with self._loading:
            self._check_room(name, pinned)
            directory = adapter_directory(path) if path else None
            found = read(directory)
            base = found.config.base
            if path and isinstance(base, str) and base and Path(base).name.lower() != Path(self.base).name.lower():
                warnings.warn(f"LoRA adapter {name!r} was made for {base}, the model is {self.base}", stacklevel=4)
            load = self._laid_out(name, found, pinned)
            with self._lock:
                self._entries[name] = Entry(path, directory, found.sha256, load, pinned)
            self._give_up(keep=name)

    def _check_room(self, name: str, pinned: bool) -> None:
        """Errors: AdapterError. In `_loading`."""
        with self._lock:
            if name in self._entries:
                raise AdapterError(f"LoRA adapter {name!r} is already loaded; unload it first, or choose another name.")
            num_pinned = sum(entry.pinned for entry in self._entries.values())
            fixed = sum(entry.pinned or entry.directory is None for entry in self._entries.values())
        if pinned and num_pinned + 1 >= self.slots:
            raise AdapterError(
                f"LoRA adapter {name!r} cannot be pinned: {num_pinned} of max_loras_per_batch={self.slots} slots are, "
                "and one must be left for the others. Load it with pinned=False, or raise max_loras_per_batch."
            )
        if self.max_loaded is not None and fixed >= self.max_loaded:
            raise AdapterError(
                f"max_loaded_loras={self.max_loaded} adapters are loaded, all of them pinned or given as tensors; "
                "unload one first."
            )

    def _laid_out(self, name: str, read: Read, pinned: bool) -> Adapter:
        """Errors: AdapterError for values that are finite no more in the activations' dtype; OutOfMemoryError."""
        for module, update in read.updates.items():
            scale = torch.tensor(update.scale, dtype=torch.float32)
            if not (fits(update.a, self.layout.dtype) and fits(update.b, self.layout.dtype) and all_finite(scale)):
                raise AdapterError(
                    f"LoRA adapter {name!r} has values in {module} that are too large for {self.layout.dtype}."
                )
        try:
            pieces, number = self._pieces(self.layout.image(read.updates)), next(self._numbers)
            for layout, group in self.parts:
                layout.image(read.updates).numpy().tofile(part_file(group, number))
        except (RuntimeError, MemoryError) as error:
            size = self.layout.size / 2**20
            raise OutOfMemoryError(
                f"no CPU memory for LoRA adapter {name!r} ({size:.0f} MiB): {str(error).partition('.')[0]}. Unload "
                "another one, or lower max_loaded_loras or max_lora_rank."
            ) from None
        load = Adapter(name, number, pieces, pinned)
        self._loads[number] = load
        for _, group in self.parts:
            finalize(load, part_file(group, number).unlink, missing_ok=True)
        return load

    def _pieces(self, image: Tensor) -> list[Tensor]:
        """Pieces of PIECE bytes, pinned where they are to be copied while steps run."""
        pieces = list(image.split(PIECE))
        if self.layout.device.type == "cuda":
            for i, piece in enumerate(pieces):
                pieces[i] = torch.empty(len(piece), dtype=torch.uint8, pin_memory=True)
                pieces[i].numpy()[:] = piece.numpy()
                rest()
        return pieces

    def _give_up(self, keep: str) -> None:
        """Takes images from those used longest ago, until there are no more than `max_loaded`. In `_loading`."""
        with self._lock:
            held = {name: entry for name, entry in self._entries.items() if entry.load is not None}
            spare = [e for name, e in held.items() if not e.pinned and e.directory is not None and name != keep]
            for entry in spare[: max(0, len(held) - (self.max_loaded or len(held)))]:
                entry.load = None
