"""`SimulatedDevice`: executes steps on hashes in place of tensors, and finds every step that would read wrong KV.

Each slot of each page holds H(weights, adapter, all tokens up to its position). A step writes the slots of all its rows
first, as a layer does; then every slot that a row can see, through a page table kept up from `SchedulerOutput` alone,
must hold the hash of that request's own prefix. So a wrong page, slot, length, stale hit, eviction, preemption, feed or
adapter fails in the step where it happens. No torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.window_pages import Windows
from fengine.errors import FengineError, InvariantError


def content_of(key: bytes, index: int, weights: int) -> int:
    """What an image has at its placeholder number `index`. Pure."""
    return hash((int.from_bytes(key, "little"), index, weights))


Draw = Callable[[Request, int, int], tuple[int, float]]  # of (row, number of tokens, their hash): token, logprob


@dataclass(slots=True)
class _Row:
    """What runs in a row slot."""

    new: Request
    request: Request
    weights: int
    tables: list[list[int]]  # its pages in each group
    ids: list[int] = field(default_factory=list)  # its tokens, as far as they are known
    chain: list[int] = field(default_factory=list)  # the hash of each prefix of them


class SimulatedDevice:
    """Steps in the order in which it gets them, from what they tell alone. Modifies: itself. `request_of` gives a
    request by rid: its tokens where a prefix hit begins, and its adapter. `draw` may raise a FengineError, which then
    belongs to the row."""

    def __init__(
        self, page_size: int, num_pages: int, request_of: Callable[[str], Request], draw: Draw,
        windows: Windows | None = None,
    ) -> None:  # fmt: skip
        self.page_size, self.request_of, self.draw = page_size, request_of, draw
        counts = [] if windows is not None and windows.alone else [num_pages]
        self.window_start: list[Callable[[int], int]] = [lambda position: 0] * len(counts)  # in each group of pages
        if windows is not None:
            counts.append(windows.num_pages)
            self.window_start.append(windows.window_start)
        self.groups: list[list[list[int | None]]] = [[[None] * page_size for _ in range(n)] for n in counts]
        self.weights = 0  # a number for each change of the weights
        self.adapters: dict[int, int] = {}  # number of the load by adapter slot
        self.images: dict[int, int] = {}  # what rows of the table of images hold
        self.rows: dict[int, _Row] = {}
        self.drawn: dict[int, int] = {}  # token by row slot, of the step before

    def execute(self, out: SchedulerOutput) -> tuple[list[int], list[float], dict[int, FengineError]]:
        """Token and logprob of each draw, and the rows that failed; rows that do not sample get rubbish. Errors:
        InvariantError."""
        if len(set(out.rows)) != len(out.rows) or min(out.counts) < 1 or sum(out.counts) != len(out.token_ids):
            raise InvariantError(f"step {out.step} has rows {out.rows} of {out.counts} tokens")
        self._admit(out)
        rows = [self.rows[slot] for slot in out.rows]
        drafts = {draft.index: len(draft.token_ids) for draft in out.drafts}
        self._feed(out, rows, drafts)
        self._write(out, rows)
        tokens, logprobs, errors, behind = [], [], {}, []
        for i, row in enumerate(rows):
            last = len(row.ids)
            self._attend(row, out.starts[i], last)
            draws = [] if out.samples[i] else [(-1, 0.0)]
            for end in range(last - drafts.get(i, 0), last + 1) if out.samples[i] else ():
                try:
                    draws.append(self.draw(row.new, end, row.chain[end - 1]))
                except FengineError as error:
                    errors[i] = error
                    draws.append((0, float("nan")))
            tokens.append(draws[0][0])
            logprobs.append(draws[0][1])
            behind += draws[1:]
        self.drawn = {slot: token for slot, token, s in zip(out.rows, tokens, out.samples, strict=True) if s}
        return tokens + [token for token, _ in behind], logprobs + [logprob for _, logprob in behind], errors

    def _admit(self, out: SchedulerOutput) -> None:
        """Keeps up what each row slot and adapter slot holds."""
        self.release(out.released)  # in one step a slot may have been given out and back
        for slot, number in out.adapters:
            if any(row.new.adapter_slot == slot for row in self.rows.values()):
                raise InvariantError(f"adapter slot {slot} is written while a row reads it")
            self.adapters[slot] = number
        for image, table_rows in out.encodes:
            self.images |= {row: content_of(image.key, k, self.weights) for k, row in enumerate(table_rows)}
        for new in out.new_rows:
            self._enter(new)
        for slot, first, *both in out.new_pages:
            row = self.rows[slot]
            for table, pages in zip(row.tables, both, strict=False):
                if not pages or first > len(table) or slot not in out.rows or len(pages) != len(both[0]):
                    raise InvariantError(f"pages {pages} from {first} on are new for {row.new.rid!r}")
                table[first:] = pages

    def _enter(self, new: Request) -> None:
        """A request has got a row slot."""
        if new.slot in self.rows:
            raise InvariantError(f"row slot {new.row} is given to {new.rid!r} while another request has it")
        request = self.request_of(new.rid)
        known = [] if new.params.bare else request.token_ids
        if new.token_ids != known or new.prompt_len != request.prompt_len:
            raise InvariantError(f"the tokens of {new.rid!r} are not told when it is admitted")
        self.rows[new.slot] = _Row(new, request, self.weights, [[] for _ in self.groups])
        self.drawn.pop(new.slot, None)

    def _feed(self, out: SchedulerOutput, rows: list[_Row], drafts: dict[int, int]) -> None:
        """Each row's tokens up to the end of its chunk, drafts included, and their hashes."""
        at, fed = 0, set(out.fed)
        for i, (row, start, count) in enumerate(zip(rows, out.starts, out.counts, strict=True)):
            ids = out.token_ids[at : at + count]
            if fed and (found := [k for k in range(count) if at + k in fed]):
                last = count - 1 - drafts.get(i, 0)
                if found != [last] or out.rows[i] not in self.drawn or row.new.params.lockstep:
                    raise InvariantError(f"{row.new.rid!r} is fed a token that the step before did not draw for it")
                ids[last] = self.drawn[out.rows[i]]
            if start > len(row.ids):  # a prefix hit
                row.ids = list(row.request.token_ids[:start])
            at += count
            self._extend(row, start, ids)

    def _extend(self, row: _Row, start: int, ids: list[int]) -> None:
        adapter = row.request.adapter
        number = -1 if adapter is None else adapter.number
        slot = row.new.adapter_slot
        if (-1 if slot is None else self.adapters.get(slot)) != number:
            raise InvariantError(f"{row.new.rid!r} runs with an adapter slot that holds another adapter")
        if row.weights != self.weights:
            row.weights, row.chain = self.weights, []
        row.ids[start:] = ids
        chain = row.chain
        del chain[start:]
        value = chain[-1] if chain else hash((self.weights, number))
        known, inputs = len(chain), row.ids[len(chain) :]
        for (at, image), placed in zip(row.request.images, row.new.placed, strict=True):
            for k in range(max(known - at, 0), min(image.tokens, len(row.ids) - at)):
                inputs[at + k - known] = content_of(image.key, k, self.weights)
                if at + k >= start and self.images.get(placed.rows[k]) != inputs[at + k - known]:
                    raise InvariantError(f"{row.new.rid!r} reads another image at {at + k}, from row {placed.rows[k]}")
        for token in inputs:
            chain.append(value := hash((value, token)))

    def _write(self, out: SchedulerOutput, rows: list[_Row]) -> None:
        size = self.page_size
        for group, pages in enumerate(self.groups):
            written: set[int] = set()
            for row, start in zip(rows, out.starts, strict=True):
                table, chain = row.tables[group], row.chain
                if len(table) * size < len(chain):
                    raise InvariantError(f"{row.new.rid!r} has {len(table)} pages for {len(chain)} tokens")
                for position in range(start, len(chain)):
                    number, at = divmod(position, size)
                    page = table[number]
                    if (slot := page * size + at) in written or not page:
                        raise InvariantError(f"two rows write slot {slot} of group {group}, or one the null page")
                    written.add(slot)
                    pages[page][at] = chain[position]

    def _attend(self, row: _Row, start: int, end: int) -> None:
        """Reads what the tokens at start .. end - 1 do, and all of their kernels' first blocks."""
        size = self.page_size
        for pages, table, window_start in zip(self.groups, row.tables, self.window_start, strict=True):
            first = window_start(start)
            read = [value for page in table[first : -(-end // size)] for value in pages[page]]
            expected = row.chain[first * size : end]
            if read[: len(expected)] != expected:
                at = next(k for k, value in enumerate(expected) if read[k : k + 1] != [value]) // size + first
                raise InvariantError(f"{row.new.rid!r} reads wrong KV in page {table[at]}, number {at} of its table")

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.rows.pop(slot, None)
