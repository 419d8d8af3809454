"""LoRA adapters of replicas: `SharedAdapters`, the names as callers have them; `Replicated`, a replica's own loads.

Each replica reads the files itself, and knows a load by the number that it has here. A request names both, so that it
is never computed with another load of the same name."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fengine.config import LoraConfig
from fengine.core.owned import Folder
from fengine.core.request import Adapter
from fengine.errors import AdapterError, FengineError
from fengine.lora.adapters import Adapters, Entry
from fengine.lora.peft_config import CONFIG
from fengine.lora.peft_files import WEIGHTS, check_arguments, check_name, check_tensors
from fengine.worker.safetensors_file import leave_tensors

Ask = Callable[..., Any]  # has all replicas call a method of `Replicated`; raises what the first of them does


class SharedAdapters(Adapters):
    """As `Adapters`, without images. Thread-safe. Modifies: itself."""

    def __init__(self, config: LoraConfig, ask: Ask, folder: str) -> None:
        """Those of `config.paths`, which every replica has loaded. `folder`: for those that are given as tensors."""
        nothing: Any = None
        super().__init__(nothing, nothing, torch.empty(config.max_loras_per_batch, 0), config.max_loaded_loras, "")
        self.ask, self.folder = ask, folder
        self._folders: dict[str, Folder] = {}  # of those given as tensors
        for name, path in config.named():
            self._enter(name, path, name in config.pinned, next(self._numbers), "")

    def load_tensors(self, name: Any, tensors: Any, values: Any, pinned: Any = False) -> None:
        check_arguments(tensors, values)
        check_tensors(tensors, name)
        folder = Folder(parent=self.folder).make()
        leave_tensors(tensors, Path(folder.name) / WEIGHTS)
        (Path(folder.name) / CONFIG).write_text(json.dumps(dict(values), default=_plain))
        with self._loading:
            try:
                self._add(name, pinned, "", lambda _: folder.name)
            except BaseException as error:
                if not isinstance(error, Exception):  # interrupted: replicas may still have to read it
                    folder.cleanup.detach()  # it goes with the engine's
                raise
            self._folders[name] = folder

    def unload(self, name: Any) -> None:
        with self._loading:  # until all have done it: a load of that name comes behind it
            with self._lock:
                entry = self._entries.get(name) if isinstance(name, str) else None
            super().unload(name)
            if entry is not None and entry.load is not None:
                self.ask("unload", name, entry.load.number)
                self._folders.pop(name, None)

    def _add(self, name: Any, pinned: Any, path: str, read: Callable[[Any], Any]) -> None:
        check_name(name, pinned)
        with self._loading:
            self._check_room(name, pinned)
            number = next(self._numbers)
            try:
                sha256 = self.ask("load", name, path or read(None), pinned, number)
            except FengineError:
                self.ask("unload", name, number)  # of those that have it
                raise
            self._enter(name, path, pinned, number, sha256)

    def _enter(self, name: str, path: str, pinned: bool, number: int, sha256: str) -> None:
        with self._lock:
            load = Adapter(name, number, None, pinned)
            self._entries[name] = Entry(path, Path(path) if path else None, sha256, load, pinned)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


class Replicated:
    """The adapters of one replica. Thread-safe. Modifies: them, itself."""

    def __init__(self, adapters: Adapters, config: LoraConfig) -> None:
        self.adapters = adapters
        self._changing = threading.RLock()  # one change at a time
        self.numbers = {name: number for number, (name, _) in enumerate(config.named(), 1)}

    def load(self, name: str, path: str, pinned: bool, number: int) -> str:
        """Instead of another load of that name, which a replica that is started again may have. Returns its sha256."""
        with self._changing:
            if name in self.numbers:
                self.unload(name, self.numbers[name])
            self.adapters.load(name, path, pinned)
            self.numbers[name] = number
            return self.adapters.digests()[name]

    def unload(self, name: str, number: int) -> None:
        with self._changing:
            if self.numbers.get(name) == number:
                del self.numbers[name]
                self.adapters.unload(name)

    def of(self, name: str, number: int) -> Adapter:
        """Errors: AdapterError, InvalidRequestError."""
        load = self.adapters.resolve(name) if self.numbers.get(name) == number else None
        if load is None or self.numbers.get(name) != number:  # another one may have come while it was looked up
            raise AdapterError(
                f"LoRA adapter {name!r} was unloaded before the request came to its replica; send it again"
            )
        return load
