"""Every method of SGLang's offline Engine that is built has its names, order and defaults."""

import asyncio
import inspect
from typing import Any

import pytest
from checksum import checksum_engine

from fengine.api.engine import Engine

GENERATE = """prompt=None sampling_params=None input_ids=None image_data=None audio_data=None video_data=None
mm_hashes=None mm_content_hashes=None return_logprob=False logprob_start_len=None top_logprobs_num=None
token_ids_logprob=None lora_path=None custom_logit_processor=None require_reasoning=False return_hidden_states=False
return_routed_experts=False routed_experts_start_len=0 stream=False bootstrap_host=None bootstrap_port=None
bootstrap_room=None routed_dp_rank=None disagg_prefill_dp_rank=None kv_hints=None data_parallel_rank=None
external_trace_header=None rid=None session_params=None priority=None session_id=None"""
ENCODE = """prompt image_data=None audio_data=None video_data=None dimensions=None lora_path=None
embed_override_token_id=None embed_overrides=None external_trace_header=None rid=None"""
SCORE = """query=None items=None label_token_ids=None apply_softmax=False item_first=False embed_override_token_id=None
query_embed_overrides=None item_embed_overrides=None return_pooled_hidden_states=False score_extraction_token_id=None
temperature=1.0 return_token_logprobs=False stacked_query_item_embed_overrides=None"""
SIGNATURES = {
    "generate": GENERATE,
    "async_generate": GENERATE,
    "encode": ENCODE,
    "async_encode": ENCODE,
    "rerank": "prompt",
    "score": SCORE,
    "async_score": SCORE,
    "shutdown": "",
    "get_all_child_pids": "",
    "flush_cache": "",
    "open_session": "capacity_of_str_len session_id=None streaming=False timeout=None",
    "close_session": "session_id",
    "stop_profile": "",
    "get_server_info": "",
    "get_model_info": "",
    "freeze_gc": "",
    "update_weights_from_disk": "model_path load_format=None",
    "update_weights_from_tensor": "named_tensors load_format=None flush_cache=True",
    "update_weights_from_distributed": (
        "names dtypes shapes group_name='weight_update_group' flush_cache=True load_format=None"
    ),
    "update_weights_from_ipc": "zmq_handles flush_cache=True",
    "init_weights_update_group": "master_address master_port rank_offset world_size group_name backend='nccl'",
    "destroy_weights_update_group": "group_name",
    "begin_weight_update": "selector='all'",
    "end_weight_update": "",
    "get_weights_by_name": "name truncate_size=100",
    "load_lora_adapter": "lora_name lora_path pinned=False",
    "load_lora_adapter_from_tensors": "lora_name tensors config_dict load_format=None",
    "unload_lora_adapter": "lora_name",
    "async_load_lora_adapter": "lora_name lora_path pinned=False",
    "async_unload_lora_adapter": "lora_name",
    "release_memory_occupation": "tags=None",
    "resume_memory_occupation": "tags=None",
}
OURS = {  # what SGLang has only inside its tokenizer_manager, or not at all
    "abort": "rid=None abort_all=False",
    "pause_generation": "mode='abort'",
    "continue_generation": "",
    "chat": (
        "messages sampling_params=None tools=None add_generation_prompt=True chat_template_kwargs=None stream=False"
    ),
    "apply_chat_template": "messages tools=None add_generation_prompt=True tokenize=False",
    "register_logit_processor": "name processor",
}


def positional(name: str) -> list[str]:
    """The parameters that may be given by position, as `name` or `name=default`."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    found: list[Any] = [p for p in inspect.signature(getattr(Engine, name)).parameters.values() if p.kind not in kinds]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found[1:]]


@pytest.mark.parametrize("name", SIGNATURES | OURS)
def test_a_method_has_its_signature(name: str) -> None:
    assert positional(name) == (SIGNATURES | OURS)[name].split()


def test_what_may_only_be_given_by_name() -> None:
    for name in ("generate", "async_generate"):
        salt = inspect.signature(getattr(Engine, name)).parameters["cache_salt"]
        assert salt.kind is inspect.Parameter.KEYWORD_ONLY and salt.default is None
    profile = inspect.signature(Engine.start_profile).parameters
    known = "output_dir start_step num_steps activities profile_by_stage with_stack record_shapes profile_id"
    assert set(profile) >= set(known.split()) or any(p.kind is p.VAR_KEYWORD for p in profile.values())


def test_adapters_are_refused_in_sglangs_way() -> None:
    with checksum_engine() as engine:
        results = (
            engine.load_lora_adapter("a", "b"), engine.unload_lora_adapter("a"),
            engine.load_lora_adapter_from_tensors("a", {}, {}), asyncio.run(engine.async_load_lora_adapter("a", "b")),
            asyncio.run(engine.async_unload_lora_adapter("a")),
        )  # fmt: skip
    for result in results:
        assert not result.success and result.loaded_adapters == {}
        assert result.error_message.startswith("LoRA is not enabled")


def test_asynchronous_methods_are_coroutines() -> None:
    for name in ("async_generate", "async_encode", "async_score", "async_chat"):
        assert inspect.iscoroutinefunction(getattr(Engine, name)), name
