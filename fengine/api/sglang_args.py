"""SGLang's settings that fengine has not, and its ways to write those that it has. `sglang_args.json` holds names and
defaults (0.5.23 and older releases) by the reason why they have no effect here: *harmless* ones are accepted whatever
their value, *refused* ones only where they are off, which is their default, None or a value of `also_off`. *calls*
has the arguments of calls that are refused, unless they are None, False, 0 or a list of None."""

import argparse
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fengine.api.arguments import unknown
from fengine.config import KV_DTYPES, QUANTIZATIONS
from fengine.core.json_text import json_object
from fengine.core.scalars import told
from fengine.errors import ConfigError, UnsupportedFeatureError

logger = logging.getLogger("fengine")
_DATA = json.loads((Path(__file__).parent / "sglang_args.json").read_text("utf-8"))
HARMLESS: Mapping[str, Mapping[str, Any]] = _DATA["harmless"]  # defaults by name, by reason
REFUSED: Mapping[str, Mapping[str, Any]] = _DATA["refused"]
CALLS: Mapping[str, list[str]] = _DATA["calls"]  # arguments of generate, encode and score that are not built, likewise
ALSO_OFF: Mapping[str, list[Any]] = _DATA["also_off"]
SERVERS = "an Engine opens no port, so nothing about servers applies"  # the reason of those for servers alone
FOREIGN = {name: default for group in (*HARMLESS.values(), *REFUSED.values()) for name, default in group.items()}
C = TypeVar("C")
ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE3")  # of speculation
FEW_BITS = {"quantization": QUANTIZATIONS, "kv_cache_dtype": KV_DTYPES}  # what is built
WORDS = {  # SGLang's words, where the configuration has others
    "load_format": {"sharded_state": "safetensors"},  # what save_sharded_model writes
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},  # kernels of the same files
    "kv_cache_dtype": {"bf16": "auto", "bfloat16": "auto"},  # as activations are
    "dtype": {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"},
}
OPTIONS = {  # other words of the command line; a short one may be the beginning of several
    "model_path": ("--model",), "tp_size": ("--tp", "--tensor-parallel-size"),
    "dp_size": ("--dp", "--data-parallel-size"), "pp_size": ("--pp", "--pipeline-parallel-size"),
    "ep_size": ("--ep", "--expert-parallel-size"), "speculative_draft_model_path": ("--speculative-draft-model",),
}  # fmt: skip
TIMEOUTS = {  # environment variables of SGLang, which has no arguments for these; -1 is none
    "scheduler.waiting_timeout": "SGLANG_REQ_WAITING_TIMEOUT",
    "scheduler.running_timeout": "SGLANG_REQ_RUNNING_TIMEOUT",
}
RAW_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"  # one that changes results, and is not built
_LORA_KEYS = {"lora_name", "lora_path", "pinned"}


def cli_object(text: str) -> dict[str, Any]:
    """A JSON object on a command line. Pure. Errors: ArgumentTypeError, the only one whose message argparse tells."""
    try:
        return json_object("the value", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def with_foreign_fields(cls: type[C]) -> type[C]:
    """The dataclass with SGLang's other settings as further fields, by name only; wrong names raise FengineErrors."""
    foreign = [
        (name, Any, field(default_factory=partial(type(default), default)) if isinstance(default, (list, dict))
         else field(default=default))
        for name, default in FOREIGN.items()
    ]  # fmt: skip
    made = make_dataclass(cls.__name__, foreign, bases=(cls,), kw_only=True)
    made.__doc__, made.__module__, made.__qualname__ = cls.__doc__, cls.__module__, cls.__qualname__
    initialise = made.__init__

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            initialise(self, *args, **kwargs)
        except TypeError as error:
            known = [f.name for f in fields(made)]
            for name in kwargs:
                if name not in known:
                    raise unknown("Engine()", name, known) from None
            words = str(error).rpartition("__init__() ")[2]
            raise ConfigError(f"Engine() {words}; it needs a model_path: Engine(model_path='box')") from None

    made.__init__ = checked  # type: ignore[method-assign]
    return made


def refuse_foreign(values: Mapping[str, Any]) -> None:
    """Reports everything not built that is not off, all at once. Errors: UnsupportedFeatureError."""
    bad = _given(REFUSED, values)
    if (algorithm := values["speculative_algorithm"]) is not None and algorithm.upper() not in ALGORITHMS:
        bad.append(f"speculative_algorithm={told(algorithm)} (of speculation {', '.join(ALGORITHMS)} are built)")
    for name, built in FEW_BITS.items():
        if values[name] is not None and WORDS[name].get(values[name], values[name]) not in built:
            bad.append(f"{name}={told(values[name])} (quantized weights and KV: {', '.join(built)} are built)")
    if os.environ.get(RAW_LOGPROBS, "").lower() in ("true", "1", "yes", "y"):
        bad.append(f"{RAW_LOGPROBS} of the environment (logprobs of outputs are behind temperature)")
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these out.")


def log_harmless(values: Mapping[str, Any]) -> None:
    """Logs, in one line at level info, the harmless settings that were given, and why they have no effect."""
    given = _given(HARMLESS, values)
    if values["grammar_backend"] in ("xgrammar", "outlines"):
        given.append(f"grammar_backend={values['grammar_backend']!r} (grammars are llguidance's)")
    if given:
        logger.info("accepted without effect: %s", "; ".join(given))


def _given(groups: Mapping[str, Mapping[str, Any]], values: Mapping[str, Any]) -> list[str]:
    """Those of these settings that are not off, each with the reason that it stands under. Pure."""
    return [
        f"{name}={told(values[name])} ({reason})"
        for reason, group in groups.items()
        for name, default in group.items()
        if values[name] is not None and not any(_same(values[name], off) for off in (default, *ALSO_OFF.get(name, ())))
    ]


def _same(a: Any, b: Any) -> bool:
    a, b = (list(x) if isinstance(x, tuple) else x for x in (a, b))
    kinds = {type(a), type(b)}
    return (len(kinds) == 1 or kinds == {int, float}) and a == b


def set_log_level(level: str | None) -> None:
    """Sets the level of the logger "fengine", and lets it print where nothing else does. Modifies: logging."""
    if level is None:
        return
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


def graphs_of(values: Mapping[str, Any]) -> tuple[int | None, bool]:
    """(most rows of a decode step that is captured, None: any; whether steps with prompts are). Errors: ConfigError.
    Sizes in a list come before a greatest one, as in SGLang."""
    prefill = not (values["disable_prefill_cuda_graph"] or values["cuda_graph_backend_prefill"] == "disabled")
    if values["disable_decode_cuda_graph"] or values["cuda_graph_backend_decode"] == "disabled":
        return 0, prefill
    for name in ("cuda_graph_bs_decode", "cuda_graph_bs", "cuda_graph_max_bs_decode", "cuda_graph_max_bs"):
        if (given := values[name]) is not None:
            try:
                return max(int(size) for size in (given if isinstance(given, (list, tuple)) else [given])), prefill
            except (ValueError, TypeError):
                raise ConfigError(f"{name} must be numbers of rows, got {told(given)}") from None
    return None, prefill


GUESSING = ("speculative_num_steps", "speculative_num_draft_tokens")  # numbers of a speculative_algorithm


def draft_tokens(values: Mapping[str, Any]) -> int | None:
    """Errors: ConfigError where number of steps and of tokens contradict each other, or nothing guesses."""
    if values["speculative_algorithm"] is None and (given := [name for name in GUESSING if values[name] is not None]):
        why = f"{given[0]}={values[given[0]]} is given, but no speculative_algorithm, so nothing would be guessed"
        raise ConfigError(f"{why}: give one, or leave {given[0]} out")
    steps, tokens = values["speculative_num_steps"], values["speculative_num_draft_tokens"]
    if steps is not None and tokens not in (None, steps + 1):
        raise ConfigError(
            f"speculative_num_draft_tokens={tokens} with speculative_num_steps={steps}: chains have one token more "
            f"than steps; give {steps + 1}, or leave one of them out"
        )
    return tokens if steps is None else steps + 1


def _seconds(name: str) -> float | None:
    try:
        value = float(os.environ.get(name) or -1)
    except ValueError:
        raise ConfigError(f"{name}={os.environ[name]!r:.80} must be a number of seconds, -1 for none") from None
    return None if value < 0 else value


def further_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What of the configuration's `lora` is no single field, and what environment variables say. Errors:
    ConfigError."""
    adapters, kinds = _adapters(values["lora_paths"]), values["lora_target_modules"]
    if adapters and values["enable_lora"] is False:
        raise ConfigError("lora_paths is given, but enable_lora=False; leave one of them out")
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if kinds is not None and not all(isinstance(kind, str) for kind in kinds):
        raise ConfigError(f"lora_target_modules must be names of modules, got {told(kinds)}")
    return {
        "lora.paths": tuple(f"{item['lora_name']}={item['lora_path']}" for item in adapters),
        "lora.pinned": tuple(item["lora_name"] for item in adapters if item["pinned"]),
        "lora.target_modules": None if not kinds or {"all", "all-linear"} & set(kinds) else tuple(sorted(kinds)),
        **{path: _seconds(name) for path, name in TIMEOUTS.items()},
    }


def _adapters(given: Any) -> list[dict[str, Any]]:
    """`lora_paths`, each as {lora_name, lora_path, pinned}. Pure. Errors: ConfigError."""
    if isinstance(given, dict):
        given = [{"lora_name": name, "lora_path": path} for name, path in given.items()]
    found = [_adapter(item) for item in given or ()]
    names = [item["lora_name"] for item in found]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"lora_paths has two adapters of the name {told(twice[0])}")
    return found


def _adapter(item: Any) -> dict[str, Any]:
    """One of `lora_paths`; a path alone is its own name. Pure. Errors: ConfigError."""
    if isinstance(item, str) and item.startswith("{"):
        item = json_object("lora_paths", item)
    if isinstance(item, str):
        name, equals, path = item.partition("=")
        item = {"lora_name": name, "lora_path": path if equals else name}
    values = {"pinned": False} | (item if isinstance(item, dict) else {})
    name, path = values.get("lora_name"), values.get("lora_path")
    values["lora_path"] = path = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not (isinstance(name, str) and name and isinstance(path, str) and path and values.keys() == _LORA_KEYS):
        words = 'must hold "name=path", paths, or dicts (or their JSON) of lora_name, lora_path, pinned'
        raise ConfigError(f"lora_paths {words}; got {told(item)}")
    if "=" in name:
        raise ConfigError(f"lora_paths: a name must not contain '=', got {told(name)}")
    if not isinstance(values["pinned"], bool):
        raise ConfigError(f"lora_paths: pinned must be True or False, got {told(values['pinned'])}")
    return values
