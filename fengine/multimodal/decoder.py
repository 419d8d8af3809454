"""`Decoder`: encoded images to RGB, in a process that a hostile file may take down without the engine."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from fengine.errors import FengineError, InvalidRequestError

CHILD = Path(__file__).with_name("decode_child.py")
PATIENCE = 20.0  # seconds that one image may take


class Decoder:
    """Thread-safe. Its process starts with the first image, and again after one that it did not survive."""

    def __init__(self, most_pixels: int, patience: float = PATIENCE) -> None:
        self.most_pixels, self.patience = most_pixels, patience
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes) -> np.ndarray:
        """uint8 [height, width, 3]. Errors: InvalidRequestError with the reason; FengineError if no process starts."""
        with self._lock:
            process, late = self._running(), threading.Event()

            def end() -> None:
                late.set()
                process.kill()  # which ends the exchange

            timer = threading.Timer(self.patience, end)
            timer.start()
            try:
                return _exchange(process, data)
            except InvalidRequestError:  # the process lives on
                raise
            except (OSError, ValueError) as error:
                told = f"decoding takes longer than {self.patience:.0f} s" if late.is_set() else str(error)
                self._stop()
                raise InvalidRequestError(told) from None
            except BaseException:  # its answer would be taken for the next one's
                self._stop()
                raise
            finally:
                timer.cancel()
                timer.join()
                if late.is_set():
                    self._stop()

    def close(self) -> None:
        """Ends the process. Idempotent."""
        with self._lock:
            self._stop()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(CHILD), str(self.most_pixels)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError as error:
                raise FengineError(f"no process can be started to decode images: {error.strerror}") from error
        return self._process

    def _stop(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _exchange(process: "subprocess.Popen[bytes]", data: bytes) -> np.ndarray:
    """One image's way through the process. Errors: InvalidRequestError if it is refused; OSError, ValueError where the
    process ends."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(data).to_bytes(8, "little") + data)
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise OSError("the process that decodes it ended: the file is damaged, or takes too much memory")
    told = json.loads(line)
    if "error" in told:
        raise InvalidRequestError(told["error"])
    width, height = told["size"]
    pixels = process.stdout.read(width * height * 3)
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
