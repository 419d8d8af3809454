"""What a run's results depend on, and where it took place: SHA-256 of sources, files, values; checkout, packages, GPU.
A fact about the place that cannot be had is null; none of these raises. No torch import."""

import functools
import hashlib
import inspect
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import fengine
from fengine.config import LoraConfig, ModelConfig
from fengine.config.schema import PACKAGED
from fengine.errors import CacheSecurityError, ConfigError, StorageError
from fengine.eval.runs.folder import storage_errors, write_file
from fengine.ops.compiler import private_cache_dir

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
GIT_SECONDS = 5.0


def canonical(value: Any) -> str:
    """SHA-256 of a value's JSON with sorted keys and no blanks. Pure."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@functools.cache  # the code that this process runs is that of its beginning
def code_digest() -> str:
    """SHA-256 over fengine's own sources: models, kernels and their schedules."""
    root, whole = Path(fengine.__file__).parent, hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".h", ".cpp")):
        whole.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def source_digest(value: Any) -> str | None:
    """SHA-256 of the source of a value's class; None where there is none, as in a prompt of Python."""
    try:
        return hashlib.sha256(inspect.getsource(type(value)).encode()).hexdigest()
    except (OSError, TypeError):
        return None


def local_directory(path: str) -> Path | None:
    """Where a model's files are, if that is known without asking the hub: in the package, or a directory."""
    directory = PACKAGED.get(path) or Path(path).expanduser()
    return directory if directory.is_dir() else None


def model_digests(config: ModelConfig) -> dict[str, Any]:
    """File → SHA-256: weights, config, tokenizer, chat template. A hub id stands for itself with its revision. Errors:
    StorageError."""
    parts = {"files": config.path, "tokenizer_files": config.tokenizer_path}
    found = {part: local_directory(path) for part, path in parts.items() if path is not None}
    files = {part: file_digests(directory) for part, directory in found.items() if directory is not None}
    return {"path": config.path, "revision": config.revision, **files}


def adapter_digests(config: LoraConfig) -> dict[str, Any]:
    """By name: an adapter's path, and file → SHA-256. A hub id stands for itself. Errors: StorageError."""
    places = [(name, path, local_directory(path)) for name, path in config.named()]
    return {name: {"path": path} | ({"files": file_digests(at)} if at is not None else {}) for name, path, at in places}


def file_digests(directory: Path) -> dict[str, str | None]:
    """SHA-256 of every file that a model is read from, and of its chat template's text. Errors: StorageError."""
    memory, files = _DigestCache(), sorted({p for pattern in MODEL_FILES for p in directory.glob(pattern)})
    digests: dict[str, str | None] = {p.name: memory.sha256(p) for p in files}
    memory.save()
    return digests | {"chat template": template_digest(directory)}


def takes_images(directory: Path) -> bool:
    """Whether it is a model's that has a tower for images."""
    try:
        return "vision_config" in json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def template_digest(directory: Path) -> str | None:
    """None if there is no template in its usual places."""
    try:
        path = directory / "chat_template.jinja"
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        found = json.loads((directory / "tokenizer_config.json").read_bytes()).get("chat_template")
        return None if found is None else canonical(found)
    except (OSError, ValueError, AttributeError):
        return None


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
        with storage_errors(f"{path} cannot be read"):
            info = path.stat()
            key, facts = str(path.resolve()), [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
            kept = self._known.get(key)
            if isinstance(kept, list) and kept[:-1] == facts and isinstance(kept[-1], str):
                return kept[-1]
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._known[key], self._new = [*facts, digest], True
        return digest

    def save(self) -> None:
        """Where that fails, the files are read again next time."""
        if self._path is None or not self._new:
            return
        with suppress(StorageError):
            write_file(self._path, json.dumps(dict(list(self._known.items())[-10_000:])))


@functools.cache  # the code that this process runs is that of its beginning
def checkout() -> dict[str, Any] | None:
    """The git commit of the checkout that fengine runs from, and the SHA-256 of what was changed since, None where
    nothing was. None for an installed fengine, or where git is missing or slow."""
    root = Path(fengine.__file__).resolve().parent.parent
    if not (root / ".git").exists() or not (root / "pyproject.toml").is_file():
        return None
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    if commit is None or status is None:
        return None
    change = _git(root, "diff", "--no-ext-diff", "--no-textconv", "HEAD") if status else None
    digest = hashlib.sha256(status + (change or b"")).hexdigest() if status else None
    return {"commit": commit.decode().strip(), "dirty": bool(status), "change_sha256": digest}


def _git(root: Path, *words: str) -> bytes | None:
    """The words' output. It takes no lock, asks nobody, and runs no program that the repository's config names."""
    calm = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    calm |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    quiet: dict[str, Any] = {"capture_output": True, "check": True, "stdin": subprocess.DEVNULL}
    try:
        return subprocess.run(command, env=calm, timeout=GIT_SECONDS, **quiet).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache  # they are read from some hundred files
def packages() -> dict[str, tuple[str, str]]:
    """What is installed: name and version, by normalised name. Where one is there twice it is the one that is imported.
    Only the head of a file is parsed: behind it there are pages of description."""
    found: dict[str, tuple[str, str]] = {}
    for one in distributions():
        head = (one.read_text("METADATA") or one.read_text("PKG-INFO") or "").partition("\n\n")[0]
        told = {key: value.strip() for key, _, value in (line.partition(":") for line in head.split("\n"))}
        name, version = told.get("Name"), told.get("Version")
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), (name, version))
    return found


def gpu(device: str | None) -> dict[str, Any]:
    """A CUDA device, its driver, and the switches of torch by which float32 sums may lose precision, once torch is
    there. On the CPU: no name."""
    torch = sys.modules.get("torch")
    if torch is None or not (device or "").startswith("cuda"):
        return {"gpu": None}
    facts, matmul = torch.cuda.get_device_properties(device), torch.backends.cuda.matmul
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda,
        "driver": _first_line("/proc/driver/nvidia/version"),
        "tf32": bool(matmul.allow_tf32),
        "bf16_reduced_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def _first_line(path: str, start: str = "") -> str | None:
    """The first line of a file that begins so; None if there is none."""
    try:
        with open(path, encoding="utf-8") as lines:
            return next((line.rstrip("\n") for line in lines if line.startswith(start)), None)
    except OSError:
        return None


def cpu_name() -> str:
    found = (_first_line("/proc/cpuinfo", "model name") or "").partition(":")[2].strip()
    return found or platform.processor() or platform.machine()


def proved(device: str | None) -> dict[str, int] | None:
    """How many schedules were seen to give the reference's bits on this GPU, and how many were turned down."""
    module, torch = sys.modules.get("fengine.ops.proof"), sys.modules.get("torch")
    if module is None or torch is None or not (device or "").startswith("cuda"):
        return None
    index = torch.device(device).index
    known = list(module.proofs(torch.cuda.current_device() if index is None else index).known.values())
    return {"equal": known.count(True), "turned_down": known.count(False)}
