"""OpenAI's {"url", "detail"} of an image."""

from collections.abc import Mapping
from typing import Any

from fengine.errors import InvalidRequestError, UnsupportedFeatureError


def url_in(value: Mapping[str, Any]) -> Any:
    """Of OpenAI's {"url", "detail"}. Pure. Errors: InvalidRequestError for other keys; UnsupportedFeatureError."""
    given = {key: item for key, item in value.items() if item is not None}
    if unknown := given.keys() - {"url", "detail"}:
        raise InvalidRequestError(
            f"an image as a dict has url and detail, got {sorted(map(str, unknown))[0]!r:.80}, too"
        )
    check_detail(given.get("detail"))
    return given.get("url")


def check_detail(detail: Any) -> None:
    """Errors: InvalidRequestError, UnsupportedFeatureError."""
    if detail == "low":
        raise UnsupportedFeatureError('not built: detail="low"; send a smaller image, or leave detail out.')
    if detail not in (None, "auto", "high", "original"):  # all the same: as the checkpoint's processor sees it
        raise InvalidRequestError(f"detail must be auto, high or original, got {detail!r:.80}")
