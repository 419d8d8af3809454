"""torch.compile over one layer of each kind, used for all layers of that kind, as JAX scans over layers.

What is left for the compiler between our ops, which are opaque to it, is elementwise: with a rounding to the tensors'
dtype behind each operation its bits are those of the eager layer. Nothing but the sizes of a step differs between two
calls of a compiled layer: so it checks nothing when it is called, and no request makes anything compile."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fengine.models.kv_state import Params, Tensors
from fengine.models.layers import LayerFn, LayerOut, Norm, Normed
from fengine.models.spec import ModelSpec

# A second thread would cost more than it brings, and checking the size of every intermediate costs as much as a small
# layer. `vec_isa_ok` takes the vector width from the CPU's flags instead of from three test programs, which would be
# half of a warm start.
OPTIONS: dict[str, Any] = {
    "cpp.threads": 1,
    "size_asserts": False,
    "cpp.vec_isa_ok": True,
    "emulate_precision_casts": True,
    "guard_filter_fn": lambda guards: [False] * len(guards),
}
SIZES = "TRBNAPUYJ"  # a graph serves every one of them


def layer_kind(layer: Params) -> tuple[Any, ...]:
    """What layers of one kind have in common: parameters, their shapes and dtypes, the LayerKind. Pure."""
    facts = ((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in tree_leaves(layer))
    return (*sorted(layer), *facts)


def layer_kinds(layers: list[Params]) -> list[int]:
    """The first layer of each kind. Pure."""
    kinds = [layer_kind(layer) for layer in layers]
    return [kinds.index(each) for each in dict.fromkeys(kinds)]


def compiled_layers(layer_fn: LayerFn) -> LayerFn:
    """`layer_fn`, compiled at the first call with each kind of layer and with the fields that a step may lack."""
    kinds: dict[int, tuple[Params, Any]] = {}  # by identity: to tell a kind takes as long as a short layer
    made: dict[Any, LayerFn] = {}

    def run(
        layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors,
        normed_TD: Normed, residual_TD: Tensor, next_norm: Norm | None,
    ) -> LayerOut:  # fmt: skip
        if id(layer) not in kinds:
            kinds[id(layer)] = layer, layer_kind(layer)
        fields = "token_A" in batch, "last_key_J" in batch
        then = None if next_norm is None else next_norm[1]
        key = kinds[id(layer)][1], then, fields, normed_TD is residual_TD, type(normed_TD)
        if key not in made:
            made[key] = _compiled(layer_fn)
            normed = {"normed_TD": normed_TD} if isinstance(normed_TD, Tensor) else normed_TD.tensors()
            mark_sizes(batch, k_PSGK=k_PSGK, v_PSGK=v_PSGK, residual_TD=residual_TD, **normed)
        return made[key](layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD, residual_TD, next_norm)

    return run


def _compiled(layer_fn: LayerFn) -> LayerFn:
    def layer(*arguments: Any) -> LayerOut:
        return layer_fn(*arguments)

    # A code object of its own: Dynamo keeps its graphs, and counts recompilations against a limit, per code object, and
    # every kind of layer of every engine of this process would share this one.
    layer.__code__ = layer.__code__.replace()
    compiled: Callable[..., LayerOut] = torch.compile(layer, fullgraph=True, options=OPTIONS)
    return compiled


def mark_sizes(batch: Tensors, **others: Tensor) -> None:
    """Marks SIZES as what the compiler must not specialise on, each of them one size wherever its letter stands in a
    name. Call before the first compiled call."""
    for name, tensor in {**batch, **others}.items():
        for dim, letter in enumerate(name.rpartition("_")[2]):
            if letter in SIZES:
                torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=letter)
