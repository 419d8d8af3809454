"""Ranks of a group: how a model is shared among processes, and how they find one another. See `ops/columns.py`.
And memory of a GPU that other processes of its host write to, by the driver's handles (CUDA IPC); no multicast."""

import ctypes
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fengine.config import EngineConfig
from fengine.errors import ConfigError
from fengine.models.kv_state import Params, Tensors
from fengine.models.spec import ModelSpec
from fengine.models.weights import VOCAB_BLOCK
from fengine.ops import edges, peers
from fengine.ops.columns import Group, distributed, share
from fengine.ops.copy_engines import Dock, Memory, dock_bytes, driver
from fengine.ops.exchange import Mail, inbox_bytes
from fengine.worker.step import Sampled, SampleFn, UnembedFn, sample_rows
from fengine.worker.step_input import LogitsStage, StepInput

FIRST = 120.0  # seconds in which the ranks must find one another
ABORTING = 3.0  # seconds that the end of a group may take
LONGEST = timedelta(days=1)  # of an exchange; ranks that are dead are found by their silence


def check_parts(config: EngineConfig, spec: ModelSpec) -> None:
    """Errors: ConfigError for a model that so many ranks cannot share equally, or for too few GPUs;
    UnsupportedFeatureError for what is not built over several ranks."""
    size = config.parallel.tp_size
    if size == 1:
        return
    found = spec.experts
    shared = {
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
        "hidden_size": spec.hidden_size,
    }  # fmt: skip
    if found is None or found.dense_layers:
        shared["intermediate_size"] = spec.mlp_size
    if found is not None:
        shared |= {"moe_intermediate_size": found.size, "shared_expert_intermediate_size": found.shared_size}

    def uneven(size: int) -> list[str]:
        """What so many cannot share."""
        odd = [f"{name} {value}" for name, value in shared.items() if value % size]
        few = spec.vocab_size <= VOCAB_BLOCK * (size - 1)
        return odd + [f"vocab_size {spec.vocab_size} (blocks of {VOCAB_BLOCK})"] * few

    if odd := uneven(size):
        works = [n for n in range(1, size) if not uneven(n)]
        raise ConfigError(
            f"parallel.tp_size is {size}, and {', '.join(odd)} cannot be cut in so many equal parts; {works} work"
        )


def group_of(name: str, rank: int, folder: str, sockets: Sequence[int], device: str) -> Group:
    """As a rank on that device knows it, before it joins."""
    size = len(sockets)
    mail = Mail(size, device) if device.startswith("cuda") else None
    return Group(name, rank, size, folder, tuple(sockets), mail)


def device_of_rank(device: str, rank: int, size: int) -> str:
    """Ranks take GPUs that follow each other; on a CPU they share it. Errors: ConfigError."""
    if not device.startswith("cuda"):
        return device
    first = int(device.partition(":")[2] or 0)
    if first + size > torch.cuda.device_count():
        raise ConfigError(
            f"parallel.tp_size × parallel.dp_size is {size} from GPU {first} on, and torch sees "
            f"{torch.cuda.device_count()} GPUs; lower one of them"
        )
    return f"cuda:{first + rank}"


def swap(own: Tensor, group: Group) -> Tensor:
    """[ranks, *own.shape] of those on the CPU. Pure. Errors: RankGoneError."""
    return peers.swap(own, group.rank, group.sockets)


def least(number: int, group: Group) -> int:
    """The least number of all ranks. Pure. Errors: as `swap`."""
    return int(swap(torch.tensor(number), group).min())


@contextmanager
def process_group(group: Group, device: str, dock: int = 0) -> Iterator[None]:
    """On GPUs the ranks' NCCL group, known to torch by its name: neither torch's default group nor any global is
    touched. The ranks find one another by a file in the group's folder. `dock`: bytes of each rank's. Modifies: the
    group's mail, which is opened."""
    with ExitStack() as held:
        if group.mail is not None:
            held.enter_context(_nccl(group, device))
            _open(group, group.mail, dock, held)
        held.callback(_stop, group, device)
        yield


@contextmanager
def _nccl(group: Group, device: str) -> Iterator[None]:
    files = distributed.FileStore(str(Path(group.folder) / f"store{group.size}"), group.size)
    files.set_timeout(timedelta(seconds=FIRST))
    made: Any = dist.ProcessGroup(files, group.rank, group.size)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST
    nccl = dist.ProcessGroupNCCL(distributed.PrefixStore("cuda", files), group.rank, group.size, options)
    made._register_backend(torch.device(device), dist.ProcessGroup.BackendType.NCCL, nccl)
    made._set_group_name(group.name)
    distributed.distributed_c10d._register_process_group(group.name, made)
    try:
        yield
    finally:
        _abort(made)
        distributed.distributed_c10d._unregister_process_group(group.name)


def _abort(made: Any) -> None:
    """Ends what the group still does, for which nobody waits long: NCCL may wait for graphs that hold its kernels."""

    def run() -> None:
        with suppress(RuntimeError):
            made.abort()

    thread = threading.Thread(target=run, name="fengine-abort", daemon=True)
    thread.start()
    thread.join(ABORTING)


def release(group: Group, device: str) -> None:
    """From any thread: no exchange waits any more, and what it gives is void."""
    peers.release(group.sockets)
    _stop(group, device)


def _stop(group: Group, device: str) -> None:
    if group.mail is None:
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        group.mail.stop.copy_(torch.ones(1, dtype=torch.int32).pin_memory(), non_blocking=True)
        torch.cuda.current_stream().synchronize()
    if not group.mail.open:
        with suppress(RuntimeError):  # it is not joined yet, or is left
            _abort(distributed.distributed_c10d._resolve_process_group(group.name))


def _open(group: Group, mail: Mail, dock: int, held: ExitStack) -> None:
    """Opens the mail, if every rank can."""
    if addresses := _inboxes(group, inbox_bytes(group.size), held):
        mail.peer_P.copy_(torch.tensor(addresses))
        mail.open = True
    if mail.open and dock and (addresses := _inboxes(group, dock, held)):
        own = torch.as_tensor(Memory(addresses[group.rank], dock), device=mail.stop.device)
        mail.dock = Dock(own, addresses, group.rank, mail.stop)


def _inboxes(group: Group, size: int, held: ExitStack) -> list[int]:
    """The addresses of so many bytes of each rank; none if a rank cannot."""

    def handles(own: bytes) -> list[bytes]:
        return [bytes(part.numpy()) for part in swap(torch.frombuffer(bytearray(own), dtype=torch.uint8), group)]

    addresses: list[int] = []
    with suppress(OSError):
        addresses = held.enter_context(inboxes(size, group.rank, handles))
    return addresses if least(bool(addresses), group) else []


def dock_of(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes of each rank's dock: for the products of the largest step of this model. Pure."""
    widest = max(spec.num_heads * spec.head_dim, spec.mlp_size)
    return dock_bytes(config.scheduler.max_step_tokens or 1, widest + spec.hidden_size)


def ranked_rows(group: Group) -> SampleFn:
    """`sample_rows` for a rank of a group: rank 0 draws, and all have what it drew. Errors: RuntimeError of torch if a
    rank is gone."""

    def run(
        params: Params, unembed: UnembedFn, hidden_TD: Tensor, tensors: Tensors, stages: Sequence[LogitsStage],
        top: int | None,
    ) -> Sampled:  # fmt: skip
        if group.rank == 0:
            token_R, logprob_R, likeliest = sample_rows(params, unembed, hidden_TD, tensors, stages, top)
        else:
            logits_RV = unembed(params, edges.take(hidden_TD, tensors["logit_index_R"]))
            token_R, logprob_R = torch.zeros_like(tensors["logit_index_R"]), torch.zeros_like(logits_RV[:, 0])
            likeliest = None
        return share(token_R, group), logprob_R, likeliest

    return run


def checksum(step: StepInput) -> int:
    """Of what the forward pass computes from. Pure."""
    digest = 0
    names = ("token_T", "slot_T", "window_slot_U", "q_start_B", "kv_len_R", "logit_index_R")
    for name in filter(step.arrays.__contains__, names):
        digest = zlib.crc32(step.arrays[name].tobytes(), digest)
    return digest


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
