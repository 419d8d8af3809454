"""Decodes images in a process of its own, which a hostile file may take down. Run by `decoder.py`; imports no fengine.
in: 8 bytes of length, the encoded image; again and again out: a line of JSON, {"size": [width, height]} or {"error":
why}; behind a size width * height * 3 bytes of RGB"""

import io
import json
import sys
import warnings

from PIL import Image, ImageOps, UnidentifiedImageError

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
RATIO = 200  # of sides: a processor that wants a length of the shorter one would make the longer one as much longer


class Refused(Exception):
    """Why an image is not taken."""


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


def main() -> None:
    """Until the input ends."""
    most_pixels, (source, sink) = int(sys.argv[1]), (sys.stdin.buffer, sys.stdout.buffer)
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours
    Image.init()
    warnings.simplefilter("ignore")
    limit_memory(most_pixels)
    while len(head := source.read(8)) == 8:
        data = source.read(int.from_bytes(head, "little"))
        try:
            image = decoded(data, most_pixels)
            told, pixels = {"size": image.size}, image.tobytes()
        except Exception as error:  # whatever a file makes a decoder raise
            told, pixels = {"error": str(error)[:300] or type(error).__name__}, b""
        sink.write(json.dumps(told).encode() + b"\n" + pixels)
        sink.flush()


def limit_memory(most_pixels: int) -> None:
    """To what a picture of that size takes a few times; where the system knows such limits."""
    if resource is not None:
        most = (1 << 30) + 32 * most_pixels
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
