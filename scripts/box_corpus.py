"""The corpus of the box model: documents drawn from grammars and tables, seeded, with nothing downloaded.

    python scripts/box_corpus.py --show 20      # print some documents
    python scripts/box_corpus.py --seed 3 --documents 1000 --out corpus.txt

A document is a list of (text, trained) segments.  Untrained segments are what a user would type (operands to add, a
string to copy, an instruction): the model reads them but hardly spends capacity on predicting them.
"""

import argparse
from collections.abc import Iterator
from random import Random

from box_chat import chat, plain_turn
from box_prose import Segments, ask, document
from box_skills import Sample, render_chat, training_sample
from box_tools import END, training_segments

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

# share of documents (not of tokens: a story is ten times as long as a sum)
SHARES = {
    "prose": 23,
    "chat": 21,
    "plain_turn": 5,
    "capitals": 6,
    "arithmetic": 15,
    "sort": 6,
    "copy": 9,
    "json": 5,
    "json_compact": 1,
    "json_keys": 2,
    "choice_capitals": 5,
    "choice_arithmetic": 8,
    "choice_find": 5,
    "tools": 24,
}


def chat_segments(messages: list[dict[str, str]]) -> Segments:
    """A chat as the template writes it, trained on the assistant's turns and their ends."""
    segments: Segments = []
    start = 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = ("\n" if segments else "") + render_chat(messages[start:i])
            segments += [(prompt, False), (message["content"] + END, True)]
            start = i + 1
    return segments


def skill_segments(skill: str, rng: Random) -> Segments:
    """One sample, or sometimes a few plain ones of the same skill in a row, as in a few-shot prompt."""
    sample = training_sample(skill, rng)
    if sample.chat:
        return chat_segments(
            [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}]
        )
    segments: Segments = []
    shots = rng.randint(2, 6) if rng.random() < (0.25 if skill.startswith("choice") else 0.12) else 1
    joint = rng.choice(["\n", "\n\n"])
    for i in range(shots):
        while i and (sample.chat or not _same_form(sample, segments[0][0])):
            sample = training_sample(skill, rng)
        segments += [((joint if i else "") + sample.prompt, False), (sample.answer, True)]
        if i < shots - 1:
            sample = training_sample(skill, rng)
    return segments


def _same_form(sample: Sample, first: str) -> bool:
    """Whether two prompts look alike: the same first character class and the same last line."""
    return sample.prompt[:2].isalpha() == first[:2].isalpha() and sample.prompt[-3:] == first[-3:]


def documents(seed: int) -> Iterator[tuple[str, Segments]]:
    """An endless seeded stream of (kind, segments)."""
    rng = Random(seed)
    kinds, weights = list(SHARES), list(SHARES.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        if kind == "prose":
            segments = document(rng)
        elif kind == "chat":
            segments = chat_segments(chat(rng))
        elif kind == "plain_turn":
            segments = ask(rng, *plain_turn(rng), forms=False)
        elif kind == "tools":
            segments = training_segments(rng)
        else:
            segments = skill_segments(kind, rng)
        # one city ends with a dot of its own
        yield kind, [(text.replace("D.C..", "D.C."), trained) for text, trained in segments]


def text_of(segments: Segments) -> str:
    return "".join(text for text, _ in segments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--out", help="write the text of the documents here, one blank line between them")
    parser.add_argument("--show", type=int, default=0, help="print this many documents with their kinds")
    args = parser.parse_args()
    stream = documents(args.seed)
    for _ in range(args.show):
        kind, segments = next(stream)
        print(f"--- {kind}\n" + "".join(f"[{text}]" if trained else text for text, trained in segments))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as out:
            for _ in range(args.documents):
                out.write(text_of(next(stream)[1]) + "\n\n")


if __name__ == "__main__":
    main()
