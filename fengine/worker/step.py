"""One step of the device column: a pure function of (params, kv, batch, sampling), and its compiled form."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.models import lookup
from fengine.models.kv_state import KVState, Params, SamplingBatch, StepBatch, StepOut
from fengine.models.spec import ModelSpec
from fengine.ops import edges
from fengine.worker.sampler import sample

StepFn = Callable[[Params, KVState, StepBatch, SamplingBatch, "Feed"], tuple[KVState, StepOut]]
ForwardFn = Callable[[Params, KVState, StepBatch, "Feed"], tuple[KVState, Tensor]]


# What is left for Inductor between our ops is small: a second thread would cost more than it brings, and checking the
# size of every intermediate costs as much as a small layer. `vec_isa_ok` takes the vector width from the CPU's flags
# instead of from three test programs, which would be half of a warm start.
INDUCTOR = {"cpp.threads": 1, "size_asserts": False, "cpp.vec_isa_ok": True}


def guards(found: Sequence[Any]) -> list[bool]:
    """Which of torch.compile's guards (its `GuardFilterEntry`s) are checked before every step. Pure.

    What may differ between two calls of one engine's step: whether some row has an adapter, and how many layers there
    are (a start tries one of each kind). All else is fixed when it is built, and to compare some 200 facts of it (every
    weight's shape, every constant) would take a fifth of a short step.
    """
    return ["adapters" in guard.name or guard.guard_type == "SEQUENCE_LENGTH" for guard in found]


class Feed(NamedTuple):
    """Tokens that only the device knows yet: rows whose last token was drawn by the step before this one.

    Where from_T[t] is true, token t of the batch is last_token_R[index_T[t]] instead of what the host staged.
    """

    last_token_R: Tensor  # int32, the tokens drawn by the step before, which had its own R
    index_T: Tensor  # int32
    from_T: Tensor  # bool


def resolve_feed(batch: StepBatch, feed: Feed) -> StepBatch:
    """The batch with fed tokens filled in. Pure."""
    return batch._replace(token_T=edges.feed(batch.token_T, feed.last_token_R, feed.index_T, feed.from_T))


def step(
    params: Params, spec: ModelSpec, kv: KVState, batch: StepBatch, sampling: SamplingBatch
) -> tuple[KVState, StepOut]:
    """Runs every token of `batch` through the model and draws one token per row.

    Modifies: the storage of `kv`, which is dead after the call; the returned state is the only live one.
    """
    model = lookup(spec.architecture)
    kv, hidden_TD = model.forward(params, spec, kv, batch)
    logits_RV = model.unembed(params, spec, edges.take(hidden_TD, batch.logit_index_R))
    return kv, sample(logits_RV, sampling)


def make_step(spec: ModelSpec, *, compiled: bool) -> StepFn:
    """The step with `spec` closed over and fed tokens resolved, under `torch.compile(fullgraph=True)` if asked.

    The sizes T, R and N are unbacked symbols: one graph serves every batch, so no request can trigger a compile.
    """

    def run(
        params: Params, kv: KVState, batch: StepBatch, sampling: SamplingBatch, feed: Feed
    ) -> tuple[KVState, StepOut]:
        return step(params, spec, kv, resolve_feed(batch, feed), sampling)

    if not compiled:
        return run
    # A code object of its own: Dynamo keeps its graphs, and counts recompilations against a limit, per code object, and
    # every engine of this process would share this one.
    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True, options={**INDUCTOR, "guard_filter_fn": guards})


def make_forward(spec: ModelSpec) -> ForwardFn:
    """The step's part up to hidden_TD, with `spec` closed over and fed tokens resolved. It runs uncompiled."""
    model = lookup(spec.architecture)

    def run(params: Params, kv: KVState, batch: StepBatch, feed: Feed) -> tuple[KVState, Tensor]:
        return model.forward(params, spec, kv, resolve_feed(batch, feed))

    return run


def mark_sizes(batch: StepBatch, sampling: SamplingBatch, feed: Feed) -> None:
    """Marks T, R, B, N and A as sizes that the compiler must not specialise on, each of them one size wherever it
    stands in a name. Call before the first compiled call."""
    if "torch._dynamo" not in sys.modules:
        return  # nothing is compiled, and importing the compiler would take longer than importing torch
    adapters = {} if batch.adapters is None else {"token_A": batch.adapters.token_A}
    fields = batch._asdict() | sampling._asdict() | feed._asdict() | adapters
    for name, tensor in fields.items():
        if name != "adapters":
            sizes = ["R before"] if name == "last_token_R" else name.rsplit("_", 1)[1]
            for dim, size in enumerate(sizes):
                torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=size)
