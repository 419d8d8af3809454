"""The tokenizer that transformers makes of a directory: for programs that reach through SGLang's engine for one."""

from typing import Any

from fengine.tokenizer.pipeline import auto_tokenizer
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import resolve_model


def hf_tokenizer(tokenizer: Tokenizer, context_length: int | None = None) -> Any:
    """transformers' own, with the chat template in force. Its files were tried when `tokenizer` was loaded. It shares
    nothing with the engine's, for encoding changes it: it is not thread-safe."""
    found = auto_tokenizer(tokenizer.directory)
    found.chat_template = tokenizer.chat_templates.get("default", tokenizer.chat_templates or None)
    if context_length is not None:
        found.model_max_length = context_length
    return found


def get_tokenizer(
    tokenizer_name: str, *, tokenizer_mode: str = "auto", trust_remote_code: bool = False,
    tokenizer_revision: str | None = None,
) -> Any:  # fmt: skip
    """SGLang's helper: the tokenizer of a directory or hub id. Errors: ModelLoadError and its kinds.
    `trust_remote_code` is a permission, and code of a checkpoint is never run; `tokenizer_mode` has no effect."""
    return hf_tokenizer(Tokenizer.from_directory(resolve_model(tokenizer_name, tokenizer_revision, weights=False)))
