"""`is_in_ci`, which SGLang's documentation asks before it imports workarounds."""

import os

__all__ = ["is_in_ci"]


def is_in_ci() -> bool:
    """Whether FENGINE_IS_IN_CI or SGLANG_IS_IN_CI is "true" or "1"."""
    return any(os.environ.get(name, "").lower() in ("true", "1") for name in ("FENGINE_IS_IN_CI", "SGLANG_IS_IN_CI"))
