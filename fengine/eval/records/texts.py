"""Differences of rows as lines for readers. Pure; no torch."""

from fengine.eval.cli.figures import one_line
from fengine.eval.records.compare import Divergence, RowDifference, Side


def row_lines(found: RowDifference, names: tuple[str, str]) -> list[str]:
    """A row's first difference in tokens, and that in a logprob where it comes before; else what differs. `names` are
    those of the two runs. Pure."""
    told = []
    for what, at in (("bits of a logprob", found.first_logprob), ("tokens", found.first_token)):
        if at is not None and (what == "tokens" or found.first is at):
            told += _divergence(at, what, names)
    return told or [f"row {found.id!r}: {', '.join(found.other)}"]


def _divergence(at: Divergence, what: str, names: tuple[str, str]) -> list[str]:
    """Pure."""
    head = f"row {at.id!r}, answer {at.sample}, token {at.token}: first difference in {what}"
    return [head, *(f"   {name}  {_side(side)}" for name, side in zip(names, (at.a, at.b), strict=True))]


def _side(side: Side) -> str:
    if side.token is None:
        return "the answer has ended"
    value = "" if side.logprob is None else f", logprob {side.logprob!r} ({side.bits})"
    return f"token {side.token}{value}" + (f"  …{one_line(side.text)!r}" if side.text else "")
