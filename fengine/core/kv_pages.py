"""`PagePool`: which pages of the KV state are free, and how many holders every other page has. No torch.

    page 0            null page, target of padding writes; never handed out
    pages 1 .. n-1    each is free (0 holders) or has holders: running requests, and at most once the prefix cache

A page whose only holder is the prefix cache is *idle*: it can be evicted at any time. So for every page
`free + idle + held by a request = num_pages - 1`, and what can be had without preempting is `num_free + num_idle`.

Pages may be released while a step that uses them is still in flight: whoever gets them next can only be in a later
step, and steps run on the device in the order in which they were planned."""

from collections.abc import Iterable, Sequence

from fengine.errors import ConfigError, InvariantError


class PagePool:
    """Reference-counted page ids. Modifies: only itself. Deterministic: the same calls hand out the same pages."""

    windowed = False  # pages have more than holders

    __slots__ = ("num_pages", "num_idle", "_free", "_holders", "_kept")

    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the null page, as `KVState.num_pages` does. Errors: ConfigError below 2."""
        if num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2 (the null page and one to use), got {num_pages}")
        self.num_pages = num_pages
        self.num_idle = 0
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page freed last is handed out first
        self._holders = [0] * num_pages
        self._kept = bytearray(num_pages)  # 1 where the prefix cache is a holder

    @property
    def capacity(self) -> int:
        """Pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Free pages plus those that the prefix cache would give up."""
        return len(self._free) + self.num_idle

    room = num_available  # what can be allocated

    def gauges(self) -> dict[str, int]:
        """`used_pages`: held by running requests. Pure."""
        used = self.capacity - self.num_available
        return {"pages": self.capacity, "free_pages": self.num_free, "used_pages": used}

    def spare(self, dues: Sequence[int], rows: int) -> int:
        """Pages beyond one for each of so many rows, and those that are due to them. Pure."""
        return self.num_available - rows - sum(dues)

    def fits(self, need: int, dues: Sequence[int], rows: int) -> bool:
        """Whether there are so many pages for a newcomer beyond those. Pure."""
        return need <= self.spare(dues, rows)

    # What a window changes: `WindowPages` says how.

    def in_tables(self, pages: list[int]) -> tuple[list[int], tuple[int, ...]]:
        """What stands for new pages in the tables of a step: pages, and window pages. Pure."""
        return pages, ()

    def window_start(self, position: int) -> int:
        """The first page of its row that attention of a token at this position reads. Pure."""
        return 0

    def unsee(self, pages: Iterable[int]) -> None:
        """Its holder's later tokens do not reach these pages. Errors: InvariantError."""

    def usable(self, pages: Sequence[int]) -> int:
        """So many of these cached pages, the first ones, can be gone on from. Pure."""
        return len(pages)

    def renews(self, page: int, cached: int) -> bool:
        """Whether a request's page is worth more to the cache than its own of the same tokens. Pure."""
        return False

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` free pages with the caller as their one holder. None, and nothing changed, if too few are free."""
        free = self._free
        if count > len(free):
            return None
        if count == 0:
            return []
        pages = free[: -count - 1 : -1]
        del free[-count:]
        holders = self._holders
        for page in pages:
            holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each page. Errors: InvariantError for a page that is free."""
        holders, kept = self._holders, self._kept
        for page in pages:
            before = holders[page]
            if before == 0:
                raise InvariantError(f"page {page} was retained while it was free")
            holders[page] = before + 1
            if before == 1 and kept[page]:
                self.num_idle -= 1

    def release(self, pages: Sequence[int], first: int = 0) -> None:
        """One holder less for each page, which sees those from number `first` on; a page without holders is free.
        Errors: InvariantError on a double free."""
        holders, kept, free = self._holders, self._kept, self._free
        for page in pages:
            left = holders[page] - 1
            if left > 1:
                holders[page] = left
            elif left < kept[page]:
                raise InvariantError(f"page {page} was released by somebody who does not hold it")
            elif left == 0:
                holders[page] = 0
                free.append(page)
            else:
                holders[page] = 1
                self.num_idle += kept[page]

    def keep(self, page: int) -> None:
        """The prefix cache becomes a holder of a page that a request holds. Errors: InvariantError otherwise."""
        if self._kept[page] or self._holders[page] == 0:
            raise InvariantError(f"page {page} cannot be cached: it is free, or cached already")
        self._kept[page] = 1
        self._holders[page] += 1

    def unkeep(self, page: int) -> None:
        """The prefix cache gives the page up. Errors: InvariantError if it does not hold it."""
        if not self._kept[page]:
            raise InvariantError(f"page {page} was given up by the prefix cache, which does not hold it")
        self._kept[page] = 0
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self.num_idle -= 1
            self._free.append(page)
