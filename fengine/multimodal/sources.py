"""`image_data` in every form to pixels: paths, bytes, base64, data URLs, PIL, arrays, file://, and http(s) if allowed.
Whatever is wrong with one names its index; nothing of the call is queued then."""

import base64
import binascii
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from fengine.config import MultimodalConfig
from fengine.core.scalars import told
from fengine.errors import InvalidRequestError, MissingExtraError, UnsupportedFeatureError
from fengine.multimodal.decoder import Decoder
from fengine.multimodal.fetch import fetch, is_public
from fengine.multimodal.image_url import url_in

try:
    from PIL import Image as pillow

    from fengine.multimodal.decode_child import Refused, as_rgb, check_sides
except ImportError:
    pillow = None

BASE64 = re.compile(rb"[A-Za-z0-9+/\-_\s]+={0,2}\s*")


class Sources:
    """Thread-safe. `inside`: paths are read only below `config.image_folder`, as those that come over HTTP are."""

    def __init__(self, config: MultimodalConfig) -> None:
        self.config, self.decoder = config, Decoder(config.max_image_pixels)
        self._lock = threading.Lock()  # a PIL image that is given twice loads its file once

    def pixels(self, item: Any, inside: bool = False) -> np.ndarray:
        """uint8 [height, width, 3]. Errors: InvalidRequestError, UnsupportedFeatureError, MissingExtraError."""
        if pillow is None:
            raise MissingExtraError.of("an image", "Pillow", "vision")
        if isinstance(item, pillow.Image):
            try:
                with self._lock:
                    return np.asarray(as_rgb(item, self.config.max_image_pixels))
            except (Refused, OSError, ValueError) as error:
                raise InvalidRequestError(str(error)) from error
        if hasattr(item, "__array__") or hasattr(item, "__array_interface__"):
            try:
                array = np.asarray(item)
            except Exception as error:  # whatever a class of its own raises
                raise InvalidRequestError(f"it cannot be read as an array: {type(error).__name__}: {error}") from error
            return self._of_array(array)
        data = bytes(item) if isinstance(item, (bytes, bytearray, memoryview)) else self._bytes(item, inside)
        self._check_size(len(data))
        return self.decoder.decode(data)

    def close(self) -> None:
        self.decoder.close()

    def _of_array(self, array: np.ndarray) -> np.ndarray:
        """An array of bytes as it is: gray, RGB, or RGBA over white."""
        shape = array.shape
        if array.dtype != np.uint8 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
            raise InvalidRequestError(
                f"an array must be uint8 [height, width] or [height, width, 1, 3 or 4], got {array.dtype} {list(shape)}"
            )
        if 0 in shape:
            raise InvalidRequestError(f"{list(shape)} has no pixels")
        try:
            check_sides(shape[1], shape[0], self.config.max_image_pixels)
        except Refused as error:
            raise InvalidRequestError(str(error)) from error
        if shape[2:] == (4,):
            assert pillow is not None
            return np.asarray(as_rgb(pillow.fromarray(np.ascontiguousarray(array)), self.config.max_image_pixels))
        gray = array if array.ndim == 3 else array[:, :, None]
        return np.ascontiguousarray(np.repeat(gray, 3, 2) if gray.shape[2] == 1 else gray)

    def _bytes(self, item: Any, inside: bool) -> bytes:
        """What a path, a URL or base64 stands for."""
        if isinstance(item, Mapping):
            if "format" in item:
                kind = item["format"]
                raise UnsupportedFeatureError(f"not built: image_data with format={kind!r:.80}; give the image itself.")
            item = url_in(item)
        if isinstance(item, Path):
            return self._file(item, inside)
        if not isinstance(item, str) or not item:
            got = "a list: the images of a prompt are a flat one" if isinstance(item, (list, tuple)) else told(item)
            raise InvalidRequestError(f"it must be a path, URL, base64 text, bytes, a PIL image or an array, got {got}")
        scheme, _, rest = item.partition(":")
        scheme = scheme.lower()
        if scheme == "data":
            return _data_url(rest)
        if not rest.startswith("//"):
            return self._path_or_base64(item, inside)
        if scheme in ("http", "https"):
            return self._fetch(item, inside)
        if scheme != "file":
            raise InvalidRequestError(f"{item!r:.200} is no URL of http, https, file or data")
        return self._file(Path(unquote(urlsplit(item).path)), inside)

    def _path_or_base64(self, item: str, inside: bool) -> bytes:
        looks = len(item) >= 64 and BASE64.fullmatch(item.encode()) is not None
        if looks and (len(item) > 1024 or not Path(item).exists()):
            return _from_base64(item)
        return self._file(Path(item), inside)

    def _fetch(self, url: str, inside: bool) -> bytes:
        """Whoever calls this process may name what it reaches, as with paths; others only hosts that are listed."""
        if not self.config.allow_image_urls:
            raise InvalidRequestError("http(s) URLs are not read; set allow_image_urls=True, or send the image itself")
        hosts, most = self.config.image_hosts, self.config.max_image_mib << 20
        return fetch(url, hosts, most, first=is_public if inside and not hosts else lambda _: True)

    def _file(self, path: Path, inside: bool) -> bytes:
        folder = self.config.image_folder
        if inside:
            if folder is None:
                raise InvalidRequestError("paths are not read over HTTP; set image_folder, or send a data URL")
            if not path.resolve().is_relative_to(Path(folder).resolve()):
                raise InvalidRequestError(f"{str(path)!r:.200} is not below image_folder")
        try:
            with path.open("rb") as file:
                data = file.read((self.config.max_image_mib << 20) + 1)
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"{str(path)!r:.200} cannot be read: {error}") from error
        return data

    def _check_size(self, count: int) -> None:
        if count > self.config.max_image_mib << 20 or not count:
            raise InvalidRequestError(f"it has no bytes, or more than max_image_mib = {self.config.max_image_mib} MiB")


def _data_url(rest: str) -> bytes:
    head, comma, data = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequestError("a data URL must be data:image/...;base64,...")
    return _from_base64(unquote(data))


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()).replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"it is no base64: {error}") from error
