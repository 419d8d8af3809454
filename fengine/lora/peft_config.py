"""`adapter_config.json` of PEFT: which modules an adapter changes, with which rank and scale. Strict, and no torch.

What changes the result and is not built is refused by name, and so is every setting that is not known here, unless it
is off (null, false, 0, empty). Matching follows PEFT 0.21 (`check_target_module_exists`, `get_pattern_key`).
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fengine.errors import AdapterError, InvalidRequestError, ModelLoadError
from fengine.tokenizer.stop_regex import inside, one_character, parse
from fengine.worker.safetensors_file import read_json

CONFIG = "adapter_config.json"
HARMLESS = {  # what training needed, and what says nothing about the result
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "eva_config",
}  # fmt: skip
MAX_RANK = 4096
PLAIN = re.compile(r"([^*+?{}()|\\\[\]]|\\\W)*")  # a pattern that `re` reads in linear time
MAX_WORK = 1 << 14  # pieces of a pattern that are tried on one name
EDGES = {"AT_BEGINNING": "^", "AT_BEGINNING_STRING": r"\A", "AT_BOUNDARY": r"\b", "AT_NON_BOUNDARY": r"\B",
         "AT_END": "$", "AT_END_STRING": r"\Z"}  # fmt: skip
ALL_LINEAR = "all-linear"


def _names(value: Any) -> tuple[str, ...] | str | None:
    """A regular expression as it is, a list of names (of a live LoraConfig a set) as a tuple; None for others."""
    listed = isinstance(value, (list, tuple, set)) and all(isinstance(name, str) and name for name in value)
    return tuple(value) if listed else value if isinstance(value, str) else None


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _by_pattern(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(k, str) and good(v) for k, v in value.items())


class Field(NamedTuple):
    """A setting that is read: what it must be, and the value that stands for what was given."""

    good: Callable[[Any], bool]
    needed: str
    read: Callable[[Any], Any] = lambda value: value


FIELDS = {  # the order is that of `PeftConfig`
    "r": Field(_is_rank, f"a whole number from 1 to {MAX_RANK}"),
    "lora_alpha": Field(_is_alpha, "a finite number above 0"),
    "use_rslora": Field(lambda value: isinstance(value, bool), "true or false", lambda value: value or False),
    "rank_pattern": Field(_by_pattern(_is_rank), "an object from names to values as of r", lambda value: value or {}),
    "alpha_pattern": Field(_by_pattern(_is_alpha), "an object from names to values as of lora_alpha",
                           lambda value: value or {}),
    "target_modules": Field(bool, "a list of module names, or one regular expression", _names),
    "exclude_modules": Field(lambda value: value is not None, "null, a list of module names, or one regular expression",
                             lambda value: _names(value or ())),
    "layers_to_transform": Field(
        lambda value: value is None or (isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)),
        "null, a layer's number or a list of them", lambda value: [value] if type(value) is int else value or None),
}  # fmt: skip
BUILT = {  # settings of which one meaning is built, and why no other
    "bias": Field(lambda value: value in (None, "none"), ": an adapter changes no biases"),
    "init_lora_weights": Field(
        lambda value: value in (None, True, False, "gaussian", "orthogonal", "eva"),
        ": its training changed the base weights, too; convert the adapter to plain LoRA with PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=...)"),
    "layers_pattern": Field(
        lambda value: not value or "layers" in (_names([value] if isinstance(value, str) else value) or ()),
        ": the layers of this model are in 'layers'"),
}  # fmt: skip


class PeftConfig(NamedTuple):
    """Checked, by PEFT's names. Modules are a list of names, or one regular expression for whole names."""

    path: str
    base: str | None
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: list[int] | None
    prefix: str = "model."  # what PEFT has in place of it: a model with images has more, a decoder alone nothing

    def theirs(self, module: str) -> str:
        """The name that PEFT, and so this config, has for a module. Pure."""
        return self.prefix + module.removeprefix("model.")

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern(self.rank_pattern, self.theirs(module)), self.r)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by. Pure."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, self.theirs(module)), self.lora_alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targeted(self, modules: Sequence[str]) -> list[str]:
        """Those of the model's linear layers ("model.layers.0.self_attn.q_proj") that the adapter changes. Pure.

        Targets that the model has not are passed over: trainers list those of several models. Errors: AdapterError if
        there is none at all.
        """
        targets, exclude, layers = self.target_modules, self.exclude_modules, self.layers_to_transform
        named = {module: self.theirs(module) for module in modules}
        found = [module for module, name in named.items() if _matches(targets, name) and not _matches(exclude, name)]
        found = [  # a layer that is named whole is meant whatever its number
            module for module in found
            if layers is None or named[module] in targets or int(module.split(".")[2]) in layers
        ]  # fmt: skip
        if not found:
            raise AdapterError(
                f"{self.path}: target_modules {targets!r:.200} with layers_to_transform and exclude_modules match "
                f"no linear layer of this model ({modules[0]} and others): the adapter would do nothing."
            )
        return found


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
    given = {name: field.read(values.get(name)) for name, field in FIELDS.items()}
    problems = [
        f"{name}={value!r:.80} is not supported{BUILT[name].needed if name in BUILT else ''}"
        for name, value in values.items()
        if name not in {"peft_type"} | FIELDS.keys() | HARMLESS
        and not (BUILT[name].good(value) if name in BUILT else not value)
    ]
    problems += [
        f"{name} must be {field.needed}, got {values.get(name)!r:.80}"
        for name, field in FIELDS.items()
        if not field.good(given[name])
    ]
    if given["layers_to_transform"] is not None and isinstance(given["target_modules"], str):
        problems.append("layers_to_transform goes with a list of target_modules only")
    if values.get("peft_type") != "LORA":
        problems = [f"peft_type is {values.get('peft_type')!r:.80}; only LORA is built"]
    if problems:
        raise AdapterError(f"{path} cannot be used:\n  " + "\n  ".join(problems))
    config = PeftConfig(path, values.get("base_model_name_or_path"), **given)
    for names in (config.target_modules, config.exclude_modules):
        _matches(names, "x")  # is it a regular expression?
    for pattern in (config.rank_pattern, config.alpha_pattern):
        _pattern(pattern, "x")
    return config


def _matches(names: tuple[str, ...] | str, module: str) -> bool:
    """Whether a list of names or a regular expression means this module."""
    if isinstance(names, tuple):
        return any(module == name or module.endswith(f".{name}") for name in names)
    return names.lower() == ALL_LINEAR or (bool(names) and _fullmatch(names, module))


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first key that means this module; else the module's own name."""
    return next((key for key in patterns if _fullmatch(rf"(.*\.)?({key})", module, key)), module)


def _fullmatch(pattern: str, text: str, own: str = "*") -> bool:
    """`re.fullmatch` in bounded time: not each way in which a pattern may match is tried, but each place which any of
    them reaches. `own`: the part of the pattern that came from the file. Errors: AdapterError."""
    try:
        if PLAIN.fullmatch(own):  # of which there may be one for each module
            return re.fullmatch(pattern, text) is not None
        tree = _parsed(pattern)
        return len(text) in _ends(tree, text, {0}, tree.state.flags, iter(range(MAX_WORK)))
    except (re.error, OverflowError, RecursionError, InvalidRequestError) as error:
        raise AdapterError(f"a pattern of {CONFIG} cannot be used: {error}") from None


_parsed = lru_cache(1024)(parse)


def _ends(items: Any, text: str, places: set[int], flags: int, work: Iterator[int]) -> set[int]:
    """Where what `items` match may end that begins at one of these places. Modifies: work."""
    for kind, value in items:
        places = _behind(str(kind), value, text, places, flags, work)
    return places


def _behind(kind: str, value: Any, text: str, places: set[int], flags: int, work: Iterator[int]) -> set[int]:
    """As `_ends`, of one item. Errors: InvalidRequestError."""
    if next(work, None) is None:
        raise InvalidRequestError("it takes too long")
    if kind == "SUBPATTERN":
        _, more, less, items = value
        return _ends(items, text, places, inside(flags, more, less), work)
    if kind == "BRANCH":
        return set().union(*(_ends(items, text, places, flags, work) for items in value[1]))
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        return _repeated(value, text, places, flags, work)
    if kind in ("ASSERT", "ASSERT_NOT") and value[0] > 0:
        return {at for at in places if (not _ends(value[1], text, {at}, flags, work)) == (kind == "ASSERT_NOT")}
    width, one = 0, re.compile(EDGES.get(str(value), ""), flags & ~re.VERBOSE)
    if kind != "AT":
        width, one = 1, one_character("it", kind, value, flags)
    return {at + width for at in places if one.match(text, at)}


def _repeated(value: Any, text: str, places: set[int], flags: int, work: Iterator[int]) -> set[int]:
    """As `_ends`. Of more repeats than there are characters one is of nothing, and may be as often."""
    (low, high, items), ends = value, set[int]()
    for count in range(min(high, len(text) + 1) + 1):
        if count >= min(low, len(text) + 1):
            places = places - ends
            ends |= places
        if not places:
            break
        places = _ends(items, text, places, flags, work)
    return ends
