"""`ServerArgs`: SGLang's names for an engine's settings, each honoured, harmless, or refused by name."""

import argparse
import json
import os
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_args

from fengine.api.adapter_paths import adapter_paths
from fengine.api.foreign_args import ALSO_OFF, HARMLESS
from fengine.api.foreign_args import REFUSED as REFUSED_BY_REASON
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
    Policy,
    SchedulerConfig,
    SpeculationConfig,
)
from fengine.core.request import SamplingParams
from fengine.errors import ConfigError, GrammarError, UnsupportedFeatureError
from fengine.structured_output.regex import explicit
from fengine.structured_output.schema import Whitespace
from fengine.tokenizer.stop_regex import compile_patterns

_Foreign = make_dataclass(
    "_Foreign",
    [
        (name, Any, field(default=default))
        for group in (*HARMLESS.values(), *REFUSED_BY_REASON.values())
        for name, default in group.items()
    ],
    kw_only=True,
)


@dataclass
class ServerArgs(_Foreign):
    """A plain dataclass (`dataclasses.asdict` works). `to_config` checks it and gives an EngineConfig.

    The fields here are honoured; those of `foreign_args.py` are accepted without effect, or refused with the reason.
    """

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    context_length: int | None = None
    is_embedding: bool = False
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
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
    return_hidden_states_mode: str | None = None  # "last" or "full": the most that calls may ask for
    weight_version: str = "default"
    chat_template: str | None = None  # a file, or the template itself
    hf_chat_template_name: str | None = None
    default_chat_template_kwargs: dict | None = None
    enable_lora: bool | None = None  # None: if lora_paths are given
    lora_paths: dict | list | None = None  # {name: path}, or a list of "name=path", paths, or SGLang's dicts
    max_loras_per_batch: int = 8
    max_lora_rank: int | None = None
    lora_target_modules: list | tuple | set | str | None = None
    max_loaded_loras: int | None = None
    grammar_backend: str | None = None  # llguidance, or none: then grammars are refused
    constrained_json_whitespace_pattern: str | None = None  # between the parts of JSON; None: a space, or a line end
    constrained_json_disable_any_whitespace: bool = False  # exactly one space behind comma and colon, none elsewhere
    numerics: str = "exact"  # fengine's own

    def to_config(self) -> EngineConfig:
        """The same settings in fengine's words. Errors: ConfigError, UnsupportedFeatureError."""
        self._check_types()
        self._refuse()
        self._check_values()
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk < 1:  # SGLang's -1: chunking off; the step still needs a budget
            chunk = None
        overlap = None if self.disable_overlap_schedule is None else not self.disable_overlap_schedule
        return EngineConfig(
            model=ModelConfig(
                path=str(self.model_path),
                tokenizer_path=self.tokenizer_path,
                revision=self.revision,
                load_format=_choice(LoadFormat, "load_format", self.load_format),
                dtype=_choice(Dtype, "dtype", _DTYPE_WORDS.get(self.dtype, self.dtype)),
                device=self.device,
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
            ),
            compile=CompileConfig(enabled=self.enable_torch_compile, cuda_graph=not self.disable_cuda_graph),
            speculation=self._speculation(),
            lora=self._lora(),
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
        return "full" if self.enable_return_hidden_states else self.return_hidden_states_mode

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
                parser.add_argument(name, type=kind, default=f.default)

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
            allowed = get_args(kinds) or (kinds,)
            if type(value) not in allowed and not (type(value) is int and float in allowed):
                kind = getattr(kinds, "__name__", kinds)
                bad.append(f"{f.name} must be {kind}, got {value!r:.80} ({type(value).__name__})")
        if bad:
            raise ConfigError("; ".join(bad))

    def _refuse(self) -> None:
        """Everything not built that differs from its default, all at once."""
        bad = []
        for reason, group in REFUSED_BY_REASON.items():
            for name, default in group.items():
                value = getattr(self, name)
                if not (value is None or _same(value, default) or any(_same(value, x) for x in ALSO_OFF.get(name, ()))):
                    bad.append(f"{name}={value!r:.80} ({reason})")
        if (algorithm := self.speculative_algorithm) is not None and algorithm.upper() != "NGRAM":
            bad.append(f"speculative_algorithm={algorithm!r:.80} (of speculation only NGRAM is built)")
        if bad:
            raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these arguments out.")

    def _check_values(self) -> None:
        """Errors: ConfigError."""
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval must be at least 1, got {self.stream_interval}")
        if self.return_hidden_states_mode not in (None, "last", "full"):
            raise ConfigError(f"return_hidden_states_mode must be last or full, got {self.return_hidden_states_mode!r}")
        if self.grammar_backend not in (None, "llguidance", "none"):
            raise ConfigError(
                f"grammar_backend must be llguidance (the default) or none, got {self.grammar_backend!r}: other "
                "libraries let pass what a JSON schema forbids in a keyword that they do not know"
            )
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


def _same(a: Any, b: Any) -> bool:
    kinds = {type(a), type(b)}
    return (len(kinds) == 1 or kinds == {int, float}) and a == b


REFUSED = tuple(name for group in REFUSED_BY_REASON.values() for name in group)
_DTYPE_WORDS = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}


def _choice(enum: Any, name: str, value: str) -> Any:
    try:
        return enum[value]
    except KeyError:
        raise ConfigError(f"{name} must be one of {', '.join(e.name for e in enum)}, got {value!r}") from None
