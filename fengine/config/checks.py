"""What configurations may hold, and `resolve`, which decides what "auto" means. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fengine.config.schema import EngineConfig, LoraConfig, SpeculationConfig
from fengine.errors import ConfigError


@dataclass(frozen=True)
class Hardware:
    """What `resolve` may know about the machine."""

    device: str  # "cpu" or "cuda"


KV_DTYPES = ("auto", "fp8_e4m3")
QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "w8a8_fp8")
MAX_ROWS = 65536
MAX_PAGE_SIZE = 4096  # tokens
MAX_DRAFTS = 1024  # of a row in one step
MAX_ADAPTERS = 256  # of a batch
MAX_RANK = 512
MAX_PROCESSES = 64
DEFAULT_RANK = 64
# Whole numbers, each with its least and most; what is None is not checked.
BOUNDS: dict[str, tuple[int, int | None]] = {
    "model.context_length": (1, None),
    "cache.page_size": (1, MAX_PAGE_SIZE),
    "cache.max_total_tokens": (1, None),
    "scheduler.max_running_requests": (1, MAX_ROWS),  # tables are made for every row
    "scheduler.max_queued_requests": (1, None),
    "scheduler.max_step_tokens": (1, None),
    "compile.graph_rows": (0, MAX_ROWS),
    "speculation.step_tokens": (1, MAX_ROWS),
    "speculation.num_draft_tokens": (2, MAX_DRAFTS),  # a row's own token and a draft
    "speculation.ngram_min_match": (1, None),
    "lora.max_loras_per_batch": (1, MAX_ADAPTERS),
    "lora.max_lora_rank": (1, MAX_RANK),
    "parallel.tp_size": (1, MAX_PROCESSES),
    "parallel.dp_size": (1, MAX_PROCESSES),
    "multimodal.cache_mib": (1, None),
    "multimodal.max_image_mib": (1, 1024),
    "multimodal.max_image_pixels": (1, 1 << 30),
}


def check(config: EngineConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    values = {name: getattr(getattr(config, group), field) for name in BOUNDS for group, field in [name.split(".")]}
    return outside(BOUNDS, values) + _check_values(config) + _check_sizes(config) + _check_lora(config.lora)


def held(problems: Mapping[str, bool]) -> list[str]:
    """The problems that are, of those that could be. Pure."""
    return [problem for problem, holds in problems.items() if holds]


def outside(bounds: Mapping[str, tuple[int, int | None]], values: Mapping[str, Any]) -> list[str]:
    """Problems with numbers that are less than the least or more than the most; None is none. Pure."""
    problems = []
    for name, (least, most) in bounds.items():
        if (value := values[name]) is not None and (value < least or most is not None and value > most):
            limit = f"at least {least}" if value < least else f"at most {most}"
            problems.append(f"{name} must be {limit}, got {value}")
    return problems


def check_seed(seed: int) -> list[str]:
    """Problems with the seed of a run or a server. Pure."""
    return held({f"seed must be in [-2**63, 2**63 - 1], got {seed}": not -(2**63) <= seed < 2**63})


def _check_values(config: EngineConfig) -> list[str]:
    model, cache, share, scheduler = config.model, config.cache, config.cache.mem_fraction_static, config.scheduler
    timeouts = {name: getattr(scheduler, name) for name in ("waiting_timeout", "running_timeout")}
    problems = {
        f"scheduler.{name} must be null or seconds greater than 0, got {seconds}": not 0 < seconds < math.inf
        for name, seconds in timeouts.items() if seconds is not None
    } | {
        f"cache.mem_fraction_static must be in (0, 1), got {share}": share is not None and not 0 < share < 1,
        f"model.sampling_defaults must be openai or model, got {model.sampling_defaults!r}":
            model.sampling_defaults not in ("openai", "model"),
        f"model.quantization must be null, {', '.join(QUANTIZATIONS)}, got {model.quantization!r}":
            model.quantization not in (None, *QUANTIZATIONS),
        f"cache.kv_cache_dtype must be one of {', '.join(KV_DTYPES)}, got {cache.kv_cache_dtype!r:.80}":
            cache.kv_cache_dtype not in KV_DTYPES,
        "model.device must be null, cpu, cuda or cuda:N, got ''": model.device == "",
        "model.tokenizer_path must be null or a path, got ''; leave it out for the model's own":
            model.tokenizer_path == "",
    }  # fmt: skip
    homes = {"model.download_dir": model.download_dir, "multimodal.image_folder": config.multimodal.image_folder}
    homes |= {"scheduler.record": scheduler.record}
    return held(problems) + [told for key, path in homes.items() for told in check_home(key, path)]


def check_home(key: str, path: str | None) -> list[str]:
    """Problems with a path that would be a folder of the name ~: here no home is looked up. Pure."""
    return [f"{key}={path!r:.200} begins with ~; write the whole path"] if (path or "").startswith("~") else []


def _check_sizes(config: EngineConfig) -> list[str]:
    """What does not go together."""
    cache, drafts = config.cache, config.speculation
    tokens, rows = config.scheduler.max_step_tokens, config.scheduler.max_running_requests
    least, most = drafts.ngram_min_match, drafts.ngram_max_match
    return held({
        f"speculation.ngram_max_match ({most}) is smaller than speculation.ngram_min_match ({least})": most < least,
        f"cache.page_size ({cache.page_size}) is larger than cache.max_total_tokens ({cache.max_total_tokens}): the "
        "pool would hold no page":
            bool(cache.page_size and cache.max_total_tokens and cache.page_size > cache.max_total_tokens),
        f"speculation.draft is {drafts.draft!r} with speculation.algorithm={drafts.algorithm.value}: it belongs to "
        "standalone and eagle3, which need it": (drafts.draft is None) == drafts.algorithm.drafts,
        f"scheduler.max_step_tokens ({tokens}) is smaller than scheduler.max_running_requests ({rows}): a step of "
        "decoding rows would not fit; raise the first or lower the second": bool(tokens and rows and tokens < rows),
        "scheduler.record is of one engine's steps; set parallel.dp_size=1":
            config.scheduler.record is not None and config.parallel.dp_size > 1,
        f"speculation.num_draft_tokens ({drafts.num_draft_tokens}) with a draft model must be at most cache.page_size "
        f"({cache.page_size})":
            drafts.algorithm.drafts and (drafts.num_draft_tokens or 0) > (cache.page_size or MAX_PAGE_SIZE),
    })  # fmt: skip


def check_adapter(name: str | None, lora: LoraConfig, key: str = "adapter") -> list[str]:
    """Problems with the name of an adapter, that of a run's rows for example. Pure."""
    names = [known for known, _ in lora.named()]
    if name is None or name in names:
        return []
    return [f"{key}={name!r} is not in lora.paths, which has {', '.join(map(repr, names)) or 'none'}"]


def _check_lora(lora: LoraConfig) -> list[str]:
    most, batch, names = lora.max_loaded_loras, lora.max_loras_per_batch, [name for name, _ in lora.named()]
    too_many = most is not None and len(names) > most
    return held({
        f"lora.max_loaded_loras ({most}) is smaller than lora.max_loras_per_batch ({batch}): the adapters of a batch "
        "must be loaded": most is not None and most < batch,
        f"lora.paths has {len(names)} adapters, lora.max_loaded_loras is {most}": too_many,
        **{f"lora.paths has {name!r} twice": names.count(name) > 1 for name in sorted(set(names))},
        **{f"lora.paths has {n!r}={p!r}; neither may be empty": not (n and p) for n, p in lora.named()},
        **{f"lora.pinned has {n!r}, which is not in lora.paths": n not in names for n in lora.pinned},
        "lora.paths is given, but lora.enabled is false": bool(lora.paths) and not lora.on,
    })  # fmt: skip


def resolve(config: EngineConfig, hardware: Hardware) -> EngineConfig:
    """Replaces every "auto" that does not depend on the checkpoint. Pure. Errors: ConfigError with all problems."""
    _refuse(check(config))
    device = config.model.device or hardware.device
    if device == "cuda" and config.model.gpu_id:
        device = f"cuda:{config.model.gpu_id}"
    model = replace(config.model, device=device)
    config = replace(config, model=model, **_resolved(config, gpu=device.startswith("cuda")))
    _refuse(_check_sizes(config))  # of the defaults, too
    return config


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("invalid configuration:\n  " + "\n  ".join(problems))


def _resolved(config: EngineConfig, *, gpu: bool) -> dict[str, Any]:
    """The groups whose defaults depend on the device. Pure."""
    cache, scheduler, drafts, compiling = config.cache, config.scheduler, config.speculation, config.compile
    rows = scheduler.max_running_requests or (512 if gpu else 64)
    tokens = scheduler.max_step_tokens or max(rows, 8192 if gpu else 512)
    rows = rows if scheduler.max_running_requests else min(rows, tokens)
    overlap = gpu if scheduler.overlap is None else scheduler.overlap
    compiled = gpu and not compiling.cuda_graph if compiling.enabled is None else compiling.enabled
    page_size = cache.page_size or (64 if gpu else 16)  # 16 on a CPU: as fast as larger ones, with more prefix hits
    return {
        "cache": replace(cache, page_size=page_size),
        "scheduler": replace(scheduler, max_running_requests=rows, max_step_tokens=tokens, overlap=overlap),
        "compile": replace(compiling, enabled=compiled),
        "speculation": _resolved_drafts(drafts, tokens, page_size, gpu),
    }


def _resolved_drafts(drafts: SpeculationConfig, tokens: int, page_size: int, gpu: bool) -> SpeculationConfig:
    """For steps of so many tokens. Pure."""
    most, step_tokens = (min(6, page_size), 128) if drafts.algorithm.drafts else (16, 64)  # more take a step longer
    step_tokens = drafts.step_tokens or (step_tokens if gpu else 16)
    most = drafts.num_draft_tokens or most
    return replace(drafts, num_draft_tokens=most, step_tokens=min(step_tokens, tokens))
