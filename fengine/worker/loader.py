"""From a checkpoint directory to parameters on a device, tensor by tensor; or random ones of the same shapes.
Everything that can be known from names, shapes and dtypes is checked before the first tensor is allocated. Peak memory
is the weights plus one fused matrix."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine import models
from fengine.config import Dtype, LoadFormat
from fengine.errors import ConfigError, OutOfMemoryError, UnsupportedArchitectureError, UnsupportedFormatError
from fengine.models.kv_state import Params
from fengine.models.quantization import read_quantization
from fengine.models.rope import rope_tables
from fengine.models.sources import ExpertOrder, Source
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import EMBEDDING, HEAD, Weight, head_weight
from fengine.ops import linear, quantized, w8a8
from fengine.ops.columns import Columns, Group
from fengine.ops.quantized import Codes
from fengine.worker.checkpoint_checks import check_entries, check_tied, read_entries
from fengine.worker.quantized_weights import (
    check_unread,
    encoded_by,
    in_our_order,
    module_of,
    read_codes,
    rows_of,
    scheme_of,
    whole,
)
from fengine.worker.safetensors_file import DTYPES, read_config, reading


class Placement(NamedTuple):
    """Where leaves go and in which dtype: matrices as stored or as asked for, vectors as the activations."""

    device: torch.device
    matrix: torch.dtype
    group: Group | None = None  # whose rank holds its part of what is cut

    def of(self, weight: Weight) -> torch.dtype:
        return torch.float32 if weight.wide or (self.device.type == "cpu" and not weight.matrix) else self.matrix


def spec_from_config(config: Config) -> ModelSpec:
    """Pure. Errors: ModelLoadError naming the field, UnsupportedArchitectureError, UnsupportedFormatError."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UnsupportedArchitectureError(
            f"config.json: architectures must name one class, got {names!r}; supported: {', '.join(models.MODELS)}."
        )
    spec, text = models.lookup(names[0]).spec_from_hf(config), config.get("text_config") or {}
    return replace(spec, quantization=read_quantization(config) or read_quantization(text))


def _stored_dtype(config: Config) -> torch.dtype:
    """The dtype a config announces; only dummy weights need it. float32 if it announces none, as transformers does."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    known = {str(dtype): dtype for dtype in DTYPES.values()}
    dtype = known.get(f"torch.{str(name).removeprefix('torch.')}")
    if dtype is None:
        raise UnsupportedFormatError(f"config.json: dtype {name!r} is not supported; use float32, bfloat16 or float16.")
    return dtype


def length_of(spec: ModelSpec, asked: int | None) -> int:
    """The context, for so many positions. Errors: ConfigError if the checkpoint was not made for them."""
    length = spec.max_position if asked is None else asked
    if not 1 <= length <= spec.max_position:
        limit = f"{spec.max_position}, the checkpoint's max_position_embeddings"
        raise ConfigError(f"model.context_length must be from 1 to {limit}, got {length}.")
    return length


def load_params(
    directory: Path, spec: ModelSpec, *, dtype: Dtype = Dtype.auto, device: torch.device | str = "cpu",
    context_length: int | None = None, load_format: LoadFormat = LoadFormat.auto, seed: int = 0,
    group: Group | None = None,
) -> Params:  # fmt: skip
    """Fused and packed parameters (see `models.weights`), of a group its rank's, and rotary tables up to
    `context_length`.

    Matrices keep their stored dtype unless `dtype` says otherwise. `load_format=dummy` needs config.json only and gives
    random weights that are a function of (seed, leaf, device). Errors: ModelLoadError and its kinds, ConfigError,
    OutOfMemoryError.
    """
    length = length_of(spec, context_length)
    device = torch.device(device)
    wanted = None if dtype is Dtype.auto else getattr(torch, dtype.value)
    weights = models.lookup(spec.architecture).weights(spec)
    try:
        if load_format is LoadFormat.dummy:
            placement = Placement(device, wanted or _stored_dtype(read_config(directory)), group)
            needed = [weight for weight in weights if not weight.optional]
            params = _build(spec, needed, lambda weight: _random(weight, spec, placement, seed), group)
        else:
            params = _load(directory, spec, weights, device, wanted, group)
        params |= _constants(spec, length, params["final_norm_D"])
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights do not fit on {device}: {str(error).partition('.')[0]}. Free the device, set "
            "model.dtype=bfloat16, or use a smaller model."
        ) from None
    return params


def _constants(spec: ModelSpec, length: int, like: Tensor) -> Params:
    """What a forward pass reads beside the checkpoint's tensors, on the device of `like`; the scale in its dtype."""
    tables: Params = {name: table.to(like.device) for name, table in rope_tables(spec, length).items()}
    if spec.rope_sections:
        tables["rope_axis_K"] = torch.tensor(spec.rope_sections * 2, device=like.device)
    return tables if spec.embed_scale == 1.0 else tables | {"embed_scale": like.new_tensor(spec.embed_scale)}


Leaf = Tensor | linear.Leaf


def _build(spec: ModelSpec, weights: list[Weight], leaf: Callable[[Weight], Leaf], group: Group | None) -> Params:
    """The tree of all leaves. Tied, or without a head to generate with, "unembed" is the very leaf "embed", or the
    rank's rows of it."""
    params: Params = {"layers": [{"kind": spec.kind(index)} for index in range(spec.num_layers)]}
    if spec.vision is not None:
        params["vision"] = {"layers": [{} for _ in range(spec.vision.num_layers)]}
    for weight in weights:
        parent: Any = params
        for key in weight.path[:-1]:
            parent = parent[key]
        parent[weight.path[-1]] = leaf(weight)
    if spec.tie_embeddings or not spec.generates:
        params["unembed"] = params["embed"] if group is None else _own_rows(params["embed"], group)
    return params


def _own_rows(embed: linear.Dense, group: Group) -> Columns:
    """The rank's rows of the embedding as its part of the head, over the same memory."""
    head = head_weight(embed.n, embed.packed.shape[-1 if embed.packed.dim() == 2 else -2])
    rows = head.rows(group.rank, group.size)[0][0]
    step = linear.LANES if embed.packed.dim() == 3 else 1
    packed = embed.packed[rows.start // step : -(-rows.stop // step)]
    return columns(head, linear.Dense(packed, rows.stop - rows.start), group)


def _load(
    directory: Path, spec: ModelSpec, weights: list[Weight], device: torch.device, wanted: torch.dtype | None,
    group: Group | None,
) -> Params:  # fmt: skip
    entries = read_entries(directory, spec)
    weights = check_entries(directory, spec, weights, entries, mixed=wanted is not None)
    placement = Placement(device, wanted or DTYPES[entries[EMBEDDING].dtype], group)
    with reading(entries) as read:
        if spec.generates and spec.tie_embeddings and HEAD in entries:
            check_tied(read(HEAD), read(EMBEDDING))
        sources = {source.name: module_of(source) for weight in weights for source in weight.sources}
        for name in {f"{module}.bias" for module in sources.values()} & entries.keys() - sources.keys():
            check_unread(name, read(name))

        def matrix(weight: Weight, source: Source, own: Sequence[slice]) -> list[Tensor | Codes]:
            scheme = scheme_of(weight, source, spec.quantization, entries)
            if scheme is None and source.order is None and own:  # no more than the rank's rows is read
                parts = [read(source.name, rows, weight.axis) for rows in own]
                return [torch.cat(parts, weight.axis)] if weight.axis else [*parts]
            if own and isinstance(source.order, ExpertOrder) and (scheme is None or scheme.layout == "mxfp4"):
                at = source.order.stored(own)  # one slice, too
                if scheme is None:
                    return [source.ours(read(source.name, at, len(source.shape) - 1))]
                source = source._replace(shape=(*source.shape[:2], at.stop - at.start))
                return [in_our_order(source, read_codes(source, scheme, lambda name: read(name, at, 1), entries))]
            if scheme is None or scheme.layout == "load":
                part = encoded_by(source.ours(read(source.name)), scheme, device)
            else:
                part = in_our_order(source, read_codes(source, scheme, read, entries))
            return _own_part(weight, part, own)

        def leaf(weight: Weight) -> Leaf:
            own = zip(weight.sources, _own_slices(weight, group), strict=True)
            return place(weight, [part for source, rows in own for part in matrix(weight, source, rows)], placement)

        return _build(spec, weights, leaf, group)


def _own_slices(weight: Weight, group: Group | None) -> list[list[slice]]:
    """Of each source, what the rank has of it; empty: all. Pure."""
    cut = group if weight.shard else None
    return [[] for _ in weight.sources] if cut is None else weight.rows(cut.rank, cut.size)


def place(weight: Weight, stored: Sequence[Tensor | Codes], placement: Placement) -> Leaf:
    """Joins a rank's parts of a leaf on the device; matrices in the device's layout. The storage can be given back."""
    dtype, group = placement.of(weight), placement.group
    cut = group if weight.shard else None
    if (leaf := _in_few_bits(weight, stored, placement)) is not None:
        return leaf if cut is None else columns(weight, leaf, cut)
    parts = [whole(part, placement.device, dtype) for part in stored]
    joined = torch.cat(parts) if len(parts) > 1 else parts[0] if cut is None else parts[0].clone()
    if not weight.matrix:
        return _own(joined.contiguous())
    *experts, _, columns_K = weight.shape
    dense = linear.pack(joined.view(*experts, -1, columns_K))
    dense = dense._replace(packed=_own(dense.packed))
    return dense if cut is None else columns(weight, dense, cut)


def _in_few_bits(
    weight: Weight, stored: Sequence[Tensor | Codes], placement: Placement
) -> linear.Leaf | quantized.Quantized | None:
    """The leaf of parts that are all in few bits and can be joined so; None: they are to be whole. Pure."""
    parts = [part.to(placement.device) for part in stored if isinstance(part, Codes)]
    codes = quantized.joined(parts) if len(parts) == len(stored) else None
    experts, dtype = weight.shape[0] if len(weight.shape) == 3 else 0, placement.of(weight)
    if codes is not None and codes.kind == "w8a8":
        return w8a8.pack(codes, experts)
    if codes is not None and experts:
        return quantized.pack_experts(codes, experts, weight.path[-1] == "wexperts_gate_up", dtype)
    return None if codes is None else quantized.pack(codes, dtype)


def columns(weight: Weight, own: linear.Leaf, group: Group) -> Columns:
    """A rank's part of a matrix. Pure."""
    n, k = weight.shape[-2:]
    return Columns(own, n, k, weight.each(n, group.size), weight.whole, group)


def _own(leaf: Tensor) -> Tensor:
    return leaf if leaf.untyped_storage().resizable() else leaf.clone()


def _drawn(weight: Weight, spec: ModelSpec, placement: Placement, seed: int) -> Tensor:
    """Random numbers: every matrix keeps the variance of its input, norms are one, biases small. What writes to the
    residual stream is scaled by 1/sqrt(2L), so that the stream grows to order one over all layers and neither a token's
    own embedding nor its context is drowned (Radford et al. 2019, GPT-2, section 2.3)."""
    shape, dtype = weight.shape, placement.of(weight)
    if weight.fill == "one":
        return torch.full(shape, 1.0 - spec.norm_shift, dtype=dtype, device=placement.device)
    key = hashlib.sha256(f"{seed}/{weight.path}".encode()).digest()[:8]
    generator = torch.Generator(placement.device).manual_seed(int.from_bytes(key, "little") >> 1)
    std = 0.02 if weight.fill == "small" else shape[-1] ** -0.5
    if weight.fill == "residual":
        std /= (2 * spec.num_layers) ** 0.5
    return torch.empty(shape, dtype=dtype, device=placement.device).normal_(0.0, std, generator=generator)


def _random(weight: Weight, spec: ModelSpec, placement: Placement, seed: int) -> Leaf:
    """A random leaf, in few bits where the spec says so; of a group the rank's part."""
    stored = tensor = _drawn(weight, spec, placement, seed)
    if weight.fill == "one":
        return tensor
    scheme = spec.quantization and weight.matrix and spec.quantization.of(module_of(weight.sources[0]))
    if weight.path != ("embed",):
        stored = encoded_by(tensor, scheme or None, placement.device)
    group = placement.group if weight.shard else None
    if isinstance(stored, Tensor) and group is None:
        return linear.pack(stored) if weight.matrix else stored
    own = zip(_of_sources(weight, stored), _own_slices(weight, group), strict=True)
    return place(weight, [one for part, rows in own for one in _own_part(weight, part, rows)], placement)


def _of_sources(weight: Weight, stored: Tensor | Codes) -> list[Tensor | Codes]:
    """A whole leaf as the parts that its sources are. Pure."""
    ends = list(accumulate(source.plain.shape[0] for source in weight.sources))
    if len(ends) == 1:
        return [stored]
    stored = stored.flatten(0, 1) if isinstance(stored, Tensor) and weight.stack else stored
    return rows_of(stored, [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)])


def _own_part(weight: Weight, part: Tensor | Codes, own: Sequence[slice]) -> list[Tensor | Codes]:
    """What the rank has of a source, which may be in pieces; all of it for no slices. Pure."""
    return rows_of(part, own, weight.axis, weight.shape[0]) if own else [part]
