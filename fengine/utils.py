"""Helpers that SGLang's offline-engine examples import from `sglang.utils`."""

from collections.abc import AsyncIterator
from typing import Any

__all__ = ["async_stream_and_merge", "stream_and_merge", "trim_overlap"]


def trim_overlap(existing: str, new: str) -> str:
    """`new` without its longest beginning that is an end of `existing`. Pure."""
    for size in range(min(len(existing), len(new)), 0, -1):
        if existing.endswith(new[:size]):
            return new[size:]
    return new


def _delta(existing: str, chunk: dict[str, Any]) -> str:
    """What `chunk` adds to the text so far. Pure.

    A chunk whose output_ids are all completion tokens carries all text so far; with fewer it carries only what is new,
    so that a genuine repetition ("ha" + "ha") survives. Without these figures overlap is trimmed, as SGLang does.
    """
    text, ids = chunk["text"], chunk.get("output_ids")
    total = chunk.get("meta_info", {}).get("completion_tokens")
    if ids is not None and total is not None:
        if len(ids) != total:
            return text
        if text.startswith(existing):
            return text[len(existing) :]
    return trim_overlap(existing, text)


def stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any] | None) -> str:
    """Streams one prompt and returns its whole text, whether the engine streams cumulative text or increments."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += _delta(text, chunk)
    return text


async def async_stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any] | None) -> AsyncIterator[str]:
    """Streams one prompt and yields what each chunk adds (perhaps ""); the pieces concatenate to the whole text."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        delta = _delta(text, chunk)
        text += delta
        yield delta
