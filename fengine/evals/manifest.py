"""What a run's results depend on, written down, compared before a run goes on, and hashed. No torch.

`identity` holds all that a bit of `outputs.jsonl` can depend on; two runs of equal identity have equal files. Machine
names, times and the command's words are kept beside it, for readers, and never compared.
"""

import functools
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import fengine
from fengine.config import EngineConfig, LoraConfig, ModelConfig
from fengine.errors import CacheSecurityError, ConfigError, ResumeMismatchError, StorageError
from fengine.evals import machine
from fengine.evals.config import FREE, EvalConfig, flat
from fengine.evals.resume import Survey
from fengine.evals.task import Task
from fengine.ops.compiler import private_cache_dir
from fengine.runs.config import Point

SCHEMA = 1
CODE = ("code_sha256: ", "versions.fengine: ")  # lines of `differences` about fengine's own sources
SEED_PLAN = "the first 8 bytes of SHA-256 of the JSON [run seed, row id, sample index], big-endian, shifted right by 1"
COMPUTING = ("torch", "triton", "transformers", "tokenizers", "numpy")
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt")
# What a process's environment says to the libraries that compute. Values of other variables are nobody's business.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CC")
PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TRITON_", "NVIDIA_TF32", "FENGINE_")


def row_seed(run_seed: int, row_id: str, sample: int) -> int:
    """The seed of one sample of one row: `SEED_PLAN`. Whatever the order, whichever process. Pure."""
    text = json.dumps([run_seed, row_id, sample], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def canonical(value: Any) -> str:
    """SHA-256 of a value's JSON with sorted keys and no blanks. Pure."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def settings(config: EvalConfig) -> dict[str, Any]:
    """The resolved config, flat, without the keys that no result depends on. Pure."""
    return {key: value for key, value in flat(config).items() if key.partition(".")[0] not in FREE}


def identity(config: EvalConfig, task: Task, rows: Survey) -> dict[str, Any]:
    """All that can be known before a model is loaded. Errors: StorageError if a file of the model cannot be read."""
    values = settings(config)
    return {
        "config": values,
        "config_sha256": canonical(values),
        "task": {"name": task.name, "version": task.version},
        "input": rows.as_dict(),
        "seeds": {"run_seed": config.seed, "plan": SEED_PLAN},
        "versions": versions(),
        "code_sha256": code_digest(),
        "model": model_digests(config.model),
        **({"adapters": adapter_digests(config.lora)} if config.lora.paths else {}),
    }


def in_force(engine: EngineConfig, max_input: int) -> dict[str, Any]:
    """What an open engine adds: every "auto" resolved, how many tokens of input it takes, what it computes on."""
    device = engine.model.device
    return {
        "engine": flat(engine),
        "max_input": max_input,
        "numerics": engine.numerics.value,
        "schedules": "the tables of code_sha256; of library calls, those proved bit for bit on this GPU",
        "hardware": {"device": device, "cpu": cpu_name(), **machine.gpu(device)},
    }


def refuse_differences(
    found: dict[str, Any], wanted: dict[str, Any], folder: Path, *, allow_code_change: bool = False
) -> None:
    """Errors: ResumeMismatchError that names every key in which a run's record and this command differ."""
    lines = differences(found, wanted)
    of_code = [line for line in lines if line.startswith(CODE)]
    if allow_code_change:
        lines = [line for line in lines if line not in of_code]
    if lines:
        more = f"\n  and {len(lines) - 20} more" if len(lines) > 20 else ""
        if lines == of_code:
            more += "\nresume.allow_code_change=true goes on all the same, and the manifest tells of it;"
        raise ResumeMismatchError(
            f"{folder} holds a run of something else (recorded → now):\n"
            + "\n".join(f"  {line}" for line in lines[:20])
            + more
            + "\nput that back to go on with it, or choose another out=DIR"
        )


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Lines "key: old → new", for every leaf in which two mappings differ, but the digest of the config. Pure."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return [] if found == wanted else [f"{name}: {_short(found)} → {_short(wanted)}"]
    lines = []
    for key in [*found, *(key for key in wanted if key not in found)]:
        if key != "config_sha256":
            inner = key if name in ("", "config") else f"{name}.{key}"
            lines += differences(found.get(key), wanted.get(key), inner)
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


# -- files -------------------------------------------------------------------------------------------------------------


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


# -- for readers -------------------------------------------------------------------------------------------------------


def surroundings() -> dict[str, Any]:
    """Where a run took place: not compared, since results do not depend on it."""
    packages = list(_packages())
    kept = {k: v for k, v in sorted(os.environ.items()) if k in VARIABLES or k.startswith(PREFIXES)}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "environment": kept,
        "packages_sha256": canonical(packages),
        "packages": packages,
    }


@functools.cache  # they are read from some hundred files
def _packages() -> tuple[str, ...]:
    return tuple(sorted({f"{d.name}=={d.version}" for d in distributions() if d.name}))


def session(argv: Iterable[str], started: str) -> dict[str, Any]:
    """One process that worked on a run."""
    told = {"pid": os.getpid(), "host": platform.node(), "argv": list(argv), "cwd": os.getcwd()}
    return told | {"git": machine.checkout(), "code_sha256": code_digest(), "started": started, "ended": None}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        found = ""
    return found or platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """Of fengine and the libraries that compute."""
    return {"fengine": fengine.__version__, **{name: _version(name) for name in COMPUTING}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def origin(point: Point, base: Path) -> dict[str, Any]:
    """A new run's name, and what was said to have it: with the config that is enough to run it again."""
    return {
        "run_id": uuid.uuid4().hex,
        "overrides": list(point.overrides),
        "choices": dict(point.choices),
        "swept": list(point.swept),
        "base": str(base),  # what a relative task.data is under
    }


def record(what: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A new manifest; `said` is its `origin`. Pure but for what it reads of the machine."""
    head = {"fengine_manifest": SCHEMA, "identity": what, "in_force": None, "sessions": [], "result": None}
    return head | {"origin": said, "surroundings": surroundings()}


def recorded(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The identity in a manifest that was read. Errors: ResumeMismatchError if it is not one of this version;
    StorageError if what stands beside the identity is not what fengine writes."""
    found = manifest.get("identity")
    if manifest.get("fengine_manifest") != SCHEMA or not isinstance(found, dict):
        raise ResumeMismatchError(f"{folder}/manifest.json is of another version of fengine; choose another out=DIR")
    wrong = [name for name in ("in_force", "origin", "result") if not isinstance(manifest.get(name), dict | None)]
    wrong += ["in_force"] * ("in_force" not in manifest)
    sessions = manifest.get("sessions")
    if not isinstance(sessions, list) or not all(isinstance(one, dict) for one in sessions):
        wrong.append("sessions")
    if wrong:
        raise StorageError(
            f"{folder}/manifest.json is damaged: {wrong[0]} is {manifest.get(wrong[0])!r:.40}; restore it"
        )
    return found
