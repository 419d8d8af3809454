"""`fengine lm-eval …`: lm-evaluation-harness's own command line with fengine among its models. For releases that do not
look for models of other packages (up to 0.4.13); the words are all lm-eval's. No torch is needed to start it."""

import sys
from collections.abc import Sequence
from contextlib import suppress

from fengine.errors import MissingExtraError
from fengine.eval.cli import command

USAGE = """
fengine lm-eval run --model fengine --model_args pretrained=MODEL,... --tasks NAMES ...

lm-evaluation-harness's own command line, with fengine among its models. `fengine lm-eval run --help` shows its words;
model_args are the arguments of fengine.eval.harness.lm_eval_model.FengineLM and of fengine.Engine.
"""


def main(words: Sequence[str]) -> int:
    """Runs the words behind `fengine lm-eval` and returns the exit code."""
    return command.run(USAGE, lambda _: evaluate(words), words[:1])


def evaluate(words: Sequence[str]) -> int:
    """lm-eval's command line, which knows fengine. Errors: MissingExtraError, and whatever the evaluation raises."""
    try:
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError.of("fengine lm-eval", "lm_eval", "lm-eval") from None
    from fengine.eval.harness.lm_eval_model import FengineLM

    with suppress(ValueError):  # a later release has found it by its entry point already
        register_model("fengine")(FengineLM)
    sys.argv = ["lm-eval", *words]  # where lm-eval reads them
    cli_evaluate()
    return command.OK
