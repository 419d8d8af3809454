"""`ServerArgs`: SGLang's names for an engine's settings, each honoured, harmless, or refused by name."""

import os
from dataclasses import dataclass, fields
from typing import Any, get_args

from fengine.config import (
    CacheConfig,
    CompileConfig,
    Dtype,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    Numerics,
    Policy,
    SchedulerConfig,
)
from fengine.errors import ConfigError, UnsupportedFeatureError


@dataclass
class ServerArgs:
    """A plain dataclass (`dataclasses.asdict` works). `to_config` checks it and gives an EngineConfig."""

    model_path: str
    # -- honoured
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    revision: str | None = None
    context_length: int | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    page_size: int | None = None
    schedule_policy: str = "fcfs"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool | None = None
    disable_cuda_graph: bool = False
    random_seed: int | None = None  # None is 0: a run can be repeated without having noted its seed
    incremental_streaming_output: bool = False
    stream_output: bool = False  # SGLang's older name of the same
    enable_metrics: bool = False
    enable_torch_compile: bool = True
    numerics: str = "exact"  # fengine's own
    # -- harmless: what they ask for is always so, or has no counterpart in one process
    enable_deterministic_inference: bool = True
    enable_mixed_chunk: bool = True
    max_prefill_tokens: int | None = None
    cuda_graph_max_bs: int | None = None
    log_level: str = "error"
    log_level_http: str | None = None
    log_requests: bool = False
    show_time_cost: bool = False
    decode_log_interval: int = 40
    watchdog_timeout: float = 300
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    warmups: str | None = None
    skip_server_warmup: bool = False
    sampling_backend: str | None = None
    # -- refused unless left at their default
    trust_remote_code: bool = False
    download_dir: str | None = None
    stream_interval: int = 1
    is_embedding: bool = False
    chat_template: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    attention_backend: str | None = None
    json_model_override_args: str = "{}"
    model_impl: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    enable_lora: bool | None = None
    lora_paths: Any = None
    speculative_algorithm: str | None = None
    grammar_backend: str | None = None
    enable_hierarchical_cache: bool = False
    enable_custom_logit_processor: bool = False
    enable_return_hidden_states: bool = False
    enable_memory_saver: bool = False
    enable_multimodal: bool | None = None
    disaggregation_mode: str = "null"
    allow_auto_truncate: bool = False
    preferred_sampling_params: str | None = None
    cpu_offload_gb: int = 0

    def to_config(self) -> EngineConfig:
        """The same settings in fengine's words. Errors: ConfigError, UnsupportedFeatureError."""
        self._check_types()
        self._refuse()
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
            numerics=_choice(Numerics, "numerics", self.numerics),
            random_seed=0 if self.random_seed is None else self.random_seed,
        )

    def _check_types(self) -> None:
        """A wrong type is told here, not where it is first used."""
        bad = []
        for f in fields(self):
            value, kinds = getattr(self, f.name), f.type
            if f.name in REFUSED or (f.name == "model_path" and isinstance(value, os.PathLike)):
                continue
            allowed = get_args(kinds) or (kinds,)
            if type(value) not in allowed and not (type(value) is int and float in allowed):
                kind = getattr(kinds, "__name__", kinds)
                bad.append(f"{f.name} must be {kind}, got {value!r:.80} ({type(value).__name__})")
        if bad:
            raise ConfigError("; ".join(bad))

    def _refuse(self) -> None:
        """Everything not built that differs from its default, all at once."""
        defaults = {f.name: f.default for f in fields(self)}
        off = {name: (None, False if defaults[name] is None else defaults[name]) for name in REFUSED}
        bad = [f"{name}={getattr(self, name)!r}" for name in REFUSED if getattr(self, name) not in off[name]]
        if bad:
            raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these arguments out.")


REFUSED = tuple(f.name for f in fields(ServerArgs))[[f.name for f in fields(ServerArgs)].index("trust_remote_code") :]
_DTYPE_WORDS = {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"}


def _choice(enum: Any, name: str, value: str) -> Any:
    try:
        return enum[value]
    except KeyError:
        raise ConfigError(f"{name} must be one of {', '.join(e.name for e in enum)}, got {value!r}") from None
