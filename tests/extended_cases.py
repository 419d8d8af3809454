"""Requests of all kinds, run through an engine core: what the tests of the extended step share."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from books import check_scheduler
from loops import in_loop

from fengine.api.features import FEATURES
from fengine.config import CacheConfig, CompileConfig, Dtype, EngineConfig, ModelConfig, SchedulerConfig
from fengine.core.request import Request, SamplingParams
from fengine.engine.build import build
from fengine.engine.parts import Parts
from fengine.engine.request_state import RequestState


@dataclass
class Ask:
    """A request to come, by value: running it twice makes two requests."""

    prompt: list[int]
    asked: SamplingParams | None = None
    new: int = 8
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    def request(self, rid: str) -> Request:
        return Request(
            rid, len(self.prompt), list(self.prompt), self.sampling(), self.seed, self.new, self.stop_ids,
        )  # fmt: skip

    def sampling(self) -> SamplingParams:
        """What is `asked`, with the checked `params`."""
        given = {name: getattr(SamplingParams.of(self.params), name) for name in (*self.params, "top_k")}
        return replace(self.asked or SamplingParams(), **given)


def config(path: Path | str, *, tokens: int = 64, rows: int = 8, page_size: int = 4, pool: int = 2048,
           overlap: bool = False, cached: bool = True, compiled: bool = False, device: str = "cpu",
           dtype: str = "float32") -> EngineConfig:  # fmt: skip
    return EngineConfig(
        model=ModelConfig(path=str(path), device=device, skip_tokenizer_init=True, dtype=Dtype(dtype)),
        cache=CacheConfig(page_size=page_size, max_total_tokens=pool, prefix_cache=cached),
        scheduler=SchedulerConfig(max_running_requests=rows, max_step_tokens=tokens, overlap=overlap),
        compile=CompileConfig(enabled=compiled),
    )


@contextmanager
def running(path: Path | str, **options: Any) -> Iterator[Parts]:
    """An engine's parts; its books are checked after each step and at the end."""
    parts = build(config(path, **options), FEATURES)
    scheduler = parts.core.stepper.scheduler
    update = scheduler.update

    def checked(*arguments: Any) -> list[Request]:
        finished = update(*arguments)
        check_scheduler(scheduler)
        return finished

    scheduler.update = checked  # type: ignore[method-assign]
    try:
        yield parts
        in_loop(parts.core, lambda: check_scheduler(scheduler))
        assert parts.stats()["pages_used"] == 0
    finally:
        parts.close()


class Found:
    """A finished request, and what was found of it: `record`, its state."""

    def __init__(self, state: RequestState) -> None:
        self.request, self.record = state.request, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


def run(parts: Parts, asks: Sequence[Ask]) -> list[Any]:
    """All at once; returns what was `Found`, in order."""
    done = threading.Semaphore(0)
    states = [RequestState(ask.request(f"r{i}"), None, False, lambda _: done.release()) for i, ask in enumerate(asks)]
    parts.core.submit(states)
    for _ in states:
        assert done.acquire(timeout=120)
    assert parts.core.inbox.end is None, parts.core.inbox.end
    return [Found(state) for state in states]


def outcome(found: Found) -> tuple[Any, ...]:
    """Everything that a request got, comparable bit for bit."""
    request, record = found.request, found.record
    assert request.finish is not None
    vector = None if record.embedding is None else record.embedding.tobytes()
    return (
        request.token_ids, request.logprobs, request.finish,
        record.input_logprobs, record.input_top, record.input_ids, record.output_top, record.output_ids,
        [(array.shape, array.tobytes()) for array in record.hidden], vector, str(record.fault), request.unasked,
    )  # fmt: skip
