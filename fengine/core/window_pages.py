"""`WindowPages`: a page pool for models in which some layers, or all, see a sliding window. No torch.

    page          page_size positions of a row; full layers keep their keys under its number
    window page   where windowed layers keep those of the page; 0 where they are gone

A page has a window page from its allocation on. A running request sees those that its later tokens can reach, and no
others: `unsee` says which it leaves behind. A window page that nobody sees is free, or *idle* if the prefix cache has
its page: then it is given up as soon as one is needed, the one longest idle first. Its page stays in the cache, and no
hit ends where a window page is lacking: see `usable`.

Steps in flight still read what later steps overwrite: they run in the order in which they were planned."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fengine.core.kv_pages import PagePool
from fengine.errors import ConfigError, InvariantError


class Windows(NamedTuple):
    """The window pages of a pool. Attention reads keys from multiples of `grain` on, whichever of them a token sees."""

    window: int  # keys that a token sees, itself the last
    grain: int
    page_size: int
    num_pages: int  # window pages, the null page included
    step_tokens: int  # at most in one step
    alone: bool  # no layer is full: rows' tables tell window pages only

    def window_start(self, position: int) -> int:
        """The first page that attention of a token at this position reads. Pure."""
        return max(position + 1 - self.window, 0) // self.grain * self.grain // self.page_size

    @property
    def least(self) -> int:
        """Window pages with which a row of any length gets on by itself."""
        return -(-(self.window + self.grain) // self.page_size) + 3

    @property
    def most(self) -> int:
        """Window pages that a row may need at once."""
        return self.least + self.step_tokens // self.page_size


class WindowPages(PagePool):
    """As `PagePool`. Modifies: only itself. Deterministic."""

    windowed = True

    __slots__ = ("windows", "window_of", "_unused", "_idle", "_seers")

    def __init__(self, num_pages: int, windows: Windows) -> None:
        """Errors: ConfigError if a row could stand still."""
        super().__init__(num_pages)
        if windows.num_pages - 1 < min(num_pages - 1, windows.least):
            raise ConfigError(
                f"a window of {windows.window} tokens needs {windows.least} pages of {windows.page_size} tokens, but "
                f"the pool has {windows.num_pages - 1}: raise max_total_tokens"
            )
        self.windows = windows
        self.window_of = [0] * num_pages  # by page
        self._unused = list(range(windows.num_pages - 1, 0, -1))  # a stack
        self._idle: dict[int, None] = {}  # pages, the one longest idle first
        self._seers = [0] * num_pages  # running requests by page

    @property
    def num_windows(self) -> int:
        """Window pages that can be had."""
        return len(self._unused) + len(self._idle)

    @property
    def room(self) -> int:
        return min(self.num_available, self.num_windows)

    def gauges(self) -> dict[str, int]:
        most = self.windows.num_pages - 1
        return super().gauges() | {"window_pages": most, "used_window_pages": most - self.num_windows}

    def in_tables(self, pages: list[int]) -> tuple[list[int], tuple[int, ...]]:
        windows = [self.window_of[page] for page in pages]
        return (windows, ()) if self.windows.alone else (pages, tuple(windows))

    def window_start(self, position: int) -> int:
        return self.windows.window_start(position)

    def usable(self, pages: Sequence[int]) -> int:
        size, found, since = self.windows.page_size, 0, 0
        for count, page in enumerate(pages, 1):
            if not self.window_of[page]:
                since = count
            if since <= self.window_start(count * size):
                found = count
        return found

    def renews(self, page: int, cached: int) -> bool:
        return self.window_of[page] > 0 == self.window_of[cached] and self.num_holders(cached) == 1

    def spare(self, dues: Sequence[int], rows: int) -> int:
        most = self.windows.most
        return min(super().spare(dues, rows), self.num_windows - rows - sum(min(due, most) for due in dues))

    def fits(self, need: int, dues: Sequence[int], rows: int) -> bool:
        return need <= super().spare(dues, rows) and min(need, self.windows.most) <= self.spare(dues, rows)

    def allocate(self, count: int) -> list[int] | None:
        if count > self.num_windows:
            return None
        pages = super().allocate(count)
        if pages is None:
            return None
        while len(self._unused) < count:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._free_window(oldest)
        for page in pages:
            self.window_of[page] = self._unused.pop()
            self._seers[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each page, which sees those that a token behind them can. Errors: InvariantError."""
        super().retain(pages)
        for page in pages[self.window_start(len(pages) * self.windows.page_size) :]:
            if not self.window_of[page]:
                raise InvariantError(f"page {page} was hit without its window page")
            self._seers[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int], first: int = 0) -> None:
        self.unsee(pages[first:])
        super().release(pages)

    def unsee(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._seers[page] -= 1
            if self._seers[page] < 0:
                raise InvariantError(f"page {page} was left behind by somebody who does not see it")
            if self._seers[page] == 0:
                if self._kept[page]:
                    self._idle[page] = None
                else:
                    self._free_window(page)

    def unkeep(self, page: int) -> None:
        super().unkeep(page)
        if self.window_of[page] and not self._seers[page]:
            del self._idle[page]
            self._free_window(page)

    def _free_window(self, page: int) -> None:
        self._unused.append(self.window_of[page])
        self.window_of[page] = 0
