"""What an engine tells about itself, in SGLang's shapes."""

import math
import sys
import time
from collections.abc import Container
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from fengine import __version__
from fengine.api.context import HasContext
from fengine.api.server_args import ServerArgs, in_force
from fengine.config import Algorithm
from fengine.engine.parts import Parts
from fengine.worker.safetensors_file import read_config


def get_server_info(engine: HasContext) -> dict[str, Any]:
    """Every field of ServerArgs, those that were "auto" with the value in force; what the engine is made of, and one
    internal state for each replica."""
    parts, args, stats = engine._parts, engine._context.args, engine._parts.core.call("get_stats")
    config = parts.config
    return asdict(args) | in_force(config) | _names(args) | {
        "context_length": parts.context_length,
        "max_total_tokens": parts.pool_tokens,
        "chunked_prefill_size": config.scheduler.max_step_tokens,
        "speculative_num_draft_tokens": config.speculation.num_draft_tokens if args.speculative_algorithm else None,
        "weight_version": stats["weight_version"],
        "launch_command": " ".join(sys.argv),
        "status": "ready" if not stats["refusals"] else next(iter(stats["refusals"].values())),
        "max_total_num_tokens": parts.pool_tokens,
        "max_req_input_len": min(parts.context_length, parts.pool_tokens) - 1,
        "startup_time": _startup_time(parts),
        "version": __version__,
        "internal_states": [_internal_state(parts, of_one) for of_one in parts.core.each_stats().values()],
    }  # fmt: skip


def _startup_time(parts: Parts) -> dict[str, Any]:
    """Seconds by phase, in SGLang's words; kinds of graphs are captured together. Pure."""
    cuda = (parts.config.model.device or "").startswith("cuda")
    kinds = ("prefill", "target_verify", "draft_prefill", "draft_decode", "draft_extend")
    graphs = {"decode": parts.compile_seconds if cuda else 0.0, **dict.fromkeys(kinds, 0.0)}
    return {**parts.phases, "scheduler_e2e": parts.start_seconds, "cuda_graph": graphs}


def _names(args: ServerArgs) -> dict[str, Any]:
    path = str(args.model_path)
    return {
        "model_path": path,
        "tokenizer_path": args.tokenizer_path or path,
        "served_model_name": args.served_model_name or path,
    }


def _internal_state(parts: Parts, core_stats: dict[str, Any]) -> dict[str, Any]:
    """SGLang's state of one data-parallel rank, fengine's counters with it. Memory in GiB. Pure."""
    stats = parts.stats(core_stats)
    busy, tokens = time.perf_counter() - parts.ready_at, stats["output_tokens"]
    accepted = tokens / max(tokens - stats["correct_draft_tokens"], 1)  # for each draw of a row in a step
    return {
        "world_size": parts.config.parallel.tp_size,
        "effective_max_running_requests_per_dp": parts.config.scheduler.max_running_requests,
        "last_gen_throughput": tokens / busy,  # output tokens per second since the start
        "memory_usage": _memory_usage(parts, core_stats["refusals"]),
        "weight_version": core_stats["weight_version"],
        **({} if parts.config.speculation.algorithm is Algorithm.none else {"avg_spec_accept_length": accepted}),
        **stats,
    }


def _memory_usage(parts: Parts, refusals: Container[str]) -> dict[str, Any]:
    """GiB of weights, KV pool and graphs (on CUDA: all else that torch holds); what is released counts 0. Pure."""
    weights = parts.weights.nbytes()
    kv = 0 if "kv_cache" in refusals else parts.kv_bytes
    device = parts.config.model.device or "cpu"
    held = torch.cuda.memory_reserved(device) if device.startswith("cuda") else weights + kv
    return {
        "weight": weights / 2**30,
        "kvcache": kv / 2**30,
        "graph": max(held - weights - kv, 0) / 2**30,
        "token_capacity": parts.pool_tokens,
    }


def get_model_info(engine: HasContext) -> dict[str, Any]:
    """What kind of model runs. `preferred_sampling_params` are those in force, the model's own included."""
    parts, args, stats = engine._parts, engine._context.args, engine._parts.core.call("get_stats")
    return {
        **_names(args),
        "is_generation": parts.spec.generates,
        "preferred_sampling_params": dict(engine._context.preferred) or None,
        "weight_version": stats["weight_version"],
        "load_format": args.load_format,
        "has_image_understanding": parts.spec.vision is not None,
        "has_audio_understanding": False,
        "num_parameters": sum(math.prod(place.shape) for place in parts.weights.places.values()),
        "weight_dtypes": sorted({str(place.leaf.dtype) for place in parts.weights.places.values()}),
        "model_type": hf_config(parts).get("model_type"),
        "architectures": [parts.spec.architecture],
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
    }


def model_config(parts: Parts, args: ServerArgs) -> dict[str, Any]:
    """What programs read of SGLang's `model_config`. Pure."""
    spec = parts.spec
    return {
        "model_path": str(args.model_path),
        "context_len": parts.context_length,
        "is_generation": spec.generates,
        "is_multimodal": spec.vision is not None,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hf_eos_token_id": set(parts.eos_ids),
        "hf_config": SimpleNamespace(**hf_config(parts)),
    }


def hf_config(parts: Parts) -> dict[str, Any]:
    """The model's config.json with the values that count over it; {} where it has none."""
    path = parts.model_dir / "config.json"
    return read_config(parts.model_dir, parts.config.model.json_overrides) if path.exists() else {}


def get_load(engine: HasContext) -> list[dict[str, Any]]:
    """SGLang's load of each data-parallel rank: requests, those that wait, and tokens in the pages that they hold."""
    parts = engine._parts
    return [_load(parts, rank, parts.stats(stats)) for rank, stats in parts.core.each_stats().items()]


def _load(parts: Parts, rank: int, stats: dict[str, Any]) -> dict[str, Any]:
    tokens = stats["pages_used"] * parts.config.cache.page
    requests, usage = stats["running"] + stats["waiting"], stats["pages_used"] / max(1, stats["pages_total"])
    return {
        "dp_rank": rank, "num_reqs": requests, "num_waiting_reqs": stats["waiting"], "num_tokens": tokens,
        "num_running_reqs": stats["running"], "num_total_reqs": requests, "num_used_tokens": tokens,
        "max_total_num_tokens": parts.pool_tokens, "token_usage": usage,
        "max_running_requests": parts.config.scheduler.max_running_requests,
    }  # fmt: skip
