"""Products in chunks whose exchange is hidden: ranks are processes, their docks files that all of them map, and copies
are made at once."""

from pathlib import Path

from interpreted import run_ranks, starts_interpreter

RANK = """
import ctypes, mmap, sys, types
from pathlib import Path
import torch
from fengine.ops import copy_engines
from fengine.ops.copy_engines import FLAGS, Dock, dock_bytes, product

rank, size, paths = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
copy_engines.ROWS, copy_engines.LEAST_ROWS = 4, 2
files = [open(path, "r+b") for path in paths]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
docks = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]


class Stream:
    cuda_stream = 0

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    wait_event = wait_stream

    def record_event(self):
        pass


def driver(name, *given):
    if name == "cuMemcpyAsync":
        ctypes.memmove(given[0].value, given[1].value, given[2].value)
        return
    copy = given[0]._obj
    for row in range(copy.height):
        ctypes.memmove(copy.target.address + row * copy.target.pitch, copy.source.address + row * copy.source.pitch,
                       copy.width)


torch.cuda.Stream, torch.cuda.current_stream, copy_engines.driver = Stream, Stream, driver
dock = Dock(docks[rank], [each.data_ptr() for each in docks], rank, torch.zeros(1, dtype=torch.int32))
generator = torch.Generator().manual_seed(5)
for rows, k, n in [(2, 8, 8), (4, 16, 8), (13, 8, 16), (21, 16, 16)] * 3:
    x = torch.randn(rows, k, generator=generator)
    w = torch.randn(n, k, generator=generator)
    assert dock.fits(rows, k + n, x)
    own_k, own_n = slice(rank * k // size, (rank + 1) * k // size), slice(rank * n // size, (rank + 1) * n // size)
    chunks = []

    def make(some):
        return (x[some, own_k] * 2).contiguous()

    def multiply(operand):
        chunks.append(len(operand))
        return (operand[:, None] * w[own_n]).sum(2)

    found = product(make, multiply, rows, k, n, dock)
    assert torch.equal(found, (2 * x[:, None] * w).sum(2)), (rows, k, n)
    assert sum(chunks) == rows and len(chunks) == (1 if rows <= 4 else 2), chunks
assert not dock.fits(1, 8, x) and not dock.fits(1 << 20, 8, x)
if rank:
    Path(paths[rank] + ".end").touch()
    sys.exit()
while not all(Path(path + ".end").exists() for path in paths[1:]):
    pass
dock.stop.fill_(1)  # the others are gone, and nobody waits for them
product(make, multiply, rows, k, n, dock)
print("ends")
"""


@starts_interpreter
def test_ranks_multiply_what_all_of_them_made(tmp_path: Path) -> None:
    run_ranks(RANK, [tmp_path / f"dock{rank}" for rank in range(2)], 4096 + 21 * 32 * 4)
