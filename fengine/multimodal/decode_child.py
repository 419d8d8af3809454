"""Decodes images, those that are encoded in a process of `decoder.py`, which a hostile file may take down."""

import io
import os
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

from fengine.tokenizer.trial import Refused

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
RATIO = 200  # of sides: a processor that wants a length of the shorter one would make the longer one as much longer


def decoded(data: bytes, most_pixels: int) -> Image.Image:
    """The picture as RGB, turned as EXIF says, over white where it is transparent. Errors: Refused."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise Refused(f"it is damaged, or none of {', '.join(FORMATS)}") from None
    return as_rgb(image, most_pixels)


def check_sides(width: int, height: int, most_pixels: int) -> None:
    """Errors: Refused."""
    if width * height > most_pixels:
        raise Refused(f"it has {width} × {height} pixels, more than max_image_pixels = {most_pixels}: make it smaller")
    if max(width, height) > RATIO * min(width, height):
        raise Refused(f"it has {width} × {height} pixels; one side may be at most {RATIO} times the other: cut it")


def as_rgb(image: Image.Image, most_pixels: int) -> Image.Image:
    """As `decoded`, of an open image. Errors: Refused."""
    check_sides(*image.size, most_pixels)
    if image.mode[0] in "IF":  # which would become white where they are over 255
        raise Refused(f"its pixels have more than 8 bits (mode {image.mode}): convert it to 8 bits")
    if getattr(image, "is_animated", False) and image.format != "MPO":  # of a camera's, the first is the picture
        raise Refused(f"it is animated ({getattr(image, 'n_frames', 'several')} frames): send one frame as an image")
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:  # as transformers' processors do
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def attempt(most_pixels: int, data: bytes) -> tuple[tuple[int, int], bytes]:
    """Width and height of an encoded image, and its RGB. In a process of its own. Errors: Refused; MemoryError."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    try:
        with warnings.catch_warnings(action="ignore"), open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # libraries of C tell of damage there
            image = decoded(data, most_pixels)
            return image.size, image.tobytes()
    except (Refused, MemoryError):
        raise
    except Exception as error:  # whatever a file makes a decoder raise
        raise Refused(str(error)[:300] or type(error).__name__) from None
