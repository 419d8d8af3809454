"""Rank 0 of a weight update group, as trainers make it; run by test_weights_group.py.

Each line of stdin: "NAME URL" of a group to join and to be in from here on; the path of a safetensors file to broadcast
tensor by tensor, "flat PATH" for one bucket, "cut PATH" for half of them and then a sudden end. Answers each with a
line; the end of stdin ends it.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, default_pg_timeout
from torch.distributed.rendezvous import rendezvous


def joined(url: str, name: str) -> Any:
    """The group, made as by SGLang's `init_custom_process_group`: a prefixed store under torch's own helper."""
    store, rank, size = next(rendezvous(url, 0, 2, timeout=default_pg_timeout))
    group, _ = _new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), dist.distributed_c10d.PrefixStore(name, store), group_name=name,  # type: ignore[arg-type]
       
        timeout=default_pg_timeout,
    )  # fmt: skip
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def main() -> None:
    group = None
    for line in sys.stdin:
        command, path = line.split() if " " in line else ("each", line.strip())
        if "://" in path:
            print("waiting", flush=True)
            group = joined(path, command)
            continue
        tensors = list(load_file(path).values())
        if command == "flat":
            tensors = [torch.cat([tensor.flatten() for tensor in tensors])]
        for tensor in tensors[: len(tensors) // 2 if command == "cut" else None]:
            dist.broadcast(tensor, src=0, group=group)
        if command == "cut":
            os._exit(1)
        print("sent", flush=True)


main()
