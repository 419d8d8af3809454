"""`engine.tokenizer_manager`: the names through which programs written for SGLang's engine reach its insides."""

from collections.abc import AsyncIterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from fengine.api import admin, info, weights
from fengine.api.admin import FlushResult
from fengine.api.io_struct import (
    ContinueGenerationReqInput,
    EncodeReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from fengine.api.streams import AsyncStream
from fengine.engine.weights.updates import UpdateResult
from fengine.tokenizer.hf_tokenizer import hf_tokenizer


class TokenizerManager:
    """SGLang's name. There is no such part in fengine: every call goes to the engine."""

    def __init__(self, engine: Any) -> None:
        parts, args = engine._parts, engine._context.args
        self._engine = engine
        self.server_args = args
        self.model_path = args.model_path
        self.context_len = parts.context_length
        self.is_generation = parts.spec.generates
        self.model_config = SimpleNamespace(**info.model_config(parts, args))

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the model, made at first use; None with skip_tokenizer_init."""
        own = self._engine._parts.tokenizer
        return None if own is None else hf_tokenizer(own, self.context_len)

    async def generate_request(
        self, req: GenerateReqInput | EncodeReqInput, request: Any = None
    ) -> AsyncIterator[dict[str, Any] | list[dict[str, Any]]]:
        """Yields the chunks of a stream, or once what `async_generate` or `async_encode` returns. `request`, of a web
        framework, has no effect. Errors: those of `Engine.generate`."""
        found = await self._engine._answered(req)
        if not isinstance(found, AsyncStream):
            yield found
            return
        try:
            async for chunk in found:
                yield chunk
        finally:
            await found.aclose()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends the request with exactly this rid, or all; an unknown or empty one is ignored."""
        if rid or abort_all:
            admin.abort(self._engine, rid, abort_all)

    async def flush_cache(self) -> FlushResult:
        return admin.flush_cache(self._engine)

    # Those below take SGLang's records, and a web framework's request, which has no effect.

    async def pause_generation(self, obj: PauseGenerationReqInput | None = None, request: Any = None) -> None:
        admin.pause_generation(self._engine, "abort" if obj is None else obj.mode)

    async def continue_generation(self, obj: ContinueGenerationReqInput | None = None, request: Any = None) -> None:
        admin.continue_generation(self._engine)

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput, request: Any = None) -> None:
        weights.release_memory_occupation(self._engine, obj.tags)

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput, request: Any = None) -> None:
        weights.resume_memory_occupation(self._engine, obj.tags)

    async def update_weights_from_disk(self, obj: UpdateWeightFromDiskReqInput, request: Any = None) -> UpdateResult:
        return weights.update_weights_from_disk(
            self._engine, obj.model_path, obj.load_format, weight_version=obj.weight_version,
            abort_all_requests=obj.abort_all_requests,
        )  # fmt: skip
