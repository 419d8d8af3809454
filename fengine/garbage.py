"""What the garbage collector looks through: not what is imported, which never goes."""

import atexit
import gc
from functools import cache


def freeze() -> None:
    """Collects garbage once, then exempts all that is left from later collections (`gc.freeze`)."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton's bindings would report at the end what the collector cannot take


@cache
def freeze_imports() -> None:
    """`freeze`, once a process: torch and its kind are 200,000 to 500,000 objects, and a full collection, which may
    come between any two steps, goes through them for 0.2 to 0.4 s."""
    freeze()
