"""The other schedules under which `fengine verify` computes a run again, as engine configurations. Pure; no torch.

Bits may not depend on any of this: the order of rows, how many run at once, how prompts are cut, the size of pages,
what the prefix cache holds, preemption, and whether a token was drawn or read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fengine.config import MAX_ROWS, Algorithm, EngineConfig

# name -> what is other than in the run, for readers
LAYOUTS = {
    "permuted": "the run's own engine, rows in another order",
    "rescored": "what was decoded is read: prompt and answer as one prompt",
    "warm": "every row a second time, over a prefix cache that has seen it",
    "alone": "one request at a time",
    "batch": "another number of requests at once",
    "chunks": "prompts cut into small chunks",
    "pages": "another page size",
    "uncached": "no prefix cache",
    "guessed": "with guessed tokens (speculation=ngram); without where the run had them",
    "preempted": "a pool of pages so small that requests are preempted and computed again",
}
CROWD = 24  # rows that the small pool is asked for at least, so that they get in one another's way
SPARE_TOKENS = 16  # of the small pool, behind the longest request


@dataclass(frozen=True)
class Layout:
    """`config` of its engine. `passes`: how often the rows run, of which the last is compared. `rescore`: the rows are
    read, not asked. `copies`: how often each row is in a pass."""

    name: str
    config: EngineConfig
    passes: int = 1
    rescore: bool = False
    copies: int = 1

    def settings(self, base: EngineConfig) -> dict[str, Any]:
        """What differs from the run's engine. Pure."""
        found = {}
        for section in ("cache", "scheduler", "compile", "speculation"):
            mine, its = vars(getattr(self.config, section)), vars(getattr(base, section))
            changed = {f"{section}.{name}": value for name, value in mine.items() if value != its[name]}
            found |= {name: getattr(value, "value", value) for name, value in changed.items()}
        return found


@dataclass(frozen=True)
class Sizes:
    """What was in force in the run, and how large its requests are, in tokens."""

    page: int
    rows: int  # most requests at once
    step: int  # most tokens of a step
    requests: int
    prompt: int  # of an average request
    longest: int  # prompt and answer of the longest


def sizes_of(in_force: Mapping[str, Any] | None, requests: int, prompt: int, longest: int) -> Sizes:
    """From a manifest's `in_force`; the CPU's defaults where it is not known. Pure."""
    engine = (in_force or {}).get("engine")
    keys = ("cache.page_size", "scheduler.max_running_requests", "scheduler.max_step_tokens")
    known = [engine.get(key) if isinstance(engine, dict) else None for key in keys]
    page, rows, step = (value if type(value) is int and 0 < value <= MAX_ROWS else None for value in known)
    return Sizes(page or 16, rows or 64, step or 512, requests, max(1, prompt), max(2, longest))


def layout(name: str, base: EngineConfig, sizes: Sizes) -> Layout:
    """One of LAYOUTS for a run with the engine `base`. Pure.

    The first two share the run's engine. The others run uncompiled, since what a compiler makes of the step is one more
    thing that bits may not depend on, and to compile each of them would take longer than to run it.
    """
    plain = replace(base, compile=replace(base.compile, enabled=False))
    cache, scheduler = base.cache, base.scheduler
    if name in ("permuted", "rescored"):
        return Layout(name, base, rescore=name == "rescored")
    if name == "warm":
        page = sizes.page if sizes.prompt >= 2 * sizes.page else min(4, sizes.page)  # only whole pages are shared
        return Layout(name, replace(plain, cache=replace(cache, prefix_cache=True, page_size=page)), passes=2)
    if name == "alone":
        return Layout(name, _rows(plain, 1, sizes.step))
    if name == "batch":
        return Layout(name, _rows(plain, 2 * sizes.rows if sizes.requests > sizes.rows else 3, sizes.step))
    if name == "chunks":
        step = max(2, min(sizes.prompt // 3, sizes.step // 2))
        return Layout(name, _rows(plain, min(sizes.rows, step), step))
    if name == "pages":
        page = sizes.page // 2 if sizes.page > 1 else 16
        return Layout(name, replace(plain, cache=replace(cache, page_size=page)))
    if name == "uncached":
        return Layout(name, replace(plain, cache=replace(cache, prefix_cache=False)))
    if name == "guessed":
        on = base.speculation.algorithm is not Algorithm.none
        other = Algorithm.none if on else Algorithm.ngram
        return Layout(name, replace(plain, speculation=replace(base.speculation, algorithm=other)))
    assert name == "preempted", name
    page = min(4, sizes.page)
    pool = page * -(-(sizes.longest + SPARE_TOKENS) // page)
    small = replace(cache, page_size=page, max_total_tokens=pool, mem_fraction_static=None, prefix_cache=False)
    rows = max(2, min(32, sizes.rows))
    few = replace(scheduler, max_running_requests=rows, max_step_tokens=max(rows, min(64, sizes.step)))
    return Layout(name, replace(plain, cache=small, scheduler=few), copies=-(-CROWD // max(1, sizes.requests)))


def _rows(config: EngineConfig, rows: int, step: int) -> EngineConfig:
    """`config` with so many requests at once, and steps of at least as many tokens. Pure."""
    return replace(
        config, scheduler=replace(config.scheduler, max_running_requests=rows, max_step_tokens=max(rows, step))
    )


def ordered(names: Sequence[str]) -> list[str]:
    """In the order of LAYOUTS, in which neighbours share an engine. Pure."""
    return [name for name in LAYOUTS if name in names]
