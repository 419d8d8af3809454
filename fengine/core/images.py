"""Images of requests, and `ImageRows`: which rows of the device's table hold the embeddings of which image. No torch.

An image stands in a prompt as a span of placeholder tokens, whose embeddings come from rows of one table on the device.
It is known by `key`, a hash of all that its embeddings depend on: so it is encoded once, and its embeddings stay until
room is needed, those used longest ago first.

    waiting request --enter--> its images have rows --encoded, budget by budget--> it may be admitted --leave--> idle"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """What an encoder takes at once. `arrays` are numpy's, by name, for the worker's eyes."""

    key: bytes
    tokens: int  # placeholder tokens, so rows of the table
    patches: int  # what encoding it costs
    arrays: Mapping[str, Any]
    bidirectional: bool = False  # its tokens see each other, so one step computes all of them


class ImageSpan(NamedTuple):
    """Prompt positions start : start + image.tokens are the image's."""

    start: int
    image: Image


class RopePositions(NamedTuple):
    """Where tokens stand for rotary embedding with three axes: prompt token p at positions_3P[:, p], behind the prompt
    at p + delta on each axis."""

    positions_3P: Any  # int32 of numpy
    delta: int


class Encode(NamedTuple):
    """Before a step the image's embeddings are written to these rows of the table."""

    image: Image
    rows: list[int]


class Placed(NamedTuple):
    """Prompt positions from `start` on take these rows of the table."""

    start: int
    rows: list[int]


def page_salts(salt: Hashable | None, spans: Iterable[ImageSpan], page_size: int) -> dict[int, Hashable]:
    """What stands in the prefix cache before the tokens of a page, by page: the request's salt before the first, and of
    each page with a part of an image whose part it is. Pure."""
    found: dict[int, tuple[Hashable, ...]] = {} if salt is None else {0: (salt,)}
    for start, image in spans:
        for page in range(start // page_size, (start + image.tokens - 1) // page_size + 1):
            found[page] = (*found.get(page, ()), image.key, page * page_size - start)
    return dict(found)


def uncut(spans: Iterable[ImageSpan], start: int, count: int) -> int:
    """The most of `count` tokens from `start` on behind which no bidirectional image is cut. Pure."""
    for at, image in spans:
        if image.bidirectional and at < start + count < at + image.tokens:
            return max(at - start, 0)
    return count


def least(spans: Iterable[ImageSpan], start: int) -> int:
    """How many tokens from `start` on one step must compute: the rest of a bidirectional image, or 1. Pure."""
    ends = (at + image.tokens for at, image in spans if image.bidirectional and at <= start < at + image.tokens)
    return next(ends, start + 1) - start


class HasImages(Protocol):
    """A request, as far as `ImageRows` knows it."""

    rid: str
    images: tuple[ImageSpan, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    rows: list[int]
    users: int = 0  # requests that have entered
    encoded: bool = False  # or planned, in a step that comes before any that reads it


@dataclass(slots=True, eq=False)
class ImageRows:
    """Deterministic. Modifies: itself. `capacity` rows; a step encodes images of up to `budget` patches, or one."""

    capacity: int
    budget: int
    num_encoded: int = 0
    planned: list[Encode] = field(default_factory=list)  # for the next step
    _free: list[int] = field(default_factory=list)
    _entries: "OrderedDict[bytes, _Entry]" = field(default_factory=OrderedDict)  # those used longest ago first
    _holders: dict[str, list[bytes]] = field(default_factory=dict)  # by rid, the keys of its images

    def __post_init__(self) -> None:
        self._free = list(range(self.capacity - 1, -1, -1))

    def ready(self, rid: str) -> bool:
        """Whether the request has entered, and every one of its images is encoded. Pure."""
        keys = self._holders.get(rid)
        return keys is not None and all(self._entries[key].encoded for key in keys)

    def enter(self, rid: str, spans: Iterable[ImageSpan]) -> bool:
        """Gives rows to all images of a request, or, where too few are idle, to none of them."""
        images = {span.image.key: span.image for span in spans}
        if rid in self._holders:
            return True
        idle = sum(len(e.rows) for key, e in self._entries.items() if not e.users and key not in images)
        need = sum(image.tokens for key, image in images.items() if key not in self._entries)
        if need > len(self._free) + idle:
            return False
        for key in images:
            if key in self._entries:
                self._entries[key].users += 1
        for key, image in images.items():
            if key not in self._entries:
                self._entries[key] = _Entry(self._take(image.tokens), 1)
        self._holders[rid] = list(images)
        return True

    def need(self, spans: Iterable[ImageSpan]) -> int:
        """How many rows the images of one request take. Pure."""
        return sum({span.image.key: span.image.tokens for span in spans}.values())

    def lacking(self, spans: Iterable[ImageSpan]) -> list[Image]:
        """The images of a request that has entered which are not encoded yet. Pure."""
        images = {span.image.key: span.image for span in spans}
        return [image for key, image in images.items() if not self._entries[key].encoded]

    def plan(self, candidates: Iterable[HasImages], waiting: Iterable[HasImages], whole: bool) -> None:
        """Adds to `planned` what to encode before a step for requests that may be admitted soon: up to the budget, or
        one image; with `whole` all of one request."""
        served = set[str]()
        for request in candidates:
            served.add(request.rid)
            if not request.images or self.ready(request.rid):
                continue
            if not self.enter(request.rid, request.images):
                for other in waiting:  # whoever comes later must not keep it from its rows
                    if other.rid not in served:
                        self.leave(other.rid)
                if not self.enter(request.rid, request.images):
                    return
            for image in self.lacking(request.images):
                patches = image.patches + sum(encode.image.patches for encode in self.planned)
                if self.planned and patches > self.budget and not whole:
                    return
                entry = self._entries[image.key]
                entry.encoded = True
                self.planned.append(Encode(image, entry.rows))
            whole = False

    def hand_out(self) -> list[Encode]:
        """What a step is to encode first."""
        planned, self.planned = self.planned, []
        self.num_encoded += len(planned)
        return planned

    def placed(self, spans: Iterable[ImageSpan]) -> tuple[Placed, ...]:
        """Where the embeddings of a request that has entered lie. Pure."""
        return tuple(Placed(start, self._entries[image.key].rows) for start, image in spans)

    def leave(self, rid: str) -> None:
        """The request has ended, or gives its rows up; what is encoded stays while there is room, and what is planned
        for it alone is not encoded."""
        for key in self._holders.pop(rid, ()):
            entry = self._entries[key]
            entry.users -= 1
            if not entry.users and any(encode.image.key == key for encode in self.planned):
                self.planned = [encode for encode in self.planned if encode.image.key != key]
                entry.encoded = False
            self._entries.move_to_end(key, last=entry.encoded)

    def forget(self) -> None:
        """Every embedding: the weights have changed, and nothing runs."""
        self.planned.clear()
        self._entries.clear()
        self._holders.clear()
        self.__post_init__()

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count:
            key = next(key for key, entry in self._entries.items() if not entry.users)
            self._free += self._entries.pop(key).rows
        rows, self._free = self._free[-count:], self._free[:-count]
        return rows
