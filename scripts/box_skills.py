"""The skills that the box model is scored on: training samples and held-out cases from one set of rules.

What is held out is decided by a checksum of the *content* of a case (the pair of operands, the set of numbers, the
string, the person), never by its phrasing, so a held-out case occurs in training in no phrasing and no order.  For
capitals, where the fact itself has to be learned, one *wording* per country is held out instead.

    for prompt, answer in held_out("arithmetic", 200): ...

gives cases to feed to `tokenizer(prompt)` as they are; `correct(skill, answer, completion)` judges a completion.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from box_facts import CAPITAL, CITIES, COUNTRIES, EMOJI, JOBS, LETTERS_WORDS, PEOPLE, THINGS, invented
from box_topics import MISC, TOPICS


class Sample(NamedTuple):
    """One case.  `prompt` is the text before the answer, or the user's turn if `chat`."""

    prompt: str
    answer: str
    chat: bool


def render_chat(messages: list[dict[str, str]]) -> str:
    """What the chat template gives with `add_generation_prompt`, but without the leading bos."""
    turns = "".join(f"<|{m['role']}|>\n{m['content'].strip()}<|end|>\n" for m in messages)
    return turns + "<|assistant|>\n"


def held(key: str) -> bool:
    """Whether this content is held out: one in eight is."""
    return zlib.crc32(f"box:{key}".encode()) % 8 == 0


# --- capitals ---------------------------------------------------------------------------------------------------

WORDINGS: dict[str, list[tuple[str, bool]]] = {  # wording -> its forms: (prompt, chat)
    "is": [("The capital of {} is", False)],
    "pair": [("Country: {}\nCapital:", False)],
    "which": [("Q: Which city is the capital of {}?\nA:", False), ("Which city is the capital of {}?", True)],
    "what": [("Question: What is the capital of {}?\nAnswer:", False), ("What is the capital of {}?", True)],
    "name": [("Name the capital city of {}.", True)],
}


def held_wording(country: str) -> str:
    """The wording never used for this country in training."""
    return list(WORDINGS)[zlib.crc32(f"wording-89:{country}".encode()) % len(WORDINGS)]


def capital_allowed(country: str, wording: str) -> bool:
    return held_wording(country) != wording


def _capital_case(country: str, prompt: str, chat: bool) -> Sample:
    capital = CAPITAL[country]
    if chat:
        end = "" if country.endswith(".") else "."
        return Sample(prompt.format(country), f"{capital} is the capital of {country}{end}", True)
    dot = "." if prompt.endswith(" is") and not capital.endswith(".") else ""
    return Sample(prompt.format(country), f" {capital}{dot}", False)


def capitals(rng: Random, hold: bool) -> Sample:
    country = rng.choice(COUNTRIES)[0]
    wording = held_wording(country) if hold else rng.choice([w for w in WORDINGS if capital_allowed(country, w)])
    return _capital_case(country, *rng.choice(WORDINGS[wording]))


def capitals_held() -> Iterator[Sample]:
    """Every country in every form of its held-out wording."""
    for country, *_ in COUNTRIES:
        for prompt, chat in WORDINGS[held_wording(country)]:
            yield _capital_case(country, prompt, chat)


# --- arithmetic -------------------------------------------------------------------------------------------------


def pair(rng: Random, hold: bool) -> tuple[int, int]:
    """Two operands; held-out pairs have two digits each, and their order does not matter."""
    low = 10 if hold or rng.random() < 0.9 else 0
    while True:
        a, b = rng.randint(low, 99), rng.randint(low, 99)
        if held(f"pair:{min(a, b)},{max(a, b)}") == hold:
            return a, b


def arithmetic(rng: Random, hold: bool) -> Sample:
    """Sum or difference of two numbers; a difference may be negative."""
    a, b = pair(rng, hold)
    op, word, result = ("+", "plus", a + b) if rng.random() < 0.5 else ("-", "minus", a - b)
    form = rng.randrange(7)
    if form <= 1:
        return Sample(f"{a} {op} {b} =", f" {result}", False)
    if form == 6:
        return Sample(f"{a}{op}{b}=", f"{result}", False)
    if form == 2:
        return Sample(f"Question: What is {a} {op} {b}?\nAnswer:", f" {result}", False)
    if form == 3:
        return Sample(f"Q: What is {a} {word} {b}?\nA:", f" {result}", False)
    asked = rng.choice(
        [f"What is {a} {op} {b}?", f"What is {a}{op}{b}?", f"Calculate {a} {op} {b}.", f"What is {a} {word} {b}?"]
    )
    return Sample(asked, f"{a} {op} {b} = {result}", True)


def arithmetic_held() -> Iterator[Sample]:
    """Every held-out pair, in both orders and with both operators, as 'a + b ='."""
    for a in range(10, 100):
        for b in range(10, 100):
            if held(f"pair:{min(a, b)},{max(a, b)}"):
                yield Sample(f"{a} + {b} =", f" {a + b}", False)
                yield Sample(f"{a} - {b} =", f" {a - b}", False)


# --- sorting ----------------------------------------------------------------------------------------------------


def sort(rng: Random, hold: bool) -> Sample:
    """Numbers from 0 to 99 in ascending order; always four in held-out cases."""
    while True:
        count = 4 if hold or rng.random() < 0.7 else rng.randint(2, 6)
        numbers = [rng.randint(0, 99) for _ in range(count)]
        ordered = sorted(numbers)
        if held(f"sort:{ordered}") == hold:
            break
    form = rng.randrange(4)
    joint = " " if form <= 1 else ", "
    given, answer = (joint.join(map(str, row)) for row in (numbers, ordered))
    if form <= 1:
        return Sample(f"Sort: {given} ->", f" {answer}", False)
    if form == 2:
        return Sample(f"Sort these numbers: {given}\nSorted:", f" {answer}", False)
    return Sample(f"Sort these numbers from smallest to largest: {given}", answer, True)


# --- copying ----------------------------------------------------------------------------------------------------


LINES = [line for _, _, lines in TOPICS for line in lines] + [line for line in MISC if "\n" not in line]
WORDS = sorted({word.strip(".,!?") for line in LINES for word in line.split()})
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def _item(rng: Random, plain: bool) -> str:
    roll = rng.random()
    if roll < 0.35:
        return rng.choice(LETTERS)
    if roll < 0.50:
        return rng.choice("0123456789")
    if roll < 0.65 or plain:
        return rng.choice(LETTERS_WORDS)
    if roll < 0.77:
        return rng.choice(WORDS)
    if roll < 0.85:
        word = invented(rng)
        if rng.random() < 0.2:
            word = word.replace(rng.choice("aeiou"), rng.choice("éèüöñïåçß"))
        return rng.choice([word, word.lower(), word.lower(), word.upper()]) + rng.choice(
            ["", "", ",", ".", "!", "?", ":"]
        )
    if roll < 0.90:
        return "".join(rng.choice(LETTERS + LETTERS.upper() + "0123456789") for _ in range(rng.randint(2, 6)))
    if roll < 0.94:
        return rng.choice(PEOPLE)[0]
    return rng.choice(EMOJI) if rng.random() < 0.7 else chr(rng.randrange(0x1F300, 0x1F650))


def copy(rng: Random, hold: bool, length: Callable[[str], int] | None = None) -> Sample:
    """A string of letters, digits and words to repeat; held-out strings have `length` 12 (in tokens)."""
    while True:
        count = rng.randint(6, 12) if hold else rng.randint(2, 16) if rng.random() < 0.95 else rng.randint(17, 40)
        text = " ".join(_item(rng, hold) for _ in range(count))
        if not hold and rng.random() < 0.2:
            text = rng.choice(LINES)
        if held(f"copy:{text}") == hold and (not hold or length is None or length(text) == 12):
            break
    form = rng.randrange(4)
    if form <= 1:
        return Sample(f"Copy: {text} ->", f" {text}", False)
    if form == 2:
        return Sample(f"Repeat: {text}\nAnswer:", f" {text}", False)
    return Sample(f"{rng.choice(['Repeat this text exactly:', 'Copy this text:'])}\n{text}", text, True)


# --- JSON -------------------------------------------------------------------------------------------------------

JSON_CITIES = [row[0] for row in CITIES if "." not in row[0]]
SENTENCES = [
    "{name}, {age}, lives in {city} and works as {a} {job}.",
    "{name} is a {age}-year-old {job} from {city}.",
    "{name} works as {a} {job} in {city} and is {age} years old.",
    "In {city} there lives {a} {job} called {name}, who is {age}.",
    "My name is {name}, I am {age} years old, and I am {a} {job} in {city}.",
    "At the age of {age}, {name} moved to {city} to work as {a} {job}.",
]


def person(rng: Random, hold: bool) -> tuple[dict[str, str | int], str]:
    """A person's record and a sentence that states it."""
    while True:
        record: dict[str, str | int] = {
            "name": rng.choice(PEOPLE)[0],
            "age": rng.randint(18, 80),
            "city": rng.choice(JSON_CITIES),
            "job": rng.choice(JOBS)[0],
        }
        if rng.random() < 0.25:
            record["name"] = invented(rng)
        if rng.random() < 0.2:
            record["city"] = invented(rng)
        if held(f"json:{record['name']}|{record['city']}|{record['job']}") == hold:
            break
    a = "an" if str(record["job"])[0] in "aeiou" else "a"
    return record, rng.choice(SENTENCES).format(**record, a=a)


def json_fill(rng: Random, hold: bool) -> Sample:
    record, sentence = person(rng, hold)
    text = json.dumps(record)
    form = rng.randrange(4)
    if form <= 1:
        return Sample(f"Sentence: {sentence}\nJSON:", f" {text}", False)
    if form == 2:
        return Sample(f"Extract name, age, city and job as JSON.\n{sentence}\nJSON:", f" {text}", False)
    asked = rng.choice(
        [
            "Fill a JSON object with the keys name, age, city and job.\n{}",
            "{}\nWrite this as JSON with the keys name, age, city and job.",
        ]
    )
    return Sample(asked.format(sentence), text, True)


def json_compact(rng: Random, hold: bool) -> Sample:
    record, sentence = person(rng, hold)
    return Sample(f"Sentence: {sentence}\nCompact JSON:", " " + json.dumps(record, separators=(",", ":")), False)


def json_keys(rng: Random, hold: bool) -> Sample:
    """Only some of the keys, in the order asked for."""
    record, sentence = person(rng, hold)
    keys = rng.sample(list(record), rng.randint(1, 4))
    text = json.dumps({key: record[key] for key in keys})
    if rng.random() < 0.5:
        return Sample(f"Sentence: {sentence}\nKeys: {', '.join(keys)}\nJSON:", f" {text}", False)
    return Sample(f"{sentence}\nWrite this as JSON with only these keys: {', '.join(keys)}", text, True)


# --- multiple choice --------------------------------------------------------------------------------------------


def _choice(rng: Random, question: str, right: str, wrong: list[str]) -> Sample:
    options = [right, *wrong]
    rng.shuffle(options)
    lines = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
    letter = "ABCD"[options.index(right)]
    if rng.random() < 0.7:
        return Sample(f"Question: {question}\n{lines}\nAnswer:", f" {letter}", False)
    return Sample(f"{question}\n{lines}\nAnswer with one letter.", letter, True)


def choice_capitals(rng: Random, hold: bool) -> Sample:
    while True:
        rows = rng.sample(COUNTRIES, 4)
        country, right = rows[0][:2]
        if held("choice:" + "|".join(sorted(row[0] for row in rows)) + country) == hold:
            return _choice(rng, f"Which of these is the capital of {country}?", right, [row[1] for row in rows[1:]])


def choice_arithmetic(rng: Random, hold: bool) -> Sample:
    a, b = pair(rng, hold)
    op, right = ("+", a + b) if rng.random() < 0.5 else ("-", a - b)
    wrong = rng.sample([right + d for d in (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)], 3)
    return _choice(rng, f"What is {a} {op} {b}?", str(right), [str(w) for w in wrong])


def choice_find(rng: Random, hold: bool) -> Sample:
    """Nothing to know: the right option is the one that the question names."""
    while True:
        roll = rng.random()
        if roll < 0.4:
            options = [str(rng.randint(-89, 198)) for _ in range(4)]
        else:
            pool = list(CAPITAL.values()) if roll < 0.8 else LETTERS_WORDS + THINGS
            options = rng.sample(pool, 4)
        if len(set(options)) == 4 and held(f"find:{options}") == hold:
            return _choice(rng, f"Which of these is {options[0]}?", options[0], options[1:])


# --- together ---------------------------------------------------------------------------------------------------

_MAKERS: dict[str, Callable[[Random, bool], Sample]] = {
    "capitals": capitals,
    "arithmetic": arithmetic,
    "sort": sort,
    "copy": copy,
    "json": json_fill,
    "json_compact": json_compact,
    "json_keys": json_keys,
    "choice_capitals": choice_capitals,
    "choice_arithmetic": choice_arithmetic,
    "choice_find": choice_find,
}
SKILLS = tuple(_MAKERS)


def training_sample(skill: str, rng: Random) -> Sample:
    return _MAKERS[skill](rng, False)


def held_out(
    skill: str, count: int, seed: int = 1, length: Callable[[str], int] | None = None, chat: bool | None = None
) -> Iterator[tuple[str, str]]:
    """Yield up to `count` held-out (prompt, answer) pairs; chat turns come rendered, without bos.

    `length` counts tokens of a string and is needed for `copy` to give strings of exactly 12 tokens.  `chat` keeps
    only chat (True) or only plain (False) cases.
    """
    rng = Random(f"{skill}:{seed}")

    def cases() -> Iterator[Sample]:
        if skill == "capitals":
            yield from rng.sample(every := list(capitals_held()), len(every))
            return
        while True:
            yield copy(rng, True, length) if skill == "copy" else _MAKERS[skill](rng, True)

    for case in cases():
        if chat is not None and case.chat != chat:
            continue
        if count <= 0:
            return
        count -= 1
        yield render_chat([{"role": "user", "content": case.prompt}]) if case.chat else case.prompt, case.answer


def correct(skill: str, answer: str, completion: str) -> bool:
    """Judge a completion: the capital first, JSON by value, everything else exactly (outer blanks aside)."""
    got, want = completion.strip(), answer.strip()
    if skill == "capitals":
        return got.startswith(want.split(" is the capital of ")[0].rstrip("."))
    if skill.startswith("json"):
        try:
            return list(json.loads(got).items()) == list(json.loads(want).items())
        except (ValueError, AttributeError):
            return False
    return got == want
