"""Requests of many kinds, their answers alone and in company, and the bits in which two lists of answers differ."""

import random
import struct
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

from fengine import Engine


class Ask(NamedTuple):
    """One request. `images`: where placeholders stand in `ids`, `size` for each, and the pictures as data URLs."""

    ids: list[int]
    params: dict[str, Any]
    images: Sequence[tuple[int, str]] = ()
    size: int = 1

    def cut(self, count: int, params: dict[str, Any]) -> "Ask":
        """Its first `count` tokens, and the rest of a picture that this would cut. Pure."""
        count = max([count, *(at + self.size for at, _ in self.images if at < count)])
        return Ask(self.ids[:count], params, [image for image in self.images if image[0] < count], self.size)


class Answer(NamedTuple):
    """Its drawn tokens and their log-probabilities, which are float32 values."""

    tokens: list[int]
    logprobs: list[float]


class Difference(NamedTuple):
    """Between two lists of answers; tokens that one side lacks differ, with all bits of their logprob."""

    compared: int  # tokens, and as many logprobs
    tokens: int
    logprobs: int
    bits: int  # of logprobs, as float32


SIZES = ((40, 30), (224, 224), (100, 37), (28, 300), (1, 1))  # of pictures
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 50},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 200, "min_p": 0.001},
)


def requests(vocab: int, count: int, longest: int, seed: int = 0) -> list[Ask]:
    """`count` prompts of 1 to `longest` tokens, log-uniform, both ends included; one in four begins with a shared head.

    Greedy and seeded rows, with and without filters, alternate. Outputs have 4 to 24 tokens, one in eight up to 128.
    Pure.
    """
    draw = random.Random(seed)
    head = [draw.randrange(vocab) for _ in range(max(1, min(200, longest // 4)))]
    asks = []
    for i in range(count):
        length = {0: 1, 1: longest}.get(i) or min(longest, int(longest ** draw.random()))
        ids = [draw.randrange(vocab) for _ in range(length)]
        if i % 4 == 3 and len(head) < length:
            ids[: len(head)] = head
        most = max(24, min(128, longest // 8)) if i % 8 == 6 else 24
        size = draw.randint(max(4, most // 2), most) if most > 24 else draw.randint(4, most)
        asks.append(Ask(ids, ask_params(i, size)))
    return asks


def with_images(asks: list[Ask], token: int, size: int = 1, seed: int = 0) -> list[Ask]:
    """Two in three of them with one to three pictures of several sizes, of `size` placeholders each; a few pictures
    come again and again. Pure."""
    draw = random.Random(seed)
    few = [picture(i, *draw.choice(SIZES)) for i in range(6)]
    found = []
    for i, ask in enumerate(asks):
        ids, images, before, count = list[int](), [], 0, len(ask.ids)
        for at in sorted(draw.sample(range(count), min(count, draw.randint(1, 3)) if i % 3 else 0)):
            ids += ask.ids[before:at]
            shown = draw.choice(few) if draw.random() < 0.5 else picture(100 + i, *draw.choice(SIZES))
            images.append((len(ids), shown))
            ids, before = ids + [token] * size, at + 1
        found.append(Ask(ids + ask.ids[before:], ask.params, images, size))
    return found


def picture(seed: int, width: int, height: int) -> str:
    """Random pixels as the data URL of a PPM file. Pure."""
    data = b"P6 %d %d 255\n" % (width, height) + random.Random(seed).randbytes(width * height * 3)
    return "data:image/x-portable-pixmap;base64," + b64encode(data).decode()


def ask_params(i: int, size: int) -> dict[str, Any]:
    return SAMPLING[i % len(SAMPLING)] | {"max_new_tokens": size, "ignore_eos": True, "sampling_seed": 1000 + i}


def total(ask: Ask, image: int = 0) -> int:
    """Tokens of prompt and answer, where a picture takes at most `image`. Pure."""
    return len(ask.ids) + ask.params["max_new_tokens"] + image * len(ask.images)


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def difference(want: list[Answer], got: list[Answer]) -> Difference:
    """Pure. Errors: ValueError if the lists have different lengths."""
    compared = tokens = logprobs = bits = 0
    for a, b in zip(want, got, strict=True):
        both = min(len(a.tokens), len(b.tokens))
        missing = max(len(a.tokens), len(b.tokens)) - both
        unlike = [float_bits(x) ^ float_bits(y) for x, y in zip(a.logprobs, b.logprobs, strict=False)]
        compared += both + missing
        tokens += missing + sum(x != y for x, y in zip(a.tokens, b.tokens, strict=False))
        logprobs += missing + sum(x != 0 for x in unlike)
        bits += 32 * missing + sum(x.bit_count() for x in unlike)
    return Difference(compared, tokens, logprobs, bits)


# -- running requests -------------------------------------------------------------------------------------------------


def generate(llm: Engine, asks: list[Ask]) -> list[Answer]:
    """All in one call. Errors: RuntimeError for an answer that was cut short."""
    ids, params = [ask.ids for ask in asks], [ask.params for ask in asks]
    images = [[data for _, data in ask.images] or None for ask in asks] if any(ask.images for ask in asks) else None
    outputs: Any = llm.generate(input_ids=ids, sampling_params=params, image_data=images, return_logprob=True)
    for output, ask in zip(outputs, asks, strict=True):
        if len(output["output_ids"]) != ask.params["max_new_tokens"]:
            raise RuntimeError(f"an answer ended early: {output['meta_info']['finish_reason']}")
    return answers(outputs)


def answers(outputs: Sequence[Any]) -> list[Answer]:
    """Pure."""
    return [Answer(o["output_ids"], [lp for lp, _, _ in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


def alone(llm: Engine, asks: list[Ask]) -> list[Answer]:
    """One after the other, each on an empty prefix cache: the reference."""
    found = []
    for ask in asks:
        llm.flush_cache()
        found += generate(llm, [ask])
    return found


def shuffled(llm: Engine, asks: list[Ask], seed: int, groups: bool = False, cold: bool = True) -> list[Answer]:
    """In another order: all at once, or in groups of random sizes; the answers in the order of `asks`."""
    draw = random.Random(seed)
    order = list(range(len(asks)))
    draw.shuffle(order)
    found: dict[int, Answer] = {}
    if cold:
        llm.flush_cache()
    while order:
        size = draw.randint(1, max(1, len(asks) // 3)) if groups else len(order)
        group, order = order[:size], order[size:]
        found |= zip(group, generate(llm, [asks[i] for i in group]), strict=True)
    return [found[i] for i in range(len(asks))]
