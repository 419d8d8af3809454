"""What the commands of `fengine` share: how they end, their help, their arguments. No torch. A command is in a
module of `eval/commands`, which `run.py` lists in COMMANDS."""

import difflib
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fengine.errors import ConfigError, EngineClosedError, EngineDeadError, FengineError, OutOfMemoryError, StorageError
from fengine.eval.cli import compose
from fengine.eval.cli.engines import report
from fengine.eval.cli.lines import say
from fengine.eval.cli.schema import Schema
from fengine.eval.runs.folder import FULL

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DIFFERS = FAILED  # of commands that compare


@dataclass(frozen=True)
class Arguments:
    """A command's arguments by kind: places (folders, files), key=value, overrides (keys that it passes on)."""

    places: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    overrides: tuple[str, ...] = ()


def ended(work: Callable[[], int], program: str = "fengine") -> int:
    """`work()`, its errors told and turned into exit codes."""
    try:
        with _terminable():
            return work()
    except KeyboardInterrupt:
        say(f"{program}: interrupted", stream=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:
        if end.code != TERMINATED:
            raise
        say(f"{program}: terminated", stream=sys.stderr)
        return TERMINATED
    except FengineError as error:
        return reported(error)
    except MemoryError:
        return reported(OutOfMemoryError("the host's memory ended; free some, or let this process have more"))
    except BrokenPipeError:  # the reader of our standard output has gone: nothing is left to say, nor to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # a name that is too long, a folder that may not be read, wherever it was met
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        name = f": {str(error.filename)!r:.200}" if error.filename else ""
        gone = not name and isinstance(error, FileNotFoundError)  # of os.getcwd
        told = "the current directory does not exist any more; cd into one that does"
        return reported(StorageError.of(told if gone else f"{(error.strerror or str(error)).lower()}{name}", error))


@contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that what is open is closed as by Ctrl-C; who has a handler keeps it."""
    own = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if own:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run(usage: str, work: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """A command with arguments of its own; `--help` prints `usage` instead."""
    if "-h" in argv or "--help" in argv:
        return ended(lambda: say(usage.strip(), prose=True) or OK)
    return ended(lambda: work(argv))


def composed(argv: Sequence[str] | None, schema: Schema, work: Callable[[Namespace], int]) -> int:
    """A command whose arguments (default: those of this process) Hydra reads; it answers --help and its kin itself."""

    def read() -> int:
        given = compose.parse(sys.argv[1:] if argv is None else argv, schema)
        if not compose.is_inspection(given):
            return work(given)
        compose.inspect(given, schema)
        return OK

    return ended(read, schema.program)


def reported(error: FengineError) -> int:
    """The exit code of an error, once it is reported."""
    report(error)
    full = isinstance(error, StorageError) and error.errno in FULL
    return FAILED if full or isinstance(error, (EngineDeadError, EngineClosedError)) else USAGE


def each(runs: Sequence[Path], work: Callable[[Path], int], recover: Callable[[], None] = lambda: None) -> int:
    """`work` on every run, and the worst of its exit codes. An error of one of several is told and stops no other; at
    the end it is said which ones did not end well. `recover` is called after an error. An interruption stops it all.
    Errors: those of `work`, if there is one run only."""
    codes: dict[str, int] = {}
    for one in runs:
        try:
            codes[one.name] = work(one)
        except FengineError as error:
            if len(runs) == 1:
                raise
            say(f"{one}:", stream=sys.stderr)
            codes[one.name] = reported(error)
            recover()
        if codes[one.name] >= INTERRUPTED:
            break
    bad = [f"{name} ({code})" for name, code in codes.items() if code != OK]
    if bad and len(runs) > 1:
        say(f"{len(bad)} of {len(runs)} runs with an exit code other than 0: {', '.join(bad)}", stream=sys.stderr)
    return max(codes.values(), default=OK)


def parse(
    argv: Sequence[str], options: Mapping[str, Callable[[str], Any]] | None = None, flags: Sequence[str] = (),
    overrides: bool = False,
) -> Arguments:  # fmt: skip
    """Sorts words. `options` maps a key to what reads its value (ValueError: its text says what is allowed). With
    `overrides`, other key=value words are kept as they are. A word with "=" that is a path is a place. Errors:
    ConfigError for an unknown word, with the nearest known one; for a key given twice."""
    known, places, read, others = options or {}, [], dict[str, Any](), []
    for word in argv:
        key, sign, value = word.partition("=")
        if sign and key in known:
            if key in read:
                raise ConfigError(f"{word:.500}: {key} is given twice")
            try:
                read[key] = known[key](value)
            except ValueError as error:
                raise ConfigError(f"{key}={value:.500}: {error}") from error
        elif word.startswith("-") and word not in flags:
            raise ConfigError(unknown(word, [*flags, "--help", *known]))
        elif sign and not os.path.exists(word):
            if not overrides:
                raise ConfigError(unknown(word, [*known]))
            others.append(word)
        elif word not in flags:
            places.append(word)
    return Arguments(tuple(places), read, frozenset(w for w in argv if w in flags), tuple(others))


def unknown(word: str, known: Sequence[str]) -> str:
    """What to say of a word that is none of `known`; fraction=1 and --fraction find verify.fraction. Pure."""
    key, sign, value = word.partition("=")
    names = {name.rpartition(".")[2]: name for name in known} | {name: name for name in known}
    found = [near for one in (key, key.lstrip("-")) for near in difflib.get_close_matches(one, names, 1, 0.7)]
    near = f"{names[found[0]]}{sign}{value:.200}" if found else ""
    hint = f"did you mean {near}?" if near else f"there {'are' if len(known) > 1 else 'is'} {', '.join(known)}"
    return f"unknown word {word:.500}; {hint if known else 'this command takes no key=value'}"


def number(low: float, high: float, *, above: bool = False, whole: bool = False) -> Callable[[str], Any]:
    """Reads a number from low to high; with `above`, low itself is not allowed; with `whole`, an integer."""
    limits = f"above {low:g} and at most {high:g}" if above else f"from {low} to {high}"

    def read(text: str) -> Any:
        try:
            value = int(text) if whole and len(text) < 40 else float(text)
        except ValueError:
            value = float("nan")
        if whole is isinstance(value, float) or not low <= value <= high or above and value == low:
            kind = "a number " if not whole else "an integer " if isinstance(value, float) else ""
            raise ValueError(f"must be {kind}{limits}")
        return value

    return read


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads an integer from low to high."""
    return number(low, high, whole=True)


def switch(text: str) -> bool:
    """Reads true or false."""
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads a list of names, with or without [ ]; each must be one of `allowed`."""

    def read(text: str) -> list[str]:
        listed = [word.strip().strip("'\"") for word in text.removeprefix("[").removesuffix("]").split(",")]
        listed = [word for word in listed if word]
        wrong = [word for word in listed if word not in allowed]
        if wrong or not listed:
            start = f"{wrong[0]!r:.80} is none of" if wrong else "choose of"
            raise ValueError(f"{start} {', '.join(allowed)}")
        if len(set(listed)) < len(listed):
            raise ValueError("a name occurs twice")
        return listed

    return read
