"""The other schedules under which `fengine verify` computes a run again, and what one of them found. Pure; no torch.
Bits may not depend on any of this: the order of rows, how many run at once, how prompts are cut, the size of pages,
what the prefix cache holds, preemption, and whether a token was drawn or read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fengine.config import MAX_ROWS, Algorithm, EngineConfig
from fengine.eval.cli.view import count, duration
from fengine.eval.runs.compare import Counts, RowDifference

CROWD = 24  # rows that the small pool is asked for at least, so that they get in one another's way
SPARE_TOKENS = 16  # of the small pool, behind the longest request
IDENTICAL, DIFFERS, FAILED = "identical", "differs", "not computed"
NOT_EXERCISED, NOT_COMPARED = "not exercised", "nothing to compare"
MARKS = {IDENTICAL: "✓", DIFFERS: "✗", FAILED: "✗"}
HEAD = f"  {'layout':<11}{'verdict':<19}{'rows':>7}{'tokens':>9}{'logprobs':>10}{'differ':>8}{'time':>9}"
COUNTERS: tuple[str, ...] = ("preemptions", "draft_tokens", "correct_draft_tokens")  # of an engine, used as evidence


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


@dataclass
class Found(Counts):
    """What one layout gave. `answers` counts those compared; `failed` the rows that it could not compute."""

    answers: int = 0
    failed: int = 0
    left_out: int = 0  # answers that cannot be re-scored
    error: str | None = None  # of the first row that failed
    prompt_tokens: int = 0
    cached_tokens: int = 0
    longest: int = 0  # tokens of the longest request, and of the longest prompt
    longest_prompt: int = 0
    requests: int = 0
    first: RowDifference | None = None  # of the row that comes first in the run
    first_at: int = -1  # its number

    def add(self, number: int, difference: RowDifference, answers: int) -> None:
        """Row `number` of the run, of which so many answers were compared. Modifies: itself."""
        self.count(difference)
        self.answers += answers
        if not difference.same and (self.first is None or number < self.first_at):
            self.first, self.first_at = difference, number

    def measure(self, metas: Sequence[dict[str, Any]]) -> None:
        """Counts the calls of one row. Modifies: itself."""
        for meta in metas:
            self.requests += 1
            self.prompt_tokens += meta["prompt_tokens"]
            self.cached_tokens += meta.get("cached_tokens", 0)
            self.longest = max(self.longest, meta["prompt_tokens"] + meta["completion_tokens"])
            self.longest_prompt = max(self.longest_prompt, meta["prompt_tokens"])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values. Pure."""
        counted = {name: value for name, value in vars(self).items() if name not in ("first", "first_at")}
        return counted | {"first": None if self.first is None else self.first.as_dict()}


Changes = dict[str, Any]  # "section.key" of an EngineConfig -> value
Evidence = tuple[str, bool]  # what a layout did, and whether that shows anything


@dataclass(frozen=True)
class Layout:
    """`config` of its engine. `passes`: how often the rows run, of which the last is compared. `rescore`: the rows are
    read, not asked. `copies`: how often each row is in a pass. `settings`: in which the engine is not the run's."""

    name: str
    config: EngineConfig
    settings: Changes
    passes: int = 1
    rescore: bool = False
    copies: int = 1


@dataclass(frozen=True)
class LayoutKind:
    """`what` is for readers. `evidence`: what shows that the layout was exercised, or that it was not, from the layout,
    what was found, and the engine's COUNTERS. `changes` of the run's engine; None: it is the run's own."""

    what: str
    evidence: Callable[[Layout, Found, dict[str, int]], Evidence]
    changes: Callable[[EngineConfig, Sizes], Changes] | None = None


def layout(name: str, base: EngineConfig, sizes: Sizes) -> Layout:
    """One of LAYOUTS for a run with the engine `base`. Pure. The first two share the run's engine. The others run
    uncompiled, since what a compiler makes of the step is one more thing that bits may not depend on, and to compile
    each of them would take longer than to run it."""
    changes = LAYOUTS[name].changes
    wanted = {} if changes is None else {"compile.enabled": False} | changes(base, sizes)
    config, settings, page = base, {}, wanted.get("cache.page_size")
    if page and (drafts := base.speculation).algorithm.drafts:  # whose guesses for a row lie in one page
        wanted["speculation.num_draft_tokens"] = min(drafts.num_draft_tokens or 4, page)
    for key, value in wanted.items():
        section, _, last = key.partition(".")
        mine = getattr(config, section)
        if getattr(mine, last) != value:
            settings[key] = getattr(value, "value", value)
            config = replace(config, **{section: replace(mine, **{last: value})})
    copies = -(-CROWD // max(1, sizes.requests)) if name == "preempted" else 1
    return Layout(name, config, settings, 2 if name == "warm" else 1, name == "rescored", copies)


def _rows(rows: int, step: int) -> Changes:
    """So many requests at once, and steps of at least as many tokens. Pure."""
    return {"scheduler.max_running_requests": rows, "scheduler.max_step_tokens": max(rows, step)}


def _warm(base: EngineConfig, sizes: Sizes) -> Changes:
    page = sizes.page if sizes.prompt >= 2 * sizes.page else min(4, sizes.page)  # only whole pages are shared
    return {"cache.prefix_cache": True, "cache.page_size": page}


def _chunks(base: EngineConfig, sizes: Sizes) -> Changes:
    step = max(2, min(sizes.prompt // 3, sizes.step // 2))
    return _rows(min(sizes.rows, step), step)


def _preempted(base: EngineConfig, sizes: Sizes) -> Changes:
    page, rows = min(4, sizes.page), max(2, min(32, sizes.rows))
    pool = {"max_total_tokens": page * -(-(sizes.longest + SPARE_TOKENS) // page), "mem_fraction_static": None}
    cache = {f"cache.{key}": value for key, value in (pool | {"page_size": page, "prefix_cache": False}).items()}
    return cache | _rows(rows, min(64, sizes.step))


def _chunks_evidence(one: Layout, found: Found, _: Any) -> Evidence:
    limit, longest = one.config.scheduler.max_step_tokens or 0, found.longest_prompt
    return f"steps of at most {count(limit, 'token')}, the longest prompt has {longest:,}", longest > limit


def _guessed_evidence(one: Layout, found: Found, counted: dict[str, int]) -> Evidence:
    if one.config.speculation.algorithm is Algorithm.none:
        return "nothing is guessed", True
    tokens = count(counted["draft_tokens"], "guessed token")
    return f"{counted['correct_draft_tokens']:,} of {tokens} kept", counted["draft_tokens"] > 0


def _preempted_evidence(one: Layout, found: Found, counted: dict[str, int]) -> Evidence:
    times = f", each row {one.copies} times" if one.copies > 1 else ""
    pool = f"a pool of {count(one.config.cache.max_total_tokens or 0, 'token')}{times}"
    return f"{count(counted['preemptions'], 'preemption')} in {pool}", counted["preemptions"] > 0


def _rescored_evidence(one: Layout, found: Found, _: Any) -> Evidence:
    left = f", {found.left_out:,} cannot be" if found.left_out else ""
    return f"{count(found.answers, 'answer')} re-scored{left}", found.answers > 0


def _prompt_tokens(found: Found) -> str:
    return count(found.prompt_tokens, "prompt token")


LAYOUTS = {
    "permuted": LayoutKind(
        "the run's own engine, rows in another order", lambda _, found, __: (count(found.requests, "request"), True)),
    "rescored": LayoutKind("what was decoded is read: prompt and answer as one prompt", _rescored_evidence),
    "warm": LayoutKind(
        "every row a second time, over a prefix cache that has seen it",
        lambda _, found, __: (f"{found.cached_tokens:,} of {_prompt_tokens(found)} cached", found.cached_tokens > 0),
        _warm),
    "alone": LayoutKind(
        "one request at a time", lambda *_: ("1 request at once", True), lambda _, sizes: _rows(1, sizes.step)),
    "batch": LayoutKind(
        "another number of requests at once",
        lambda one, *_: (f"up to {one.config.scheduler.max_running_requests} requests at once", True),
        lambda _, sizes: _rows(2 * sizes.rows if sizes.requests > sizes.rows else 3, sizes.step)),
    "chunks": LayoutKind("prompts cut into small chunks", _chunks_evidence, _chunks),
    "pages": LayoutKind(
        "another page size",
        lambda one, *_: (f"pages of {count(one.config.cache.page_size or 0, 'token')}", True),
        lambda _, sizes: {"cache.page_size": sizes.page // 2 if sizes.page > 3 else 16}),
    "uncached": LayoutKind(
        "no prefix cache", lambda _, found, __: (f"{_prompt_tokens(found)}, all computed", True),
        lambda *_: {"cache.prefix_cache": False}),
    "guessed": LayoutKind(
        "with guessed tokens (speculation=ngram); without where the run had them", _guessed_evidence,
        lambda base, _: {"speculation.draft": None, "speculation.algorithm":
                         Algorithm.ngram if base.speculation.algorithm is Algorithm.none else Algorithm.none}),
    "preempted": LayoutKind(
        "a pool of pages so small that requests are preempted and computed again", _preempted_evidence, _preempted),
}  # fmt: skip


@dataclass(frozen=True)
class LayoutVerdict:
    """`evidence` is what shows that the layout was exercised, or that it was not."""

    layout: Layout
    found: Found
    verdict: str
    evidence: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values. Pure."""
        name = self.layout.name
        head = {"layout": name, "what": LAYOUTS[name].what, "settings": self.layout.settings, "verdict": self.verdict}
        return head | {"evidence": self.evidence, "seconds": self.seconds} | self.found.as_dict()

    @property
    def lines(self) -> list[str]:
        """A line of a table under HEAD, in 80 columns; then what proves it, and what went wrong. Pure."""
        found, mark = self.found, MARKS.get(self.verdict, "·")
        cells = f"{found.rows:>7,}{found.tokens:>9,}{found.logprobs:>10,}{found.differing_rows:>8,}"
        told = [f"{mark} {self.layout.name:<11}{self.verdict:<19}{cells}{duration(self.seconds):>9}", self.evidence]
        if found.differing_rows:
            told.append(f"{count(found.differing_logprobs, 'logprob')} differ in {count(found.differing_bits, 'bit')}")
        if found.failed:
            told.append(f"{count(found.failed, 'row')} could not be computed ({found.error})")
        return [told[0], *(f"  {line}" for line in told[1:])]


def judged(one: Layout, found: Found, counted: dict[str, int], seconds: float) -> LayoutVerdict:
    """`counted` are the COUNTERS of the engine while it ran. Pure."""
    evidence, exercised = LAYOUTS[one.name].evidence(one, found, counted)
    cases = ((DIFFERS, found.differing_rows), (FAILED, found.failed), (NOT_COMPARED, not found.answers))
    verdict = next((name for name, holds in cases if holds), IDENTICAL if exercised else NOT_EXERCISED)
    return LayoutVerdict(one, found, verdict, evidence, round(seconds, 3))


def whole(verdicts: Sequence[LayoutVerdict], damaged: bool) -> tuple[str, bool]:
    """The verdict of all layouts, and whether it is that all is well. Pure."""
    names: dict[str, list[str]] = {}
    for one in verdicts:
        names.setdefault(one.verdict, []).append(one.layout.name)
    if DIFFERS in names:
        return f"differs under {', '.join(names[DIFFERS])}", False
    if FAILED in names:
        return f"not verified: rows could not be computed under {', '.join(names[FAILED])}", False
    if IDENTICAL not in names:
        return "not verified: nothing was compared", False
    shown = f" (not exercised: {', '.join(names[NOT_EXERCISED])})" if NOT_EXERCISED in names else ""
    if damaged:
        return f"identical in what was compared{shown}, but the run's files are damaged", False
    return f"identical under {', '.join(names[IDENTICAL])}{shown}", True
