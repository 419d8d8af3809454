"""Two runs for a page: where they differ, as `reading.compare` finds it, with the rows themselves. No torch."""

from typing import Any

from fengine.reading.compare import compare, edges
from fengine.reading.records import Records, pairs_of
from fengine.report.facts import causes
from fengine.report.plain import cut, number, size
from fengine.report.rows import item

MOST = 200  # differing rows that are shown
CAPS = (4096, 512, 64, 16)


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
    firsts = []
    for one, plain in zip(found.firsts, told["firsts"], strict=True):
        at = [[d["sample"], d["token"]] if d else None for d in (plain["token"], plain["logprob"])]
        firsts.append({"id": cut(one.id, 200), "token": at[0], "logprob": at[1], "other": plain["other"]}
                      | {"largest": number(plain["largest_delta"], 9), "pair": pairs.get(one.id)})  # fmt: skip
    counts = ("same rows differing_rows only_a only_b tokens logprobs differing_tokens differing_logprobs "
              "differing_bits largest_delta rows_with metrics").split()  # fmt: skip
    return {name: told[name] for name in counts} | {
        "only_a_ids": [cut(one, 200) for one in told["only_a_ids"][:20]],
        "only_b_ids": [cut(one, 200) for one in told["only_b_ids"][:20]],
        "histogram": [[low, high, count] for (low, high), count in zip(edges(), found.histogram, strict=True)],
        "causes": [cut(line, 600) for line in causes(a, b)[:200]],
        "firsts": firsts,
    }


def _pair(a: dict[str, Any], b: dict[str, Any], allowance: int) -> list[dict[str, Any]] | None:
    """Both records, cut alike; None if they do not fit."""
    for cap in CAPS:
        found = [item(a, 0, cap), item(b, 0, cap)]
        if size(found) <= allowance:
            return found
    return None
