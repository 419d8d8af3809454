"""Memory of a GPU that other processes of its host write to, by the driver's handles (CUDA IPC); no multicast. Errors:
OSError, everywhere, for what the driver refuses."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fengine.ops.copy_engines import driver

HANDLE = 64  # bytes of a handle
LAZY_PEER_ACCESS = 1  # of cuIpcOpenMemHandle


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * HANDLE)]


@contextmanager
def inboxes(size: int, rank: int, swap: Callable[[bytes], list[bytes]]) -> Iterator[list[int]]:
    """The addresses of zeroed memory of `size` bytes of every rank, on this rank's current GPU or mapped there. `swap`
    gives the handles of all ranks for that of one. What a rank that has died leaves is unmapped all the same."""
    with ExitStack() as held:
        try:
            own, handle = _exported(size, held)
        except OSError:
            swap(bytes(HANDLE))  # which the others cannot open either
            raise
        found = []
        for peer, told in enumerate(swap(handle)):
            there = own
            if peer != rank:
                there = ctypes.c_uint64()
                driver("cuIpcOpenMemHandle_v2", ctypes.byref(there), Handle.from_buffer_copy(told), LAZY_PEER_ACCESS)
                held.callback(_quietly, "cuIpcCloseMemHandle", there)
            found.append(int(there.value))
        yield found


def _exported(size: int, held: ExitStack) -> tuple[ctypes.c_uint64, bytes]:
    own, handle = ctypes.c_uint64(), Handle()
    driver("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(size))
    held.callback(_quietly, "cuMemFree_v2", own)
    driver("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    driver("cuCtxSynchronize")
    driver("cuIpcGetMemHandle", ctypes.byref(handle), own)
    return own, bytes(handle)


def _quietly(name: str, address: ctypes.c_uint64) -> None:
    getattr(ctypes.CDLL("libcuda.so.1"), name)(address)
