"""Images in chats: parts of a message's content, in the order of the prompt's placeholders."""

from collections.abc import Mapping
from typing import Any

from fengine.core.scalars import told
from fengine.errors import InvalidRequestError
from fengine.multimodal.image_url import check_detail, url_in

IMAGE = {"type": "image"}  # what a template sees of one
PARTS = ("image_url", "image", "input_image")
IN = ("image_url", "source", "image", "url", "path", "base64")  # where a part has it
KEYS = ("type", *IN, "detail", "cache_control")  # of caches that an API's provider has: nothing depends on it


def without_images(messages: Any) -> tuple[Any, list[Any]]:
    """A chat as its template sees it, and its images in order. Pure. Errors: InvalidRequestError. A part is OpenAI's
    {"type": "image_url", "image_url": {"url": …}} or {"type": "input_image", "image_url": …}, Anthropic's {"type":
    "image", "source": {…}}, or {"type": "image", "image": whatever image_data takes}."""
    images: list[Any] = []
    if not isinstance(messages, (list, tuple)):
        return messages, images
    return [_message(message, images, f"messages[{i}]") for i, message in enumerate(messages)], images


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image. Pure."""
    return isinstance(part, Mapping) and part.get("type") in PARTS and dict(part) != IMAGE


def has_places(messages: Any) -> bool:
    """Whether a plain chat has parts that only say where an image stands. Pure."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return any(isinstance(part, dict) and part == IMAGE for c in contents if isinstance(c, list) for part in c)


def _message(message: Any, images: list[Any], where: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)) or not any(map(is_image, content)):
        return message
    parts = []
    for i, part in enumerate(content):
        if is_image(part):
            images.append(_image(part, f"{where}['content'][{i}]"))
        parts.append(dict(IMAGE) if is_image(part) else part)
    return {**message, "content": parts}


def _image(part: Mapping[str, Any], where: str) -> Any:
    """What `image_data` would have of it. Errors: InvalidRequestError."""
    for key, value in part.items():
        if key not in KEYS and value is not None:
            raise InvalidRequestError(f"{where} has {key!r:.80}, which is not read of an image: {', '.join(KEYS)} are.")
    check_detail(part.get("detail"))
    given = [part[name] for name in IN if part.get(name) is not None]
    found, source = given[0] if given else None, part.get("source")
    if isinstance(part.get("image_url"), Mapping):
        found = url_in(part["image_url"])
    if isinstance(source, Mapping):
        base64 = f"data:{source.get('media_type', 'image/png')};base64,{source.get('data')}"
        found = base64 if source.get("type") == "base64" else source.get("url")
    if found is None or len(given) > 1:
        what = "several of" if given[1:] else "none of"
        raise InvalidRequestError(f"{where} is an image with {what} {', '.join(IN)}; give one: {told(part)}.")
    return found
