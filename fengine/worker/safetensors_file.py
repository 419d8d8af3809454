"""Reading checkpoint files that may be damaged or hostile: strict JSON, safetensors headers, and tensor bytes.

A header is checked in full before any memory for tensors is taken, in whole Python numbers that cannot overflow. Bytes
are read, not mapped, so a file that shrinks meanwhile is an error message and not a crash. Format:
https://huggingface.co/docs/safetensors#format (8 bytes little-endian header size, JSON header, data).
"""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fengine.errors import CorruptCheckpointError, ModelLoadError, UnsupportedFormatError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NEVER_OPENED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".ggml", ".h5", ".msgpack", ".npz")
MAX_JSON_BYTES = 16 << 20
MAX_TENSORS = 100_000
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # those that are loaded
JSON_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]|-?Infinity|NaN')


class TensorEntry(NamedTuple):
    """Where a tensor lies: bytes [start, stop) of `path`."""

    path: Path
    name: str
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int


def regular_file(path: Path) -> int:
    """The size of a file that can be opened without waiting. Errors: ModelLoadError for anything else."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        dangling = f" (a link to {os.readlink(path)}, which does not exist)" if path.is_symlink() else ""
        raise ModelLoadError(f"{path} is missing{dangling}; download the checkpoint again.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(info.st_mode):
        raise ModelLoadError(f"{path} is not a regular file; a checkpoint consists of regular files or links to them.")
    return info.st_size


def open_file(path: Path) -> BinaryIO:
    """Unbuffered. Errors: ModelLoadError."""
    regular_file(path)
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be opened: {error.strerror}; check its permissions.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Errors: ModelLoadError (missing), CorruptCheckpointError with line and column."""
    size = regular_file(path)
    if size > MAX_JSON_BYTES:
        raise CorruptCheckpointError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read.")
    with open_file(path) as file:
        data = _read_exactly(file, path, 0, size)
    if not data.strip():
        raise CorruptCheckpointError(f"{path} is empty; download the checkpoint again.")
    return parse_object(data, str(path))


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Strict JSON: UTF-8 without BOM, one object, no duplicate keys, no NaN. Errors: CorruptCheckpointError."""

    def corrupt(message: str, text: str, position: int) -> CorruptCheckpointError:
        line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
        return CorruptCheckpointError(f"{what}:{line}:{column}: {message}.")

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{what}: byte {error.start} is not UTF-8.") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise corrupt(f"not valid JSON, {error.msg}", text, error.pos) from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise CorruptCheckpointError(f"{what}: not usable JSON ({type(error).__name__}).") from None
    if not isinstance(value, dict):
        raise corrupt(f"expected a JSON object, got {type(value).__name__}", text, len(text) - len(text.lstrip()))
    if fault := _fault(text):
        raise corrupt(fault[0], text, fault[1])
    return value


def _fault(text: str) -> tuple[str, int] | None:
    """The first duplicate key or NaN in `text`, which is valid to the json module, and its position."""
    keys: list[set[str]] = []
    for token in JSON_TOKEN.finditer(text):
        if token[0] == "{":
            keys.append(set())
        elif token[0] == "}":
            keys.pop()
        elif token[1] is None:
            return f"{token[0]} is not a JSON number", token.start()
        elif token[2] is not None:
            key = json.loads(token[1]) if "\\" in token[1] else token[1][1:-1]
            if key in keys[-1]:
                return f"duplicate key {key!r}", token.start()
            keys[-1].add(key)
    return None


def read_shards(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of a directory's weight files by name.

    Errors: ModelLoadError (no weights, a missing shard), UnsupportedFormatError, CorruptCheckpointError.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() or single.is_symlink():
        return {entry.name: entry for entry in read_header(single)}
    if not index.exists() and not index.is_symlink():
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
    size = regular_file(path)
    with open_file(path) as file:
        length = int.from_bytes(_read_exactly(file, path, 0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
            raise CorruptCheckpointError(
                f"{path} has {size} bytes and a header of {length}; a header takes 2 to {MAX_JSON_BYTES} bytes and "
                "fits into the file. It is truncated or not a safetensors file; download it again."
            )
        header = parse_object(_read_exactly(file, path, 8, length), f"header of {path}")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise CorruptCheckpointError(f"{path} names {len(header)} tensors; at most {MAX_TENSORS} are read.")
    entries = [_entry(path, name, raw, 8 + length) for name, raw in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 8 + length
    for entry in entries:
        if entry.start != end:
            raise CorruptCheckpointError(
                f"{path}: tensor {entry.name!r} starts at byte {entry.start}, the one before ends at {end}; tensors "
                "must follow each other without gap or overlap."
            )
        end = entry.stop
    if end != size:
        raise CorruptCheckpointError(f"{path} has {size} bytes but its header describes {end}; download it again.")
    return entries


def _entry(path: Path, name: str, raw: Any, base: int) -> TensorEntry:
    """One tensor of a header. `base` is where the data begin."""

    def whole(values: Any) -> bool:
        return isinstance(values, list) and len(values) <= 8 and all(type(v) is int and v >= 0 for v in values)

    if not isinstance(raw, dict) or not whole(raw.get("shape")) or not whole(raw.get("data_offsets")):
        raise CorruptCheckpointError(f"{path}: tensor {name!r} lacks a valid shape or data_offsets.")
    if not isinstance(raw.get("dtype"), str) or raw["dtype"] not in BITS:
        raise CorruptCheckpointError(f"{path}: tensor {name!r} has unknown dtype {raw.get('dtype')!r}.")
    shape, offsets = raw["shape"], raw["data_offsets"]
    if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != math.prod(shape) * BITS[raw["dtype"]]:
        raise CorruptCheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {raw['dtype']} does not fill data_offsets {offsets}."
        )
    return TensorEntry(path, name, raw["dtype"], tuple(shape), base + offsets[0], base + offsets[1])


def read_tensor(file: BinaryIO, entry: TensorEntry) -> Tensor:
    """The tensor of `entry` on the CPU, in its stored dtype (one of DTYPES). Errors: CorruptCheckpointError."""
    raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8, device="cpu")
    _read_into(file, entry.path, entry.start, raw.numpy().data)
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)


def _read_exactly(file: BinaryIO, path: Path, start: int, count: int) -> bytes:
    data = bytearray(count)
    _read_into(file, path, start, memoryview(data))
    return bytes(data)


def _read_into(file: BinaryIO, path: Path, start: int, view: memoryview) -> None:
    """Fills `view` from byte `start` on. A raw read may return less than asked for (at most 2 GiB on Linux)."""
    try:
        file.seek(start)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise CorruptCheckpointError(f"{path} ended at byte {start + done} while it was read; download again.")
            done += count
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None


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
