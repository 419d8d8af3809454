"""Process groups that only receive weights, made by hand: neither torch's default group nor any global is touched. Rank
0 is the trainer, which broadcasts. The names under which the ranks find one another are those of torch's own groups
made over a prefixed store, so a trainer may use SGLang's `init_custom_process_group` or its many copies."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fengine.core.scalars import told
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
LONGEST = 10**6  # seconds: torch counts milliseconds in 32 bits


class GroupError(Exception):
    """The group could not be made, or a rank of it is gone."""


class UpdateGroup(NamedTuple):
    """Receives on `device`; `close` leaves the group."""

    backend: Any  # torch's ProcessGroupGloo or ProcessGroupNCCL
    device: torch.device

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Fills the tensors with what rank 0 broadcasts, in order. Errors: GroupError if a rank is gone or slow."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            for work in [self.backend.broadcast([tensor], options) for tensor in tensors]:
                work.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise GroupError(f"receiving failed: {str(error).strip().partition(chr(10))[0][:300]}") from error

    def close(self) -> None:
        for end in ("abort", "shutdown"):
            if hasattr(self.backend, end):
                getattr(self.backend, end)()
                return


def check_arguments(
    address: Any, port: Any, rank: Any, world_size: Any, name: Any, backend: Any, device: str, timeout: Any
) -> None:
    """Errors: InvalidRequestError, UnsupportedFeatureError."""
    if backend not in tuple(BACKENDS):
        raise UnsupportedFeatureError(f"backend {backend!r} is not supported; use {' or '.join(BACKENDS)}.")
    whole = type(world_size) is int and type(rank) is int
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    wrong = {
        f"backend 'nccl' needs weights on a CUDA device, they are on {device}; use 'gloo'.":
            backend == "nccl" and not device.startswith("cuda"),
        "master_address and group_name must be strings that are not empty, without NUL.":
            not all(isinstance(text, str) and text and "\0" not in text for text in (address, name)),
        f"master_port must be from 1 to 65535, got {told(port)}.": type(port) is not int or not 0 < port < 65536,
        f"rank_offset must be from 1 to world_size - 1 (rank 0 is the trainer's), got rank_offset={told(rank)} and "
        f"world_size={told(world_size)}.": not whole or not 1 <= rank < world_size,
        f"timeout must be a number of seconds above 0, at most {LONGEST}, got {told(timeout)}.":
            not number or not 0 < timeout <= LONGEST,
    }  # fmt: skip
    for message in (message for message, found in wrong.items() if found):
        raise InvalidRequestError(message)


def join(
    address: str, port: int, rank: int, world_size: int, name: str, backend: str, device: str, timeout: timedelta
) -> UpdateGroup:
    """Waits until every rank is there. `address` may be a "file://" URL (the port is not used). Errors: GroupError."""
    url = address if "://" in address else f"tcp://{address}:{port}"
    place = torch.device(device if backend == "nccl" else "cpu")
    try:
        store, _, _ = next(rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        for prefix in (name, f"{name}/", f"{place.type}/"):
            store = PrefixStore(prefix, store)
        if backend == "gloo":
            return UpdateGroup(dist.ProcessGroupGloo(store, rank, world_size, timeout), place)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with torch.cuda.device(place):
            return UpdateGroup(dist.ProcessGroupNCCL(store, rank, world_size, options), place)
    except (RuntimeError, ValueError, TypeError, OSError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0][:300]
        raise GroupError(f"rank {rank} of {world_size} could not join group {name!r} at {url}: {reason}") from error


def _settle(made: "Future[UpdateGroup]", *given: Any) -> None:
    try:
        made.set_result(join(*given))
    except BaseException as error:  # who waits raises it
        made.set_exception(error)


def buffers(
    dtypes: Any, shapes: Any, count: int, device: torch.device, flat: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """(what to receive, the tensors it holds): one tensor each, or with `flat` one that holds them one after another.
    Errors: InvalidRequestError."""
    kinds = _checked(dtypes, shapes, count, flat)
    try:
        if not flat:
            tensors = [torch.empty(tuple(s), dtype=kind, device=device) for s, kind in zip(shapes, kinds, strict=True)]
            return tensors, tensors
        counts = [math.prod(shape) for shape in shapes]
        bucket = torch.empty(sum(counts), dtype=kinds[0] if kinds else torch.float32, device=device)
        return [bucket], [part.view(tuple(s)) for part, s in zip(bucket.split(counts), shapes, strict=True)]
    except (RuntimeError, TypeError, OverflowError) as error:  # more than there is memory, or than torch can count
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"no tensors of these shapes can be made: {reason}") from None


def _checked(dtypes: Any, shapes: Any, count: int, flat: bool) -> list[torch.dtype]:
    """The dtypes of `count` tensors. Errors: InvalidRequestError."""
    if not all(isinstance(values, (list, tuple)) and len(values) == count for values in (dtypes, shapes)):
        raise InvalidRequestError(f"names, dtypes and shapes must be lists of equal length; there are {count} names.")
    kinds = [_dtype(name) for name in dtypes]
    for shape in shapes:
        if not isinstance(shape, (list, tuple)) or not all(type(size) is int and size > 0 for size in shape):
            raise InvalidRequestError(f"shapes has {told(shape)}; a shape is a list of whole numbers above 0.")
    if flat and len(set(kinds)) > 1:
        raise InvalidRequestError(f"a flattened bucket has one dtype, got {sorted(map(str, set(kinds)))}.")
    return kinds


def _dtype(name: Any) -> torch.dtype:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidRequestError(f"dtypes has {told(name)}, which is no dtype of torch.")
    return found


class Groups:
    """The groups of one engine, by name; they receive on its `device`. Thread-safe: callers' threads only."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ended: Future[Any] = Future()  # done when those who join are to wait no more
        self._groups: dict[str, UpdateGroup | None] = {}  # None: it is being joined
        self._lock = threading.Lock()  # never held while anybody waits for other ranks

    def join(self, address: Any, port: Any, rank: Any, world_size: Any, name: Any, backend: Any, timeout: Any) -> None:
        """Waits, up to `timeout` seconds, until every rank is there. Errors: InvalidRequestError, GroupError."""
        check_arguments(address, port, rank, world_size, name, backend, self._device, timeout)
        with self._lock:
            if name in self._groups:
                raise GroupError(f"group {name!r} exists: destroy it first, or choose another name")
            self._groups[name], ended = None, self._ended
        made, seconds, kept = Future[Any](), timedelta(seconds=timeout), False
        given = (address, port, rank, world_size, name, backend, self._device, seconds)
        threading.Thread(target=_settle, args=(made, *given), name="fengine-join", daemon=True).start()
        try:
            wait((made, ended), return_when=FIRST_COMPLETED)  # torch's own waiting cannot be interrupted
        finally:
            with self._lock:
                del self._groups[name]
                if kept := not ended.done() and made.done() and made.exception() is None:
                    self._groups[name] = made.result()
            if not kept:
                made.add_done_callback(lambda made: made.exception() or made.result().close())
        if ended.done():
            raise GroupError(f"group {name!r} was not joined: the engine or its server is being shut down")
        made.result()

    def end_joins(self, for_good: bool = False) -> None:
        """Whoever waits for ranks that are not there does so no more. Idempotent."""
        with self._lock:
            if not (ended := self._ended).done():
                self._ended = ended if for_good else Future[None]()
                ended.set_result(None)

    def _find(self, name: Any) -> UpdateGroup:
        group = self._groups.get(name) if isinstance(name, str) else None
        if group is None:
            raise GroupError(f"there is no group {told(name)}: call init_weights_update_group first")
        return group

    def device(self, name: Any) -> torch.device:
        """Where a group receives. Errors: GroupError if there is no such group."""
        return self._find(name).device

    def receive(self, name: str, tensors: Sequence[Tensor]) -> None:
        """As UpdateGroup.receive. A group that failed is gone: its ranks are out of step. Errors: GroupError."""
        try:
            self._find(name).receive(tensors)
        except GroupError:
            with suppress(GroupError):  # somebody may have left it meanwhile
                self.leave(name)
            raise

    def leave(self, name: Any) -> None:
        """Errors: GroupError if there is no such group."""
        with self._lock:
            group = self._find(name)
            del self._groups[name]
        group.close()

    def close(self) -> None:
        """Leaves every group, for good."""
        self.end_joins(for_good=True)
        for name in list(self._groups):
            with suppress(GroupError):  # another thread leaves it, or one that joins it will
                self.leave(name)
