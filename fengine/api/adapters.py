"""`AdapterCalls`: the calls of `Engine` that load and unload LoRA adapters. SGLang's signatures and answers."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from fengine.engine.build import Parts
from fengine.errors import FengineError, InvalidRequestError
from fengine.lora.adapters import Adapters


class AdapterResult(NamedTuple):
    """SGLang's answer about LoRA adapters. Without success, nothing was changed."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]  # path by name


NOT_ENABLED = "LoRA is not enabled. Please set `--enable-lora` (enable_lora=True) to enable LoRA."


class AdapterCalls:
    """An adapter's files are read and checked in the caller's thread while steps go on. What is wrong with them is told
    in the answer. Errors: InvalidRequestError for malformed arguments, EngineClosedError, EngineDeadError."""

    _parts: Parts

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> AdapterResult:
        """Loads a PEFT adapter from a directory or hub id; requests name it with `lora_path=lora_name`.

        `pinned`: once it has come to a slot of the device it stays there.
        """
        return self._adapters(lambda adapters: adapters.load(lora_name, lora_path, pinned))

    def load_lora_adapter_from_tensors(
        self, lora_name: str, tensors: Any, config_dict: dict[str, Any], load_format: str | None = None
    ) -> AdapterResult:
        """Loads an adapter from tensors under PEFT's names, and the values of its adapter_config.json."""
        if load_format is not None:
            raise InvalidRequestError(f"load_format={load_format!r:.80} is not built; give tensors by name, a dict.")
        return self._adapters(lambda adapters: adapters.load_tensors(lora_name, tensors, config_dict))

    def unload_lora_adapter(self, lora_name: str) -> AdapterResult:
        """Forgets an adapter. Requests that came before finish with it; its slot and memory are free then."""
        return self._adapters(lambda adapters: adapters.unload(lora_name))

    async def async_load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> AdapterResult:
        """As `load_lora_adapter`; the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.load_lora_adapter, lora_name, lora_path, pinned)

    async def async_unload_lora_adapter(self, lora_name: str) -> AdapterResult:
        """As `unload_lora_adapter`."""
        return await asyncio.to_thread(self.unload_lora_adapter, lora_name)

    def lora_adapters(self) -> dict[str, str]:
        """Names and paths of the adapters that requests may name."""
        return {} if self._parts.adapters is None else self._parts.adapters.paths()

    def _adapters(self, change: Callable[[Adapters], None]) -> AdapterResult:
        adapters = self._parts.adapters
        self._parts.driver.call(lambda: None)  # a closed engine says so
        if adapters is None:
            return AdapterResult(False, NOT_ENABLED, {})
        try:
            change(adapters)
        except InvalidRequestError:
            raise
        except FengineError as error:
            return AdapterResult(False, str(error), adapters.paths())
        return AdapterResult(True, "", adapters.paths())
