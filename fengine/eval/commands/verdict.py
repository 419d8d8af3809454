"""What a verification found: by layout, and as a whole. Pure; no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fengine.config import Algorithm
from fengine.eval.cli.figures import count, duration
from fengine.eval.commands.layouts import LAYOUTS, Layout
from fengine.eval.commands.replay import Found
from fengine.eval.records.compare import RowDifference

IDENTICAL, DIFFERS, FAILED = "identical", "differs", "not computed"
COUNTERS: tuple[str, ...] = ("preemptions", "draft_tokens", "correct_draft_tokens")
NOT_EXERCISED, NOT_COMPARED = "not exercised", "nothing to compare"


@dataclass(frozen=True)
class LayoutVerdict:
    """`evidence` is what shows that the layout was exercised, or that it was not."""

    name: str
    settings: dict[str, Any]  # in which the engine was other than the run's
    found: Found
    verdict: str
    evidence: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Pure."""
        counted = {name: value for name, value in vars(self.found).items() if name[0] != "_" and name != "first"}
        told = {"layout": self.name, "what": LAYOUTS[self.name], "settings": self.settings, "verdict": self.verdict}
        told |= {"evidence": self.evidence, "seconds": self.seconds}
        return told | counted | {"first": first_of(self.found.first)}

    def line(self) -> str:
        """Pure."""
        found = self.found
        bits = f"{found.differing_logprobs:,} differ in {count(found.differing_bits, 'bit')}"
        rows = f"{count(found.rows, 'row')}, {found.differing_rows:,} differ"
        tokens = f"{count(found.tokens, 'token')}; {count(found.logprobs, 'logprob')}, {bits}"
        told = f"{self.name:<10} {rows}; {tokens}: {self.verdict}"
        failed = f"; {count(found.failed, 'row')} could not be computed ({found.error})" if found.failed else ""
        return f"{told} ({self.evidence}; {duration(self.seconds)}){failed}"


def judged(
    one: Layout, found: Found, counted: dict[str, int], seconds: float, settings: dict[str, Any]
) -> LayoutVerdict:
    """`counted` are the COUNTERS of the engine while it ran. Pure."""
    evidence, exercised = _evidence(one, found, counted)
    verdict = IDENTICAL if exercised else NOT_EXERCISED
    if not found.answers:
        verdict = NOT_COMPARED
    if found.failed:
        verdict = FAILED
    if found.differing_rows:
        verdict = DIFFERS
    return LayoutVerdict(one.name, settings, found, verdict, evidence, round(seconds, 3))


def _evidence(one: Layout, found: Found, counted: dict[str, int]) -> tuple[str, bool]:
    """What the layout did, and whether that shows anything."""
    scheduler, cache = one.config.scheduler, one.config.cache
    if one.rescore:
        left = f", {found.left_out:,} cannot be" if found.left_out else ""
        return f"{count(found.answers, 'answer')} re-scored{left}", found.answers > 0
    if one.name == "warm":
        return (
            f"{found.cached_tokens:,} of {count(found.prompt_tokens, 'prompt token')} cached",
            found.cached_tokens > 0,
        )
    if one.name == "chunks":
        limit = scheduler.max_step_tokens or 0
        longest = f"the longest prompt has {found.longest_prompt:,}"
        return f"steps of at most {count(limit, 'token')}, {longest}", found.longest_prompt > limit
    if one.name == "preempted":
        times = f", each row {one.copies} times" if one.copies > 1 else ""
        pool = f"a pool of {count(cache.max_total_tokens or 0, 'token')}{times}"
        return f"{count(counted['preemptions'], 'preemption')} in {pool}", counted["preemptions"] > 0
    if one.name == "guessed" and one.config.speculation.algorithm is not Algorithm.none:
        right = f"{counted['correct_draft_tokens']:,} of {count(counted['draft_tokens'], 'guessed token')} kept"
        return right, counted["draft_tokens"] > 0
    told = {
        "alone": "1 request at once",
        "batch": f"up to {scheduler.max_running_requests} requests at once",
        "pages": f"pages of {count(cache.page_size or 0, 'token')}",
        "uncached": f"{count(found.prompt_tokens, 'prompt token')}, all computed",
        "guessed": "nothing is guessed",
    }
    return told.get(one.name, count(found.requests, "request")), True


def whole(rows: Sequence[LayoutVerdict], damaged: bool) -> tuple[str, bool]:
    """The verdict of all layouts, and whether it is that all is well. Pure."""
    names = {verdict: [row.name for row in rows if row.verdict == verdict] for verdict in (
        DIFFERS, FAILED, IDENTICAL, NOT_EXERCISED)}  # fmt: skip
    if names[DIFFERS]:
        return f"differs under {', '.join(names[DIFFERS])}", False
    if names[FAILED]:
        return f"not verified: rows could not be computed under {', '.join(names[FAILED])}", False
    if not names[IDENTICAL]:
        return "not verified: nothing was compared", False
    shown = f" (not exercised: {', '.join(names[NOT_EXERCISED])})" if names[NOT_EXERCISED] else ""
    if damaged:
        return f"identical in what was compared{shown}, but the run's files are damaged", False
    return f"identical under {', '.join(names[IDENTICAL])}{shown}", True


def first_of(found: RowDifference | None) -> dict[str, Any] | None:
    """The first difference as JSON: of tokens and logprobs, what comes first in the row. Pure."""
    if found is None:
        return None
    told: dict[str, Any] = {"id": found.id, "other": list(found.other)}
    named = {"token": found.first_token, "logprob": found.first_logprob}
    return told | {name: None if at is None else asdict(at) for name, at in named.items()}
