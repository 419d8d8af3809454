"""`PrefixCache`: KV pages of token prefixes computed before, as a trie over whole pages. No torch.

One node is one page; the edge to it is the tuple of the page's `page_size` token ids, compared in full (a dict look-up
hashes first, but equal hashes alone never match). The path from the root spells the whole prefix.

A page may have a salt, which stands before its tokens: whoever has another one there, or none, never meets it. That of
a request is its first page's; where images stand in pages, theirs say which.

    root -(t0 .. t15)-> page 7 -(t16 .. t31)-> page 3 -(...)-> page 9     leaf
                                    `---------(...)-> page 4              leaf

Invariant, which makes `num_idle` exact: **whoever holds a node's page holds the pages of all its ancestors.** So idle
nodes (held by the cache alone) have only idle descendants and can go leaf by leaf. `insert` keeps it by adding nothing
below a node that has another page than the caller's (two requests computed the same tokens) that would stay held.

Eviction takes the least recently used leaf. Only the deepest node of a path is stamped on use. A node that becomes a
leaf was last used with the child that has just gone as the oldest leaf, or has a later stamp of its own; so in the
first case it goes next, as it should. The heap of leaves is put right when an entry is popped. O(log n) amortised."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush

from fengine.core.kv_pages import PagePool

_Key = tuple[Hashable, ...]  # a page's tokens, behind its salt if it has one
Salts = Mapping[int, Hashable]  # by page of a prefix


class _Node:
    __slots__ = ("tokens", "page", "parent", "children", "used", "queued")

    def __init__(self, tokens: "_Key", page: int, parent: "_Node | None") -> None:
        self.tokens = tokens
        self.page = page
        self.parent = parent  # None for the root and for nodes taken out of the trie
        self.children: dict[_Key, _Node] = {}
        self.used = 0
        self.queued = False  # has an entry in the heap


# How far a holder's pages are in the cache, for its own eyes: the node that `insert` goes on from, its pages from the
# root, and whether some node of the path has another page than the holder's.
Reached = tuple[_Node, int, bool]


class PrefixCache:
    """Deterministic. Modifies: itself, and the holders of pages in `pool`."""

    __slots__ = ("pool", "page_size", "num_pages", "_root", "_clock", "_heap")

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.num_pages = 0
        self._root = _Node((), 0, None)
        self._clock = 0  # counts uses
        self._heap: list[tuple[int, int, _Node]] = []  # (used, tie-breaker, node)

    def _path(self, token_ids: Sequence[int], limit: int, salts: Salts | None, depth: int = 0) -> Iterator[_Key]:
        """The keys of the whole pages among the first `limit` tokens, from page `depth` on, lazily."""
        keys = zip(*[iter(token_ids[depth * self.page_size : limit])] * self.page_size, strict=False)
        return _salted(keys, salts, depth) if salts else keys

    def match(self, token_ids: Sequence[int], limit: int, salts: Salts | None = None) -> list[int]:
        """The pages of the longest cached prefix within `limit` tokens; the caller becomes a holder of them."""
        nodes = self._longest(token_ids, limit, salts)
        pages = [node.page for node in nodes]
        if pages:
            self._touch(nodes[-1])
            self.pool.retain(pages)
        return pages

    def match_length(self, token_ids: Sequence[int], limit: int, salts: Salts | None = None) -> int:
        """Tokens that `match` would find. Pure."""
        return len(self._longest(token_ids, limit, salts)) * self.page_size

    def _longest(self, token_ids: Sequence[int], limit: int, salts: Salts | None) -> list[_Node]:
        """The nodes of the longest cached prefix that can be gone on from, from the root's child on."""
        nodes, node = [], self._root
        for tokens in self._path(token_ids, limit, salts):
            node = node.children.get(tokens)
            if node is None:
                break
            nodes.append(node)
        del nodes[self.pool.usable([node.page for node in nodes]) :]
        return nodes

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], leaving: bool = False, salts: Salts | None = None,
        after: Reached | None = None,
    ) -> Reached:  # fmt: skip
        """Remembers `pages`, which the caller holds, as the KV of the first `len(pages) * page_size` tokens.

        Nodes that exist stay as they are. `leaving`: the caller releases all these pages next, so those that it alone
        holds may be put below a node with another page (see the invariant above). `after` is what the caller's last
        insertion returned, of the same tokens and pages as far as it went: only those behind are looked at."""
        node, depth, foreign = after or (self._root, 0, False)
        if node.parent is None:  # the root; or taken out since, and perhaps what is above it, too
            node, depth, foreign = self._root, 0, False
        keys = self._path(token_ids, len(pages) * self.page_size, salts, depth)
        for tokens, page in zip(keys, pages[depth:], strict=True):
            child = node.children.get(tokens)
            if child is None:
                if foreign and not (leaving and self.pool.num_holders(page) == 1):
                    break
                child = node.children[tokens] = _Node(tokens, page, node)
                self.pool.keep(page)
                self.num_pages += 1
            elif child.page != page:
                foreign = foreign or not self._renew(child, page)
            node, depth = child, depth + 1
        if node is not self._root:
            self._touch(node)
            self._queue(node)
        return node, depth, foreign

    def _renew(self, node: _Node, page: int) -> bool:
        """Puts the caller's page in the place of one that is worth less, and that the cache alone holds."""
        if renewed := self.pool.renews(page, node.page):
            self.pool.unkeep(node.page)
            self.pool.keep(page)
            node.page = page
        return renewed

    def evict(self, count: int) -> int:
        """Frees up to `count` pages, least recently used leaves first. Returns how many."""
        heap, holders = self._heap, self.pool.num_holders
        count = min(count, self.pool.num_idle)
        evicted = 0
        while evicted < count:  # an idle page is left, so by the invariant an idle leaf is in the heap
            used, _, node = heappop(heap)
            node.queued = False
            parent = node.parent
            if parent is None or node.children:
                continue  # taken out, or no leaf any more
            if holders(node.page) > 1:
                self._touch(node)  # in use right now
                self._queue(node)
            elif node.used != used:
                self._queue(node)
            else:
                del parent.children[node.tokens]
                self._take_out(node)
                self._queue(parent)
                evicted += 1
        return evicted

    def drop(self, token_ids: Sequence[int], salts: Salts | None = None) -> None:
        """Forgets all pages of these tokens, and with them everything that starts with their first page."""
        for tokens in self._path(token_ids, self.page_size, salts):
            node = self._root.children.pop(tokens, None)
            if node is not None:
                self._take_out_below(node)
                self._heap = [entry for entry in self._heap if entry[2].parent is not None]
                heapify(self._heap)

    def flush(self) -> None:
        """Forgets everything. Pages that requests hold stay theirs."""
        for node in self._root.children.values():
            self._take_out_below(node)
        self._root.children.clear()
        self._heap.clear()

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _queue(self, node: _Node) -> None:
        """Puts a leaf into the heap, once."""
        if not node.queued and not node.children and node.parent is not None:
            node.queued = True
            self._clock += 1
            heappush(self._heap, (node.used, self._clock, node))

    def _take_out(self, node: _Node) -> None:
        node.parent = None
        self.num_pages -= 1
        self.pool.unkeep(node.page)

    def _take_out_below(self, top: _Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children.clear()
            self._take_out(node)


def _salted(keys: Iterator[_Key], salts: Salts, depth: int) -> Iterator[_Key]:
    """The same keys, each salt before the tokens of its page. Pure."""
    for page, tokens in enumerate(keys, depth):
        yield (salts[page], *tokens) if page in salts else tokens
