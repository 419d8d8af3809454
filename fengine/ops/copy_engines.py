"""Gathers of many rows between GPUs of one host by their copy engines, beside products over other rows.

Each rank has a dock, memory that all ranks write to: flags, then an operand whose columns come from all ranks, then a
product. Rows go in chunks: while one is multiplied the next one travels, and no multiprocessor is taken. A chunk's copy
to a rank is followed by that of the number of the dock's use, to a flag; a rank's own columns of an operand go into its
own dock beside these. A use begins when every rank has told that it has read what the use before brought.

A wait ends with what it is for or with `stop`, as in exchange.py."""
# pyright: reportInvalidTypeForm=false

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import tl, triton

FLAGS = 4096  # bytes of a dock in front of its rows
CHUNKS = 2
ROWS = 128  # a chunk has a multiple of so many, but the last
LEAST_ROWS = 2048  # fewer go through exchange.py
UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED


def driver(name: str, *arguments: Any) -> None:
    """Calls a function of the driver, in the current context. Errors: OSError for what it refuses."""
    if code := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise OSError(f"{name} failed with CUDA error {code}")


class Place(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int), ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
    ]  # fmt: skip


class Copy2D(ctypes.Structure):
    _fields_ = [("source", Place), ("target", Place), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class Memory:
    """Of this process's current GPU, as `torch.as_tensor` reads it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class Dock:
    """This rank's, and the way to those of all. Modified by each use."""

    def __init__(self, own: Tensor, addresses: list[int], rank: int, stop: Tensor) -> None:
        """Of zeroed bytes. `stop`: not 0 when nobody is to be waited for."""
        self.own, self.addresses, self.rank, self.stop = own, addresses, rank, stop
        self.peer_P = torch.tensor(addresses, dtype=torch.int64, device=stop.device)
        self.use = torch.zeros_like(stop)
        self.side, self.own_side = torch.cuda.Stream(stop.device), torch.cuda.Stream(stop.device)

    def rows(self, at: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Of the dock, from so many bytes behind its flags on."""
        return self.own[FLAGS + at :][: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def columns(self, width: int) -> slice:
        """The rank's, of so many. Pure."""
        each = width // len(self.addresses)
        return slice(self.rank * each, (self.rank + 1) * each)

    def fits(self, rows: int, columns: int, x: Tensor) -> bool:
        """Whether so many rows, with operand and product of so many columns in all, go this way. Pure."""
        return rows >= LEAST_ROWS and FLAGS + rows * columns * x.element_size() <= len(self.own)


def dock_bytes(rows: int, columns: int) -> int:
    """Of a dock for so many rows of 16-bit numbers; 0 if none is needed. Pure."""
    return FLAGS + rows * columns * 2 if rows >= LEAST_ROWS else 0


@triton.jit
def await_flags(own, use, stop_ptr, rank, SIZE: tl.constexpr):
    """Waits until every other rank has written `use` to its flag behind `own`."""
    for step in tl.static_range(1, SIZE):
        flag = own + (rank + step) % SIZE
        found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while (found != use) & (tl.load(stop_ptr, volatile=True) == 0):
            found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["rank"])
def ready_kernel(use_ptr, peer_ptr, stop_ptr, rank, SIZE: tl.constexpr):
    """Begins a use: tells every rank that this one has read the last, and waits until all have told so."""
    use = tl.load(use_ptr) + 1
    tl.store(use_ptr, use)
    for step in tl.static_range(1, SIZE):
        flag = tl.load(peer_ptr + (rank + step) % SIZE).to(tl.pointer_type(tl.int32)) + rank
        tl.atomic_xchg(flag, use, sem="release", scope="sys")
    own = tl.load(peer_ptr + rank).to(tl.pointer_type(tl.int32))
    await_flags(own, use, stop_ptr, rank, SIZE)


@triton.jit(do_not_specialize=["rank", "first"])
def arrived_kernel(use_ptr, peer_ptr, stop_ptr, rank, first, SIZE: tl.constexpr):
    """Waits for the flags from `first` on, one of each other rank."""
    use = tl.load(use_ptr)
    own = tl.load(peer_ptr + rank).to(tl.pointer_type(tl.int32)) + first
    await_flags(own, use, stop_ptr, rank, SIZE)


def copy(part_TN: Tensor, to: int, pitch: int, stream: Any) -> None:
    """Starts the copy of columns to an address, in rows of `pitch` bytes."""
    item, (rows, width) = part_TN.element_size(), part_TN.shape
    source = Place(0, 0, UNIFIED, None, part_TN.data_ptr(), None, part_TN.stride(0) * item)
    copies = Copy2D(source, Place(0, 0, UNIFIED, None, to, None, pitch), width * item, rows)
    driver("cuMemcpy2DAsync_v2", ctypes.byref(copies), ctypes.c_void_p(stream.cuda_stream))


def send(dock: Dock, part_TN: Tensor, to_TN: Tensor, chunk: int) -> None:
    """Starts the copies of a rank's columns to where the others have these rows of the dock."""
    size, stream = len(dock.addresses), dock.side
    stream.wait_stream(torch.cuda.current_stream(dock.stop.device))
    own_TN = to_TN[:, dock.columns(to_TN.shape[1])]
    to, pitch = own_TN.data_ptr() - dock.own.data_ptr(), to_TN.stride(0) * to_TN.element_size()
    number = ctypes.c_uint64(dock.use.data_ptr()), ctypes.c_size_t(4), ctypes.c_void_p(stream.cuda_stream)
    for step in range(1, size):
        begin = dock.addresses[(dock.rank + step) % size]
        copy(part_TN, begin + to, pitch, stream)
        driver("cuMemcpyAsync", ctypes.c_uint64(begin + 4 * ((1 + chunk) * size + dock.rank)), *number)


def keep(dock: Dock, part_TN: Tensor, to_TN: Tensor) -> Any:
    """Starts the copy of a rank's columns into its own dock, beside those to the others; returns its end."""
    dock.own_side.wait_stream(torch.cuda.current_stream(dock.stop.device))
    copy(part_TN, to_TN.data_ptr(), to_TN.stride(0) * to_TN.element_size(), dock.own_side)
    return dock.own_side.record_event()


def await_chunk(dock: Dock, chunk: int) -> None:
    size = len(dock.addresses)
    launcher(arrived_kernel, (1,))(dock.use, dock.peer_P, dock.stop, dock.rank, (1 + chunk) * size, size, num_warps=1)


def fill(to_TN: Tensor, from_TN: Tensor) -> None:
    """Copies by multiprocessors, 8 bytes at once."""
    if from_TN.numel():
        to_TN.view(torch.int64).copy_(from_TN.view(torch.int64))


def product(make: Callable[[slice], Tensor], multiply: Callable[[Tensor], Tensor], rows: int, k: int, n: int,
            dock: Dock) -> Tensor:  # fmt: skip
    """multiply(operand) of so many rows, [rows, n]: `make` gives the rank's columns of some rows of the operand, whose
    whole rows have k, and `multiply` its columns of the product. Modifies: the dock."""
    main, step = torch.cuda.current_stream(dock.stop.device), -(-rows // (CHUNKS * ROWS)) * ROWS
    bounds = [slice(at, min(at + step, rows)) for at in range(0, rows, step)]
    launcher(ready_kernel, (1,))(dock.use, dock.peer_P, dock.stop, dock.rank, len(dock.addresses), num_warps=1)
    parts, kept = [], []
    for chunk, some in enumerate(bounds):
        parts.append(make(some))
        to_TK = dock.rows(0, rows, k, parts[0].dtype)[some]
        send(dock, parts[chunk], to_TK, chunk)
        kept.append(keep(dock, parts[chunk], to_TK[:, dock.columns(k)]))
    operand_TK = dock.rows(0, rows, k, parts[0].dtype)
    found_TN = dock.rows(operand_TK.nbytes, rows, n, parts[0].dtype)
    products = []
    for chunk, some in enumerate(bounds):
        await_chunk(dock, chunk)
        main.wait_event(kept[chunk])
        products.append(multiply(operand_TK[some]))
        send(dock, products[chunk], found_TN[some], CHUNKS + chunk)
    product_TN, own = torch.empty_like(found_TN), dock.columns(n)
    for chunk, some in enumerate(bounds):
        fill(product_TN[some, own], products[chunk])
        await_chunk(dock, CHUNKS + chunk)
        for others in (slice(0, own.start), slice(own.stop, n)):
            fill(product_TN[some, others], found_TN[some, others])
    main.wait_stream(dock.side)
    return product_TN
