"""What a run's results depend on, written down, compared before a run goes on, and hashed. No torch. `identity` holds
all that a bit of `outputs.jsonl` can depend on; two runs of equal identity have equal files. Machine names, times and
the command's words are kept beside it, for readers, and never compared."""

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fengine
from fengine.config import check_adapter
from fengine.errors import ResumeMismatchError, StorageError
from fengine.eval.cli.schema import Point, flat
from fengine.eval.runs import provenance
from fengine.eval.runs.config import FREE, OF_A_PART, EvalConfig
from fengine.eval.runs.index import RowIndex
from fengine.eval.runs.provenance import adapter_digests, canonical, code_digest, cpu_name, model_digests
from fengine.eval.tasks.task import Task

SCHEMA = 1
CODE = ("code_sha256: ", "versions.fengine: ")  # lines of `differences` about fengine's own sources
SEED_PLAN = "the first 8 bytes of SHA-256 of the JSON [run seed, row id, sample index], big-endian, shifted right by 1"
COMPUTING = ("torch", "triton", "tokenizers", "numpy")
PIXELS = ("transformers", "pillow")
# What a process's environment says to the libraries that compute. Values of other variables are nobody's business.
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CC")
PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TRITON_", "NVIDIA_TF32", "FENGINE_")


# What an engine of Python may have been given, or called, that no config tells; and its value where it was not.
ARGUMENTS: dict[str, Any] = dict.fromkeys(
    ("preferred_sampling_params", "chat_template", "hf_chat_template_name", "default_chat_template_kwargs",
     "constrained_json_whitespace_pattern")
) | {"constrained_json_disable_any_whitespace": False, "weight_version": "default"}  # fmt: skip


def row_seed(run_seed: int, row_id: str, sample: int) -> int:
    """The seed of one sample of one row: `SEED_PLAN`. Whatever the order, whichever process. Pure."""
    text = json.dumps([run_seed, row_id, sample], separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def settings(config: EvalConfig) -> dict[str, Any]:
    """The resolved config, flat, without the keys that no result depends on. Pure."""
    values = flat(config) | dict.fromkeys(OF_A_PART)
    return {key: value for key, value in values.items() if key.partition(".")[0] not in FREE}


def identity(config: EvalConfig, task: Task, rows: RowIndex) -> dict[str, Any]:
    """All that can be known before a model is loaded. Errors: StorageError if a file of the model cannot be read."""
    values, shown = settings(config), getattr(task, "shown", "")
    return {
        "config": values,
        "config_sha256": canonical(values),
        "task": {"name": task.name, "version": task.version},
        "input": rows.as_dict(),
        **({"examples_sha256": canonical(shown)} if shown else {}),
        "seeds": {"run_seed": config.seed, "plan": SEED_PLAN},
        "versions": versions(config.task.images is not None),
        "code_sha256": code_digest(),
        "model": model_digests(config.engine.model),
        **({"adapters": adapter_digests(config.engine.lora)} if config.engine.lora.paths else {}),
    }


def in_force(engine: Any, adapter: str | None = None) -> dict[str, Any]:
    """What an open engine adds: every "auto" resolved, how many tokens of input it takes, what it computes on; and, of
    one from Python, what it was given beside its config, and where its weights, and the `adapter` of all rows, are from
    if they came after its start."""
    config, device, info = engine.config, engine.config.model.device, engine.get_server_info()
    given = {name: info[name] for name, plain in ARGUMENTS.items() if info.get(name, plain) != plain}
    loaded, updated = bool(check_adapter(adapter, config.lora)), _updated_weights(engine)
    return {
        "engine": flat(config) | dict.fromkeys(OF_A_PART),
        **({"arguments": given} if given else {}),
        **({"updated_weights": updated} if updated else {}),
        **({"adapter": {"name": adapter, "sha256": engine._parts.adapters.digests()[adapter]}} if loaded else {}),
        "max_input": int(info["max_req_input_len"]),
        "numerics": config.numerics.value,
        "schedules": "the tables of code_sha256; of library calls, those proved bit for bit on this GPU",
        "hardware": {"device": device, "cpu": cpu_name(), **provenance.gpu(device)},
    }


def _updated_weights(engine: Any) -> dict[str, Any]:
    """Of the directory that an engine's weights were read from after its start, file → SHA-256; and how many updates
    have come from no files since. {} where it computes with those that it was started with."""
    parts: Any = getattr(engine, "_parts", None)
    if parts is None:  # an engine of a test
        return {}
    directory, writes = parts.weights.source()
    others = None if directory in (None, str(parts.model_dir)) else Path(directory)
    found = {} if others is None else {"files": provenance.file_digests(others)}
    return found | ({"updates_from_memory": writes} if writes else {})


def refuse_differences(
    found: dict[str, Any], wanted: dict[str, Any], folder: Path, *, allow_code_change: bool = False
) -> None:
    """Errors: ResumeMismatchError that names every key in which a run's record and this command differ."""
    lines = differences(found, wanted)
    of_code = [line for line in lines if line.startswith(CODE)]
    if allow_code_change:
        lines = [line for line in lines if line not in of_code]
    if lines:
        code = "\nresume.allow_code_change=true goes on all the same, and the manifest tells of it;"
        raise ResumeMismatchError(
            f"{folder} holds a run of something else (recorded → now):\n{listed(lines)}"
            f"{code if lines == of_code else ''}\nput that back to go on with it, or choose another out=DIR"
        )


def listed(lines: Sequence[str]) -> str:
    """Differences below one another, of many the first 20. Pure."""
    more = [f"and {len(lines) - 20} more"] if len(lines) > 20 else []
    return "\n".join(f"  {line}" for line in [*lines[:20], *more])


def completed(known: dict[str, Any], config: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """What was recorded, with the keys that settings have got since: its mapping `config` lacks them. Pure."""
    recorded = known.get(config)
    return known | {config: defaults | recorded} if isinstance(recorded, dict) else known


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Lines "key: old → new", for every leaf in which two mappings differ, but the digest of the config and
    versions of packages that compute nothing. Pure."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return [] if found == wanted else [f"{name}: {_short(found)} → {_short(wanted)}"]
    lines = []
    for key in [*found, *(key for key in wanted if key not in found)]:
        if key != "config_sha256" and (name != "versions" or key in ("fengine", *COMPUTING)):
            inner = key if name in ("", "config") else f"{name}.{key}"
            lines += differences(found.get(key), wanted.get(key), inner)
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def surroundings() -> dict[str, Any]:
    """Where a run took place: not compared, since results do not depend on it."""
    packages = sorted(f"{name}=={version}" for name, version in provenance.packages().values())
    named = {k: v for k, v in sorted(os.environ.items()) if k in VARIABLES or k.startswith(PREFIXES)}
    kept = {k: v for k, v in named.items() if "KEY" not in k}  # of a server: secrets
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "environment": kept,
        "packages_sha256": canonical(packages),
        "packages": packages,
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def session(argv: Iterable[str], started: str) -> dict[str, Any]:
    """One process that worked on a run."""
    told = {"pid": os.getpid(), "host": platform.node(), "argv": list(argv), "cwd": os.getcwd()}
    return told | {"git": provenance.checkout(), "code_sha256": code_digest(), "started": started, "ended": None}


def versions(images: bool = False) -> dict[str, str | None]:
    """Of fengine and the libraries that compute, or that make the pixels of `images`."""
    there, names = provenance.packages(), (*COMPUTING, *(PIXELS if images else ()))
    return {"fengine": fengine.__version__} | {name: there[name][1] if name in there else None for name in names}


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
    parts = {"in_force": manifest.get("in_force", 0), "model": found.get("model")}
    parts |= {name: manifest.get(name) for name in ("origin", "result")}
    wrong = {name: value for name, value in parts.items() if not isinstance(value, dict | None)}
    wrong |= {name: found.get(name) for name in ("config", "task", "input") if not isinstance(found.get(name), dict)}
    sessions, result = manifest.get("sessions"), manifest.get("result")
    if isinstance(result, dict) and type(size := result.get("journal_bytes", 0)) is not int:
        wrong["result.journal_bytes"] = size
    if not isinstance(sessions, list) or not all(isinstance(one, dict) for one in sessions):
        wrong["sessions"] = sessions
    for name, value in wrong.items():
        raise StorageError(f"{folder}/manifest.json is damaged: {name} is {value!r:.40}; restore it")
    return found
