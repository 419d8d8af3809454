"""The command line: `fengine ...`, `python -m fengine.run ...`, and commands such as `fengine eval`, each a module.

No torch is imported before the first job starts: `eval/cli/engines.py` is the one place that does.
Exit codes: 0 ok, 1 rows failed or the engine died, 2 usage or configuration, 130 interrupted, 143 terminated.
"""

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from fengine.errors import ConfigError
from fengine.eval.cli.command import FAILED, INTERRUPTED, OK, TERMINATED, USAGE, ended
from fengine.eval.cli.help import keys_of
from fengine.eval.commands import (
    batch,
    bench,
    chat,
    diff,
    env,
    evaluate,
    lm_eval,
    merge,
    models,
    report,
    rerun,
    serve,
    steps,
    verify,
)
from fengine.eval.runs.config import EVAL, RUN

__all__ = ["FAILED", "INTERRUPTED", "OK", "TERMINATED", "USAGE", "main"]
# The first word, and who takes those behind it. Their modules import no torch (tests/eval/test_commands.py).
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "eval": evaluate.main,
    "batch": batch.main,
    "bench": bench.main,
    "chat": chat.main,
    "env": env.main,
    "merge": merge.main,
    "models": models.main,
    "diff": diff.main,
    "lm-eval": lm_eval.main,
    "report": report.main,
    "rerun": rerun.main,
    "replay": steps.main,
    "verify": verify.main,
    "serve": serve.main,
}


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
    command, blank, more = rest.lstrip().partition(" ")
    if blank and command in COMMANDS:
        os.environ["COMP_LINE"] = f"{program} {more}"
        return COMMANDS[command](words) if command in ("eval", "serve") else OK
    names = [name for name in COMMANDS if command and not blank and name.startswith(command)]
    if names:
        print(" ".join(names))
        return OK
    return evaluate.prompts(words)


def _refuse(word: str) -> int:
    """Errors: ConfigError, always."""
    near = get_close_matches(word, COMMANDS, 1)
    hint = f"did you mean fengine {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    raise ConfigError(f"no command {word!r:.80}; {hint}\nfengine --help shows what can be set: key=value")


if __name__ == "__main__":
    sys.exit(main())
