"""What the ranks of a group wait for: our gather of columns beside NCCL's, and beside the inexact all-reduce of others.

    python scripts/bench_exchange.py --ranks 2 [--part sweep]

For each model and number of rows M: the gather of a slice of the hidden size D and of the MLP's F by our kernel and by
NCCL (with what it takes to set the columns side by side), and NCCL's and torch's symmetric-memory all-reduce of D. Each
is the time of one of 20 in a captured graph, the best of 5 replays, in microseconds. "chain": a token, and 32, through
a layer's four products with and without the exchanges between them: what stays visible of one. "prefill": many rows
through what copy engines carry beside products. "decode": a layer but for attention. "sweep" tries chunks.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from floors import shape
from measure import graph_us, need_gpu, parser, save
from torch import Tensor

from fengine.ops import columns, copy_engines, exchange, linear, peers, rms_norm
from fengine.ops.columns import Columns, Group
from fengine.worker.process_group import group_of, process_group

LAYERS = {  # widths of the hidden states, of the MLP and of all heads
    name: (config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * config["head_dim"])
    for name, config in ((name, shape(name)) for name in ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b"))
}
ROWS = (1, 8, 32, 128, 512, 2048, 4096)
SWEEP: tuple[dict[str, int], ...] = (
    {}, {"LARGE": 4096}, {"LARGE": 16384}, {"CHANNELS": 132}, {"CHANNELS": 528, "LARGE": 4096}, {"MOST_SMALL": 1 << 16},
    {"MOST_SMALL": 1 << 18},
)  # fmt: skip
SIZES = ((1, 4096), (8, 4096), (8, 14336), (32, 5120), (32, 14336), (32, 25600), (128, 5120), (128, 25600), (256, 8192),
         (256, 25600), (512, 5120), (512, 25600), (1024, 25600))  # fmt: skip


def world() -> Any:
    return dist.group.WORLD


def best_us(run: Callable[[], object], count: int = 20) -> float:
    """Of one of so many in a graph."""
    return min(graph_us(lambda _: run(), count, 5, dist.barrier))


def checked_us(group: Group, part: Tensor) -> float:
    """Of our gather, once it has given what NCCL gives."""
    width = part.shape[1] * group.size
    want = columns.gather_(part, width, group.rank, group.sockets, group.name)
    for _ in range(3):
        if not torch.equal(columns.gather(part, width, group), want):
            raise SystemExit(f"rank {group.rank}: the gather of {tuple(part.shape)} is not what NCCL gives")
    return best_us(lambda: columns.gather(part, width, group))


@contextmanager
def joined(args: Any, name: str, dock: int = 0) -> Iterator[Group]:
    """A group with new inboxes."""
    device = f"cuda:{args.rank}"
    folder = Path(args.folder) / name
    folder.mkdir(exist_ok=True)
    group = group_of(name, args.rank, str(folder), json.loads(args.sockets), device)
    with process_group(group, device, dock):
        if group.mail is None or not group.mail.open:
            raise SystemExit("the GPUs cannot write to one another's memory")
        yield group
        torch.cuda.synchronize()
        dist.barrier()  # nobody writes to an inbox that is gone


def part_of(rows: int, width: int, group: Group) -> Tensor:
    return torch.randn(rows, width // group.size, device=f"cuda:{group.rank}", dtype=torch.bfloat16)


def reductions(rows: int, hidden: int, flat: Tensor | None) -> dict[str, float]:
    """All-reduces, which round in another order."""
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    found = {"all_reduce_D_nccl": best_us(lambda: dist.all_reduce(x))}
    if flat is not None and x.numel() <= flat.numel():
        own, name = flat[: x.numel()].view(x.shape), world().group_name
        if x.nbytes <= 4 << 20:
            found["all_reduce_D_one_shot"] = best_us(lambda: torch.ops.symm_mem.one_shot_all_reduce(own, "sum", name))
        found["all_reduce_D_two_shot"] = best_us(lambda: torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", name))
    return found


def table(args: Any, flat: Tensor | None) -> list[dict[str, Any]]:
    found = []
    with joined(args, "table") as group:
        for model, (hidden, mlp, _) in LAYERS.items():
            for rows in ROWS:
                row: dict[str, Any] = {"model": model, "rows": rows}
                for letter, width in (("D", hidden), ("F", mlp)):
                    part = part_of(rows, width, group)
                    row[f"gather_{letter}"] = checked_us(group, part)
                    nccl = (part, width, group.rank, group.sockets, group.name)
                    row[f"gather_{letter}_nccl"] = best_us(lambda nccl=nccl: columns.gather_(*nccl))
                found.append(row | reductions(rows, hidden, flat))
                tell(args, found[-1])
    return found


def chain(args: Any) -> list[dict[str, Any]]:
    """Of one token and of 32: products with the exchanges between them, without, and what one of four adds."""
    found = []
    with joined(args, "chain") as group:
        for model, (hidden, mlp, _) in LAYERS.items():
            shapes = [(hidden, hidden), (hidden, hidden), (mlp, hidden), (hidden, mlp)]
            weights = [
                [linear.pack(torch.randn(n // group.size, k, device="cuda", dtype=torch.bfloat16)) for n, k in shapes]
                for _ in range(3)  # so that they come from memory
            ]
            for rows in (1, 32):
                wide = {k: torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for k in (hidden, mlp)}

                def layers(exchanged: bool, wide: Any = wide, weights: Any = weights, shapes: Any = shapes) -> None:
                    x = wide[shapes[0][1]]
                    for each in weights:
                        for packed, (n, _) in zip(each, shapes, strict=True):
                            y = linear.linear(x, packed)
                            x = columns.gather(y, n, group) if exchanged else wide[n]

                times = [best_us(lambda how=how: layers(how)) / len(weights) for how in (True, False)]
                row = {"model": model, "rows": rows, "chain": times[0], "products": times[1]}
                found.append(row | {"visible": (times[0] - times[1]) / 4})
                tell(args, found[-1])
    return found


def sweep(args: Any) -> list[dict[str, Any]]:
    found, usual = [], {name: getattr(exchange, name) for name in ("SMALL", "LARGE", "MOST_SMALL", "CHANNELS")}
    for number, changes in enumerate(SWEEP):
        for name, value in (usual | changes).items():
            setattr(exchange, name, value)
        with joined(args, f"sweep{number}") as group:
            row: dict[str, Any] = {"changes": changes}
            for rows, width in SIZES:
                row[f"{rows}x{width}"] = checked_us(group, part_of(rows, width, group))
            found.append(row)
            tell(args, row)
    return found


def leaf(n: int, k: int, group: Group, whole: bool) -> Columns:
    """A rank's part of a random matrix."""
    w_NK = torch.randn(n // group.size, k, device=f"cuda:{group.rank}", dtype=torch.bfloat16) * k**-0.5
    return Columns(linear.pack(w_NK), n, k, n // group.size, whole, group)


class Layer:
    """What a layer computes with its exchanges, but for attention itself: `heads` is the width of q."""

    def __init__(self, hidden: int, mlp: int, heads: int, group: Group) -> None:
        self.hidden, self.heads, self.group = hidden, heads, group
        self.qkv, self.o = leaf(heads + 2048, hidden, group, False), leaf(hidden, heads, group, True)
        self.gate_up, self.down = leaf(2 * mlp, hidden, group, False), leaf(hidden, mlp, group, True)
        self.norm_D = torch.ones(hidden, device=f"cuda:{group.rank}", dtype=torch.bfloat16)

    def gated(self, x_TD: Tensor) -> Tensor:
        return linear.gated_linear(x_TD, self.gate_up, None, None, True, "silu")

    def mlp(self, x_TD: Tensor) -> Tensor:
        return columns.product(self.gated, x_TD, self.down, None, None, True)

    def __call__(self, normed_TD: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor]:
        q_TC = linear.linear(normed_TD, self.qkv)[:, : self.heads // self.group.size].contiguous()
        delta_TD = linear.linear(q_TC, self.o)
        normed_TD, residual_TD = rms_norm.add_rms_norm(delta_TD, residual_TD, self.norm_D, 1e-5)
        return rms_norm.add_rms_norm(self.mlp(normed_TD), residual_TD, self.norm_D, 1e-5)


def prefill(args: Any) -> list[dict[str, Any]]:
    """Milliseconds of a layer's product of heads, of its MLP, by copy engines and by our kernel, and without any."""
    found = []
    for model, (hidden, mlp, heads) in LAYERS.items():
        with joined(args, f"prefill-{model}", copy_engines.dock_bytes(8192, mlp + hidden)) as group:
            layer = Layer(hidden, mlp, heads, group)
            for rows in args.rows or (8192, 4096, 2048, 1024):
                found.append({"model": model, "rows": rows, **prefill_row(layer, rows, group, group.mail)})
                tell(args, found[-1])
    return found


def prefill_row(layer: Layer, rows: int, group: Group, mail: Any) -> dict[str, float]:
    x_TD, dock, found = torch.randn(rows, layer.hidden, device="cuda", dtype=torch.bfloat16), mail.dock, {}
    if dock is None or dock.own.data_ptr() != dock.addresses[group.rank]:
        raise SystemExit("there is no dock")
    dist.broadcast(x_TD, 0)
    copy_engines.LEAST_ROWS = min(rows, 2048)
    q_TC, f_TF = part_of(rows, layer.o.k, group), part_of(rows, layer.down.k, group)
    for name, run in (("o", lambda: linear.linear(q_TC, layer.o)), ("mlp", lambda: layer.mlp(x_TD))):
        mail.dock = None
        want, found[f"{name}_kernel"] = run(), best_us(run, 4) / 1e3
        mail.dock = dock
        for _ in range(3):
            if not torch.equal(run(), want):
                raise SystemExit(f"rank {group.rank}: {name} of {rows} rows is not what our kernel gives")
        found[f"{name}_engines"] = best_us(run, 4) / 1e3
    heads, inner = (torch.randn(rows, w.k, device="cuda", dtype=torch.bfloat16) for w in (layer.o, layer.down))
    found["o_alone"] = best_us(lambda: layer.o.leaf.linear(heads, None, None, None, True), 4) / 1e3

    def alone() -> None:
        linear.gated_linear(x_TD, layer.gate_up)
        layer.down.leaf.linear(inner, None, None, None, True)

    found["mlp_alone"] = best_us(alone, 4) / 1e3
    found["send_F_GB_s"] = f_TF.nbytes / 1e3 / best_us(lambda: sent(dock, f_TF, layer.down.k), 4)
    found["gather_F_GB_s"] = f_TF.nbytes / 1e3 / best_us(lambda: columns.gather(f_TF, layer.down.k, group), 4)
    return found


def sent(dock: Any, part_TN: Tensor, width: int) -> None:
    """By the copy engines alone; its caller waits for no peer."""
    copy_engines.send(dock, part_TN, dock.rows(0, len(part_TN), width, part_TN.dtype), 0)
    torch.cuda.current_stream().wait_stream(dock.side)


def decode(args: Any) -> list[dict[str, Any]]:
    """Microseconds of a layer."""
    found = []
    for model, (hidden, mlp, heads) in LAYERS.items():
        with joined(args, f"decode-{model}") as group:
            layers = [Layer(hidden, mlp, heads, group) for _ in range(3)]  # so that weights come from memory
            for rows in (1, 32):
                x_TD = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)

                def run(x_TD: Tensor = x_TD, layers: Any = layers) -> None:
                    stream = x_TD, x_TD
                    for layer in layers:
                        stream = layer(*stream)

                found.append({"model": model, "rows": rows, "layer": best_us(run, 8) / len(layers)})
                tell(args, found[-1])
    return found


def tell(args: Any, row: dict[str, Any]) -> None:
    if args.rank == 0:
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def rank(args: Any) -> None:
    torch.cuda.set_device(args.rank)
    store = columns.distributed.FileStore(str(Path(args.folder) / "world"), args.ranks)
    dist.init_process_group("nccl", store=store, rank=args.rank, world_size=args.ranks,
                            device_id=torch.device("cuda", args.rank))  # fmt: skip
    flat = None
    with suppress(Exception):  # a torch without it
        flat = symmetric.empty(16 << 20, dtype=torch.bfloat16, device=torch.device("cuda", args.rank))
        symmetric.rendezvous(flat, world())
    parts: dict[str, Callable[[], Any]] = {
        "chain": lambda: chain(args), "table": lambda: table(args, flat), "sweep": lambda: sweep(args),
        "prefill": lambda: prefill(args), "decode": lambda: decode(args),
    }  # fmt: skip
    figures = {name: parts[name]() for name in args.part or ("chain", "table", "prefill", "decode")}
    if args.rank == 0:
        save("bench_exchange", {"ranks": args.ranks, **figures}, args.out)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do, and NCCL takes its time


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--part", action="append", choices=("chain", "table", "sweep", "prefill", "decode"))
    p.add_argument("--rows", type=int, action="append", help="of the prefill")
    p.add_argument("--rank", type=int, help="this process is one of them")
    p.add_argument("--folder", help="of a rank: where it finds the others")
    p.add_argument("--sockets", help="of a rank: to the others")
    args = p.parse_args()
    need_gpu(p)
    if args.rank is not None:
        rank(args)
    env = os.environ | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(number), "--sockets", json.dumps(own)], env=env,
                             pass_fds=[file for file in own if file >= 0])
            for number, own in enumerate(peers.mesh(args.ranks))
        ]  # fmt: skip
        try:
            codes = [each.wait() for each in ranks]
        finally:
            for each in ranks:
                each.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
