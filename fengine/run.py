"""The command line: `fengine ...`, `python -m fengine.run ...`, and commands such as `fengine eval`. A command's module
is imported when it is asked for, and torch not before the first job starts: by `eval/cli/engines.py` alone. Exit codes:
0 ok, 1 rows failed, the engine died or a disk is full, 2 usage or configuration, 130 interrupted, 143 terminated."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn, cast

from fengine.errors import ConfigError, StorageError
from fengine.eval.cli import command
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, USAGE, ended, reported
from fengine.eval.cli.lines import say
from fengine.eval.cli.schema import keys_of
from fengine.eval.runs.config import EVAL, RUN

__all__ = ["FAILED", "INTERRUPTED", "OK", "TERMINATED", "USAGE", "main"]
# The first word; a module of `eval/commands`, and in it `main`, or a help text and who takes the words behind.
COMMANDS: dict[str, tuple[str, ...]] = {
    "eval": ("evaluate", "main"),
    "serve": ("serve", "main"),
    "lm-eval": ("lm_eval", "main"),
    "batch": ("evaluate", "BATCH", "batch"),
    "env": ("inform", "ENV", "env"),
    "models": ("inform", "MODELS", "models"),
    "replay": ("inform", "REPLAY", "replay_steps"),
    "report": ("inform", "REPORT", "report"),
    **{name: (name, "USAGE", "work") for name in ("bench", "chat", "diff", "merge", "rerun", "verify")},
}


def _run(name: str, words: Sequence[str]) -> int:
    """A command's exit code."""
    module, *parts = COMMANDS[name]
    *text, work = (getattr(import_module(f"fengine.eval.commands.{module}"), part) for part in parts)
    return command.run(text[0], work, words) if text else work(words)


def _prompts(words: Sequence[str]) -> int:
    """What runs without a command's name."""
    if list(words) == ["--help"]:
        return command.composed(words, RUN, lambda _: OK)
    return import_module("fengine.eval.commands.evaluate").prompts(words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs these arguments (default: those of this process) and returns the exit code. Modifies: streams of the process
    that are closed, which become the null device: their numbers would go to the next files that are opened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError):  # it is none of Python's, or its reader has gone
            cast(Any, stream).reconfigure(errors="backslashreplace")  # in a locale that has not all of Unicode
    code = ended(lambda: _main(list(sys.argv[1:] if argv is None else argv)))
    try:
        sys.stdout.flush()
    except OSError as error:  # what is left cannot be written at the end of the process either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or reported(StorageError.of(f"standard output cannot be written: {error.strerror}", error))
    return code


def _main(words: list[str]) -> int:
    if words and words[0] in COMMANDS:
        return _run(words[0], words[1:])
    if words and words[0] in ("-sc", "--shell-completion") and "COMP_LINE" in os.environ:
        return _complete(words, os.environ["COMP_LINE"])
    if words and words[0] == "help":
        return _help(words[1:])
    if words and words[0].isidentifier() and (words[0].islower() or words[0].lower() in COMMANDS):
        _refuse(words[0])
    return _prompts(words)


def _help(words: Sequence[str]) -> int:
    """Help of all, of a command, or of the keys whose names hold a word."""
    if not words or words[0] in COMMANDS:
        return _main([*words[:1], "--help"])
    served = import_module("fengine.eval.commands.serve").SERVE
    say(keys_of(words[0], (RUN, EVAL, served)))
    return OK


def _complete(words: Sequence[str], line: str) -> int:
    """Prints what the shell's line may go on with: commands, and what Hydra knows of the keys of one. Behind a command
    that takes folders nothing is printed, so that the shell completes them. Modifies: the environment's COMP_LINE."""
    program, _, rest = line.partition(" ")
    first, blank, more = rest.lstrip().partition(" ")
    if blank and first in COMMANDS:
        os.environ["COMP_LINE"] = f"{program} {more}"
        return _run(first, words) if first in ("eval", "serve") else OK
    names = [name for name in COMMANDS if first and not blank and name.startswith(first)]
    if names:
        print(" ".join(names))
        return OK
    return _prompts(words)


def _refuse(word: str) -> NoReturn:
    """Errors: ConfigError, always."""
    if word in ("run", "generate", "complete", "infer", "predict"):
        raise ConfigError(
            f"no command {word!r}; a run of prompts needs none: fengine prompts=FILE.jsonl, or fengine 'TEXT'"
        )
    if word in ("model", "task", "sampling", "prompts", "prompt", "out", "seed"):
        raise ConfigError(f"no command {word!r}; settings are written key=value: {word}=VALUE (fengine help {word})")
    near = get_close_matches(word.lower(), COMMANDS, 1)
    hint = f"did you mean fengine {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise ConfigError(f"no command {word!r:.80}; {hint}\nfengine --help shows what can be set: key=value")


if __name__ == "__main__":
    sys.exit(main())
