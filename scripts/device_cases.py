"""The cases of `check_device.py`: what each writes and asks, and under which layouts no bit may change."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from device_work import adapted, grammar, images, long, repeating, sampled, several, stops, text

BASE: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_total_tokens": 8192, "max_running_requests": 16, "enable_torch_compile": False,
}  # fmt: skip
CHUNKS: dict[str, Any] = {"chunks of 64": {"chunked_prefill_size": 64}}
EAGER: dict[str, Any] = {"no graphs": {"disable_cuda_graph": True}}
BOTH = CHUNKS | EAGER
FEW: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}


@dataclass(frozen=True)
class Case:
    """`write` with `given` names checkpoints; `check` is a function of check_device.py."""

    write: str
    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    work: Callable[[], dict[str, Any]] = text
    layouts: dict[str, dict[str, Any]] = field(default_factory=lambda: BOTH)
    near: bool = False  # to transformers, in float32
    check: str = "bits"


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SINKS = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5},
}  # fmt: skip
GEMMA = {"sliding_window": 48, "query_pre_attn_scalar": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mistral": {"sliding_window": 48},
    "phi3": {"head_dim": None, "pad_token_id": 0, "sliding_window": 40},
    "olmo2": {"head_dim": None},
    "glm4": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "exaone4": {"sliding_window": 32, "sliding_window_pattern": 2},
    "gemma": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"sliding_window": 32},
    "cohere2": {"sliding_window": 32, "head_dim": None},
    "granite": {"head_dim": None},
    "starcoder2": {"sliding_window": 48, "head_dim": None},
    "hunyuan_v1_dense": {},
    "cohere": {"use_qk_norm": True, "head_dim": None},
    "olmo3": {"sliding_window": 48, "head_dim": None, "pad_token_id": 0},
    "smollm3": {"head_dim": None, "pad_token_id": 0},
    "ministral": {"sliding_window": 48},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": SINKS,
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 192, "head_dim": None},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": None, "pad_token_id": 0},
}
DENSE: dict[str, Any] = {"dequantized": {"model_path": "{dense}"}}
AT_LOAD = ("fp8", "w8a8_fp8")
IN_FP8, W8A8 = ("float-dynamic", "float-static", "fp8-blocks"), {"quantization": "w8a8_fp8"}
LLAMA, MIXTURE = {"family": "llama"}, {"family": "qwen3_moe", **EXPERTS}
PREEMPTED = {"preempted": {"max_total_tokens": 320, "page_size": 16, "disable_radix_cache": True}}
GUESSED: dict[str, dict[str, Any]] = {
    "n-grams": {"speculative_algorithm": "NGRAM"},
    "a draft": {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "{draft}",
                "speculative_adaptive": False},
    "EAGLE-3": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "{eagle}",
                "speculative_adaptive": False},
}  # fmt: skip
QUANTIZED = {
    "awq": {}, "awq-16-half": {}, "awq-experts": {}, "gptq-asym": {}, "gptq-sym-v2": {}, "gptq-act": {},
    "gptq-8-channel": {}, "gptq-8-act": {}, "packed-4": {}, "packed-4-asym-half": {}, "packed-4-act": {},
    "packed-8-odd": {"head_dim": 64}, "float-dynamic": {}, "float-static": {}, "micro": {}, "fp8-blocks": {},
    "fp8-small-blocks-odd": {}, "fp8-order-of-heads": {},
}  # fmt: skip


ODD = ("llama-gqa4-rope3-sharded", "llama-gqa7-rope3-biases-old", "qwen2-gqa7-tied", "qwen3-gqa4-tied", "phi3-longrope",
       "mistral-no-window-yarn", "mistral-window-of-2", "granite-scales", "glm4-half", "gemma2-mixed", "gemma3-capped",
       "cohere2-biases", "olmo3-two-ropes", "starcoder2-biases", "hunyuan_v1_dense-alpha", "gpt_oss-sinks",
       "gpt_oss-clamped", "qwen3_moe-renormalised", "glm4_moe-norms", "qwen3-gqa2-biases")  # fmt: skip
LONG = {"max_position_embeddings": 8192}
WIDE = {"head_dim": 128, "vocab_size": 50000, "hidden_size": 512, "intermediate_size": 1536, "num_key_value_heads": 1}
OPENED = {"max_total_tokens": 16384, "chunked_prefill_size": 4096}
LENGTHS = {"chunks of 700": {"chunked_prefill_size": 700}, **EAGER}


def lengthy() -> dict[str, Case]:
    """Rows that many programs share, wide heads, and vocabularies of many blocks."""
    found = {}
    kinds = {"llama": WIDE, "gpt_oss": SINKS, "gemma2": GEMMA, "mistral": {"sliding_window": 1000, "head_dim": 128}}
    for family, config in kinds.items():
        given = {"family": family, **config, **LONG}
        found[f"long, {family}"] = Case("plain", given, OPENED, long, LENGTHS)
        found[f"long, kv fp8, {family}"] = Case("plain", given, OPENED | FEW, long, LENGTHS)
    drawn = {"temperature": 0.9, "top_k": 50, "top_p": 0.9}
    wide = {"family": "llama", **WIDE}
    found["wide, draws"] = Case("plain", wide, {}, lambda: sampled(**drawn))
    found["wide, top-20 logprobs"] = Case("plain", wide, {}, lambda: text(top_logprobs_num=20))
    found["wide, penalties"] = Case("plain", wide, {}, lambda: sampled(repetition_penalty=1.2, frequency_penalty=0.3))
    for kind in AT_LOAD:
        found[f"wide, {kind}"] = Case("plain", wide, {"quantization": kind})
    for name in ("awq", "gptq-asym", "packed-4", "micro", "fp8-blocks"):
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128}
        found[f"wide, {name}"] = Case("quantized", {"case": name, **sizes}, {}, text, EAGER | DENSE)
    return found


def few_bits() -> dict[str, Case]:
    found = {"mxfp4, gpt_oss": Case("microscaled", {}, {}, text, EAGER | DENSE)}
    for name, config in QUANTIZED.items():
        found[f"quantized, {name}"] = Case("quantized", {"case": name, **config}, {}, text, EAGER | DENSE)
    for name in IN_FP8:
        found[f"w8a8_fp8, {name}"] = Case("quantized", {"case": name}, W8A8)
    for kind in AT_LOAD:
        found[f"{kind} at load, llama"] = Case("plain", LLAMA, {"quantization": kind})
        found[f"{kind} at load, qwen3_moe"] = Case("plain", MIXTURE, {"quantization": kind})
    return found


def few_bits_of_keys() -> dict[str, Case]:
    kinds = {name: FAMILIES[name] for name in ("llama", "mistral", "gpt_oss", "gemma2", "gemma3")}
    found = {f"kv fp8, {name}": Case("plain", {"family": name, **config}, FEW) for name, config in kinds.items()}
    found["kv fp8, guessed"] = Case("drafted", {}, FEW, repeating, GUESSED)
    found["kv fp8, preempted"] = Case("plain", LLAMA, FEW, text, PREEMPTED)
    found["kv fp8, awq"] = Case("quantized", {"case": "awq"}, FEW)
    return found


def guessed() -> dict[str, Case]:
    models = {name: GUESSED[name] for name in ("n-grams", "a draft")}
    return {
        "guessed, llama": Case("drafted", {}, {}, repeating, GUESSED),
        "guessed, qwen3_moe": Case("drafted", MIXTURE, {}, repeating, GUESSED),
        "guessed, gemma2": Case("drafted", {"family": "gemma2", **GEMMA}, {}, repeating, models),
    }


def loras() -> dict[str, Case]:
    options = {"lora_paths": "{adapters}", "max_lora_rank": 16}
    kinds = {"llama": {}, "qwen2": {"head_dim": None}, "qwen3_moe": EXPERTS}
    found = {f"lora, {n}": Case("with_adapters", {"family": n, **c}, options, adapted) for n, c in kinds.items()}
    for name in ("awq", "awq-experts", "gptq-act", "gptq-8-channel", "packed-4", "micro", *IN_FP8):
        found[f"lora, {name}"] = Case("with_adapters", {"case": name}, options, adapted, EAGER | DENSE)
    for name in IN_FP8:
        found[f"lora, w8a8_fp8, {name}"] = Case("with_adapters", {"case": name}, options | W8A8, adapted)
    for kind in AT_LOAD:
        found[f"lora, {kind} at load, qwen3_moe"] = Case(
            "with_adapters", MIXTURE, options | {"quantization": kind}, adapted
        )
    found["lora, kv fp8"] = Case("with_adapters", LLAMA, options | FEW, adapted)
    found["lora, guessed"] = Case("with_adapters", LLAMA, options, adapted, {"guesses": GUESSED["n-grams"]})
    return found


def pictures() -> dict[str, Case]:
    options = {"dtype": "bfloat16", "max_total_tokens": 2048}
    layouts = {"chunks of 7": {"chunked_prefill_size": 7, "max_running_requests": 3}, **EAGER}
    found = {
        f"images, {family}": Case("pictured", {"family": family}, options, images, layouts, near=True)
        for family in ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl", "gemma3")
    }
    found["images, kv fp8"] = Case("pictured", {"family": "llava"}, options | FEW, images, EAGER)
    found["images, guessed"] = Case("pictured", {"family": "qwen2_5_vl"}, options, images,
                                    {"guesses": GUESSED["n-grams"]})  # fmt: skip
    return found


def embeddings() -> dict[str, Case]:
    options, found = {"dtype": "bfloat16"}, {}
    for name in ("bert", "roberta", "xlm-r", "modernbert", "modernbert, biases", "embeddinggemma"):
        kind = "Model" if name == "embeddinggemma" else "ForSequenceClassification"
        given = {"case": name, "kind": kind}
        found[f"encoder, {name}"] = Case("encoder", given, options, layouts=EAGER, check="encoded")
    for family in ("qwen3", "mistral"):
        given = {"family": family, **FAMILIES[family]}
        found[f"embeddings, {family}"] = Case("embedder", given, {"is_embedding": True}, layouts=BOTH, check="encoded")
    return found


def layouts() -> dict[str, Case]:
    sizes, small = {"pages of 64": {"page_size": 64}}, {"page_size": 16}
    on = {"enable_torch_compile": True}
    compiled = {"compiled": on, "without graphs": on | EAGER["no graphs"]}
    windows = {"family": "mistral", "sliding_window": 48}
    found = {
        "pages of 16 and 64": Case("plain", LLAMA, small, text, sizes),
        "pages of 16 and 64, windows": Case("plain", windows, small, text, sizes),
        "no prefix cache": Case("plain", LLAMA, {"disable_radix_cache": True}),
        "preempted": Case("plain", LLAMA, {}, text, PREEMPTED),
        "overlap off": Case("plain", LLAMA, {}, text, {"no overlap": {"disable_overlap_schedule": True}}),
        "compiled": Case("plain", LLAMA, {}, text, compiled),
        "sessions": Case("plain", LLAMA, check="conversation"),
        "sessions, windows": Case("plain", {"family": "gemma3", **FAMILIES["gemma3"]}, check="conversation"),
        "memory and weights": Case("two", LLAMA, check="memory"),
        "memory and weights, experts": Case("two", MIXTURE, check="memory"),
        "tied": Case("plain", LLAMA | {"tie_word_embeddings": True}),
    }  # fmt: skip
    for dtype in ("float16", "float32"):
        found[f"{dtype}, llama"] = Case("plain", LLAMA, {"dtype": dtype})
        found[f"{dtype}, qwen3_moe"] = Case("plain", MIXTURE, {"dtype": dtype})
    return found


def draws() -> dict[str, Case]:
    ways = {
        "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
        "logit bias": {"logit_bias": {"31": 4.0, "7": -100.0}},
        "top-k, top-p, min-p": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    }
    found = {name: Case("plain", LLAMA, {}, partial(sampled, **params)) for name, params in ways.items()}
    top = {"top_logprobs_num": 5, "token_ids_logprob": [[5, 9, 200]] * 8}
    hidden = {"enable_return_hidden_states": True}
    found |= {
        "top-5 logprobs": Case("plain", LLAMA, {}, partial(text, **top)),
        "hidden states": Case("plain", LLAMA, hidden, partial(text, 12, return_hidden_states=True)),
        "n = 3": Case("plain", LLAMA, {}, several),
        "stops, the box": Case("box", {}, {"skip_tokenizer_init": False}, stops),
    }
    if importlib.util.find_spec("llguidance"):
        found["grammars, the box"] = Case("box", {}, {"skip_tokenizer_init": False}, grammar)
    return found


def families() -> dict[str, Case]:
    found = {
        f"family {family}": Case("plain", {"family": family, **config}, {}, text, CHUNKS, near=True)
        for family, config in FAMILIES.items()
    }
    return found | {f"odd, {name}": Case("config_of_test", {"case": name}, {}, text, EAGER) for name in ODD}


CASES: dict[str, Case] = {}
for part in (few_bits_of_keys, guessed, few_bits, lengthy, loras, pictures, embeddings, layouts, draws, families):
    CASES |= part()
