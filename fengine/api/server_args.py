"""`ServerArgs`: SGLang's names for an engine's settings, each honoured, harmless, or refused by name."""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, get_args

from fengine.api import sglang_args as sglang
from fengine.config import EngineConfig, check_home, held
from fengine.core.json_text import json_object
from fengine.core.request import SamplingParams
from fengine.core.scalars import MAX_BITS, plain, told
from fengine.errors import ConfigError, GrammarError
from fengine.structured_output.regex import explicit
from fengine.structured_output.schema import Whitespace
from fengine.tokenizer.stop_regex import compile_patterns

CHOICES: dict[str, tuple[Any, ...]] = {
    "return_hidden_states_mode": (None, "last", "full"),
    "grammar_backend": (None, "llguidance", "xgrammar", "outlines", "none"),
    "log_level": (None, "debug", "info", "warning", "error", "critical"),
    "log_requests_level": (0, 1, 2, 3),
    "sampling_defaults": (None, "model", "openai"),
}
SECTIONS: Mapping[str, Any] = {f.name: f.type for f in fields(EngineConfig)}


def setting(default: Any, path: str) -> Any:
    """A field that is `path` of the EngineConfig; with "!" in front its opposite. None: the configuration's default."""
    return field(default=default, metadata={"path": path})


@sglang.with_foreign_fields
@dataclass
class ServerArgs:
    """A plain dataclass (`dataclasses.asdict` works). `to_config` checks it and gives an EngineConfig. The fields here
    are honoured; those of `sglang_args.json` are accepted without effect, or refused with the reason."""

    model_path: str
    tokenizer_path: str | None = setting(None, "model.tokenizer_path")
    skip_tokenizer_init: bool = setting(False, "model.skip_tokenizer_init")
    load_format: str = setting("auto", "model.load_format")
    dtype: Any = "auto"  # a name, or a dtype of torch
    device: str | None = setting(None, "model.device")  # cpu, cuda, cuda:N
    tp_size: int = setting(1, "parallel.tp_size")  # GPUs that hold the model together
    dp_size: int = setting(1, "parallel.dp_size")  # replicas of the model, that share the requests
    dp_restart: bool = setting(False, "parallel.dp_restart")  # fengine's own: a replica that dies is started again
    base_gpu_id: int = 0  # the GPU where device is cuda, or left out
    revision: str | None = setting(None, "model.revision")
    download_dir: str | None = setting(None, "model.download_dir")  # a cache of the hub in place of HF_HOME's
    context_length: int | None = setting(None, "model.context_length")
    is_embedding: bool = setting(False, "model.is_embedding")
    quantization: str | None = setting(None, "model.quantization")  # of the file; "fp8" of one in 16 bits: at load
    kv_cache_dtype: str = setting("auto", "cache.kv_cache_dtype")  # "fp8_e4m3": keys and values in half of the bytes
    json_model_override_args: str | dict = "{}"  # values over those of config.json
    mem_fraction_static: float | None = setting(None, "cache.mem_fraction_static")
    max_total_tokens: int | None = setting(None, "cache.max_total_tokens")
    max_running_requests: int | None = setting(None, "scheduler.max_running_requests")
    max_queued_requests: int | None = setting(None, "scheduler.max_queued_requests")  # what comes beyond is refused
    chunked_prefill_size: int | None = None
    page_size: int | None = setting(None, "cache.page_size")
    schedule_policy: str = setting("fcfs", "scheduler.policy")
    enable_priority_scheduling: bool = False  # orders the queue; a request that runs is never preempted for it
    schedule_low_priority_values_first: bool = False
    default_priority_value: int | None = None
    disable_radix_cache: bool = setting(False, "!cache.prefix_cache")
    disable_overlap_schedule: bool | None = setting(None, "!scheduler.overlap")
    disable_cuda_graph: bool = setting(False, "!compile.cuda_graph")
    disable_prefill_cuda_graph: bool = False
    disable_decode_cuda_graph: bool = False
    cuda_graph_backend_prefill: str | None = None  # "disabled", or a hint
    cuda_graph_backend_decode: str | None = None
    cuda_graph_max_bs: int | None = None  # most rows of a decode step that is captured
    cuda_graph_max_bs_decode: int | None = None
    cuda_graph_bs: list | tuple | None = None  # the largest is such a bound; the other sizes are fengine's own
    cuda_graph_bs_decode: list | tuple | None = None
    enable_torch_compile: bool | None = setting(None, "compile.enabled")  # None: only on a GPU without CUDA graphs
    speculative_algorithm: str | None = None  # "NGRAM"; "STANDALONE": a small model; "EAGLE3": a head
    speculative_draft_model_path: str | None = setting(None, "speculation.draft")
    speculative_num_steps: int | None = None  # guesses of the small model; its draft tokens are one more
    speculative_num_draft_tokens: int | None = None  # of a row in one step, its own token included
    speculative_adaptive: bool = setting(True, "speculation.adaptive")  # as many guesses of a request as pay
    speculative_ngram_min_match_window_size: int | None = setting(None, "speculation.ngram_min_match")
    speculative_ngram_max_match_window_size: int | None = setting(None, "speculation.ngram_max_match")
    random_seed: int | None = setting(None, "random_seed")  # None is 0: runs can be repeated
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    stream_output: bool = False  # SGLang's older name of the same
    enable_metrics: bool = False
    preferred_sampling_params: str | dict | None = None  # JSON or a dict: defaults under what each call gives
    sampling_defaults: str | None = setting(None, "model.sampling_defaults")  # "model": generation_config.json's
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
    enable_lora: bool | None = setting(None, "lora.enabled")  # None: if lora_paths are given
    lora_paths: dict | list | None = None  # {name: path}, or a list of "name=path", paths, or SGLang's dicts
    max_loras_per_batch: int = setting(8, "lora.max_loras_per_batch")
    max_lora_rank: int | None = setting(None, "lora.max_lora_rank")
    lora_target_modules: list | tuple | set | str | None = None
    max_loaded_loras: int | None = setting(None, "lora.max_loaded_loras")
    grammar_backend: str | None = None  # none refuses grammars; whatever else is named, they are llguidance's
    constrained_json_whitespace_pattern: str | None = None  # between the parts of JSON; None: a space, or a line end
    constrained_json_disable_any_whitespace: bool = False  # exactly one space behind comma and colon, none elsewhere
    enable_weights_cpu_backup: bool = False  # resume_memory_occupation brings back the weights that were released
    log_level: str | None = None  # of the logger "fengine"; None leaves it alone
    log_requests: bool = False
    log_requests_level: int = 2  # 0: ids and times; 1: parameters, too; 2: the beginning of texts; 3: whole texts
    crash_dump_folder: str | None = None  # where the last requests are written if the engine dies
    numerics: str = setting("exact", "numerics")  # fengine's own, as those of images
    allow_image_urls: bool = setting(False, "multimodal.allow_image_urls")  # http(s)
    allowed_media_domains: list | tuple | None = setting(None, "multimodal.image_hosts")  # if any, only of these
    image_folder: str | None = setting(None, "multimodal.image_folder")  # of paths that come over HTTP
    image_cache_mib: int = setting(256, "multimodal.cache_mib")
    media_url_max_file_size_mb: int = setting(64, "multimodal.max_image_mib")
    max_image_pixels: int = setting(1 << 26, "multimodal.max_image_pixels")
    # Declared for type checkers; sglang_args.json says what becomes of them.
    trust_remote_code: Any = False
    attention_backend: Any = None
    sampling_backend: Any = None
    gpu_id_step: Any = 1
    enable_memory_saver: Any = False

    def to_config(self) -> EngineConfig:
        """The same settings in fengine's words. Errors: ConfigError, UnsupportedFeatureError."""
        self._check_types()
        sglang.refuse_foreign(vars(self))
        self._check_values()
        sglang.set_log_level(self.log_level)
        sglang.log_harmless(vars(self))
        values = {path.lstrip("!"): _converted(path, getattr(self, name)) for name, path in PATHS.items()}
        sections: dict[str, dict[str, Any]] = defaultdict(dict)
        for path, value in (values | self._derived()).items():
            section, _, name = path.rpartition(".")
            if value is not None:
                sections[section][name] = _enum(section, name, value)
        top = sections.pop("", {})
        return EngineConfig(**{name: SECTIONS[name](**given) for name, given in sections.items()}, **top)

    def _derived(self) -> dict[str, Any]:
        """Values of the configuration that are no single field here. Errors: ConfigError."""
        overrides = json_object("json_model_override_args", self.json_model_override_args)
        rows, prefill_graphs = sglang.graphs_of(vars(self))
        number, chunk = self.base_gpu_id, self.chunked_prefill_size
        if number and self.device not in (None, "cpu", "cuda", f"cuda:{number}"):
            raise ConfigError(f"device={self.device!r} and base_gpu_id={number} name two GPUs; leave one of them out")
        dtype = plain(self.dtype) if isinstance(self.dtype, str) else told(self.dtype)
        return {
            "model.path": str(self.model_path),
            "model.dtype": dtype.removeprefix("torch."),
            "model.gpu_id": number,
            "model.json_overrides": json.dumps(overrides, sort_keys=True) if overrides else "",
            "scheduler.max_step_tokens": chunk if chunk is None or chunk > 0 else None,  # -1: chunking is off
            "compile.prefill_graphs": prefill_graphs,
            "compile.graph_rows": rows,
            "speculation.algorithm": self.speculative_algorithm and self.speculative_algorithm.lower(),
            "speculation.num_draft_tokens": sglang.draft_tokens(vars(self)),
            **sglang.further_values(vars(self)),
        }

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
        full = self.enable_return_hidden_states or self.return_hidden_states
        return "full" if full else self.return_hidden_states_mode

    def preferred(self) -> dict[str, Any]:
        """`preferred_sampling_params`, checked. Errors: ConfigError."""
        values = json_object("preferred_sampling_params", self.preferred_sampling_params)
        try:
            compile_patterns(SamplingParams.of(values).stop_regex)
        except ValueError as error:
            raise ConfigError(f"preferred_sampling_params: {error}") from error
        return values

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """An option for each field: `--tp-size 2`, and `--disable-cuda-graph` for a field that is False."""
        for f in fields(ServerArgs):
            words = ["--" + f.name.replace("_", "-"), *sglang.OPTIONS.get(f.name, ())]
            if list in get_args(f.type):
                parser.add_argument(*words, nargs="+")
            elif dict in get_args(f.type) and str not in get_args(f.type):
                parser.add_argument(*words, type=sglang.cli_object)
            elif bool in (type(f.default), *get_args(f.type)):
                parser.add_argument(*words, action=argparse.BooleanOptionalAction, default=f.default)
            else:
                kind = next((k for k in (int, float) if k in (f.type, *get_args(f.type), type(f.default))), str)
                made = f.default if f.default_factory is MISSING else f.default_factory()
                parser.add_argument(*words, type=kind, default=made, required=made is MISSING)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "ServerArgs":
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    def _check_types(self) -> None:
        """A wrong type is told here, not where it is first used."""
        bad = []
        for f in fields(self):
            value, allowed = getattr(self, f.name), get_args(f.type) or (f.type,)
            fits = type(value) in allowed or (type(value) is int and float in allowed)
            if f.type is Any or (f.name == "model_path" and isinstance(value, os.PathLike)):
                continue
            if not fits or (type(value) is int and value.bit_length() > MAX_BITS):
                kind = getattr(f.type, "__name__", f.type)
                bad.append(f"{f.name} must be {kind}, got {told(value)} ({type(value).__name__})")
        if bad:
            raise ConfigError("; ".join(bad))

    def _check_values(self) -> None:
        """Errors: ConfigError."""
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if (value.lower() if name == "log_level" and value else value) not in allowed:
                words = ", ".join(str(word) for word in allowed if word is not None)
                raise ConfigError(f"{name} must be one of {words}, got {told(value)}")
        for name, least in (("stream_interval", 1), ("base_gpu_id", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {told(getattr(self, name))}")
        spaces = self.constrained_json_disable_any_whitespace, self.constrained_json_whitespace_pattern is not None
        problems = check_home("crash_dump_folder", self.crash_dump_folder) + held({
            "constrained_json_disable_any_whitespace and constrained_json_whitespace_pattern exclude each other; leave "
            "one out": all(spaces),
            "weight_version must be a text that is not empty": not self.weight_version,
        })  # fmt: skip
        if problems:
            raise ConfigError("; ".join(problems))
        try:
            _ = self.whitespace, self.preferred()
        except GrammarError as error:
            raise ConfigError(str(error)) from error


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """The settings of a command line; argparse ends the process if they are none."""
    parser = argparse.ArgumentParser(prog="fengine.launch_server")
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))


def _converted(path: str, value: Any) -> Any:
    return not value if path.startswith("!") and value is not None else value


PATHS: Mapping[str, str] = {f.name: f.metadata["path"] for f in fields(ServerArgs) if "path" in f.metadata}


def in_force(config: EngineConfig) -> dict[str, Any]:
    """The fields that are values of the configuration, as a resolved one has them. Pure."""
    found = {}
    for name, path in PATHS.items():
        section, _, key = path.lstrip("!").rpartition(".")
        value = getattr(getattr(config, section) if section else config, key)
        found[name] = _converted(path, value.value if isinstance(value, Enum) else value)
    return found


def _enum(section: str, name: str, value: Any) -> Any:
    """The value of a configuration's field, by name where that is an enum. Errors: ConfigError."""
    kind: Any = SECTIONS[name] if not section else {f.name: f.type for f in fields(SECTIONS[section])}[name]
    value = sglang.WORDS.get(name, {}).get(value, value) if isinstance(value, str) else value
    if not (isinstance(kind, type) and issubclass(kind, Enum)) or isinstance(value, Enum):
        return value
    try:
        return kind[str(value).replace("-", "_")]
    except KeyError:
        word = "schedule_policy" if name == "policy" else name
        raise ConfigError(f"{word} must be one of {', '.join(e.name for e in kind)}, got {told(value)}") from None
