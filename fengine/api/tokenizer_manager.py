"""`engine.tokenizer_manager`: the names through which programs written for SGLang's engine reach its insides."""

from typing import Any

from fengine.api.generation import Generation
from fengine.api.server_args import ServerArgs
from fengine.tokenizer.hf_tokenizer import HFTokenizer


class TokenizerManager:
    """SGLang's name. There is no such part in fengine: every call goes to the engine."""

    def __init__(self, engine: Generation, args: ServerArgs) -> None:
        parts = engine._door.parts
        self._engine = engine
        self.server_args = args
        self.model_path = args.model_path
        self.context_len = parts.context_length
        self.is_generation = parts.spec.generates
        self.tokenizer = None if parts.tokenizer is None else HFTokenizer(parts.tokenizer, parts.context_length)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ends the request with exactly this rid, or all; an unknown or empty one is ignored."""
        if rid or abort_all:
            self._engine.abort(rid, abort_all)

    async def pause_generation(self, request: Any = None) -> None:
        """As `Engine.pause_generation`; `request.mode` is the mode."""
        self._engine.pause_generation(getattr(request, "mode", "abort"))

    async def continue_generation(self, request: Any = None) -> None:
        self._engine.continue_generation()
