"""The cases of `check_device.py`: what each writes, asks, and under which layouts no bit may change."""

# pyright: reportMissingImports=false

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[1:1] = [str(TESTS), str(TESTS / "parity")]
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
BASE: dict[str, Any] = {
    "skip_tokenizer_init": True, "max_total_tokens": 8192, "max_running_requests": 16, "enable_torch_compile": False,
}  # fmt: skip
CHUNKS: dict[str, Any] = {"chunks of 64": {"chunked_prefill_size": 64}}
EAGER: dict[str, Any] = {"no graphs": {"disable_cuda_graph": True}}
BOTH = CHUNKS | EAGER
FEW: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
PERSON = json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                     "age": {"type": "integer"}}, "required": ["name", "age"]})  # fmt: skip


# -- what is asked ----------------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 500 + 3 for j in range(n)] for i, n in enumerate((1, 5, 17, 48, 64, 100, 150, 33))]


def text(count: int = 40, **more: Any) -> dict[str, Any]:
    """Greedy and drawn, with the logprobs of prompts."""
    params = [
        {"max_new_tokens": count, "ignore_eos": True, "temperature": i % 2 * 1.0, "sampling_seed": i}
        for i in range(len(prompts()))
    ]
    return {"input_ids": prompts(), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0} | more


def long() -> dict[str, Any]:
    """Rows of several thousand tokens, between short ones."""
    ids = [[(7 * i + 13 * j + j * j // 7) % 500 + 3 for j in range(n)] for i, n in enumerate((3000, 40, 1700, 2500))]
    return text(40, input_ids=ids, sampling_params=text()["sampling_params"][:4])


def sampled(**params: Any) -> dict[str, Any]:
    work = text()
    work["sampling_params"] = [given | params for given in work["sampling_params"]]
    return work


def repeating() -> dict[str, Any]:
    """What n-grams can guess: prompts that repeat themselves."""
    return text(60, input_ids=[(prompt * 9)[:120] for prompt in prompts()])


def several() -> dict[str, Any]:
    return sampled(n=3, temperature=0.9) | {"logprob_start_len": None}


def adapted() -> dict[str, Any]:
    return text(24, lora_path=["a", "b", None, "a", "b", "c", "c", None])


def grammar() -> dict[str, Any]:
    kinds = ({"json_schema": PERSON}, {"regex": "[a-z]{3,9}( [a-z]+){1,4}"}, {}, {"ebnf": 'root ::= "yes" | "no"'})
    params = [{"max_new_tokens": 40, "temperature": i % 2 * 0.8, "sampling_seed": i, **kinds[i % 4]} for i in range(8)]
    return {"prompt": ["Once upon a time", "2 + 3 ="] * 4, "sampling_params": params, "return_logprob": True}


def stops() -> dict[str, Any]:
    params = [{"max_new_tokens": 60, "temperature": i % 2 * 0.8, "sampling_seed": i, "stop": [".", " the"],
               "min_new_tokens": i}
              for i in range(6)]  # fmt: skip
    return {"prompt": ["Once upon a time", "Hello, my", "The"] * 2, "sampling_params": params, "return_logprob": True}


def images() -> dict[str, Any]:
    """With placeholders that `prepared` writes out."""
    from tiny_vision import TOKEN, picture

    pictures = [picture(seed, 20 + 7 * seed, 60 - 5 * seed) for seed in range(6)]
    one, two = [5, 122, TOKEN, 123, 7, 8], [9, TOKEN, 10, TOKEN, 11, 12, 13]
    ids = [one, two, [5, 6, 7, 8, 9], [TOKEN, 4], two, one]
    given = [pictures[0], pictures[1:3], None, pictures[3], [pictures[0], pictures[0]], pictures[5]]
    params = [{"max_new_tokens": 24, "ignore_eos": True, "temperature": i % 2 * 1.0, "sampling_seed": i}
              for i in range(6)]  # fmt: skip
    return {"input_ids": ids, "image_data": given, "sampling_params": params, "return_logprob": True}


def prepared(work: dict[str, Any], engine: Any) -> dict[str, Any]:
    if "image_data" in work:
        from test_vision import in_place

        pairs = zip(work["input_ids"], work["image_data"], strict=True)
        work["input_ids"] = [in_place(engine, ids, [] if given is None else given) for ids, given in pairs]
    return work


# -- what is written --------------------------------------------------------------------------------------------------


def plain(folder: Path, family: str, seed: int = 0, name: str = "model", **config: Any) -> dict[str, Any]:
    import tiny_checkpoints

    sizes = {key: value for key, value in (SIZES | config).items() if value is not None}
    return {"model": str(tiny_checkpoints.write(folder / name, family, seed=seed, dtype=torch.bfloat16, **sizes))}


def config_of_test(folder: Path, case: str) -> dict[str, Any]:
    """A configuration of tests/parity/test_models.py, in its own odd sizes."""
    import test_models
    import tiny_checkpoints

    told = {"dtype": torch.bfloat16, "vocab_size": 512} | test_models.CASES[case]
    return {"model": str(tiny_checkpoints.write(folder / "model", case.partition("-")[0], **told))}


def quantized(folder: Path, case: str, **config: Any) -> dict[str, Any]:
    """A case of tests/parity/test_quantized.py, and its dequantized checkpoint."""
    import quantized_checkpoints
    import test_quantized

    told, make, given = test_quantized.CASES[case]
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    few, dense = quantized_checkpoints.write(folder, told, test_quantized.keep(make), **(given | sizes | config))
    return {"model": str(few), "dense": str(dense)}


def microscaled(folder: Path) -> dict[str, Any]:
    import test_quantized

    few, dense = test_quantized.mxfp4(folder, vocab_size=512, hidden_size=256, intermediate_size=256, head_dim=64)
    return {"model": str(few), "dense": str(dense)}


def drafted(folder: Path, family: str = "llama", **config: Any) -> dict[str, Any]:
    """A model, a draft that is the model with a little noise, and an EAGLE-3 head."""
    import eagle_heads
    from safetensors.torch import load_file, save_file

    found = plain(folder, family, **config)
    told, generator = json.loads((Path(found["model"]) / "config.json").read_text()), torch.Generator().manual_seed(3)
    (folder / "draft").mkdir()
    tensors = load_file(Path(found["model"]) / "model.safetensors")
    noisy = {k: (x + 0.003 * torch.randn(x.shape, generator=generator)).to(x.dtype) for k, x in tensors.items()}
    save_file(noisy, folder / "draft" / "model.safetensors", {"format": "pt"})
    (folder / "draft" / "config.json").write_text(json.dumps(told))
    return found | {"draft": str(folder / "draft"), "eagle": eagle_heads.write(folder / "eagle", told, head=128)}


def with_adapters(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    import tiny_adapters

    found = plain(folder, family, **config)
    names = {
        name: str(tiny_adapters.random_adapter(folder / name, found["model"], rank, seed=rank))
        for name, rank in (("a", 8), ("b", 16), ("c", 3))
    }
    return found | {"adapters": names}


def pictured(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    import tiny_vision

    return {"model": str(tiny_vision.write(folder / "model", family, **config))}


def encoder(folder: Path, case: str, kind: str = "Model") -> dict[str, Any]:
    """An encoder of tests/parity/test_encoders.py, what transformers says of a row, and rows."""
    import test_encoders

    more = {"num_labels": 3} if kind != "Model" else {}
    model = test_encoders.write(folder, case, kind, vocab_size=4096, **more)

    def reference(row: list[int]) -> list[float]:
        output = model(torch.tensor([row]))
        if kind != "Model":
            return output.logits[0].tolist()
        return torch.nn.functional.normalize(output.last_hidden_state[0, -1], dim=0).tolist()

    return {"model": str(folder), "rows": test_encoders.prompts(), "reference": reference}


def box(folder: Path) -> dict[str, Any]:
    return {"model": "box"}


def two(folder: Path, family: str, **config: Any) -> dict[str, Any]:
    return plain(folder, family, **config) | {"other": plain(folder, family, 1, "other", **config)["model"]}


# -- the cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`write` with `given` names checkpoints; `check` is a function of check_device.py."""

    write: str
    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    work: Callable[[], dict[str, Any]] = text
    layouts: dict[str, dict[str, Any]] = field(default_factory=lambda: BOTH)
    near: bool = False
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


def lengthy(found: dict[str, Case]) -> None:
    """Rows that many programs share, wide heads, and vocabularies of many blocks."""
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


def all_cases() -> dict[str, Case]:
    llama = {"family": "llama"}
    found = {
        "kv fp8, llama": Case("plain", llama, FEW),
        "kv fp8, mistral": Case("plain", {"family": "mistral", "sliding_window": 48}, FEW),
        "kv fp8, gpt_oss": Case("plain", {"family": "gpt_oss", **SINKS}, FEW),
        "kv fp8, gemma2": Case("plain", {"family": "gemma2", **GEMMA}, FEW),
        "kv fp8, gemma3": Case("plain", {"family": "gemma3", **FAMILIES["gemma3"]}, FEW),
        "kv fp8, guessed": Case("drafted", {}, FEW, repeating, GUESSED),
        "guessed, llama": Case("drafted", {}, {}, repeating, GUESSED),
        "guessed, qwen3_moe": Case("drafted", {"family": "qwen3_moe", **EXPERTS}, {}, repeating, GUESSED),
        "guessed, gemma2": Case("drafted", {"family": "gemma2", **GEMMA}, {}, repeating,
                                {k: GUESSED[k] for k in ("n-grams", "a draft")}),
        "mxfp4, gpt_oss": Case("microscaled", {}, {}, text, EAGER | DENSE),
    }  # fmt: skip
    for name, config in QUANTIZED.items():
        found[f"quantized, {name}"] = Case("quantized", {"case": name, **config}, {}, text, EAGER | DENSE)
    for name in ("float-dynamic", "float-static", "fp8-blocks"):
        found[f"w8a8_fp8, {name}"] = Case("quantized", {"case": name}, {"quantization": "w8a8_fp8"})
    lengthy(found)
    for kind in AT_LOAD:
        found[f"{kind} at load, llama"] = Case("plain", llama, {"quantization": kind})
        found[f"{kind} at load, qwen3_moe"] = Case("plain", {"family": "qwen3_moe", **EXPERTS}, {"quantization": kind})
    loras = {"lora_paths": "{adapters}", "max_lora_rank": 16}
    for family, config in {"llama": {}, "qwen2": {"head_dim": None}, "qwen3_moe": EXPERTS}.items():
        found[f"lora, {family}"] = Case("with_adapters", {"family": family, **config}, loras, adapted)
    found["lora, kv fp8"] = Case("with_adapters", llama, loras | FEW, adapted)
    found["lora, guessed"] = Case("with_adapters", llama, loras, adapted, {"n-grams": GUESSED["n-grams"]})
    pictures = {"dtype": "bfloat16", "max_total_tokens": 2048}
    for family in ("llava", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "internvl", "gemma3"):
        own = {"chunks of 7": {"chunked_prefill_size": 7, "max_running_requests": 3}}
        found[f"images, {family}"] = Case("pictured", {"family": family}, pictures, images, own | EAGER)
    found["images, kv fp8"] = Case("pictured", {"family": "llava"}, pictures | FEW, images, EAGER)
    found["images, guessed"] = Case("pictured", {"family": "qwen2_5_vl"}, pictures, images,
                                    {"n-grams": GUESSED["n-grams"]})  # fmt: skip
    for name in ("bert", "xlm-r", "modernbert", "embeddinggemma"):
        kind = "Model" if name == "embeddinggemma" else "ForSequenceClassification"
        found[f"encoder, {name}"] = Case(
            "encoder", {"case": name, "kind": kind}, {"dtype": "bfloat16"}, layouts=EAGER, check="encoded"
        )
    found |= {
        "pages of 16 and 64": Case("plain", llama, {"page_size": 16}, text, {"pages of 64": {"page_size": 64}}),
        "pages of 16 and 64, windows": Case("plain", {"family": "mistral", "sliding_window": 48}, {"page_size": 16},
                                            text, {"pages of 64": {"page_size": 64}}),
        "no prefix cache": Case("plain", llama, {"disable_radix_cache": True}),
        "preempted": Case("plain", llama, {}, text, {"preempted": {
            "max_total_tokens": 320, "page_size": 16, "disable_radix_cache": True}}),
        "overlap off": Case("plain", llama, {}, text, {"no overlap": {"disable_overlap_schedule": True}}),
        "compiled": Case("plain", llama, {}, text, {
            "compiled": {"enable_torch_compile": True}, "without graphs": {
                "enable_torch_compile": True, "disable_cuda_graph": True}}),
        "penalties": Case("plain", llama, {}, lambda: sampled(
            frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)),
        "logit bias": Case("plain", llama, {}, lambda: sampled(logit_bias={"31": 4.0, "7": -100.0})),
        "top-k, top-p, min-p": Case("plain", llama, {}, lambda: sampled(
            temperature=0.9, top_k=20, top_p=0.9, min_p=0.02)),
        "top-5 logprobs": Case("plain", llama, {}, lambda: text(
            top_logprobs_num=5, token_ids_logprob=[[5, 9, 200]] * 8)),
        "hidden states": Case("plain", llama, {"enable_return_hidden_states": True}, lambda: text(
            12, return_hidden_states=True)),
        "n = 3": Case("plain", llama, {}, several),
        "sessions": Case("plain", llama, check="conversation"),
        "sessions, windows": Case("plain", {"family": "gemma3", **FAMILIES["gemma3"]}, check="conversation"),
        "memory and weights": Case("two", llama, check="memory"),
        "memory and weights, experts": Case("two", {"family": "qwen3_moe", **EXPERTS}, check="memory"),
        "stops, the box": Case("box", {}, {"skip_tokenizer_init": False}, stops),
    }  # fmt: skip
    for dtype in ("float16", "float32"):
        found[f"{dtype}, llama"] = Case("plain", llama, {"dtype": dtype})
        found[f"{dtype}, qwen3_moe"] = Case("plain", {"family": "qwen3_moe", **EXPERTS}, {"dtype": dtype})
    found["preempted, kv fp8"] = Case("plain", llama, FEW, text, found["preempted"].layouts)
    if importlib.util.find_spec("llguidance"):
        found["grammars, the box"] = Case("box", {}, {"skip_tokenizer_init": False}, grammar)
    for family, config in FAMILIES.items():
        found[f"family {family}"] = Case("plain", {"family": family, **config}, {}, text, CHUNKS, near=True)
    for name in ODD:
        found[f"odd, {name}"] = Case("config_of_test", {"case": name}, {}, text, EAGER)
    return found


CASES = all_cases()
