"""Prove, then use: which schedules were seen to compute an op's reduction tree on this very machine.
Results are one JSON line each, in a file named after everything that may change them: GPU, driver, torch, Triton, CUDA
libraries and the source of the ops. Another environment is another file, so nothing stale is ever trusted."""

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from fengine.errors import FengineError
from fengine.ops.ahead import asking
from fengine.ops.compiler import private_cache_dir


class Proofs:
    """Results of comparisons, by key. Modifies: itself, and its file, by appending."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: nothing outlives the process."""
        self.path = path
        self.known: dict[str, bool] = {}
        self._asked: set[str] = set()
        for line in self._lines():
            try:
                key, equal = json.loads(line)
            except (ValueError, TypeError):
                continue  # the torn last line of a process that was killed
            if isinstance(key, str) and isinstance(equal, bool):
                self.known[key] = equal

    def _lines(self) -> list[str]:
        try:
            return [] if self.path is None else self.path.read_text(errors="replace").splitlines()
        except OSError:
            return []  # there is none yet, or none to be read

    def holds(self, key: str, compare: Callable[[], bool]) -> bool:
        """Whether the schedule that `key` names gives the reference's bits; asks `compare` the first time."""
        if asking():  # nothing runs that could be compared: once, for the kernels of the comparison
            if key not in self.known and key not in self._asked:
                self._asked.add(key)
                compare()
            return self.known.get(key, True)
        if key not in self.known:
            self.known[key] = compare()
            if self.path is not None:
                line = json.dumps([key, self.known[key]]) + "\n"
                # One short write: lines of several processes do not mix. A full disk costs the next process a proof.
                with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
                    file.write(line)
        return self.known[key]


def proved(device: torch.device, key: str, compare: Callable[[], bool]) -> bool:
    """Whether the schedule that `key` names gives the reference's bits on this device; compared once. Without a device
    only our own kernels run, in Triton's interpreter."""
    if device.type != "cuda":
        return True
    known = proofs(device.index)
    if torch.cuda.is_current_stream_capturing():  # no time to compare; warm-up has asked before
        return known.known.get(key, False)
    return known.holds(key, compare)


COMPARED = 1 << 16  # elements at least: where K is split otherwise, some in 1,000 differ after rounding


def random_rows(rows: int, width: int, outputs: int, like: Tensor) -> Tensor:
    """As many times `rows` random rows as give COMPARED outputs: [draws, rows, width] in the dtype of `like`."""
    generator = torch.Generator(like.device).manual_seed(rows)
    draws = max(1, COMPARED // (rows * outputs))
    return torch.randn(draws, rows, width, device=like.device, generator=generator).to(like.dtype)


def same_bits(want: Tensor, compute: Callable[[], Tensor], experimental: bool = False) -> bool:
    """Whether `compute` gives `want`: called as it is used, by itself and inside a captured graph. Equal results of
    weights that are all zero prove nothing. `experimental`: of a compiler that is; whatever it says, the schedule is
    not for this machine."""
    try:
        if asking():  # for the kernels of `compute`; there is nothing to be compared
            compute()
            return True
        reacts = bool((want != want.flatten()[0]).any())
        return torch.equal(want, compute()) and torch.equal(want, captured(compute)) and reacts
    except Exception:
        if experimental:
            return False
        raise


def captured(compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` gives inside a CUDA graph, where the library may choose other kernels; it has run once before."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = compute()
        finally:
            graph.capture_end()
        graph.replay()
    torch.cuda.current_stream().wait_stream(side)
    return result.clone()  # its memory ends with the graph


SWITCHES = ("CUBLAS", "TRITON_F", "TRITON_DEFAULT")  # of the environment that change what libraries or Triton compute


def environment(device: int) -> dict[str, str]:
    """What the result of a comparison may depend on, besides its key."""
    found = {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "machine": platform.machine(),
        "switches": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(SWITCHES)),
    }
    for package in ("triton", "nvidia-cublas", "nvidia-cublas-cu12"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return "unknown"


@cache
def sources_digest() -> str:
    """SHA-256 of the ops' Python sources. What was compiled or proved with others may not fit these."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@cache
def proofs(device: int) -> Proofs:
    """What is known about CUDA device `device`: a fact about the machine, learned once."""
    found = environment(device)
    if found["driver"] == "unknown":
        return Proofs(None)
    found["ops"] = sources_digest()
    name = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return Proofs(private_cache_dir() / f"proofs-{name}.jsonl")
    except (FengineError, OSError):
        return Proofs(None)  # proved again in every process
