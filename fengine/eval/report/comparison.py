"""Two runs for a page: where they differ, as `reading.compare` finds it, with the rows themselves. No torch."""

from typing import Any

from fengine.eval.records.compare import RowDifference, compare, edges
from fengine.eval.records.records import Records, causes, pairs_of
from fengine.eval.report.plain import cut, number, plain
from fengine.eval.report.rows import STRANGE, item, rounded, weight

MOST = 200  # differing rows that are shown
CAPS = (None, 4096, 512, 64, 16)


def compared(a: Records, b: Records, budget: int) -> dict[str, Any]:
    """`compare`'s value, the causes by the manifests, and the first differing rows of both sides. Errors:
    StorageError."""
    found = compare(pairs_of(a, b), MOST)
    wanted = {one.id for one in found.firsts}
    pairs = {}
    for mine, its in pairs_of(a, b) if wanted else ():
        if mine is not None and its is not None and mine["id"] in wanted:
            pairs[mine["id"]] = _pair(mine, its, budget // len(wanted))
            if len(pairs) == len(wanted):
                break
    told = found.as_dict()
    counts = ("same", "differing_rows", "differing_tokens", "differing_logprobs", "differing_bits")
    return {name: told[name] for name in (*counts, "rows", "only_a", "only_b", "tokens", "logprobs", "rows_with")} | {
        "largest_delta": number(found.largest_delta, 9),
        "metrics": {cut(name, 100): plain(delta) for name, delta in told["metrics"].items()},
        "only_a_ids": [cut(one, 200) for one in found.only_a_ids[:20]],
        "only_b_ids": [cut(one, 200) for one in found.only_b_ids[:20]],
        "histogram": [[low, high, count] for (low, high), count in zip(edges(), found.histogram, strict=True)],
        "causes": [cut(line, 600) for line in causes(a, b)[:200]],
        "firsts": [_first(one, pairs.get(one.id)) for one in found.firsts],
    }


def _first(one: RowDifference, pair: list[dict[str, Any]] | None) -> dict[str, Any]:
    """`token`, `logprob`: [answer, place] of the first that differs; `sides`: both runs at whichever comes first."""
    at = {
        name: [d.sample, d.token] if d else None
        for name, d in (("token", one.first_token), ("logprob", one.first_logprob))
    }
    both = () if one.first is None else (one.first.a, one.first.b)
    sides = [{"token": s.token, "logprob": number(s.logprob, 12), "bits": s.bits} for s in both]
    other = [cut(name, 100) for name in one.other]
    return {"id": cut(one.id, 200), **at, "sides": sides or None, "other": other, "pair": pair} | {
        "largest": number(one.largest[0], 9)
    }


def _pair(a: dict[str, Any], b: dict[str, Any], allowance: int) -> list[dict[str, Any]] | None:
    """Both records, cut alike; None if they do not fit."""
    for cap in CAPS:
        try:
            found = [item(a, 0, cap), item(b, 0, cap)]
            if sum(map(weight, found)) <= allowance:
                return list(map(rounded, found))
        except STRANGE:
            return None
    return None
