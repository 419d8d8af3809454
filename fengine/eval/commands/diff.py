"""`fengine diff RUN_A RUN_B`: where two runs differ, and why their manifests say they may. No torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, StorageError
from fengine.eval.cli import command
from fengine.eval.cli.command import DIFFERS, OK
from fengine.eval.cli.view import count, place, say
from fengine.eval.runs.compare import Comparison, compare, row_lines
from fengine.eval.runs.manifest import listed
from fengine.eval.runs.records import Records, causes, pairs_of, runs_of

USAGE = """
Usage: fengine diff RUN_A RUN_B [show=5] [--json]

Compares the records of two run folders, or of two sweeps point by point: rows that only one has; the first place of
each row where tokens or bits of logprobs differ; how far logprobs differ; the metrics' differences B - A over the rows
that both have, with their own standard errors; and what differs in what the runs depend on, by their manifests.

  show=N    how many rows to show of those that differ (default 5)
  --json    one JSON object instead of text

Exit codes:  0 the same records   1 they differ, or a file is damaged   2 usage, or a folder that is no run's
"""
KEPT = 100  # differing rows in the JSON


def work(argv: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    words = command.parse(argv, {"show": command.whole(0, 10_000)}, ["--json"])
    if len(words.places) != 2:
        raise ConfigError(f"fengine diff takes two run folders, got {len(words.places)}; see fengine diff --help")
    a, b = (Path(word) for word in words.places)
    show, told, pairs = words.options.get("show", 5), [], dict(_paired(runs_of(a), runs_of(b)))

    def differ(one: Path) -> int:
        with Records(one) as mine, Records(pairs[one]) as its:
            found = compare(pairs_of(mine, its), max(KEPT, show))
            if "--json" in words.flags:
                told.append(as_dict(mine, its, found))
            else:
                say(*lines(mine, its, found, show))
            return OK if found.same and not mine.damaged and not its.damaged else DIFFERS

    code = command.each(list(pairs), differ)
    if told:
        print(json.dumps(told[0] if len(pairs) == 1 else {"points": told}, allow_nan=False))
    return code


def _paired(a: list[Path], b: list[Path]) -> list[tuple[Path, Path]]:
    """A run with a run, or the points of two sweeps by the names of their folders. Errors: StorageError."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    if [path.name for path in a] != [path.name for path in b]:
        names = [", ".join(path.name for path in one[:8]) + (", ..." if len(one) > 8 else "") for one in (a, b)]
        raise StorageError(f"a sweep is compared with one of the same points; these have {names[0]} and {names[1]}")
    return list(zip(a, b, strict=True))


def facts(run: Records) -> dict[str, Any]:
    told = {"folder": str(run.folder), "rows": len(run), "of": run.rows, "finished": run.finished}
    told |= {"outputs_sha256": run.result.get("outputs_sha256") if run.vouched else None, "damaged": run.damaged}
    return told | {"notes": run.notes}


def as_dict(a: Records, b: Records, found: Comparison) -> dict[str, Any]:
    """What `--json` prints. Pure."""
    return {"fengine_diff": 1, "a": facts(a), "b": facts(b), "causes": causes(a, b), **found.as_dict()}


def lines(a: Records, b: Records, found: Comparison, show: int) -> list[str]:
    """What a person reads. Pure."""
    told = []
    for name, run in (("A", a), ("B", b)):
        told.append(f"{name}  {place(str(run.folder))}: {count(len(run), 'row')}")
        told += [f"   note: {note}" for note in run.notes]
    told.append(_verdict(found))
    for name, number, ids in (("A", found.only_a, found.only_a_ids), ("B", found.only_b, found.only_b_ids)):
        if number:
            more = ", ..." if number > len(ids[:5]) else ""
            told.append(f"only in {name}: {count(number, 'row')}: {', '.join(map(repr, ids[:5]))}{more}")
    told += [*_deltas(found), *_metrics(found)]
    if keys := causes(a, b):
        told += ["manifests: what differs in what the runs depend on (A → B)", listed(keys)]
    elif not found.same:
        told.append("manifests: the runs depend on the same things, so that their records should be the same")
    for one in found.firsts[:show]:
        told += row_lines(one, ("A", "B"))
    if found.differing_rows > show:
        told.append(f"... and {count(found.differing_rows - show, 'more row')} that differ")
    return told


def _verdict(found: Comparison) -> str:
    if found.same:
        return f"the same: {count(found.rows, 'row')}, {count(found.tokens, 'token')}, every bit of every logprob"
    if not found.rows:
        return "no row is in both"
    with_ = ", ".join(f"{name} in {number:,}" for name, number in found.rows_with.items())
    return f"{found.differing_rows:,} of {count(found.rows, 'row')} that both have differ{': ' if with_ else ''}{with_}"


def _deltas(found: Comparison) -> list[str]:
    if not found.differing_logprobs:
        return []
    assert found.largest_at is not None
    row, sample, token = found.largest_at
    told = [
        f"logprobs: {found.differing_logprobs:,} of {found.logprobs:,} at equal tokens differ, in "
        f"{count(found.differing_bits, 'bit')}; largest |Δ| {found.largest_delta:.3g}: row {row!r}, answer {sample}, "
        f"token {token}"
    ]
    most = max(found.histogram)
    for low, high, number in found.bins():
        if number:
            span = f"{low:.0e} to {high:.0e}" if high is not None else f"from {low:.0e}"
            told.append(f"   {span:>14}  {'█' * -(-number * 32 // most)} {number:,}")
    return told


def _metrics(found: Comparison) -> list[str]:
    told = []
    for name, delta in found.metrics.items():
        ways = "" if delta.up is None else f", {delta.up:,} up, {delta.down:,} down"
        spread = f"± {delta.stderr:.4f} (95 %: {delta.low:+.4f} to {delta.high:+.4f}; " if delta.n > 1 else "("
        told.append(f"{name}, B - A: {delta.value:+.4f} {spread}{count(delta.n, 'row')}{ways})")
    return told
