"""What happens in one simulated schedule, as data: a seed gives a `Plan`, which may lose events."""

import random
from dataclasses import dataclass, replace
from typing import Any

from fengine.config import Policy
from fengine.core.window_pages import Windows

PIECES = (b"a", b"b", b"ab", b" ", "é".encode()[:1], "é".encode()[1:], b"ba", b".", b"#", b"\xff", b"c", b"bc")
EOS, BAD = 8, 11  # the id that ends a text, and one that a broken tokenizer does not know
STOPS = ("ab", "b.", "a b", "é", "cc", "bab")
GUESSES = (None, None, None, None, "right", "mixed", "wrong", "ngram", "model", "model", "both")
PRIORITIES = (0, 0, 0, 0, 1, -1)
PROCESSORS = (None, None, None, None, None, "plain", "raises", "asks")


PLACE = 4  # the id of an image's placeholders


@dataclass(frozen=True)
class Picture:
    """Placeholders in a prompt."""

    start: int
    tokens: int
    key: int
    patches: int


@dataclass(frozen=True)
class Job:
    """One prompt of a call."""

    ids: tuple[int, ...]
    new: int
    seed: int
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    least: int = 0  # min_new_tokens
    grammar: bool = False
    processor: str | None = None
    fails_at: int | None = None  # the output at which its processor raises
    nan_at: int | None = None  # the output at which its logits are not finite
    scored: int | None = None  # its input logprobs are wanted from this token on
    adapter: str | None = None
    salt: str | None = None
    priority: int = 0
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that somebody does at a moment. `name` stays when others are dropped."""

    name: int
    at: float
    kind: str
    jobs: tuple[Job, ...] = ()
    pace: float = 0.0  # seconds of a slow client between two reads; or how long something lasts
    leave: int | None = None  # after so many chunks the client goes away
    what: Any = None


@dataclass(frozen=True)
class Settings:
    page_size: int = 2
    num_pages: int = 24
    rows: int = 4
    budget: int = 8
    policy: Policy = Policy.fcfs
    cached: bool = True
    overlap: bool = True
    guess: str | None = None
    full: int = 3  # rows beside which a model is not tried
    adapter_slots: int = 0
    max_queued: int | None = None
    interval: int = 1
    incremental: bool = False
    eager: float = 0.5  # how probable it is that a thread loses its turn where it may
    windows: Windows | None = None
    image_rows: int = 0  # of a model that takes images
    together: bool = False  # tokens of an image see each other
    patches: int = 1  # of images that are encoded before one step
    patience: int = 32  # LPM_PATIENCE
    window: int = 32  # LPM_WINDOW
    pinned: bool = False  # the adapter A keeps its slot
    bare: bool = False  # most requests want nothing but tokens


@dataclass(frozen=True)
class Plan:
    seed: int
    settings: Settings
    events: tuple[Event, ...]

    @property
    def short(self) -> bool:
        """Whether it may be looked at closely."""
        return len(self.events) <= 13

    def without(self, names: set[int]) -> "Plan":
        return replace(self, events=tuple(event for event in self.events if event.name not in names))


CLIENTS = ("call", "call", "stream", "stream", "async", "chat", "again")
STEERING = (
    "abort", "abort", "abort_all", "pause", "pause", "flush", "weights", "weights", "memory", "adapter", "adapter",
    "stats", "watch",
)  # fmt: skip
FAULTS = ("launch", "result", "die", "shutdown", "stuck")


def plan_of(seed: int, size: int = 1) -> Plan:
    """Half of the plans are harmless but for their interleaving; some end in a fault of the device or of a thread.

    `size` times as many events as in a short one, over so much more time.
    """
    rng = random.Random(seed)
    page = rng.choice([1, 2, 4])
    settings = Settings(
        page_size=page, rows=rng.choice([1, 2, 4, 6, 6]), budget=rng.choice([1, 3, 6, 24, 24]),
        policy=rng.choice([Policy.fcfs, Policy.lpm]), cached=rng.random() < 0.8, overlap=rng.random() < 0.7,
        guess=rng.choice(GUESSES), full=rng.choice([3, 5, 7]), adapter_slots=rng.choice([0, 0, 1, 2]),
        max_queued=rng.choice([None, None, None, 0, 2]), interval=rng.choice([1, 2, 3]),
        incremental=rng.random() < 0.3, eager=rng.choice([0.02, 0.2, 0.6, 1.0]),
        image_rows=rng.choice([0, 0, 1]), patches=rng.choice([1, 4, 100]),
        patience=rng.choice([32, 1, 3]), window=rng.choice([32, 2, 5]),
    )  # fmt: skip
    settings = replace(settings, pinned=settings.adapter_slots == 2 and rng.random() < 0.5)
    if settings.guess == "model" and rng.random() < 0.5:  # many rows, whose guesses need not be known
        settings = replace(settings, rows=6, budget=24, overlap=True, full=7, bare=True)
    settings = replace(settings, together=rng.random() < 0.4)
    ranks = rng.choice([PRIORITIES[:1], PRIORITIES[:5], PRIORITIES[3:]])
    span = rng.choice([0.0, 0.005] if settings.bare else [0.0, 0.005, 0.02, 0.1]) * size  # in which things begin
    stems = [tuple(rng.randrange(len(PIECES)) for _ in range(rng.randrange(1, 14))) for _ in range(2)]
    events = [client(rng, name, settings, stems, ranks, span) for name in range(size * rng.choice([1, 3, 4, 6, 9]))]
    for _ in range(size * rng.choice([0, 0, 1, 2, 4])):
        events.append(steering(rng, len(events), span))
    if rng.random() < 0.15:
        fault = rng.choice(FAULTS)
        events.append(Event(len(events), rng.random() * span, fault, what=rng.randrange(6)))
    longest = max(need(job, page) for event in events for job in event.jobs)
    if settings.image_rows:
        most = max(image_need(job) for event in events for job in event.jobs)
        settings = replace(settings, image_rows=max(1, most + rng.choice([-1, 0, 0, 1, 4, 20])))
    pages = 1 + longest + rng.choice([-1, 0, 0, 1, 2, 3, longest, 3 * longest]) + 3 * longest * settings.bare
    settings = replace(settings, num_pages=max(2, pages))
    if rng.random() < 0.4:
        windows = Windows(rng.choice([1, 3, 8]), rng.choice([1, 4]), page, 0, settings.budget, rng.random() < 0.5)
        count = min(settings.num_pages, windows.least + rng.choice([1, 2, 5, 20]))
        settings = replace(settings, windows=windows._replace(num_pages=count))
    return Plan(seed, settings, tuple(events))


def need(job: Job, page_size: int) -> int:
    """Pages that the job takes in the end."""
    return -(-(len(job.ids) + job.new) // page_size)


def image_need(job: Job) -> int:
    """Rows of the image table that the job takes."""
    return sum({picture.key: picture.tokens for picture in job.pictures}.values())


def client(
    rng: random.Random, name: int, settings: Settings, stems: list[tuple[int, ...]], ranks: tuple[int, ...], span: float
) -> Event:
    kind = rng.choice(CLIENTS)
    jobs = tuple(
        job_of(rng, settings, stems, ranks) for _ in range(rng.choice([2, 3, 4] if settings.bare else [1, 1, 2, 3]))
    )
    if kind == "chat":
        jobs = tuple(replace(job, salt=None, pictures=()) for job in jobs)
    if kind == "again" and rng.random() < 0.5:
        jobs = tuple(replace(job, scored=rng.randrange(len(job.ids))) for job in jobs)
    pace = rng.choice([0.0, 0.0, 0.002, 0.02])
    leave = rng.randrange(4) if rng.random() < 0.2 else None
    return Event(name, rng.random() * span, kind, jobs, pace, leave, rng.randrange(1 << 16))


def job_of(rng: random.Random, settings: Settings, stems: list[tuple[int, ...]], ranks: tuple[int, ...]) -> Job:
    stem = rng.choice(stems)
    ids = stem[: rng.randrange(1, len(stem) + 1)] + tuple(rng.randrange(12) for _ in range(rng.randrange(0, 4)))
    new = rng.choice([0, 1, 2, rng.randrange(3, 24), rng.randrange(10, 32), rng.randrange(20, 32)])
    odd = rng.random()
    pictures: tuple[Picture, ...] = ()
    if settings.image_rows and rng.random() < 0.6:
        ids, pictures = with_pictures(rng, ids)
    processor = rng.choice(PROCESSORS)
    job = Job(
        ids, new, rng.randrange(5),
        stop_ids=frozenset({EOS}) if rng.random() < 0.5 else frozenset(),
        stop=tuple(rng.sample(STOPS, rng.randrange(1, 3))) if rng.random() < 0.25 else (),
        least=rng.randrange(new + 1) if rng.random() < 0.1 else 0,
        grammar=rng.random() < 0.15,
        processor=processor, fails_at=rng.randrange(6) if processor == "raises" else None,
        nan_at=rng.randrange(6) if odd < 0.05 else None,
        scored=rng.randrange(len(ids)) if 0.6 < odd < 0.7 else None,
        adapter=rng.choice([None, "A", "B", "C"]) if settings.adapter_slots else None,
        salt=rng.choice([None, None, None, "s"]),
        priority=rng.choice(ranks),
        pictures=pictures,
    )  # fmt: skip
    if settings.bare and rng.random() < 0.9:
        return replace(job, new=max(new, 8), least=0, grammar=False, processor=None, fails_at=None, scored=None)
    return job


def with_pictures(rng: random.Random, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Places for one image or two in a prompt; of a key each image has the same size."""
    found: list[Picture] = []
    for at in sorted(rng.sample(range(len(ids) + 1), min(len(ids), rng.choice([1, 1, 2])))):
        key = rng.randrange(5)
        start = at + sum(picture.tokens for picture in found)
        found.append(Picture(start, 1 + key % 3, key, 1 + key))
        ids = (*ids[:start], *[PLACE] * found[-1].tokens, *ids[start:])
    return ids, tuple(found)


def steering(rng: random.Random, name: int, span: float) -> Event:
    kind = rng.choice(STEERING)
    what: Any = None
    if kind == "abort":
        what = f"{rng.randrange(name)}.{rng.randrange(2)}"
    elif kind == "pause":
        what = rng.choice(["abort", "retract", "in_place"])
    elif kind == "memory":
        what = rng.choice([None, ("kv_cache",), ("weights",), "parts"])
    elif kind == "adapter":
        what = rng.choice(["A", "B", "C"])
    return Event(name, rng.random() * span, kind, pace=rng.choice([0.0, 0.003, 0.03]), what=what)
