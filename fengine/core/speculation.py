"""Speculation: tokens guessed for a row are computed behind its last one, and kept where the row draws them itself.

    proposer --drafts--> schedule_drafts --> a step with 1 + k tokens of the row, a draw behind each --> take_drafts
                                                                                               |
    drawn:    d0  d1  d2  d3                d0 == g1, d1 == g2, d2 != g3: d0 d1 d2 are the row's next tokens,
    computed:  t  g1  g2  g3                and the KV of g3 is overwritten by that of d2 in a later step

A draw is a function of logits, seed and position, and the logits behind g1 are those behind d0 where the two are equal.
So tokens and logprobs are the same bits with any proposer and without one: a proposal costs or saves time only.

Drafts take nothing from others: they get what is left of a step when everything else is planned, and pages only beyond
the reserve of the rows that run. While they are in flight their row waits, for nobody knows its next position.
Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; here the draws are coupled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum  # Pythons differ in how they sum floats
from typing import NamedTuple

from fengine.core.request import Drafting, Request
from fengine.core.running import Rows
from fengine.core.scheduler_output import Drafts, SchedulerOutput


class Ask(NamedTuple):
    """Guess what follows the `token_ids` of the batch's row `row`, leaving out the first `skip` tokens, which are drawn
    already. There is room for `most` tokens, and fewer than `least` are not worth it. `tried`: a model may be asked.
    `late`: the proposal may be `Late`."""

    row: int
    request: Request
    drafting: Drafting
    skip: int
    least: int
    most: int
    tried: bool = True
    late: bool = False


class Late(list[int]):
    """A proposal of which the host knows only the length yet: the tokens lie on the device, where its step is fed."""


MOST_EDITED = 16  # drafts of a row in a step whose logits are edited, or of which more is read than draws
FEW = 4  # beside other rows, which wait for the drafts: more than the first try of a short copy

Proposer = Callable[[Sequence[Ask]], Sequence[Sequence[int]]]  # one proposal for each ask; any length, any ids


@dataclass(frozen=True)
class Speculation:
    """Who proposes, and how much. A draft model is another `propose`."""

    propose: Proposer
    most: int  # drafts of a row in one step
    step_tokens: int  # drafts fill a step up to so many tokens; fuller steps have none
    vocab_size: int
    full: int = 1 << 30  # batches of so many rows have no drafts: they cannot pay
    waits: bool = False  # a model proposes, which needs every token: rows wait for theirs where it is tried
    mixed: bool = False  # what it does not propose, or is not asked for, others do, who need not every token
    hope: float = 0.0  # what a new request gains by a try of it, in tokens
    toll: float = 0.0  # what a try costs every row beside others, those with nothing to gain too
    crowd: float = 0.0  # and how much more for each of them
    kv_bytes: int = 0  # that a token of the pool takes beside the model's own
    open: Callable[..., None] = lambda *_: None  # told of the model's KV state, its rows, where guesses are fed from
    warm_up: Callable[[], None] = lambda: None  # captures graphs, over weights that are there
    release: Callable[[bool], None] = lambda kv: None  # drops them, and on True its KV, until it is told of another
    reveal: Callable[[], Mapping[Request, list[int]]] | None = None  # waits for `Late` proposals, and tells them
    go_ahead: Callable[[SchedulerOutput], None] = lambda output: None  # may guess behind a step in flight
    feature_layers: tuple[int, ...] = ()  # of the model, whose streams are wanted beside the KV


def drafting_of(request: Request, hope: float = 0.0) -> Drafting | None:
    """The record of a request that may have drafts. None: Python edits its logits, or hidden states are read from its
    steps. Pure."""
    params = request.params
    return None if params.lockstep or params.hidden or params.pool else Drafting(gain=hope)


def pays(rows: Rows, speculation: Speculation) -> bool:
    """Whether the rows that decode are to wait for their tokens, all of them, and a model is tried. Pure. They go
    together: of a batch in which some rows wait and others do not, each step computes a part."""
    count = len(rows.decoding)
    if not speculation.waits or not 0 < count < speculation.full:
        return False
    hope = speculation.hope
    gain = fsum(gain_of(r.drafting, r.num_computed, hope) for r in rows.decoding if r.drafting is not None)
    return gain > tolls(count, speculation.toll, speculation.crowd)


def tolls(rows: int, toll: float, crowd: float) -> float:
    """What a try costs all rows of a batch, in tokens. Pure."""
    return rows * (toll + rows * crowd) if rows > 1 else 0.0


def gain_of(drafting: Drafting, computed: int, hope: float) -> float:
    """What a try of a model for a request brings, by so many computed tokens. Pure."""
    if computed < drafting.try_from:
        return 0.0
    return drafting.gain if computed < drafting.hope_from else hope


def schedule_drafts(batch: SchedulerOutput, rows: Rows, speculation: Speculation) -> None:
    """Adds drafts to decoding rows of a batch that is complete otherwise. Modifies: the batch, rows, their requests."""
    count = len(batch.requests)
    if count >= speculation.full or (left := speculation.step_tokens - sum(batch.counts)) < 1:
        return
    tried = pays(rows, speculation)
    if speculation.waits and not tried and not speculation.mixed:
        return
    asks = _asks(batch, rows, speculation, tried, left)
    proposals = speculation.propose(asks) if asks else []
    wanting = sum(map(bool, proposals))
    if not wanting:
        return
    spare = rows.spare()
    for ask, proposal in zip(asks, proposals, strict=True):
        if not proposal:
            continue
        request, held = ask.request, len(ask.request.pages)
        room = (held + spare) * rows.page_size - request.num_computed
        draft = known_ids(proposal, min(ask.most, room, -(-left // wanting)), speculation.vocab_size)
        wanting -= 1
        if not draft:
            continue
        left -= len(draft)
        batch.counts[ask.row] += len(draft)
        batch.drafts.append(Drafts(ask.row, draft))
        batch.guessed = isinstance(proposal, Late)  # as all others
        rows.leave_behind(request)
        rows.grow(request, request.num_computed + len(draft))
        spare -= len(request.pages) - held
        ask.drafting.in_flight = len(draft)
        rows.num_lockstep += 1


def _asks(batch: SchedulerOutput, rows: Rows, speculation: Speculation, tried: bool, left: int) -> list[Ask]:
    """What may be proposed for the rows of a batch that decode, of `left` tokens. As little per row as can be. Pure."""
    most = speculation.most
    least = 1 if len(batch.requests) == 1 or speculation.waits else min(FEW, most)
    asks = []
    for i, request in enumerate(batch.requests):
        drafting, start = request.drafting, batch.starts[i]
        if drafting is None or start < drafting.rest_until:
            continue
        if start < request.prompt_len or batch.counts[i] > 1 or not batch.samples[i]:
            continue  # it does not decode
        if rows.grown.get(request) == 0:
            continue  # the worker has not been told of it
        room = request.full - 2 - start  # the last token is drawn, not computed
        if room < least:
            continue  # at its end
        allowed = most if request.params.bare else min(most, MOST_EDITED)
        skip, late = start + 1 - len(request.token_ids), speculation.reveal is not None and request.params.bare
        asks.append(Ask(i, request, drafting, skip, least, min(allowed, room), tried, late))
    return _shared(asks, left) if asks and speculation.waits else asks


def _shared(asks: list[Ask], left: int) -> list[Ask]:
    """A model makes no guesses for which the step has no room. Pure."""
    share = -(-left // len(asks))
    return [ask._replace(most=share) if ask.most > share else ask for ask in asks]


def known_ids(proposal: Sequence[int], most: int, vocab_size: int) -> list[int]:
    """Its first `most` tokens, as far as they are ids that the model has. Pure."""
    draft: list[int] = []
    for token in proposal[: max(most, 0)]:
        if not 0 <= token < vocab_size:
            break
        draft.append(token)
    return draft


def take_drafts(
    batch: SchedulerOutput, rows: Rows, tokens: Sequence[int], logprobs: Sequence[float], end: Callable[[Request], None]
) -> list[Request]:
    """Takes what was drawn behind the drafts that turned out right, when the first draw of every row is taken. `end`
    ends a request by the draw appended last. Returns the requests that ended. Modifies: rows, the requests."""
    ended, at = [], len(batch.requests)
    for i, draft in batch.drafts:
        request, drafting, correct = batch.requests[i], batch.requests[i].drafting, 0
        assert drafting is not None
        runs = request.row is not None
        rows.num_lockstep -= runs
        drafting.in_flight = 0
        ids, full = request.token_ids, request.full
        while request.finish is None and correct < len(draft) and ids[-1] == draft[correct]:
            token, logprob = tokens[at + correct], logprobs[at + correct]
            if token < 0:
                break  # nothing could be drawn behind it: it is computed again
            correct += 1
            request.num_computed += runs
            ids.append(token)
            request.logprobs.append(logprob)
            if len(ids) >= full or token in request.stop_ids or logprob != logprob:
                end(request)
                ended.append(request)
        at += len(draft)
        rows.num_drafts += len(draft)
        rows.num_correct_drafts += correct
        settle(drafting, len(draft), correct)
        if request.row is not None:
            rows.shrink(request)
    return ended


def settle(drafting: Drafting, tried: int, right: int) -> None:
    """Notes a try of which `right` drafts were drawn. Modifies: drafting."""
    drafting.last = tried, right
    drafting.proposed += tried
    drafting.correct += right
    drafting.histogram += [0] * (right + 1 - len(drafting.histogram))
    drafting.histogram[right] += 1
