"""Facts about the place of a run: the checkout that the code is from, the packages, the GPU, what was proved on it. No
torch import.

A fact that cannot be had is null; none of these raises.
"""

import functools
import hashlib
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import fengine

GIT_SECONDS = 5.0


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


@functools.cache  # they are read from some hundred files
def packages() -> dict[str, tuple[str, str]]:
    """What is installed: name and version, by normalised name. Where one is there twice it is the one that is imported.

    Only the head of a file is parsed: behind it there are pages of description.
    """
    found: dict[str, tuple[str, str]] = {}
    for one in distributions():
        head = (one.read_text("METADATA") or one.read_text("PKG-INFO") or "").partition("\n\n")[0]
        told = {key: value.strip() for key, _, value in (line.partition(":") for line in head.split("\n"))}
        name, version = told.get("Name"), told.get("Version")
        if name and version:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), (name, version))
    return found


def _git(root: Path, *words: str) -> bytes | None:
    """The words' output. It takes no lock, asks nobody, and runs no program that the repository's config names."""
    calm = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    calm |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    try:
        done = subprocess.run(
            command, env=calm, capture_output=True, timeout=GIT_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def gpu(device: str | None) -> dict[str, Any]:
    """A CUDA device, its driver, and the switches of torch by which float32 sums may lose precision, once torch is
    there. On the CPU: no name."""
    torch = sys.modules.get("torch")
    if torch is None or not (device or "").startswith("cuda"):
        return {"gpu": None}
    facts = torch.cuda.get_device_properties(device)
    matmul = torch.backends.cuda.matmul
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": f"{facts.major}.{facts.minor}",
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "tf32": bool(matmul.allow_tf32),
        "bf16_reduced_sums": bool(matmul.allow_bf16_reduced_precision_reduction),
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def _driver() -> str | None:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return None


def proved(device: str | None) -> dict[str, int] | None:
    """How many schedules were seen to give the reference's bits on this GPU, and how many were turned down."""
    module = sys.modules.get("fengine.ops.proof")
    torch = sys.modules.get("torch")
    if module is None or torch is None or not (device or "").startswith("cuda"):
        return None
    index = torch.device(device).index
    known = list(module.proofs(torch.cuda.current_device() if index is None else index).known.values())
    return {"equal": known.count(True), "turned_down": known.count(False)}
