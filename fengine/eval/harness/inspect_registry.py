"""What inspect-ai loads at its start (entry point group `inspect_ai`): the name of the provider, and where it is."""

# pyright: reportMissingImports=false

from fengine.errors import MissingExtraError

try:
    from inspect_ai.model import ModelAPI, modelapi
except ImportError as error:
    raise MissingExtraError.of("the provider fengine/…", "inspect_ai", "inspect-ai") from error


@modelapi(name="fengine")
def fengine() -> type[ModelAPI]:
    """`inspect eval task.py --model fengine/PATH`."""
    from fengine.eval.harness.inspect_model import FengineAPI  # and torch, once it is asked for

    return FengineAPI
