"""New weights, checked in full before a byte of the live ones changes: names, shapes, dtypes, finite values."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine import models
from fengine.core.scalars import own_class
from fengine.engine.weights.places import Place
from fengine.errors import CorruptCheckpointError, InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, HEAD
from fengine.worker.checkpoint_checks import HARMLESS, check_entries, check_tied, listed, read_entries
from fengine.worker.loader import spec_from_config
from fengine.worker.safetensors_file import DTYPES, read_config, reading

FLOATS = tuple(DTYPES.values())


class Origin(NamedTuple):
    """A checkpoint directory, and what its weight files were when it was read: (name, size, time of change)."""

    directory: Path
    stamp: tuple[tuple[str, int, int], ...]

    @classmethod
    def of(cls, directory: Path) -> "Origin":
        files = sorted(directory.glob("*.safetensors"))
        try:
            facts = [(file.name, file.stat()) for file in files]
        except OSError as error:
            raise ModelLoadError(f"{error.filename} cannot be read: {error.strerror}.") from None
        return cls(directory, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts))


class Change(NamedTuple):
    """A checked tensor of the place's shape and dtype, and where it goes."""

    name: str
    place: Place
    tensor: Tensor

    def kept(self) -> "Change":
        """With a copy on the CPU that nobody else holds: the caller may reuse its own."""
        return self._replace(tensor=self.tensor.cpu() if self.tensor.is_cuda else self.tensor.clone())


class Unsent(NamedTuple):
    """In place of a tensor that could not come."""

    why: str


FORMATS = (None, "direct", "flattened_bucket")  # of tensors


def tensors_of(given: Any, load_format: Any) -> list[tuple[str, Tensor]]:
    """Errors: InvalidRequestError, UnsupportedFeatureError."""
    if load_format not in FORMATS:
        raise UnsupportedFeatureError(
            f"load_format={load_format!r:.80} is not built: custom loaders are code. Pass (name, tensor) pairs with "
            "load_format=None, or 'flattened_bucket'."
        )
    return unflattened(given) if load_format == "flattened_bucket" else pairs(given)


def pairs(named_tensors: Any) -> list[tuple[str, Tensor]]:
    """(name, tensor) pairs from a list of them or a dict. Errors: InvalidRequestError."""
    named_tensors = own_class(named_tensors)
    items = list(named_tensors.items()) if isinstance(named_tensors, dict) else named_tensors
    listed = items if isinstance(items, (list, tuple)) else [items]
    if not all(isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], str) for item in listed):
        raise InvalidRequestError(f"named_tensors must be a list of (name, tensor) or a dict, got {items!r:.200}.")
    return [(name, value) for name, value in listed]


def unflattened(buckets: Any) -> list[tuple[str, Tensor]]:
    """The tensors of SGLang's flattened buckets: {"flattened_tensor", "metadata"} or objects of these attributes. A
    flat tensor holds bytes (uint8), or elements of one dtype; metadata says name, shape and dtype of each tensor, in
    order. Errors: InvalidRequestError, also for serialized buckets, which are pickles."""
    found: list[tuple[str, Tensor]] = []
    for bucket in buckets if isinstance(buckets, (list, tuple)) else [buckets]:
        flat, entries = _entry(bucket, "flattened_tensor"), _entry(bucket, "metadata")
        if fault := unreadable(flat):
            raise InvalidRequestError(f"flattened_tensor {fault}.")
        if flat.dim() != 1 or not isinstance(entries, (list, tuple)):
            raise InvalidRequestError(
                "a flattened bucket needs a flattened_tensor of one axis, and a list as metadata."
            )
        found += _parts(flat, entries)
    return found


def _parts(flat: Tensor, entries: Any) -> list[tuple[str, Tensor]]:
    found, at = [], 0
    for entry in entries:
        name, shape, dtype = (_entry(entry, key) for key in ("name", "shape", "dtype"))
        kind = {str(known): known for known in FLOATS}.get(f"torch.{str(dtype).removeprefix('torch.')}")
        sizes = shape if isinstance(shape, (list, tuple)) else [None]
        if not isinstance(name, str) or kind is None or not all(type(size) is int and size >= 0 for size in sizes):
            raise InvalidRequestError(
                f"metadata of a flattened bucket: got name {name!r:.80}, {shape!r:.80}, {dtype!r}."
            )
        if flat.dtype not in (torch.uint8, kind):
            raise InvalidRequestError(f"tensor {name!r} is {kind}, but the flattened_tensor is {flat.dtype}.")
        count = math.prod(shape) * (kind.itemsize if flat.dtype == torch.uint8 else 1)
        if at + count > len(flat):
            raise InvalidRequestError(f"the flattened_tensor ends within tensor {name!r}, at {len(flat)} elements.")
        part = flat[at : at + count].clone() if flat.dtype == torch.uint8 else flat[at : at + count]
        found.append((name, part.view(kind).reshape(tuple(shape))))
        at += count
    if at != len(flat):
        raise InvalidRequestError(f"the flattened_tensor has {len(flat)} elements, and the metadata names {at}.")
    return found


def _entry(values: Any, name: str) -> Any:
    found = values.get(name) if isinstance(values, dict) else getattr(values, name, None)
    if found is None:
        raise InvalidRequestError(f"a flattened bucket needs {name!r}, got {type(values).__name__}.")
    return found


def check(
    spec: ModelSpec, places: dict[str, Place], fused: dict[str, tuple[str, ...]],
    tensors: Iterable[tuple[str, Tensor]], seen: set[str],
) -> list[Change]:  # fmt: skip
    """What the tensors change, in the live dtypes. Errors: InvalidRequestError with every problem, one a line. `seen`
    are names that came before in the same update. A tied output head is returned too: see `settle_head`."""
    problems: list[str] = []
    changes: list[Change] = []
    names, rename = set(seen), models.lookup(spec.architecture).rename
    ours = ((rename(spec, name), tensor) for name, tensor in tensors)
    for name, tensor in _split_fused(((name, tensor) for name, tensor in ours if name), fused, places):
        tied = spec.tie_embeddings and name == HEAD
        place = places.get(EMBEDDING if tied else name)
        if name in names:
            problems.append(f"tensor {name!r} is given twice")
        elif name.endswith(HARMLESS) or (name == HEAD and not spec.generates):
            continue
        elif place is None:
            problems.append(f"tensor {name!r} is not part of this {spec.architecture}")
        elif fault := _fault(tensor, place):
            problems.append(f"tensor {name!r}: {fault}")
        else:
            converted = tensor.detach().to(place.leaf.dtype)
            if finite(converted):
                changes.append(Change(name, place, converted))
            else:
                problems.append(f"tensor {name!r} holds NaN or infinite values (as {place.leaf.dtype})")
        names.add(name)
    if problems:
        raise InvalidRequestError(f"the weights were refused and nothing was changed:{listed(problems)}")
    return changes


def _split_fused(
    tensors: Iterable[tuple[str, Tensor]], fused: dict[str, tuple[str, ...]], places: dict[str, Place]
) -> Iterable[tuple[str, Tensor]]:
    """A tensor under a fused name becomes its parts, if it has their rows; a decoder's own names get "model."."""
    for name, tensor in tensors:
        if name not in places and f"model.{name}" in places:
            name = f"model.{name}"
        rows = [places[part].shape[0] for part in fused.get(name, ()) if part in places]
        if rows and unreadable(tensor):
            yield fused[name][0], tensor  # what cannot be split is refused in the name of the first part
        elif not rows or not tensor.dim() or tensor.shape[0] != sum(rows):
            yield name, tensor
        else:
            yield from zip(fused[name], tensor.split(rows), strict=True)


def unreadable(tensor: Any) -> str | None:
    if isinstance(tensor, Unsent):
        return tensor.why
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        hint = " (give full_tensor())" if hasattr(tensor, "full_tensor") else ""
        return f"must be a torch.Tensor, got {type(tensor).__name__}{hint}"
    if tensor.is_nested:
        return "must be one dense tensor, got a nested one (give its parts by their names)"
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return f"must be a dense tensor with values, got layout {tensor.layout} on {tensor.device}"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "its memory has been released (give the whole, gathered parameter)"
    return None


def unfit(tensor: Any) -> str | None:
    """As `unreadable`, of weights."""
    dtype = getattr(tensor, "dtype", None)
    wrong = f"dtype {dtype} is not supported; use float32, bfloat16 or float16"
    return unreadable(tensor) or (None if dtype in FLOATS else wrong)


def _fault(tensor: Any, place: Place) -> str | None:
    if why := unfit(tensor):
        return why
    differs = tuple(tensor.shape) != place.shape
    return f"expected shape {list(place.shape)}, got {list(tensor.shape)}" if differs else None


def finite(tensor: Tensor) -> bool:
    """Whether every value is; without temporaries of the tensor's size. Pure."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low) and math.isfinite(high)


def settle_head(spec: ModelSpec, changes: list[Change], live: Callable[[], Tensor | None]) -> list[Change]:
    """The changes without a tied output head, which must be the embedding that will be in force: a new one, or what
    `live` gives. Pure. Errors: InvalidRequestError, and those of `live`."""
    heads = [change.tensor for change in changes if spec.tie_embeddings and change.name == HEAD]
    if not heads:
        return changes
    others = [change for change in changes if change.name != HEAD]
    embedding = next((change.tensor for change in others if change.name == EMBEDDING), None)
    embedding = live() if embedding is None else embedding
    if embedding is None or not torch.equal(heads[0].cpu(), embedding.cpu()):
        raise InvalidRequestError(
            f"the weights were refused and nothing was changed: this model ties its embeddings, but {HEAD!r} "
            f"differs from {EMBEDDING!r}; give both, equal, or the embedding alone."
        )
    return others


def read_directory(
    directory: Path, told: ModelSpec, spec: ModelSpec, names: Collection[str]
) -> list[tuple[str, Tensor]]:
    """All tensors of a checkpoint of the model that runs, `names` among them, in CPU memory. `told` is what the running
    model's own config.json said; the directory's must say the same. Errors: ModelLoadError and its kinds; a file that
    changes meanwhile is one."""
    found = read_spec(directory)
    if found != told:
        differ = [
            f"{f.name} is {getattr(found, f.name)!r}, {getattr(told, f.name)!r} runs"
            for f in fields(ModelSpec)
            if getattr(found, f.name) != getattr(told, f.name)
        ]
        raise CorruptCheckpointError(f"{directory} is another model than the one that runs: {'; '.join(differ)}.")
    entries = read_entries(directory, spec)
    check_entries(directory, spec, models.lookup(spec.architecture).weights(spec), entries, mixed=True)
    absent = sorted(set(names) - entries.keys())
    if absent:
        raise CorruptCheckpointError(f"{directory} lacks tensor {absent[0]!r}, which the model that runs has.")
    with reading(entries) as read:
        tensors = {name: read(name) for name in entries if not name.endswith(HARMLESS)}
    if spec.generates and spec.tie_embeddings and HEAD in tensors:
        check_tied(tensors.pop(HEAD), tensors[EMBEDDING])
    return list(tensors.items())


def read_spec(directory: Path) -> ModelSpec:
    """The architecture that a directory holds. Errors: ModelLoadError and its kinds."""
    return spec_from_config(read_config(directory))
