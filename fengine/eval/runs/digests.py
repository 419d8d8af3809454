"""SHA-256 of what a run's results depend on: fengine's sources, a model's files, values. No torch."""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import fengine
from fengine.config import LoraConfig, ModelConfig
from fengine.errors import CacheSecurityError, ConfigError, StorageError
from fengine.ops.compiler import private_cache_dir

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")


def canonical(value: Any) -> str:
    """SHA-256 of a value's JSON with sorted keys and no blanks. Pure."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache  # the code that this process runs is that of its beginning
def code_digest() -> str:
    """SHA-256 over fengine's own sources: models, kernels and their schedules."""
    root, whole = Path(fengine.__file__).parent, hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".h", ".cpp")):
        whole.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def local_directory(path: str) -> Path | None:
    """Where a model's files are, if that is known without asking the hub: the box, or a directory."""
    directory = Path(fengine.__file__).parent / "models" / "box" if path == "box" else Path(path).expanduser()
    return directory if directory.is_dir() else None


def model_digests(config: ModelConfig) -> dict[str, Any]:
    """File → SHA-256: weights, config, tokenizer, chat template. A hub id stands for itself with its revision.

    Errors: StorageError.
    """
    digests: dict[str, Any] = {"path": config.path, "revision": config.revision}
    for part, path in (("files", config.path), ("tokenizer_files", config.tokenizer_path)):
        directory = None if path is None else local_directory(path)
        if directory is not None:
            digests[part] = file_digests(directory)
    return digests


def adapter_digests(config: LoraConfig) -> dict[str, Any]:
    """By name: an adapter's path, and file → SHA-256. A hub id stands for itself. Errors: StorageError."""
    digests: dict[str, Any] = {}
    for name, path in config.named():
        directory = local_directory(path)
        digests[name] = {"path": path} | ({} if directory is None else {"files": file_digests(directory)})
    return digests


def file_digests(directory: Path) -> dict[str, str | None]:
    """SHA-256 of every file that a model is read from, and of its chat template's text. Errors: StorageError."""
    memory = _DigestCache()
    digests: dict[str, str | None] = {p.name: memory.sha256(p) for p in model_files(directory)}
    memory.save()
    return digests | {"chat template": _template_digest(directory)}


def has_chat_template(directory: Path) -> bool:
    return _template_digest(directory) is not None


def _template_digest(directory: Path) -> str | None:
    """None if there is no template in its usual places."""
    try:
        path = directory / "chat_template.jinja"
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        found = json.loads((directory / "tokenizer_config.json").read_bytes()).get("chat_template")
        return None if found is None else canonical(found)
    except (OSError, ValueError, AttributeError):
        return None


def model_files(directory: Path) -> list[Path]:
    """The files that a model is read from. Pure but for the directory."""
    return sorted({p for pattern in MODEL_FILES for p in directory.glob(pattern)})


class _DigestCache:
    """SHA-256 of files, kept by path, size and times of change in the user's own cache directory."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._known: dict[str, list[Any]] = {}
        self._new = False
        try:
            self._path = private_cache_dir() / "sha256.json"
            known = json.loads(self._path.read_bytes())
            self._known = known if isinstance(known, dict) else {}
        except (OSError, ValueError, CacheSecurityError, ConfigError):
            return  # without it the files are read

    def sha256(self, path: Path) -> str:
        """Errors: StorageError."""
        try:
            info = path.stat()
            key, facts = str(path.resolve()), [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
            kept = self._known.get(key)
            if isinstance(kept, list) and kept[:-1] == facts and isinstance(kept[-1], str):
                return kept[-1]
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        self._known[key] = [*facts, digest]
        self._new = True
        return digest

    def save(self) -> None:
        """Where that fails, the files are read again next time."""
        if self._path is None or not self._new:
            return
        partial = self._path.with_name(f".sha256-{os.getpid()}.tmp")
        try:
            partial.write_text(json.dumps(dict(list(self._known.items())[-10_000:])))
            os.replace(partial, self._path)
        except OSError:
            return
