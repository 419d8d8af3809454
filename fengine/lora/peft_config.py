"""`adapter_config.json` of PEFT: which modules an adapter changes, with which rank and scale. Strict, and no torch.

What changes the result and is not built is refused by name, and so is every setting that is not known here, unless it
is off (null, false, 0, empty). Matching follows PEFT 0.21 (`check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fengine.errors import AdapterError, InvalidRequestError, ModelLoadError
from fengine.tokenizer.stop_regex import StopRegex, StopRegexSearch
from fengine.worker.safetensors_file import read_json

CONFIG = "adapter_config.json"
READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "bias", "init_lora_weights",
}  # fmt: skip
# What training needed, and what says nothing about the result.
HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "eva_config",
}  # fmt: skip
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # the others change the base weights, too
MAX_RANK = 4096
PLAIN = re.compile(r"[^*+?{}()|\\\[\]]*")  # a pattern that `re` reads in linear time
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class PeftConfig:
    """Checked. `targets` is a list of names, or one regular expression for whole names."""

    path: str
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    exclude: tuple[str, ...] | str
    layers: frozenset[int] | None
    base: str | None

    def rank_of(self, module: str) -> int:
        """Pure."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by. Pure."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targeted(self, modules: Sequence[str]) -> list[str]:
        """Those of the model's linear layers ("model.layers.0.self_attn.q_proj") that the adapter changes. Pure.

        Errors: AdapterError for a target that is no part of the model, or if there is none at all.
        """
        for target in self.targets if isinstance(self.targets, tuple) else ():
            if not any(_ends_with(module, (target,)) for module in modules):
                kinds = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
                raise AdapterError(
                    f"{self.path}: target_modules has {target!r}, which is not a linear layer of this model that an "
                    f"adapter may change; those are {kinds}."
                )
        found = [m for m in modules if not _matches(self.exclude, m) and _matches(self.targets, m) and self._layer(m)]
        if not found:
            raise AdapterError(
                f"{self.path}: target_modules {self.targets!r:.200} with layers_to_transform and exclude_modules match "
                f"no linear layer of this model ({modules[0]} and others): the adapter would do nothing."
            )
        return found

    def _layer(self, module: str) -> bool:
        return self.layers is None or int(module.split(".")[2]) in self.layers


def read_config(directory: Path) -> PeftConfig:
    """Errors: AdapterError."""
    try:
        return parse_config(read_json(directory / CONFIG), str(directory / CONFIG))
    except AdapterError:
        raise
    except ModelLoadError as error:
        raise AdapterError(
            f"{error} A LoRA adapter is a directory with {CONFIG} and adapter_model.safetensors."
        ) from None


def parse_config(values: Mapping[str, Any], path: str) -> PeftConfig:
    """Pure. Errors: AdapterError with every problem, one a line."""
    layers = values.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or None
    given: dict[str, Any] = {
        "r": values.get("r"),
        "lora_alpha": values.get("lora_alpha"),
        "use_rslora": values.get("use_rslora", False),
        "rank_pattern": values.get("rank_pattern") or {},
        "alpha_pattern": values.get("alpha_pattern") or {},
        "target_modules": _names(values.get("target_modules")),
        "exclude_modules": _names(values.get("exclude_modules") or ()),
        "layers_to_transform": layers,
    }
    problems = _unsupported(values) + [
        f"{name} must be {what}, got {values.get(name)!r:.80}"
        for name, (good, what) in FIELDS.items()
        if not good(given[name])
    ]
    if layers is not None and isinstance(given["target_modules"], str):
        problems.append("layers_to_transform goes with a list of target_modules only")
    if problems:
        raise AdapterError(f"{path} cannot be used:\n  " + "\n  ".join(problems))
    config = PeftConfig(
        path, given["r"], given["lora_alpha"], given["use_rslora"], given["rank_pattern"], given["alpha_pattern"],
        given["target_modules"], given["exclude_modules"], None if layers is None else frozenset(layers),
        values.get("base_model_name_or_path"),
    )  # fmt: skip
    for names in (config.targets, config.exclude):
        _matches(names, "x")  # is it a regular expression?
    for pattern in (config.rank_pattern, config.alpha_pattern):
        _pattern(pattern, "x")
    return config


def _unsupported(values: Mapping[str, Any]) -> list[str]:
    """What would change the result, and is not built."""
    if values.get("peft_type") != "LORA":
        return [f"peft_type is {values.get('peft_type')!r:.80}; only LORA is built"]
    problems = [
        f"{name}={value!r:.80} is not supported"
        for name, value in values.items()
        if name not in READ | HARMLESS and not _off(value)
    ]
    if values.get("bias", "none") != "none":
        problems.append(f"bias={values['bias']!r:.80} is not supported: an adapter changes no biases")
    start = values.get("init_lora_weights", True)
    if not any(start is plain or (isinstance(start, str) and start == plain) for plain in PLAIN_STARTS):
        problems.append(
            f"init_lora_weights={start!r:.80} is not supported: its training changed the base weights, too; convert "
            "the adapter to plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    pattern = values.get("layers_pattern")
    if not _off(pattern) and "layers" not in (_names([pattern] if isinstance(pattern, str) else pattern) or ()):
        problems.append(f"layers_pattern={pattern!r:.80} is not supported: the layers of this model are in 'layers'")
    return problems


def _off(value: Any) -> bool:
    return value is None or value is False or (type(value) in (int, float) and value == 0) or value in ("", [], {})


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _names(value: Any) -> tuple[str, ...] | str | None:
    """A regular expression as it is, a list of names as a tuple; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    return None


def _pattern_of(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(k, str) and good(v) for k, v in value.items())


def _are_layers(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(index) is int and index >= 0 for index in value))


# What each key that is read must be.
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, f"a whole number from 1 to {MAX_RANK}"),
    "lora_alpha": (_is_alpha, "a finite number above 0"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "rank_pattern": (_pattern_of(_is_rank), "an object from names to values as of r"),
    "alpha_pattern": (_pattern_of(_is_alpha), "an object from names to values as of lora_alpha"),
    "target_modules": (bool, "a list of module names, or one regular expression"),
    "exclude_modules": (lambda value: value is not None, "null, a list of module names, or one regular expression"),
    "layers_to_transform": (_are_layers, "null, a layer's number or a list of them"),
}


def _ends_with(module: str, names: Sequence[str]) -> bool:
    return module in names or any(module.endswith(f".{name}") for name in names)


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    """Whether a list of names or a regular expression means this module. The decoder alone has no "model." in front."""
    if isinstance(names, tuple):
        return _ends_with(module, names)
    if names.lower() == ALL_LINEAR:
        return True
    return bool(names) and _fullmatch(names, module)


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first key that means this module; else the module's own name."""
    return next((key for key in patterns if _fullmatch(rf"(?:.*\.)?(?:{key})", module, key)), module)


def _fullmatch(pattern: str, text: str, plain: str = "*") -> bool:
    """`re.fullmatch` in time linear in the text. `plain`: the part of the pattern that came from the file.

    Errors: AdapterError.
    """
    try:
        if PLAIN.fullmatch(plain):
            return re.fullmatch(pattern, text) is not None
        return StopRegexSearch([StopRegex(rf"\A(?:{pattern})\Z")]).feed(text) is not None
    except (re.error, InvalidRequestError) as error:
        why = str(error).removeprefix("stop_regex ")
        raise AdapterError(f"a pattern of {CONFIG} cannot be used: {why}") from None
