"""The rows of a run for a page: which of them, and what of each, so that the page stays small. No torch. A row is
failed (it has an error), wrong or right (by its first score that says so), or scored (none does)."""

import base64
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fengine.errors import FengineError
from fengine.eval.report.facts import cut, mapping, number, scalar, size, told
from fengine.eval.runs.record import record_of
from fengine.eval.runs.records import Records
from fengine.eval.tasks.columns import digest_of, read_image
from fengine.eval.tasks.drawn import png
from fengine.eval.tasks.scoring import primary
from fengine.multimodal.decoder import Decoder

FAILED, WRONG, RIGHT, SCORED = range(4)
KINDS = ("failed", "wrong", "right", "scored")
CAPS = [int(4 * 1.2**i) for i in range(100)]  # tokens of an answer that are kept of a row that is too large
CHARS = 6  # characters of a text for each of them
MAX_LINE = 64 << 20  # a longer line is not parsed
ID, TOP = 200, 20  # characters of an id; likeliest tokens beside one
_BASE64 = re.compile("(;base64,)([A-Za-z0-9+/=]{64,})")  # nobody reads
STRANGE = (TypeError, ValueError, KeyError, IndexError, AttributeError)  # a record has parts that no run writes


@dataclass(frozen=True)
class RowKinds:
    """Every row's kind and the bytes of its line; `score` is the name of what says right or wrong, if anything does."""

    kinds: bytearray
    sizes: array  # of int64
    score: str | None

    def counts(self) -> dict[str, int]:
        return {name: self.kinds.count(kind) for kind, name in enumerate(KINDS)}


def kind_of(record: dict[str, Any]) -> int:
    """Right is a score of 1 or more: of several samples, that all are right. Pure."""
    if "error" in record:
        return FAILED
    name = primary(record["scores"])
    return SCORED if name is None else RIGHT if record["scores"][name] >= 1 else WRONG


def row_kinds(records: Records, each: Callable[[dict[str, Any]], None] | None = None) -> RowKinds:
    """One pass over all rows, one in memory at a time; `each` gets every record. Errors: StorageError."""
    kinds, sizes, score = bytearray(), array("q"), None
    for place in range(len(records)):
        line = records.line(place)
        record = record_of(line) if len(line) <= MAX_LINE else None
        kinds.append(SCORED if record is None else kind_of(record))
        sizes.append(len(line))
        if record is not None and "error" not in record:
            score = score or primary(record["scores"])
            if each is not None:
                each(record)
    return RowKinds(kinds, sizes, score)


def chosen(kinds: Sequence[int], most: int) -> list[int]:
    """At most `most` places in input order: a third each for failed, wrong and other rows, what one does not need goes
    to the others in this order; of each the same distance apart. Pure."""
    if len(kinds) <= most:
        return list(range(len(kinds)))
    groups: list[list[int]] = [[], [], []]
    for place, kind in enumerate(kinds):
        groups[min(kind, 2)].append(place)
    shares = [min(len(group), most // 3) for group in groups]
    for i, group in enumerate(groups):
        shares[i] += min(len(group) - shares[i], most - sum(shares))
    return sorted(
        group[i * len(group) // share] for group, share in zip(groups, shares, strict=True) for i in range(share)
    )


def why(kinds: Sequence[int], kept: Sequence[int]) -> str | None:
    """A sentence about rows that are left out. Pure."""
    if len(kept) == len(kinds):
        return None
    parts = []
    for name, those in (("failed", {FAILED}), ("wrong", {WRONG}), ("other", {RIGHT, SCORED})):
        there, here = sum(kind in those for kind in kinds), sum(kinds[place] in those for place in kept)
        if there:
            parts.append(f"{here:,} of {there:,} {name}")
    return (
        f"{len(kept):,} of {len(kinds):,} rows are in this file, evenly spaced within each group ({', '.join(parts)}). "
        "Counts and metrics are of all rows; outputs.jsonl has every row, and rows=N puts more of them here."
    )


def items(records: Records, seen: RowKinds, kept: Sequence[int], budget: int) -> list[dict[str, Any]]:
    """The kept rows, in all of at most about `budget` bytes: the largest ones are cut, all to the same size. Errors:
    StorageError."""
    weights = []
    for place in kept:
        try:
            record = _small(records, seen, place)
            weights.append(0 if record is None else size(item(record, place)))
        except STRANGE:
            weights.append(0)
    allowance, shown = level(weights, budget), []
    for place in kept:
        stub = {"n": place, "s": seen.kinds[place], "lost": seen.sizes[place], "i": f"row {place + 1}"}
        try:
            record = _small(records, seen, place)
            stub["i"] = stub["i"] if record is None else cut(record["id"], 40)
            shown += (None if record is None else fitted([record], place, allowance)) or [stub]
        except STRANGE:
            shown.append(stub | {"strange": 1})
    return shown


def _small(records: Records, seen: RowKinds, place: int) -> dict[str, Any] | None:
    """The record, unless its line is too long to be parsed. Errors: StorageError; ValueError if the line is none."""
    if seen.sizes[place] > MAX_LINE:
        return None
    record = record_of(records.line(place))
    if record is None:
        raise ValueError(f"row {place} is no record")
    return record


def level(sizes: Sequence[int], budget: int) -> int:
    """The size to which the larger ones must be cut so that all fit the budget. Pure."""
    left, ordered = budget, sorted(sizes)
    for i, one in enumerate(ordered):
        share = left // (len(ordered) - i)
        if one > share:
            return share
        left -= one
    return max([budget, *ordered])


def fitted(records: Sequence[dict[str, Any]], place: int, allowance: int) -> list[dict[str, Any]] | None:
    """Records as items, cut alike and as little as the allowance in bytes asks for; None if they cannot be cut enough.
    Pure. Errors: one of STRANGE."""

    def bytes_at(cap: int | None) -> int:
        return sum(size(item(record, place, cap)) for record in records)

    if (whole := bytes_at(None)) <= allowance:
        return [item(record, place) for record in records]
    caps = CAPS[: bisect_left(CAPS, whole)]
    fitting = bisect_right(caps, allowance, key=bytes_at)
    return [item(record, place, caps[fitting - 1]) for record in records] if fitting else None


def item(record: dict[str, Any], place: int, cap: int | None = None) -> dict[str, Any]:
    """A record with short keys: n place, s kind, i id, d columns, e error, p prompts, a answers, sc scores; `cut`: not
    all of it. `cap` bounds answers, tokens of each, and (times CHARS) characters of each text. Pure. Errors: one of
    STRANGE."""
    most, prompts = None if cap is None else CHARS * cap, []
    answers = [_answer(one, prompts, cap) for one in record.get("answers", ())[:cap]]
    shown: dict[str, Any] = {
        "n": place,
        "s": kind_of(record),
        "i": cut(record["id"], ID),
        "d": _columns(record, {prompt for prompt in prompts if isinstance(prompt, str)}, cap, most),
        "p": [cut(p, most) if isinstance(p, str) else list(map(_token, p[:cap])) for p in prompts],
        "a": answers,
        "sc": {cut(k, ID): _score(v, most) for k, v in list(record.get("scores", {}).items())[:cap]},
    }
    if "error" in record:
        shown["e"] = [cut(told(record["error"].get(key, "")), most) for key in ("type", "message")]
    return shown | ({} if cap is None else {"cut": 1})


def _columns(record: dict[str, Any], texts: set[str], cap: int | None, most: int | None) -> list[list[str]]:
    """Those that tell more than id and prompts, `texts`. Pure."""
    columns = [(k, v) for k, v in (record.get("data") or {}).items() if v not in (record["id"], None)]
    kept = [(k, _BASE64.sub(_bytes_told, told(v))) for k, v in columns[:cap] if not (isinstance(v, str) and v in texts)]
    return [[cut(k, ID), cut(text, most)] for k, text in kept]


def _bytes_told(found: re.Match[str]) -> str:
    return f"{found[1]}… ({len(found[2]) * 3 // 4:,} bytes)"


def _answer(answer: dict[str, Any], prompts: list[Any], cap: int | None) -> dict[str, Any]:
    """p place of its prompt, t text, k token ids, l logprobs, f finish, seed, kind, m tokens in all, top pairs.
    Modifies: prompts."""
    prompt, ids = answer.get("prompt", ""), answer["output_ids"]
    if prompt not in prompts:
        prompts.append(prompt)
    shown: dict[str, Any] = {
        "p": prompts.index(prompt),
        "t": cut(answer["text"], None if cap is None else CHARS * cap),
        "k": ids[:cap],
        "l": [number(value) for value in answer["logprobs"][:cap]],
        "f": _finish(answer.get("finish_reason")),
    }
    if cap is not None and len(ids) > cap:
        shown["m"] = len(ids)
    if "sampling_seed" in answer:
        shown["seed"] = str(answer["sampling_seed"])
    if "kind" in answer:
        shown["kind"] = cut(told(answer["kind"]), ID)
    if tops := answer.get("top_logprobs"):
        shown["top"] = [[[number(logprob), _token(token)] for logprob, token in top[:TOP]] for top in tops[:cap]]
    return shown


def _token(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no token id")
    return value


def _finish(reason: Any) -> str:
    if not isinstance(reason, dict):
        return ""
    kind, more = told(reason.get("type", "")), reason.get("matched", reason.get("length"))
    word = "token " if isinstance(more, int) and kind == "stop" else ""
    return cut(kind if more is None else f"{kind} ({word}{more})", ID)


def _score(value: Any, most: int | None) -> Any:
    found = scalar(value)
    return cut(found, most) if isinstance(found, str) else found


def token_ids(found: Sequence[dict[str, Any]]) -> list[int]:
    """Each once: those of answers and prompts, then those of likeliest tokens only. Pure."""
    ids: dict[int, None] = {}
    answers = [answer for row in found for answer in row.get("a", ())]
    for answer in answers:
        ids.update(dict.fromkeys(answer["k"]))
    for prompt in (prompt for row in found for prompt in row.get("p", ()) if not isinstance(prompt, str)):
        ids.update(dict.fromkeys(prompt))
    ids.update({token: None for answer in answers for top in answer.get("top", ()) for _, token in top})
    return list(ids)


SIDE = 128  # pixels of a longer one are left out
MOST_PIXELS = 1 << 26


def add_thumbnails(found: list[dict[str, Any]], records: Records, budget: int) -> None:
    """Gives rows `img`, the data URLs of their pictures that are still what they were, of about `budget` bytes in all.
    Modifies: found. Errors: StorageError."""
    config, origin = mapping(records.identity.get("config")), mapping(records.manifest.get("origin"))
    column, decoder = str(config.get("task.images") or ""), Decoder(MOST_PIXELS)
    folder = (Path(str(origin.get("base", ""))) / str(config.get("task.data") or "")).parent
    for row in found if column else ():
        record = None if "lost" in row else record_of(records.line(row["n"]))
        pictures = mapping(mapping(record).get("data")).get(column)
        for one in pictures if isinstance(pictures, list) else ():
            try:
                data = read_image(one["image"], folder)
                pixels_HWC = decoder.decode(data) if digest_of(one["image"], data) == one["sha256"] else None
            except (OSError, ValueError, KeyError, TypeError, FengineError):
                continue  # it is gone, or none
            if pixels_HWC is not None:
                step = -(-max(pixels_HWC.shape[:2]) // SIDE)
                url = f"data:image/png;base64,{base64.b64encode(png(pixels_HWC[::step, ::step])).decode()}"
                budget -= len(url)
                if budget < 0:
                    return decoder.close()
                row.setdefault("img", []).append(url)
    decoder.close()
