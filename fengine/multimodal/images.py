"""`Images`: what a call gives as `image_data` becomes spans of placeholder tokens and what an encoder takes. Pixels go
through transformers' own processor of the checkpoint, each image by itself, and then by what the family says."""

import hashlib
import os
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from fengine.config import EngineConfig
from fengine.core.images import Image, ImageSpan, RopePositions
from fengine.core.scalars import own_class, told
from fengine.errors import EngineClosedError, FengineError, InvalidRequestError, ModelLoadError, QueueFullError
from fengine.models import lookup
from fengine.models.spec import ModelSpec, VisionSpec
from fengine.models.vision_family import Vision
from fengine.multimodal.sources import Sources, pillow

READERS = 8  # images of a call that are read at a time
MOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4  # bytes of pixels, of all that came over HTTP


@dataclass(frozen=True)
class Picture:
    """One image of a call: its pieces, each of which an encoder takes at once, and the texts around them."""

    pieces: tuple[Image, ...]
    texts: tuple[tuple[str, str], ...] = ()  # before and after each


class Prompt(NamedTuple):
    """A prompt's ids with every placeholder in place."""

    ids: list[int]
    spans: tuple[ImageSpan, ...] = ()
    rope: RopePositions | None = None


class Images:
    """Of a model that takes images. Thread-safe."""

    def __init__(self, config: EngineConfig, directory: Path, spec: VisionSpec, family: Vision, tokenizer: Any) -> None:
        self.spec, self.family, self.directory, self.tokenizer = spec, family, directory, tokenizer
        self.sources = Sources(config.multimodal)
        self._lock, self._processor, self._held = threading.Lock(), None, WeakSet[Image]()
        self._pool = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "fengine-images")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.sources.close()

    def read(self, items: Any, inside: bool = False) -> tuple[Picture, ...]:
        """The images of one prompt: one, or a list, whose None are none. Errors: InvalidRequestError and kinds, naming
        the index."""
        given = [] if items is None else items if isinstance(items, (list, tuple)) else [items]
        return tuple(self._picture(item, index, inside) for index, item in enumerate(given) if item is not None)

    def read_all(self, image_data: Any, inside: bool = False, refuse: bool = True) -> Any:
        """`image_data` of a call with every image read, several at a time, in the same lists. Unless `refuse`, what
        cannot be read stays as it is, for whoever checks its prompt. Errors: as `read`; EngineClosedError."""
        futures = list[Future[Picture]]()

        def begun(items: Any, index: int = 0) -> Any:
            items = own_class(items)
            if isinstance(items, (list, tuple)):
                return [begun(item, at) for at, item in enumerate(items)]
            if items is None:
                return None
            futures.append(self._begun(items, index, inside))
            return items, futures[-1]

        def read(found: Any) -> Any:
            if found is None or isinstance(found, list):
                return found and [read(one) for one in found]
            item, picture = found
            return picture.result() if refuse or picture.exception() is None else item

        try:
            return read(begun(image_data))
        except CancelledError:  # which asyncio would take for its caller's
            raise EngineClosedError("the engine was shut down during the call") from None
        except FengineError as error:
            raise error.with_traceback(None) from error.__cause__  # its frames would keep all that was read
        finally:
            while futures:  # of a call that is refused nothing more is read
                futures.pop().cancel()

    def _begun(self, item: Any, index: int, inside: bool) -> Future[Picture]:
        try:
            return self._pool.submit(self._picture, item, index, inside)
        except RuntimeError:
            raise EngineClosedError("the engine was shut down; create a new Engine") from None

    @property
    def placeholder(self) -> int:
        """The id that stands in a prompt for one image."""
        return self.spec.token if self.spec.begin is None else self.spec.begin

    def prompt(self, ids: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        """Errors: InvalidRequestError if there are not as many placeholders as images."""
        token, counts = self.spec.token, Counter(ids)
        pieces = [piece for picture in pictures for piece in picture.pieces]
        if counts[token] != (len(pictures) if self.spec.begin is None else 0) and counts[token] == sum(
            piece.tokens for piece in pieces
        ):
            return self.placed(list(ids), spans_in(ids, token, pieces))
        if (count := counts[self.placeholder]) != len(pictures):
            raise InvalidRequestError(
                f"image_data has {len(pictures)} image{'s' * (len(pictures) != 1)}, but the prompt has {count} "
                f"placeholder{'s' * (count != 1)} (token id {self.placeholder}): give one for each image"
            )
        expanded, spans, left, behind = list[int](), list[ImageSpan](), iter(pictures), ""
        for id in ids:
            if id != self.placeholder:
                if behind.endswith("\n") and (text := self._line_ends(id)):
                    self._append(expanded, text)
                else:
                    expanded.append(id)
                    behind = ""
                continue
            picture = next(left)
            for piece, (before, behind) in zip(picture.pieces, picture.texts, strict=True):
                self._append(expanded, before)
                spans.append(ImageSpan(len(expanded), piece))
                expanded += [token] * piece.tokens
                self._append(expanded, behind)
        return self.placed(expanded, spans)

    def placed(self, ids: list[int], spans: list[ImageSpan]) -> Prompt:
        """With every placeholder in place. Pure."""
        rope = None
        if self.family.positions is not None and spans:
            rope = RopePositions(*self.family.positions(self.spec, len(ids), spans))
        return Prompt(ids, tuple(spans), rope)

    def _append(self, ids: list[int], text: str) -> None:
        """Puts special tokens and line ends behind ids; line ends that meet are tokenized together, as those of a text.
        Modifies: ids. Errors: InvalidRequestError without a tokenizer."""
        if text and self.tokenizer is None:
            raise InvalidRequestError(
                "an image of this model has text around its parts, which skip_tokenizer_init=True cannot tokenize; "
                "give input_ids with every placeholder in place"
            )
        while text.startswith("\n") and ids and (before := self._line_ends(ids[-1])):
            text = before + text
            ids.pop()
        ids += self.tokenizer.ids_of([text], add_special_tokens=False)[0] if text else []

    def _line_ends(self, id: int) -> str:
        """The token's text, if it is nothing but line ends."""
        text = self.tokenizer.decode([id])
        return "" if text.strip("\n") else text

    def _picture(self, item: Any, index: int, inside: bool) -> Picture:
        if isinstance(item, Picture):
            return item
        try:
            found = self._process(self.sources.pixels(item, inside))
        except ModelLoadError:
            raise
        except FengineError as error:
            raise type(error)(f"image_data[{index}]: {error}") from error
        except Exception as error:  # of transformers' processor
            raise InvalidRequestError(f"image_data[{index}]: {type(error).__name__}: {str(error)[:300]}") from error
        images = tuple(
            Image(_hash(piece.arrays), piece.tokens, piece.patches, piece.arrays, self.spec.bidirectional)
            for piece in found
        )
        if inside:
            self._hold(images)
        return Picture(images, tuple((piece.before, piece.after) for piece in found))

    def _hold(self, images: tuple[Image, ...]) -> None:
        """A file of 2 kB can become 350 MiB of pixels, which its request has until it ends. Errors: QueueFullError."""
        with self._lock:
            self._held.update(images)
            if sum(array.nbytes for image in self._held for array in image.arrays.values()) > MOST:
                raise QueueFullError(
                    "the pixels of images that run or wait take a quarter of this machine's memory: send fewer or "
                    "smaller images, or try again later"
                )

    def _process(self, pixels_HWC: np.ndarray) -> list[Any]:
        processor: Any = self._load()
        features = processor(images=[pillow.fromarray(pixels_HWC)], return_tensors="np", **dict(self.family.options))
        shape, pixels, merge = np.shape(features["pixel_values"]), self.spec.pixels, self.spec.merge
        if shape[-len(pixels) :] != pixels or getattr(processor, "merge_size", merge) != merge:
            raise InvalidRequestError(
                f"its processor makes pixels of {list(shape)}, which are not those of config.json: [..., "
                f"{', '.join(map(str, pixels))}] with merge_size {merge}; correct preprocessor_config.json"
            )
        return self.family.pieces(self.spec, {name: np.asarray(value) for name, value in features.items()})

    def _load(self) -> Any:
        with self._lock:
            if self._processor is None:
                self._processor = load_processor(self.directory)
            return self._processor


def open_images(config: EngineConfig, directory: Path, spec: ModelSpec, tokenizer: Any) -> Images | None:
    """None: the model takes no images."""
    family = lookup(spec.architecture).vision
    if spec.vision is None or family is None:
        return None
    return Images(config, directory, spec.vision, family, tokenizer)


def refuse_images(items: Any) -> None:
    """Of a model that takes none. Errors: InvalidRequestError."""
    given = items if isinstance(items, (list, tuple)) else [items]
    for index, item in enumerate(given):
        if item is not None:
            raise InvalidRequestError(
                f"image_data[{index}] is {told(item)}, but this model takes no images; leave it out."
            )


def _hash(arrays: Mapping[str, np.ndarray]) -> bytes:
    """SHA-256 of names, types, shapes and values. Pure."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def spans_in(ids: Sequence[int], token: int, pieces: Sequence[Image]) -> list[ImageSpan]:
    """Where images stand in ids that have every placeholder in place. Pure. Errors: InvalidRequestError."""
    spans, at = list[ImageSpan](), 0
    for piece in pieces:
        at = next(i for i in range(at, len(ids)) if ids[i] == token)
        if any(id != token for id in ids[at : at + piece.tokens]):
            raise InvalidRequestError(f"the placeholders of an image are torn apart at position {at} of the prompt")
        spans.append(ImageSpan(at, piece))
        at += piece.tokens
    return spans


def load_processor(directory: Path) -> Any:
    """Errors: ModelLoadError."""
    from transformers import AutoImageProcessor  # half a second that models for text need not wait

    newer = find_spec("transformers.image_processing_backends") is not None
    how: dict[str, Any] = {"backend": "pil"} if newer else {"use_fast": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoImageProcessor.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, **how
            )
    except Exception as error:  # whatever its code raises over a file
        raise ModelLoadError(f"{directory} has no image processor: {str(error)[:500]}") from error
