"""Checkpoint files that may be damaged or hostile: strict JSON, the index of shards, and safetensors files. The library
`safetensors` checks a header in full before any memory for tensors is taken, and reads tensors. It reads with pread(2)
and maps nothing, so a file that shrinks meanwhile is an error message and not a crash."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fengine.core.files import MAX_JSON_BYTES, open_regular, read_file, read_from
from fengine.core.json_text import json_object, parse_json
from fengine.errors import CorruptCheckpointError, ModelLoadError, StorageError, UnsupportedFormatError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NEVER_OPENED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".h5", ".msgpack", ".npz")
MAX_TENSORS = 100_000
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of weights that are stored whole
CODES = {
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """A tensor of a safetensors file."""

    path: Path
    name: str
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    stored: str  # its name in the file


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON object, or list, from a file. Errors: ModelLoadError (missing), CorruptCheckpointError."""
    data = read_file(path)
    if not data.strip():
        raise CorruptCheckpointError(f"{path} is empty; download the checkpoint again.")
    return parse_json_of(data, str(path), kind)


def parse_json_of(data: bytes, what: str, kind: type = dict) -> Any:
    """Strict JSON: UTF-8 without BOM, one value, no duplicate keys, no NaN. Errors: CorruptCheckpointError."""
    try:
        value = parse_json(data.decode())
    except ValueError as error:  # of UTF-8, too
        raise CorruptCheckpointError(f"{what}: not usable JSON, {error}.") from None
    if not isinstance(value, kind):
        wanted = "a JSON object" if kind is dict else "a list"
        raise CorruptCheckpointError(f"{what}: expected {wanted}, got {type(value).__name__}.")
    return value


def read_config(directory: Path, overrides: str = "") -> dict[str, Any]:
    """`config.json`, parsed strictly, with the values of the JSON object `overrides` over its own. Errors:
    ModelLoadError, ConfigError; UnsupportedFormatError with only other weights."""
    if not directory.is_dir():
        kind = "is not a directory" if directory.exists() else "does not exist"
        raise ModelLoadError(f"model directory {directory} {kind}.")
    if not os.path.lexists(directory / "config.json"):
        if (directory / "adapter_config.json").is_file():
            raise ModelLoadError(f"{directory} is a LoRA adapter: load its base model, and this one by lora_paths.")
        refuse_other_formats(directory)
        raise ModelLoadError(
            f"{directory} holds {listing(directory)}; a model directory needs config.json and {SINGLE} (or {INDEX})."
        )
    refuse_quantization_file(directory / "hf_quant_config.json")
    return read_json(directory / "config.json") | json_object("model.json_overrides", overrides)


def refuse_quantization_file(path: Path) -> None:
    """ModelOpt writes one beside config.json. Errors: UnsupportedFormatError if it names a quantization."""
    told = read_json(path).get("quantization") if os.path.lexists(path) else None
    for key, value in (told or {}).items():
        if key.endswith("quant_algo") and value:
            raise UnsupportedFormatError(f"{path} names {key} {value!r}: quantized weights are not supported.")


def read_shards(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of a directory's weight files by name. Errors: ModelLoadError (no weights, a missing shard),
    UnsupportedFormatError, CorruptCheckpointError."""
    single, index = directory / SINGLE, directory / INDEX
    if os.path.lexists(single):
        return {entry.name: entry for entry in read_header(single)}
    if not os.path.lexists(index):
        refuse_other_formats(directory)
        raise ModelLoadError(
            f"{directory} has no weights: looked for {SINGLE} and {INDEX}; it holds {listing(directory)}."
        )
    shards = _read_index(index)
    entries: dict[str, TensorEntry] = {}
    for file in sorted(set(shards.values())):
        for entry in read_header(directory / file):
            if shards.get(entry.name) != file:
                owner = f"{shards[entry.name]!r}" if entry.name in shards else "no file"
                raise CorruptCheckpointError(
                    f"{directory / file} holds tensor {entry.name!r}, which {INDEX} places in {owner}."
                )
            entries[entry.name] = entry
    absent = sorted(shards.keys() - entries.keys())
    if absent:
        raise CorruptCheckpointError(
            f"{index} places tensor {absent[0]!r} in {shards[absent[0]]!r}, which does not hold it."
        )
    return entries


def _read_index(index: Path) -> dict[str, str]:
    """The index's map from tensor to file; all files exist and lie beside it."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CorruptCheckpointError(f"{index}: weight_map must be an object from tensor names to file names.")
    for name, file in shards.items():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise CorruptCheckpointError(
                f"{index}: {name!r} is placed in {file!r}, which is not a .safetensors file beside it."
            )
    absent = [file for file in sorted(set(shards.values())) if not (index.parent / file).exists()]
    if absent:
        raise ModelLoadError(
            f"{index.parent} lacks {len(absent)} of {len(set(shards.values()))} shards named by {INDEX}: "
            f"{', '.join(absent[:5])}; download the checkpoint again."
        )
    return shards


def read_header(path: Path) -> list[TensorEntry]:
    """Every tensor of a safetensors file, in the order of its bytes. Errors: ModelLoadError, CorruptCheckpointError."""
    with open_regular(path) as file:  # before the library: it knows neither these limits nor duplicate keys
        length = int.from_bytes(read_from(file, path, 8), "little")
        if not 2 <= length <= MAX_JSON_BYTES:
            raise CorruptCheckpointError(
                f"{path} is truncated or no safetensors file: its header has {length} bytes, not 2 to {MAX_JSON_BYTES}."
            )
        header = parse_json_of(read_from(file, path, length), f"header of {path}")
    if len(header) > MAX_TENSORS:
        raise CorruptCheckpointError(f"{path} names {len(header)} tensors; at most {MAX_TENSORS} are read.")
    names = open_file(path).offset_keys()
    return [TensorEntry(path, n, header[n]["dtype"], tuple(header[n]["shape"]), n) for n in names]


def open_file(path: Path) -> safe_open:
    """A safetensors file with a valid header. Errors: ModelLoadError, CorruptCheckpointError."""
    open_regular(path).close()
    try:
        return safe_open(path, "pt", backend="pread")
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{path} is truncated or no safetensors file, {error}; download again.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from None


def read_tensor(file: safe_open, entry: TensorEntry, rows: slice | None = None, axis: int = 0) -> Tensor:
    """The tensor of `entry`, or some rows of an axis and no others, on the CPU, in its stored dtype (of DTYPES or
    CODES). Errors: ModelLoadError and kinds."""
    try:
        if rows is None:
            tensor = file.get_tensor(entry.stored)
        else:  # the library refuses no rows at the end
            before, some = (slice(None),) * axis, rows.stop > rows.start
            tensor = file.get_slice(entry.stored)[(*before, rows if some else slice(1))]
            tensor = tensor if some else tensor[(*before, slice(0))]
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{entry.path} changed while it was read: {error}; download it again.") from None
    except OSError as error:
        raise ModelLoadError(f"{entry.path} cannot be read: {error}.") from None
    shape = entry.shape
    if rows is not None:
        shape = (*shape[:axis], rows.stop - rows.start, *shape[axis + 1 :])
    if tuple(tensor.shape) != shape or tensor.dtype != (DTYPES | CODES).get(entry.dtype):
        raise CorruptCheckpointError(f"{entry.path} changed while it was read: tensor {entry.stored!r} is another one.")
    return tensor


@contextmanager
def reading(entries: Mapping[str, TensorEntry]) -> Iterator[Callable[..., Tensor]]:
    """Inside, what reads a tensor by its name, or rows of it; the files are opened once. Errors: as `open_file`,
    `read_tensor`."""
    with ExitStack() as stack:
        files = {path: stack.enter_context(open_file(path)) for path in sorted({e.path for e in entries.values()})}
        yield lambda name, *rows: read_tensor(files[entries[name].path], entries[name], *rows)


def leave_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes them, from any device, into a folder where other processes of this machine read them: those that share
    memory, as tied ones do, each for itself. Errors: StorageError."""
    plain = {name: x.detach().cpu().resolve_neg().contiguous() for name, x in tensors.items()}
    held = Counter(x.untyped_storage().data_ptr() for x in plain.values())
    try:
        save_file({n: x.clone() if held[x.untyped_storage().data_ptr()] > 1 else x for n, x in plain.items()}, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"tensors cannot be written to {path}: {error}; set TMPDIR to a folder with room") from error


def refuse_other_formats(directory: Path) -> None:
    found = sorted(path.name for path in directory.iterdir() if path.suffix in NEVER_OPENED)
    if found:
        raise UnsupportedFormatError(
            f"{directory} has weights only as {', '.join(found[:3])}: pickle-based and GGUF files are never opened. "
            "Convert them to safetensors with transformers' save_pretrained."
        )


def listing(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}" if names else "no files"
