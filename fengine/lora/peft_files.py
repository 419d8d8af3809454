"""An adapter as PEFT saves it -> what it adds to which module. Checked in full: every tensor is used, none is missing.

base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [r, inputs]
base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [outputs, r]
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fengine.core.scalars import told
from fengine.errors import AdapterError, InvalidRequestError, ModelLoadError, UnsupportedFormatError
from fengine.lora.layout import Module, Site, Update, all_finite, rest
from fengine.lora.peft_config import CONFIG, PeftConfig, parse_config, read_config
from fengine.worker.checkpoint_checks import listed
from fengine.worker.safetensors_file import DTYPES, listing, open_file, read_header, read_tensor

MAX_NAME = 512
WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
PREFIX = "base_model.model."
TENSOR = re.compile(re.escape(PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
MEANINGS = {  # tensors of PEFT that are known, and not built
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "LoRA of an embedding",
    "base_layer": "a bias or weight of the base model",
    ".bias": "a bias",
    "modules_to_save": "modules_to_save",
    "lm_head": "an adapted or replaced output head",
    "embed_tokens": "an adapted or replaced embedding",
    "score.": "a replaced classification head",
    ".experts.": "LoRA of a routed expert",
    "shared_expert_gate": "LoRA of a shared expert's gate",
}


class Limits(NamedTuple):
    """What an engine takes: its linear layers, the kinds of them that may be adapted, and the largest rank. `rename`:
    the name that a tensor of the checkpoint has here."""

    sites: Sequence[Site]
    kinds: Sequence[str]
    max_rank: int
    rename: Callable[[str], str] = str

    @property
    def modules(self) -> dict[str, Module]:
        return {module.name: module for site in self.sites for module in site.modules}


class Read(NamedTuple):
    """A checked adapter. `sha256` is of its config and its tensors' file."""

    config: PeftConfig
    updates: dict[str, Update]
    sha256: str


def read_adapter(directory: Path, limits: Limits) -> Read:
    """Errors: AdapterError, naming file and tensor; UnsupportedFormatError for one that is a pickle."""
    if not directory.is_dir():
        raise AdapterError(f"adapter directory {directory} does not exist, or is no directory.")
    config = read_config(directory)
    path = directory / WEIGHTS
    if not path.exists() and not path.is_symlink():
        pickles = [name for name in PICKLES if (directory / name).exists()]
        if pickles:
            raise UnsupportedFormatError(
                f"{directory} has its adapter only as {pickles[0]}, a pickle, which is never opened; save it with PEFT "
                "as safetensors."
            )
        raise AdapterError(f"{directory} has no {WEIGHTS}; it holds {listing(directory)}.")
    try:
        digest = sha256_of(directory)  # before: files may change meanwhile
        entries = {entry.name: entry for entry in read_header(path)}
        for entry in entries.values():
            if entry.dtype not in DTYPES:
                raise AdapterError(f"{path}: tensor {entry.name!r} is {entry.dtype}; supported: {', '.join(DTYPES)}.")
        with open_file(path) as file:
            shapes = {name: entry.shape for name, entry in entries.items()}
            updates = collect(config, shapes, lambda name: read_tensor(file, entries[name]), str(path), limits)
        return Read(config, updates, digest)
    except AdapterError:
        raise
    except ModelLoadError as error:
        raise AdapterError(str(error)) from None


def sha256_of(directory: Path) -> str:
    """Of an adapter's config and tensors. Errors: AdapterError."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG, WEIGHTS):
            with open(directory / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise AdapterError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return digest.hexdigest()


def check_arguments(tensors: Any, values: Any) -> None:
    """Errors: InvalidRequestError."""
    if not isinstance(tensors, Mapping) or not isinstance(values, Mapping):
        raise InvalidRequestError("needed are tensors by name and the values of adapter_config.json, as two dicts.")


def check_name(name: Any, pinned: Any) -> None:
    """Errors: InvalidRequestError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(f"lora_name must be a text of 1 to {MAX_NAME} characters, got {told(name)}.")
    if not isinstance(pinned, bool):
        raise InvalidRequestError(f"pinned must be True or False, got {told(pinned)}.")


def check_tensors(tensors: Mapping[Any, Any], name: Any) -> None:
    """Errors: AdapterError."""
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES.values():
            raise AdapterError(f"tensor {key!r:.80} of {name!r} must be a float32, bfloat16 or float16 tensor.")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise AdapterError(f"tensor {key!r:.80} of {name!r} must be dense, and have values.")


def from_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Any], name: str, limits: Limits) -> Read:
    """An adapter given as tensors and the values of its config. Errors: AdapterError."""
    config = parse_config(values, f"config_dict of {name!r}")
    check_tensors(tensors, name)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    updates = collect(
        config, shapes, lambda key: tensors[key].detach().cpu().resolve_neg(), f"the tensors of {name!r}", limits
    )
    return Read(config, updates, "")


def collect(
    config: PeftConfig, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor], what: str, limits: Limits
) -> dict[str, Update]:
    """The updates by module. Names and shapes are checked before the first tensor is read. Errors: AdapterError."""
    modules = limits.modules
    problems: list[str] = []
    names: dict[tuple[str, str], str] = {}
    for name in shapes:
        module, side = _place(name)
        module = limits.rename(f"{module}.weight").removesuffix(".weight")
        if module not in modules:
            problems.append(f"tensor {name!r} {_why_unknown(name)}")
        elif (module, side) in names:
            problems.append(f"tensors {name!r} and {names[module, side]!r} are the same")
        else:
            names[module, side] = name
    if not names:
        first = next(iter(modules))
        problems.insert(
            0, f"no tensor belongs to a linear layer of this model; one would be {PREFIX}{first}.lora_A.weight"
        )
    if not problems:
        config = config._replace(prefix=_prefix(*next(iter(names.items()))))
        problems = _mismatches(config, config.targeted(list(modules)), names, shapes, limits)
    if problems:
        raise AdapterError(f"{what} does not fit this model or its config:{listed(problems)}")
    updates = {}
    for module in dict.fromkeys(module for module, _ in names):
        pair = {names[module, side]: read(names[module, side]) for side in "AB"}
        for name, tensor in pair.items():
            if not all_finite(tensor):
                raise AdapterError(f"{what}: tensor {name!r} holds NaN or infinite values.")
        a, b = pair.values()
        updates[module] = Update(a, b, config.scale_of(module))
        rest()
    return updates


def _place(name: str) -> tuple[str, str]:
    """(module, "A" or "B") of a tensor; a module that is none if the name does not say."""
    found = TENSOR.fullmatch(name)
    module, side = (found["module"], found["side"]) if found else ("", "")
    return (f"model.{module}" if module.startswith("layers.") else module), side


def _prefix(place: tuple[str, str], name: str) -> str:
    """What PEFT's name of a module begins with where ours does with "model."."""
    theirs, rest = name.removeprefix(PREFIX).partition(".lora_")[0], place[0].removeprefix("model.")
    return theirs.removesuffix(rest) if theirs.endswith(rest) else "model."


def _why_unknown(name: str) -> str:
    what = next((what for part, what in MEANINGS.items() if part in name), "")
    return f"is {what}, which is not supported" if what else "is not part of a LoRA adapter for this model"


def _mismatches(
    config: PeftConfig, targeted: list[str], names: Mapping[tuple[str, str], str],
    shapes: Mapping[str, tuple[int, ...]], limits: Limits,
) -> list[str]:  # fmt: skip
    """Tensors against the config's targets, ranks and the model's shapes."""
    problems, modules, known = [], limits.modules, frozenset(targeted)
    for module, side in names:
        if module not in known:
            problems.append(f"tensor {names[module, side]!r}: {CONFIG} does not target its module")
    for module in targeted:
        rank, size = config.rank_of(module), modules[module]
        if size.kind not in limits.kinds:
            problems.append(
                f"module {module!r}: this engine adapts {', '.join(limits.kinds)} only; add {size.kind!r} to its "
                "lora_target_modules"
            )
        if rank > limits.max_rank:
            problems.append(f"module {module!r} has rank {rank}, over this engine's max_lora_rank={limits.max_rank}")
        for side, shape in (("A", (rank, size.inputs)), ("B", (size.outputs, rank))):
            name = names.get((module, side))
            if name is None:
                problems.append(f"module {module!r} is targeted, but its lora_{side} is missing")
            elif shapes[name] != shape:
                problems.append(f"tensor {name!r}: expected shape {list(shape)}, got {list(shapes[name])}")
    return problems
