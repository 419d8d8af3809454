"""Constructor calls as public programs make them, with a tiny model in place of theirs and a CPU in place of GPUs.

What asks for nothing that is not built starts and answers; the rest is refused by name.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch

from fengine.api.engine import Engine
from fengine.api.server_args import ServerArgs
from fengine.errors import UnsupportedFeatureError
from fengine.worker.hub import BOX

ONE_GPU = {"tp_size": 1, "dp_size": 1, "ep_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0, "base_gpu_id": 0}
VERL = {
    **ONE_GPU, "dtype": "bfloat16", "mem_fraction_static": 0.5, "enable_memory_saver": True, "gpu_id_step": 1,
    "load_format": "dummy", "dist_init_addr": "10.0.0.1:30001", "trust_remote_code": True, "max_running_requests": 64,
    "mm_attention_backend": "fa3", "attention_backend": "fa3", "skip_tokenizer_init": True,
}  # fmt: skip
SLIME = {
    **ONE_GPU, "trust_remote_code": True, "random_seed": 1234, "enable_memory_saver": True, "host": "10.0.0.1",
    "port": 15000, "nccl_port": 15001, "dist_init_addr": "10.0.0.1:15002", "gpu_id_step": 1,
    "skip_server_warmup": True, "enable_draft_weights_cpu_backup": True, "enable_metrics": True,
}  # fmt: skip
AREAL = {
    "random_seed": 1, "skip_tokenizer_init": True, "disable_cuda_graph": False, "disable_radix_cache": True,
    "disable_cuda_graph_padding": False, "enable_nccl_nvls": False, "disable_outlines_disk_cache": False,
    "disable_custom_all_reduce": False, "disable_overlap_schedule": False, "enable_mixed_chunk": False,
    "enable_dp_attention": False, "enable_ep_moe": False, "enable_torch_compile": False, "torch_compile_max_bs": 32,
    "cuda_graph_max_bs": None, "cuda_graph_bs": None, "torchao_config": "", "enable_nan_detection": False,
    "enable_p2p_check": False, "triton_attention_reduce_in_fp32": False, "triton_attention_num_kv_splits": 8,
    "num_continuous_decode_steps": 1, "load_format": "auto", "enable_memory_saver": False,
    "allow_auto_truncate": False, "attention_backend": "fa3", "mm_attention_backend": None,
    "enable_deterministic_inference": False, "enable_multimodal": False, "sampling_backend": None,
    "context_length": 8192, "mem_fraction_static": 0.9, "max_running_requests": None, "chunked_prefill_size": -1,
    "max_prefill_tokens": 32768, "schedule_policy": "lpm", "schedule_conservativeness": 1.0, "cpu_offload_gb": 0,
    "dtype": "bfloat16", "kv_cache_dtype": "auto", "dp_size": 1, "ep_size": 1, "enable_lora": None,
    "max_lora_rank": None, "lora_target_modules": None, "lora_paths": None, "max_loaded_loras": 1,
    "max_loras_per_batch": 1, "lora_backend": "triton", "log_level": "warning", "log_level_http": "warning",
    "log_requests": False, "log_requests_level": 0, "show_time_cost": False, "enable_metrics": True,
    "decode_log_interval": 1, "tokenizer_mode": "auto", "nnodes": 1, "node_rank": 0,
}  # fmt: skip
LM_EVAL = {
    "tokenizer_path": None, "tokenizer_mode": "auto", "load_format": "auto", "trust_remote_code": True,
    "dtype": "auto", "kv_cache_dtype": "auto", "mem_fraction_static": None, "tp_size": 1, "dp_size": 1,
    "chunked_prefill_size": -1, "random_seed": 1234, "context_length": 2048,
}  # fmt: skip

STARTS: dict[str, dict[str, Any]] = {
    "the documents": {},
    "the documents, quietly": {"dtype": "float16", "log_level": "warning"},
    "an embedding model": {"is_embedding": True},
    "hidden states": {"enable_return_hidden_states": True},
    "hidden states of the first releases": {"return_hidden_states": True},
    "tokens in, tokens out": {"skip_tokenizer_init": True, "mem_fraction_static": 0.7},
    "structured outputs": {"grammar_backend": "outlines", "tool_call_parser": "qwen25"},
    "structured outputs of a model that thinks": {"grammar_backend": "xgrammar", "reasoning_parser": "deepseek-r1"},
    "streaming sessions": {"enable_streaming_session": True, "disable_radix_cache": False},
    "deterministic": {"enable_deterministic_inference": True, "attention_backend": "fa3", "random_seed": 42},
    "priorities": {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True},
    "a processor": {"enable_custom_logit_processor": True, "disable_overlap_schedule": True},
    "n-grams": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8, "cuda_graph_max_bs": 4},
    "LoRA without adapters": {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"],
                              "lora_backend": "triton", "max_loras_per_batch": 2},
    "no graphs by backend": {"attention_backend": "torch_native", "disable_radix_cache": True, "tp_size": 1,
                             "cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled",
                             "max_total_tokens": 128, "mem_fraction_static": 0.15, "trust_remote_code": True},
    "no graphs by switches": {"dtype": "bfloat16", "context_length": 2048, "max_running_requests": 8,
                              "max_total_tokens": 8192, "max_mamba_cache_size": 64, "mem_fraction_static": 0.8,
                              "disable_cuda_graph": True, "disable_prefill_cuda_graph": True,
                              "chunked_prefill_size": 2048, "random_seed": 0, "log_level": "warning"},
    "a comparison of kernels": {"dtype": "bfloat16", "tp_size": 1, "attention_backend": "fa3", "page_size": 16,
                                "mem_fraction_static": 0.6, "disable_cuda_graph": True, "context_length": 4096,
                                "chunked_prefill_size": 64},
    "a random model": {"served_model_name": "tiny-random-llama", "attention_backend": "triton", "dtype": "float16",
                       "context_length": 128, "max_total_tokens": 256, "max_running_requests": 4,
                       "mem_fraction_static": 0.01, "random_seed": 20260912, "disable_cuda_graph": True},
    "a benchmark of throughput": {"tp_size": 1, "dp_size": 1, "trust_remote_code": True, "max_prefill_tokens": 32768,
                                  "random_seed": 3, "chunked_prefill_size": -1, "schedule_policy": "lpm",
                                  "show_time_cost": True, "num_continuous_decode_steps": 1,
                                  "schedule_conservativeness": 1, "attention_backend": "flashinfer"},
    "memory given back": {"random_seed": 42, "enable_memory_saver": True, "mem_fraction_static": 0.8, "tp_size": 1,
                          "ep_size": 1, "enable_weights_cpu_backup": False},
    "memory given back, with a copy": {**ONE_GPU, "enable_dp_attention": False, "dist_init_addr": "127.0.0.1:10000",
                                       "enable_memory_saver": True, "enable_weights_cpu_backup": True,
                                       "skip_tokenizer_init": True, "max_running_requests": 32},
    "torch's dtype and a port": {"dtype": torch.bfloat16, "mem_fraction_static": 0.6, "enable_memory_saver": True,
                                 "base_gpu_id": 0, "gpu_id_step": 1, "node_rank": 0, "port": 40000},
    "verl, an engine": VERL | {"port": 30000, "log_level": "info", "log_requests": True, "log_requests_level": 2},
    "verl, a server's engine": VERL | {"disable_cuda_graph": False, "log_level": "error", "skip_server_warmup": True,
                                       "quantization": None, "json_model_override_args": "{}",
                                       "enable_weights_cpu_backup": False},
    "slime": SLIME,
    "slime, half precision": SLIME | {"dtype": "float16", "prefill_round_robin_balance": True},
    "AReaL": AREAL,
    "a trainer with torchao's name": {**ONE_GPU, "trust_remote_code": True, "random_seed": 1, "torchao_config": "",
                                      "host": "0.0.0.0", "port": 31000, "skip_server_warmup": True},
    "SkyRL": {"tp_size": 1, "attention_backend": "flashinfer", "dtype": "bfloat16", "skip_tokenizer_init": True,
              "enable_memory_saver": True, "custom_weight_loader": [], "disable_cuda_graph_padding": True},
    "TRL": {"mem_fraction_static": 0.9, "disable_custom_all_reduce": True, "stream_output": False},
    "lm-eval": LM_EVAL,
    "lighteval": LM_EVAL | {"chunked_prefill_size": 4096, "sampling_backend": None, "attention_backend": None,
                            "schedule_policy": "fcfs", "skip_tokenizer_init": False},
    "OpenCompass": {"trust_remote_code": True, "dllm_algorithm": None, "max_running_requests": 128},
    "Ray": {"skip_tokenizer_init": True, "dp_size": 1, "tp_size": 1, "mem_fraction_static": 0.8, "log_level": "info"},
    "Dynamo": {"page_size": 16, "enable_metrics": True, "kv_events_config": None, "skip_tokenizer_init": True,
               "stream_output": True, "disaggregation_mode": "null", "disaggregation_bootstrap_port": 8998},
    "a cache of models": {"download_dir": "/models", "load_format": "auto", "trust_remote_code": True},
    "rank_llm": {"port": 31313, "device": "cpu", "trust_remote_code": True},
    "embeddings in bulk": {"device": "cpu", "tp_size": 1, "dp_size": 1, "random_seed": 0, "quantization": None,
                           "revision": None, "is_embedding": True, "enable_torch_compile": False,
                           "torch_compile_max_bs": 32, "log_level": "error"},
    "DSPy": {"mem_fraction_static": 0.8, "enable_cache_report": True, "watchdog_timeout": 600},
    "an older release": {"disable_flashinfer": True, "disable_regex_jump_forward": True, "disable_disk_cache": True,
                         "disable_mla": True, "attention_reduce_in_fp32": True, "file_storage_pth": "x"},
    "a hierarchical cache that is off": {"enable_hierarchical_cache": False, "hicache_ratio": 3, "hicache_size": 8},
    "voices": {"tokenizer_path": None, "mem_fraction_static": 0.4, "trust_remote_code": True, "dtype": "bfloat16",
               "attention_backend": "flashinfer", "chunked_prefill_size": 8192, "disable_radix_cache": False,
               "disable_cuda_graph": False, "disable_overlap_schedule": True, "lora_paths": {}},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "offloading": ({"cpu_offload_gb": 500, "enable_memory_saver": True}, "cpu_offload_gb=500"),
    "bits and bytes": ({"quantization": "bitsandbytes", "disable_piecewise_cuda_graph": True}, "quantization="),
    "another fp8 cache": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2'"),
    "pipelines": ({"pp_size": 8, "tp_size": 1}, "pp_size=8"),
    "nodes": ({"nnodes": 2, "node_rank": 1}, "nnodes=2"),
    "prefill apart": (SLIME | {"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
    "diffusion": ({"dllm_algorithm": "LowConfidence"}, "dllm_algorithm="),
    "routed experts": (SLIME | {"enable_return_routed_experts": True}, "enable_return_routed_experts=True"),
    "transformers' models": ({"model_impl": "transformers"}, "model_impl='transformers'"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_checkpoints.write(
        tmp_path_factory.mktemp("public"), "llama", vocab_size=4096, max_position_embeddings=8192
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((BOX / name).read_bytes())
    return folder


@pytest.mark.parametrize("name", STARTS)
def test_a_program_starts(name: str, model: Path) -> None:
    settings: dict[str, Any] = {"max_total_tokens": 512, **STARTS[name], "model_path": str(model), "device": "cpu"}
    if settings.get("tokenizer_path", "") is not None:
        settings["tokenizer_path"] = str(model)
    args = ServerArgs(**settings)
    with Engine(**dataclasses.asdict(args)) as engine:
        if engine.server_args.is_embedding:
            assert len(engine.encode([[1, 2, 3]])) == 1
        else:
            output = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2, "ignore_eos": True})
            assert len(output["output_ids"]) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(UnsupportedFeatureError, match=re.escape(words)):
        Engine(model_path="box", **settings)
