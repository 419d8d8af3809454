"""`ServerArgs`: SGLang's names for an engine's settings, each honoured, harmless, or refused by name."""

import argparse
import json
import logging
import os
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import partial
from typing import Any, TypeVar, get_args

from fengine.api.arguments import unknown
from fengine.api.sglang_args import FOREIGN, adapter_paths, log_harmless, refuse_foreign
from fengine.config import (
    Algorithm,
    CacheConfig,
    CompileConfig,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
    ModelConfig,
    Numerics,
    ParallelConfig,
    Policy,
    SchedulerConfig,
    SpeculationConfig,
)
from fengine.core.request import SamplingParams
from fengine.errors import ConfigError, GrammarError
from fengine.structured_output.regex import explicit
from fengine.structured_output.schema import Whitespace
from fengine.tokenizer.stop_regex import compile_patterns

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


C = TypeVar("C")


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
            raise ConfigError(f"{error}; Engine needs a model_path".replace("__init__()", "Engine()")) from None

    made.__init__ = checked  # type: ignore[method-assign]
    return made


@with_foreign_fields
@dataclass
class ServerArgs:
    """A plain dataclass (`dataclasses.asdict` works). `to_config` checks it and gives an EngineConfig.

    The fields here are honoured; those of `sglang_args.json` are accepted without effect, or refused with the reason.
    """

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"  # or a dtype of torch
    device: str | None = None  # cpu, cuda, cuda:N
    tp_size: int = 1  # processes that hold the model together, on GPUs that follow each other
    base_gpu_id: int = 0  # the GPU where device is cuda, or left out
    revision: str | None = None
    context_length: int | None = None
    is_embedding: bool = False
    json_model_override_args: str | dict = "{}"  # values over those of config.json
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None  # what comes beyond is refused
    chunked_prefill_size: int | None = None
    page_size: int | None = None
    schedule_policy: str = "fcfs"
    enable_priority_scheduling: bool = False  # orders the queue; a request that runs is never preempted for it
    schedule_low_priority_values_first: bool = False
    default_priority_value: int | None = None
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool | None = None
    disable_cuda_graph: bool = False
    enable_torch_compile: bool | None = None  # fengine's own default: only on a GPU without CUDA graphs
    speculative_algorithm: str | None = None  # "NGRAM"
    speculative_num_draft_tokens: int | None = None  # of a row in one step, its own token included
    speculative_ngram_min_match_window_size: int | None = None
    speculative_ngram_max_match_window_size: int | None = None
    random_seed: int | None = None  # None is 0: a run can be repeated without having noted its seed
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    stream_output: bool = False  # SGLang's older name of the same
    enable_metrics: bool = False
    preferred_sampling_params: str | dict | None = None  # JSON or a dict: defaults under what each call gives
    allow_auto_truncate: bool = False
    enable_custom_logit_processor: bool = False
    enable_return_hidden_states: bool = False
    return_hidden_states: bool = False  # in every output, as in SGLang's first releases
    return_hidden_states_mode: str | None = None  # "last" or "full": the most that calls may ask for
    weight_version: str = "default"
    served_model_name: str | None = None
    chat_template: str | None = None  # a file, or the template itself
    hf_chat_template_name: str | None = None
    default_chat_template_kwargs: dict | None = None
    enable_lora: bool | None = None  # None: if lora_paths are given
    lora_paths: dict | list | None = None  # {name: path}, or a list of "name=path", paths, or SGLang's dicts
    max_loras_per_batch: int = 8
    max_lora_rank: int | None = None
    lora_target_modules: list | tuple | set | str | None = None
    max_loaded_loras: int | None = None
    grammar_backend: str | None = None  # none refuses grammars; whatever else is named, they are llguidance's
    constrained_json_whitespace_pattern: str | None = None  # between the parts of JSON; None: a space, or a line end
    constrained_json_disable_any_whitespace: bool = False  # exactly one space behind comma and colon, none elsewhere
    enable_weights_cpu_backup: bool = False  # resume_memory_occupation brings back the weights that were released
    log_level: str | None = None  # of the logger "fengine"; None leaves it alone
    log_requests: bool = False
    log_requests_level: int = 2  # 0: ids and times; 1: parameters, too; 2: the beginning of texts; 3: whole texts
    crash_dump_folder: str | None = None  # where the last requests are written if the engine dies
    numerics: str = "exact"  # fengine's own

    def to_config(self) -> EngineConfig:
        """The same settings in fengine's words. Errors: ConfigError, UnsupportedFeatureError."""
        self._check_types()
        refuse_foreign(vars(self))
        self._check_values()
        set_log_level(self.log_level)
        log_harmless(vars(self))
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk < 1:  # SGLang's -1: chunking off; the step still needs a budget
            chunk = None
        overlap = None if self.disable_overlap_schedule is None else not self.disable_overlap_schedule
        return EngineConfig(
            model=ModelConfig(
                path=str(self.model_path),
                tokenizer_path=self.tokenizer_path,
                revision=self.revision,
                load_format=_choice(LoadFormat, "load_format", _LOAD_WORDS.get(self.load_format, self.load_format)),
                dtype=_choice(Dtype, "dtype", _DTYPE_WORDS.get(self._dtype, self._dtype)),
                device=self.device,
                gpu_id=self._gpu_id,
                json_overrides=self._overrides,
                context_length=self.context_length,
                skip_tokenizer_init=self.skip_tokenizer_init,
                is_embedding=self.is_embedding,
            ),
            cache=CacheConfig(
                page_size=self.page_size,
                max_total_tokens=self.max_total_tokens,
                mem_fraction_static=self.mem_fraction_static,
                prefix_cache=not self.disable_radix_cache,
            ),
            scheduler=SchedulerConfig(
                max_running_requests=self.max_running_requests,
                max_step_tokens=chunk,
                policy=_choice(Policy, "schedule_policy", self.schedule_policy),
                overlap=overlap,
                max_queued_requests=self.max_queued_requests,
            ),
            compile=CompileConfig(enabled=self.enable_torch_compile, cuda_graph=not self.disable_cuda_graph),
            speculation=self._speculation(),
            lora=self._lora(),
            parallel=ParallelConfig(self.tp_size),
            numerics=_choice(Numerics, "numerics", self.numerics),
            random_seed=0 if self.random_seed is None else self.random_seed,
        )

    def _speculation(self) -> SpeculationConfig:
        default = SpeculationConfig()
        algorithm = Algorithm.none if self.speculative_algorithm is None else Algorithm.ngram
        least, most = self.speculative_ngram_min_match_window_size, self.speculative_ngram_max_match_window_size
        return SpeculationConfig(
            algorithm=algorithm,
            num_draft_tokens=self.speculative_num_draft_tokens,
            ngram_min_match=default.ngram_min_match if least is None else least,
            ngram_max_match=default.ngram_max_match if most is None else most,
        )

    def _lora(self) -> LoraConfig:
        paths, pinned = adapter_paths(self.lora_paths)
        kinds = self.lora_target_modules
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        if kinds is not None and not all(isinstance(kind, str) for kind in kinds):
            raise ConfigError(f"lora_target_modules must be names of modules, got {self.lora_target_modules!r:.80}")
        if paths and self.enable_lora is False:
            raise ConfigError("lora_paths is given, but enable_lora=False; leave one of them out")
        return LoraConfig(
            enabled=self.enable_lora,
            paths=tuple(f"{name}={path}" for name, path in paths.items()),
            pinned=pinned,
            max_loras_per_batch=self.max_loras_per_batch,
            max_lora_rank=self.max_lora_rank,
            target_modules=None if kinds is None or "all" in kinds or "all-linear" in kinds else tuple(sorted(kinds)),
            max_loaded_loras=self.max_loaded_loras,
        )

    @property
    def _dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def _gpu_id(self) -> int:
        number = self.base_gpu_id
        if number and self.device not in (None, "cpu", "cuda", f"cuda:{number}"):
            raise ConfigError(f"device={self.device!r} and base_gpu_id={number} name two GPUs; leave one of them out")
        return number

    @property
    def _overrides(self) -> str:
        """`json_model_override_args` as JSON in one form; "" for nothing. Errors: ConfigError."""
        given = self.json_model_override_args
        try:
            values = json.loads(given or "{}") if isinstance(given, str) else given
            text = json.dumps(values, sort_keys=True, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"json_model_override_args: {error}, got {given!r:.80}") from None
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ConfigError(f"json_model_override_args must be an object of config.json's names, got {given!r:.80}")
        return text if values else ""

    @property
    def whitespace(self) -> Whitespace | None:
        """What may stand between the parts of JSON that a grammar asks for; None: grammars are off."""
        if self.grammar_backend == "none":
            return None
        if self.constrained_json_disable_any_whitespace:
            return Whitespace(None)
        pattern = self.constrained_json_whitespace_pattern
        return Whitespace() if pattern is None else Whitespace(explicit(pattern, "constrained_json_whitespace_pattern"))

    @property
    def hidden_states_mode(self) -> str | None:
        """The most that a call may ask for: None, "last" or "full"."""
        every = self.enable_return_hidden_states or self.return_hidden_states
        return "full" if every else self.return_hidden_states_mode

    def preferred(self) -> dict[str, Any]:
        """Sampling parameters that hold where a call gives none. Errors: ConfigError."""
        values = self.preferred_sampling_params
        try:
            values = json.loads(values) if isinstance(values, str) else values
            compile_patterns(SamplingParams.of(values).stop_regex)
        except (ValueError, RecursionError) as error:  # JSON's errors and ours
            raise ConfigError(f"preferred_sampling_params: {error}") from error
        return dict(values or {})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """An option for each field: `--tp-size 2`, and `--disable-cuda-graph` for a field that is False."""
        for f in fields(ServerArgs):
            name = "--" + f.name.replace("_", "-")
            if f.name == "model_path":
                parser.add_argument(name, "--model", required=True)
            elif bool in (type(f.default), *get_args(f.type)):
                parser.add_argument(name, action=argparse.BooleanOptionalAction, default=f.default)
            else:
                kind = next((k for k in (int, float) if k in (f.type, *get_args(f.type), type(f.default))), str)
                default = f.default if f.default_factory is MISSING else f.default_factory()
                parser.add_argument(name, type=kind, default=default)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerArgs":
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    def _check_types(self) -> None:
        """A wrong type is told here, not where it is first used."""
        bad = []
        for f in fields(self):
            value, kinds = getattr(self, f.name), f.type
            if kinds is Any or (f.name == "model_path" and isinstance(value, os.PathLike)):
                continue
            if f.name == "dtype" and type(value).__module__ == "torch":
                continue
            allowed = get_args(kinds) or (kinds,)
            if type(value) not in allowed and not (type(value) is int and float in allowed):
                kind = getattr(kinds, "__name__", kinds)
                bad.append(f"{f.name} must be {kind}, got {value!r:.80} ({type(value).__name__})")
        if bad:
            raise ConfigError("; ".join(bad))

    def _check_values(self) -> None:
        """Errors: ConfigError."""
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval must be at least 1, got {self.stream_interval}")
        if self.return_hidden_states_mode not in (None, "last", "full"):
            raise ConfigError(f"return_hidden_states_mode must be last or full, got {self.return_hidden_states_mode!r}")
        if self.grammar_backend not in (None, "llguidance", "xgrammar", "outlines", "none"):
            raise ConfigError(
                f"grammar_backend must be llguidance (the default; xgrammar and outlines come to it) or none, got "
                f"{self.grammar_backend!r}"
            )
        if self.log_level is not None and self.log_level.lower() not in LOG_LEVELS:
            raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}")
        if not 0 <= self.log_requests_level <= 3:
            raise ConfigError(f"log_requests_level must be 0, 1, 2 or 3, got {self.log_requests_level}")
        if self.base_gpu_id < 0:
            raise ConfigError(f"base_gpu_id must be at least 0, got {self.base_gpu_id}")
        if self.constrained_json_disable_any_whitespace and self.constrained_json_whitespace_pattern is not None:
            raise ConfigError("constrained_json_disable_any_whitespace and constrained_json_whitespace_pattern exclude "
                              "each other; leave one out")  # fmt: skip
        try:
            _ = self.whitespace
        except GrammarError as error:
            raise ConfigError(str(error)) from error
        if not self.weight_version:
            raise ConfigError("weight_version must be a text that is not empty")
        self.preferred()


def set_log_level(level: str | None) -> None:
    """Sets the level of the logger "fengine", and lets it print where nothing else does. Modifies: logging."""
    if level is None:
        return
    logger = logging.getLogger("fengine")
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s %(levelname)s: %(message)s"))
        logger.addHandler(handler)


_LOAD_WORDS = {"sharded_state": "safetensors"}  # what save_sharded_model writes
_DTYPE_WORDS = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}


def _choice(enum: Any, name: str, value: str) -> Any:
    try:
        return enum[value]
    except KeyError:
        raise ConfigError(f"{name} must be one of {', '.join(e.name for e in enum)}, got {value!r}") from None
