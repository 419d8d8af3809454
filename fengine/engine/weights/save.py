"""The live weights as a checkpoint directory: safetensors shards, their index, config and tokenizer files."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fengine.core.scalars import told
from fengine.engine.weights.live import LiveWeights
from fengine.errors import InvalidRequestError, ModelLoadError, StorageError
from fengine.worker.checkpoint_checks import read_entries
from fengine.worker.safetensors_file import INDEX, read_config

SHARD_BYTES = 5 << 30
PATTERN = "model-rank-{rank}-part-{part}.safetensors"  # SGLang's
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # files that belong to a model and hold no weights


def checked(path: Any, pattern: Any, max_size: Any) -> tuple[Path, int]:
    """The folder to write, and the most bytes of a shard. Errors: InvalidRequestError."""
    folder, most = _checked_folder(path), SHARD_BYTES if max_size is None else max_size
    if type(most) is not int or most < 1:
        raise InvalidRequestError(f"max_size must be a number of bytes of at least 1, got {told(max_size)}.")
    _shard_name(PATTERN if pattern is None else pattern, 0)
    return folder, most


def save_weights(
    live: LiveWeights, read: Callable[[str], Tensor | None], model_dir: Path, overrides: str, path: Any,
    pattern: Any = None, max_size: Any = None,
) -> None:  # fmt: skip
    """Writes every tensor under its checkpoint name, in shards of at most `max_size` bytes.
    `pattern` names a shard by `part` (and `rank`, which is 0). One shard at a time is in CPU memory. Errors:
    InvalidRequestError, StorageError, MemoryReleasedError, EngineClosedError, EngineDeadError."""
    live.refuse_few_bits("saved")
    folder, most = checked(path, pattern, max_size)
    shards = [(_shard_name(PATTERN if pattern is None else pattern, part), names)
              for part, names in enumerate(_shards(live, most))]  # fmt: skip
    index, theirs, total = dict[str, str](), _stored_names(live, model_dir), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, names in shards:
            tensors = {theirs.get(name, name): tensor for name in names if (tensor := read(name)) is not None}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
            index |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        _copy_beside(model_dir, folder)
        (folder / "config.json").write_text(json.dumps(read_config(model_dir, overrides), indent=2))
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _stored_names(live: LiveWeights, model_dir: Path) -> dict[str, str]:
    """What the files of the model call its tensors, by our names; dummy weights have none."""
    try:
        return {entry.name: entry.stored for entry in read_entries(model_dir, live.spec).values()}
    except ModelLoadError:
        return {}


def _checked_folder(path: Any) -> Path:
    if not isinstance(path, (str, Path)) or str(path)[:1] in ("", "~") or not str(path).isprintable():
        raise InvalidRequestError(f"path must be a folder, without ~, got {told(path)}.")
    folder = Path(path)
    if os.path.isdir(folder) and any(folder.glob("*.safetensors*")):
        raise InvalidRequestError(f"{folder} holds weights already; name an empty folder.")
    return folder


def _shard_name(pattern: Any, part: int) -> str:
    """Errors: InvalidRequestError for a pattern that names no file, or one file for all parts."""
    try:
        name = pattern.format(rank=0, part=part)
        again = pattern.format(rank=0, part=part + 1)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"pattern must be a text with {{part}}, got {told(pattern)}: {error}") from None
    if name == again or Path(name).name != name or not name.isprintable() or not name.endswith(".safetensors"):
        raise InvalidRequestError(f"pattern must name .safetensors files by {{part}}, got {told(pattern)}.")
    return name


def _shards(live: LiveWeights, most: int) -> list[list[str]]:
    """Tensor names in shards of at most `most` bytes; a larger tensor has one of its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, place in live.places.items():
        count = place.leaf.itemsize * math.prod(place.shape)
        if shards[-1] and size + count > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards


def _copy_beside(model_dir: Path, folder: Path) -> None:
    """Copies what a model directory holds besides its weights: config, tokenizer, templates, pooling."""
    for source in sorted(model_dir.rglob("*")):
        if source.suffix in BESIDE and not source.name.endswith(".index.json") and source.is_file():
            target = folder / source.relative_to(model_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
