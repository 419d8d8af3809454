"""Which JSON schemas of a folder are held, what refuses the others, and whether a held one lets a wrong text through.

    python scripts/check_schemas.py FOLDER [--most 300] [--suite]

FOLDER holds schemas as files (.json): plain ones, ones with tests beside them ({"schema": …, "tests": [{"data": …,
"valid": …}]}), or with --suite the lists of such that JSON Schema's own test suite has. A text is wrong if the
`jsonschema` package, with its format checks, rejects it. Texts are the given ones and random ones of the grammar. `raw`
is llguidance alone, in the same run: how many it compiles, and its times. Times are of a vocabulary of 128,000 tokens:
CPU time of compiling as a request has it done, in the child process and out of it; of a row's mask as a step has it
filled.
"""

import argparse
import collections
import json
import random
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from fengine.core.request import Request
from fengine.core.sampling_params import SamplingParams
from fengine.errors import GrammarError
from fengine.structured_output import masks
from fengine.structured_output.backend import Grammar, Grammars, Source, Vocabulary
from fengine.structured_output.schema import Whitespace

WALKS, LONGEST = 3, 200  # random texts of a schema, and their tokens
WORDS = 128_000
UNCHECKED = ("idn-email", "iri", "iri-reference", "uri", "uri-reference")  # what the package checks by other rules


def cases(folder: Path, suite: bool, most: int) -> list[tuple[str, Any, list[tuple[Any, bool]]]]:
    """(name, schema, (value, whether it is valid) …), in an order of its own."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue
        for i, one in enumerate(content if suite and isinstance(content, list) else [content]):
            tests = one.get("tests") if isinstance(one, dict) else None
            if isinstance(tests, list) and "schema" in one:
                found.append((f"{path.name}:{i}", one["schema"], [(test["data"], test["valid"]) for test in tests]))
            elif not suite:
                found.append((path.name, content, []))
    random.Random(0).shuffle(found)
    return found[:most]


def tokens() -> list[bytes | None]:
    """Bytes, words as a large vocabulary has them, and an end."""
    draw, words = random.Random(0), set()
    while len(words) < WORDS:
        words.add(" " * draw.randint(0, 1) + "".join(draw.choices("etaoinshrdlucm", k=draw.randint(2, 9))))
    return [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in sorted(words)), None]


def work(grammars: Grammars) -> float:
    """CPU seconds of this process and of the children that try grammars."""
    children = [child.pid for child in grammars._trials.children if child is not None]
    spent = [int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in children]
    return time.process_time() + sum(spent) / 1e9


def raw_of(vocabulary: Vocabulary, schema: Any) -> Any:
    """A matcher of llguidance alone; None if it refuses the schema."""
    body = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    matcher = vocabulary.matcher("start: %json " + json.dumps(body))
    matcher.compute_bitmask()
    return None if matcher.is_error() else matcher


def accepts(grammar: Grammar, value: Any) -> bool:
    matcher = grammar.matcher()
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return matcher.consume_tokens(list(text)) and matcher.is_accepting()


def walk(grammar: Grammar, seed: int, raw: Any, times: list[float], times_raw: list[float]) -> Any:
    """A random value; None for a text that has not come to its end. `raw` is taken the same way, as far as it goes."""
    end = grammar.vocabulary.size - 1
    request = Request("walk", 0, [], SamplingParams(), seed, LONGEST, frozenset([end]))
    draw, cursor, fresh, out = random.Random(seed), grammar.cursor(request, []), [], b""
    for _ in range(LONGEST):
        started = time.perf_counter()
        cursor.take(fresh)
        filled = masks.fill([0], [cursor])
        times.append(time.perf_counter() - started)
        if raw is not None:
            started = time.perf_counter()
            raw.compute_bitmask()
            times_raw.append(time.perf_counter() - started)
        ids = np.flatnonzero(np.unpackbits(filled.mask_MW[0].view(np.uint8), bitorder="little")).tolist()
        few = [i for i in ids if i < 256 or i == end]
        closing = [i for i in few if i == end or chr(i) in '"}],:'] if draw.random() < 0.5 else few
        if not few or (token := draw.choice(closing or few)) == end:
            break
        raw = raw if raw is not None and raw.consume_tokens([token]) else None
        fresh, out = [token], out + bytes([token])
    return json.loads(out) if cursor.matcher.is_accepting() else None


def percentiles(times: list[float], unit: float) -> str:
    times = sorted(times)
    return f"p50 {statistics.median(times) * unit:.1f}, p95 {times[int(len(times) * 0.95)] * unit:.1f}"


def why(error: Exception) -> str:
    """A refusal without what is particular to one schema."""
    text = re.sub(r"(at|of) #\S*", "at …", str(error).removeprefix("json_schema"))
    return re.sub(r"\d+", "9", text)[:110]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--most", type=int, default=300)
    arguments.add_argument("--suite", action="store_true")
    arguments.add_argument("--draft", default="2020-12", help="of schemas that name none")
    arguments.add_argument("-v", "--verbose", action="store_true")
    given = arguments.parse_args()
    drafts = {"2020-12": jsonschema.Draft202012Validator, "7": jsonschema.Draft7Validator}
    grammars = Grammars(lambda: (tokens(), False), Whitespace())
    grammars.compile(Source("regex", r"\w\d\s"))
    vocabulary, refused, wrong, missed = grammars.vocabulary, collections.Counter(), [], []
    compiled, compiled_raw, filled, filled_raw = [], [], [], []
    held = held_raw = 0
    found = cases(given.folder, given.suite, given.most)
    for name, schema, tests in found:
        started = time.process_time()
        raw = raw_of(vocabulary, schema)
        if raw is not None:
            held_raw += 1
            compiled_raw.append(time.process_time() - started)
        started = work(grammars)
        try:
            grammar = grammars.compile(Source("json_schema", json.dumps(schema)))
        except GrammarError as error:
            refused[why(error)] += 1
            if given.verbose:
                print(name, str(error)[:300], "| raw", raw is not None)
            continue
        compiled.append(work(grammars) - started)
        held += 1
        kind = validator_for(schema, drafts[given.draft])
        checker = jsonschema.FormatChecker(set(kind.FORMAT_CHECKER.checkers) - set(UNCHECKED))
        validator = kind(schema, format_checker=checker)
        for value, valid in tests:
            taken = accepts(grammar, value)
            if taken and not valid and (given.suite or not validator.is_valid(value)):
                wrong.append((name, value))
            if valid and not taken:
                missed.append((name, value))
        for seed in range(WALKS):
            value = walk(grammar, seed, raw and raw.deep_copy(), filled, filled_raw)
            if value is not None and not validator.is_valid(value):
                wrong.append((name, value))
    grammars.close()
    print(f"held {held} of {len(found)}; raw {held_raw}; wrong texts let through: {len(wrong)}; "
          f"valid texts not let through: {len(missed)}")  # fmt: skip
    print(f"compile CPU ms: {percentiles(compiled, 1e3)}; raw: {percentiles(compiled_raw, 1e3)}")
    print(f"mask µs: {percentiles(filled, 1e6)}; raw: {percentiles(filled_raw, 1e6)}")
    for name, value in wrong[:20]:
        print("WRONG", name, json.dumps(value)[:200])
    for text, count in refused.most_common(40):
        print(f"{count:5} {text}")


if __name__ == "__main__":
    main()
