"""`Decoder`: encoded images to RGB, in a process that a hostile file may take down without the engine."""

import numpy as np

from fengine.errors import InvalidRequestError
from fengine.tokenizer.trial import Limits, Refused, Trials

SECONDS = 20.0  # of a core that one image may take


class Decoder:
    """Thread-safe. Its process starts with the first image, and again after one that it did not survive."""

    def __init__(self, most_pixels: int, seconds: float = SECONDS) -> None:
        self.most_pixels = most_pixels
        limits = Limits(seconds, (1 << 30) + 32 * most_pixels)  # what a picture of that size takes a few times
        self._trials = Trials("fengine.multimodal.decode_child", limits=limits)

    def decode(self, data: bytes) -> np.ndarray:
        """uint8 [height, width, 3]. Errors: InvalidRequestError with the reason; FengineError if no process starts."""
        try:
            (width, height), pixels = self._trials.ask(self.most_pixels, data)
        except Refused as error:
            raise InvalidRequestError(str(error)) from None
        return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._trials.close()
