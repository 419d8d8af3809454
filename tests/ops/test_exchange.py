"""The exchange between GPUs, interpreted: ranks are processes, their inboxes files that all of them map."""

from pathlib import Path

from interpreted import run_ranks, starts_interpreter

RANK = """
import mmap, sys
from pathlib import Path
import torch
from fengine.ops import exchange
from fengine.ops.exchange import Mail, gather

rank, size, paths = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
exchange.CHANNELS, exchange.SMALL, exchange.LARGE, exchange.MOST_SMALL = 2, 16, 32, 96
files = [open(path, "r+b") for path in paths]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
inboxes = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]
mail = Mail(size, "cpu")
mail.peer_P.copy_(torch.tensor([inbox.data_ptr() for inbox in inboxes]))
generator = torch.Generator().manual_seed(3)
for tokens, columns, cut, dtype in [(1, 16, 0, torch.bfloat16), (3, 10, 4, torch.bfloat16), (5, 12, 0, torch.float32),
                                    (9, 16, 3, torch.float32), (1, 3, 3, torch.int32), (0, 4, 0, torch.bfloat16)] * 2:
    whole = torch.randn(tokens, columns * size, generator=generator).mul(100).to(dtype)
    own = whole[:, rank * columns : (rank + 1) * columns].contiguous()
    for _ in range(3):
        found = gather(own, columns * size - cut, rank, mail)
        assert torch.equal(found, whole[:, : columns * size - cut]), (tokens, columns, cut, dtype)
if rank:
    Path(paths[rank] + ".end").touch()
    sys.exit()
while not all(Path(path + ".end").exists() for path in paths[1:]):
    pass
mail.stop.fill_(1)  # the others are gone, and nobody waits for them
gather(torch.ones(2, 8), 16, rank, mail)
gather(torch.ones(50, 8), 16, rank, mail)
print("ends")
"""


@starts_interpreter
def test_ranks_gather_one_anothers_columns(tmp_path: Path) -> None:
    size = 3
    paths = [tmp_path / f"inbox{rank}" for rank in range(size)]
    run_ranks(RANK, paths, 2 * 2 * size * (16 * 8 + 32 * 4 + 4))
