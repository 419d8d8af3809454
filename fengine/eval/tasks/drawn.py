"""Pictures drawn from a seed, and questions about them with their answers. No torch, no PIL. A picture has 64 × 64
pixels and shows objects in some of nine places, one digit, or a bar chart."""

import base64
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

import numpy as np

SIDE = 64
COLOURS = {
    "red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 89, 200), "yellow": (240, 215, 30),
    "purple": (140, 50, 170), "orange": (250, 130, 10),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
PLACES = (
    "top left", "top middle", "top right", "middle left", "centre", "middle right",
    "bottom left", "bottom middle", "bottom right",
)  # fmt: skip
DIGITS = (  # rows of five pixels as numbers, from the top
    "14 17 19 21 25 17 14", "4 12 4 4 4 4 14", "14 17 1 2 4 8 31", "31 2 4 2 1 17 14", "2 6 10 18 31 2 2",
    "31 16 30 1 1 17 14", "6 8 16 30 17 17 14", "31 1 2 4 8 8 8", "14 17 17 14 17 17 14", "14 17 17 15 1 2 12",
)  # fmt: skip

COVERED: dict[str, Callable[..., np.ndarray]] = {  # from the middle: x, y, and how far they are; size; the middle's y
    "circle": lambda x, y, wide, long, r, _: np.hypot(x, y) <= r,
    "square": lambda x, y, wide, long, r, _: np.maximum(wide, long) <= 0.86 * r,
    "triangle": lambda x, y, wide, long, r, _: (y <= 0.8 * r) & (wide <= 0.55 * (y + r)),
    "diamond": lambda x, y, wide, long, r, _: wide + long <= 1.1 * r,
    "cross": lambda x, y, wide, long, r, _: (np.minimum(wide, long) <= 0.32 * r) & (np.maximum(wide, long) <= r),
    "ring": lambda x, y, wide, long, r, _: (np.hypot(x, y) <= r) & (np.hypot(x, y) >= 0.55 * r),
    "bar": lambda x, y, wide, long, r, top: (wide <= r) & (y >= 0) & (y + top < SIDE - 3),
}


class Thing(NamedTuple):
    """An object, the digit or a bar; `x`, `y` is its middle, of a bar the middle of its top."""

    shape: str
    colour: str
    x: float
    y: float
    size: float
    place: str = ""


class Question(NamedTuple):
    """`kind` groups questions: shape, colour, position, what, count, exists, list, digit, bars."""

    kind: str
    text: str
    answer: str


class Picture(NamedTuple):
    """`pixels_HWC` is uint8 [64, 64, 3]; `questions` are all that there are about it."""

    pixels_HWC: np.ndarray
    things: list[Thing]
    questions: list[Question]


def picture(random: Random) -> Picture:
    light = random.random() < 0.7
    ground = [random.randint(225, 255) if light else random.randint(0, 30) for _ in range(3)]
    pixels_HWC = np.empty((SIDE, SIDE, 3), np.uint8)
    pixels_HWC[:] = ground
    draw = random.choices((_objects, _digit, _bars), (0.76, 0.12, 0.12))[0]
    things, questions = draw(random)
    for thing in things:
        shade = [min(max(part + random.randint(-14, 14), 0), 255) for part in COLOURS[thing.colour]]
        pixels_HWC[mask(thing)] = shade
    return Picture(pixels_HWC, things, questions)


def mask(thing: Thing) -> np.ndarray:
    """Which pixels it covers, bool [64, 64]. Pure."""
    x, y, r = np.arange(SIDE) + 0.5 - thing.x, np.arange(SIDE)[:, None] + 0.5 - thing.y, thing.size
    if thing.shape.isdigit():
        rows = np.array([int(row) for row in DIGITS[int(thing.shape)].split()])
        column, row = np.floor(x / r + 2.5).astype(int), np.floor(y / r + 3.5).astype(int)
        inside = (column >= 0) & (column < 5) & (row >= 0) & (row < 7)
        return inside & (rows[row.clip(0, 6)] >> (4 - column.clip(0, 4)) & 1 == 1)
    return COVERED[thing.shape](x, y, np.abs(x), np.abs(y), r, thing.y)


def _objects(random: Random) -> tuple[list[Thing], list[Question]]:
    colours = random.sample(list(COLOURS), random.randint(1, 6))
    shapes = random.sample(SHAPES, random.randint(1, 6))
    third, things = SIDE / 3, list[Thing]()
    for cell in sorted(random.sample(range(9), random.randint(1, 6))):
        x, y = (third * (at + 0.5) + random.uniform(-2, 2) for at in (cell % 3, cell // 3))
        size, shape, colour = random.uniform(6, 9), random.choice(shapes), random.choice(colours)
        things.append(Thing(shape, colour, x, y, size, PLACES[cell]))
    return things, about_objects(things)


def _about(
    thing: Thing, by_colour: Counter[str], by_shape: Counter[str], by_both: Counter[tuple[str, str]]
) -> list[Question]:
    """Questions about an object by its place, and by what no other object has. Pure."""
    shape, colour = f"A {thing.shape}.", f"{thing.colour.capitalize()}."
    found = [
        Question("what", f"What is in the {thing.place}?", f"{named(thing)}."),
        Question("shape", f"What shape is in the {thing.place}?", shape),
        Question("colour", f"What colour is in the {thing.place}?", colour),
    ]
    if by_colour[thing.colour] == 1:
        found.append(Question("shape", f"What shape is the {thing.colour} object?", shape))
    if by_shape[thing.shape] == 1:
        found.append(Question("colour", f"What colour is the {thing.shape}?", colour))
    if by_both[thing.colour, thing.shape] == 1:
        found.append(Question("position", f"Where is the {thing.colour} {thing.shape}?", f"In the {thing.place}."))
    return found


def about_objects(things: list[Thing]) -> list[Question]:
    """All questions about objects in reading order. Pure."""
    by_colour, by_shape = (Counter(getattr(thing, part) for thing in things) for part in ("colour", "shape"))
    by_both, at = Counter((thing.colour, thing.shape) for thing in things), {thing.place: thing for thing in things}
    found = [Question("count", "How many objects are there?", f"{len(things)}.")]
    found += [Question("count", f"How many {c} objects are there?", f"{by_colour[c]}.") for c in COLOURS]
    found += [Question("count", f"How many {s}{'es' * (s == 'cross') or 's'} are there?", f"{by_shape[s]}.")
              for s in SHAPES]  # fmt: skip
    for place in PLACES:
        thing = at.get(place)
        if thing is None:
            found.append(Question("what", f"What is in the {place}?", "Nothing."))
        else:
            found += _about(thing, by_colour, by_shape, by_both)
    found += [Question("exists", f"Is there {named(Thing(s, c, 0, 0, 0)).lower()}?", "Yes." if by_both[c, s] else "No.")
              for c in COLOURS for s in SHAPES]  # fmt: skip
    names = [named(thing).lower() for thing in things]
    text = " and ".join(([", ".join(names[:-1])] if names[1:] else []) + names[-1:])
    return [*found, Question("list", "Which objects are there?", f"{text[0].upper()}{text[1:]}.")]


def named(thing: Thing) -> str:
    return f"A{'n' * (thing.colour[0] in 'aeiou')} {thing.colour} {thing.shape}"


def _digit(random: Random) -> tuple[list[Thing], list[Question]]:
    digit, colour, size = random.randrange(10), random.choice(list(COLOURS)), random.uniform(4, 7.5)
    x, y = (random.uniform(half * size + 2, SIDE - 2 - half * size) for half in (2.5, 3.5))
    return [Thing(str(digit), colour, x, y, size)], [
        Question("digit", "Which digit is this?", f"{digit}."),
        Question("colour", "What colour is the digit?", f"{colour.capitalize()}."),
    ]


def _bars(random: Random) -> tuple[list[Thing], list[Question]]:
    number = random.randint(2, 6)
    heights, colours = random.sample(range(1, 10), number), random.sample(list(COLOURS), number)
    step = (SIDE - 4) / number
    things = [
        Thing("bar", colour, 2 + step * (i + 0.5), SIDE - 3 - 6 * height, 0.38 * step)
        for i, (height, colour) in enumerate(zip(heights, colours, strict=True))
    ]
    order = sorted(zip(heights, colours, strict=True))
    found = [Question("bars", "How many bars are there?", f"{number}.")]
    for word, (_, colour) in (("tallest", order[-1]), ("shortest", order[0])):
        found.append(Question("bars", f"Which bar is the {word}?", f"The {colour} bar."))
    return things, found


def ask(random: Random, questions: list[Question]) -> Question:
    """One of them: kinds are equally likely, and so are the answers of "count" and "exists". Modifies: random."""
    kind = random.choice(sorted({question.kind for question in questions}))
    left = [question for question in questions if question.kind == kind]
    if kind in ("count", "exists"):
        answer = random.choice(sorted({question.answer for question in left}))
        left = [question for question in left if question.answer == answer]
    return random.choice(left)


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Endless: a picture as a data URL, one question about it, its kind and its answer."""
    for index in itertools.count():
        random = Random(f"{seed}/{index}")
        drawn = picture(random)
        asked = ask(random, drawn.questions)
        url = f"data:image/png;base64,{base64.b64encode(png(drawn.pixels_HWC)).decode()}"
        yield {"picture": url, "question": asked.text, "answer": asked.answer, "kind": asked.kind}


def chats(seed: int, count: int) -> tuple[dict[str, Any], ...]:
    """As many of `rows`, each as a chat beside its picture and the right answer."""
    found = []
    for row in itertools.islice(rows(seed), count):
        content = [{"type": "image"}, {"type": "text", "text": row["question"]}]
        chat = [{"role": "user", "content": content}]
        found.append({"messages": chat, "images": row["picture"], "answer": row["answer"]})
    return tuple(found)


def png(pixels_HWC: np.ndarray) -> bytes:
    """The file of uint8 [H, W, 3]. Pure."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    height, width = (size.to_bytes(4, "big") for size in pixels_HWC.shape[:2])
    lines = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels_HWC), 9)
    head = chunk(b"IHDR", width + height + bytes((8, 2, 0, 0, 0)))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
