"""The command line: `fengine ...`, `python -m fengine.run ...`, and commands such as `fengine eval`. No torch is
imported before the first job starts: `eval/cli/engines.py` is the one place that does. Exit codes: 0 ok, 1 rows failed
or the engine died, 2 usage or configuration, 130 interrupted, 143 terminated."""

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial

from fengine.errors import ConfigError
from fengine.eval.cli import command
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, USAGE, ended
from fengine.eval.cli.schema import keys_of
from fengine.eval.commands import bench, chat, diff, evaluate, inform, lm_eval, merge, rerun, serve, verify
from fengine.eval.runs.config import EVAL, RUN

__all__ = ["FAILED", "INTERRUPTED", "OK", "TERMINATED", "USAGE", "main"]
# The first word, and who takes those behind it. Their modules import no torch (tests/eval/test_commands.py).
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "eval": evaluate.main,
    "serve": serve.main,
    "lm-eval": lm_eval.main,
    "batch": partial(command.run, evaluate.BATCH, evaluate.batch),
    "env": partial(command.run, inform.ENV, inform.env),
    "models": partial(command.run, inform.MODELS, inform.models),
    "replay": partial(command.run, inform.REPLAY, inform.replay_steps),
    "report": partial(command.run, inform.REPORT, inform.report),
    **{name: partial(command.run, module.USAGE, module.work) for name, module in {
        "bench": bench, "chat": chat, "diff": diff, "merge": merge, "rerun": rerun, "verify": verify,
    }.items()},
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs these arguments (default: those of this process) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    if words and words[0] in ("-sc", "--shell-completion") and "COMP_LINE" in os.environ:
        return _complete(words, os.environ["COMP_LINE"])
    if words and words[0] == "help":
        return _help(words[1:])
    if words and words[0].isidentifier() and words[0].islower():
        return ended(lambda: _refuse(words[0]))
    return evaluate.prompts(words)


def _help(words: Sequence[str]) -> int:
    """Help of all, of a command, or of the keys whose names hold a word."""
    if not words or words[0] in COMMANDS:
        return main([*words[:1], "--help"])
    return ended(lambda: print(keys_of(words[0], (RUN, EVAL, serve.SERVE)), flush=True) or OK)


def _complete(words: Sequence[str], line: str) -> int:
    """Prints what the shell's line may go on with: commands, and what Hydra knows of the keys of one. Behind a command
    that takes folders nothing is printed, so that the shell completes them. Modifies: the environment's COMP_LINE."""
    program, _, rest = line.partition(" ")
    first, blank, more = rest.lstrip().partition(" ")
    if blank and first in COMMANDS:
        os.environ["COMP_LINE"] = f"{program} {more}"
        return COMMANDS[first](words) if first in ("eval", "serve") else OK
    names = [name for name in COMMANDS if first and not blank and name.startswith(first)]
    if names:
        print(" ".join(names))
        return OK
    return evaluate.prompts(words)


def _refuse(word: str) -> int:
    """Errors: ConfigError, always."""
    if word in ("run", "generate", "complete", "infer", "predict"):
        raise ConfigError(
            f"no command {word!r}; a run of prompts needs none: fengine prompts=FILE.jsonl, or fengine 'TEXT'"
        )
    if word in ("model", "task", "sampling", "prompts", "prompt", "out", "seed"):
        raise ConfigError(f"no command {word!r}; settings are written key=value: {word}=VALUE (fengine help {word})")
    near = get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean fengine {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise ConfigError(f"no command {word!r:.80}; {hint}\nfengine --help shows what can be set: key=value")


if __name__ == "__main__":
    sys.exit(main())
