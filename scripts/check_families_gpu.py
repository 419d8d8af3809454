"""Every family on a GPU, on small random checkpoints in bf16: `python scripts/check_families_gpu.py --json FILE`.

For each family: requests alone, together, and in chunks of 64 must have the same tokens and logprobs bit for bit, and
the logprobs of a prompt must be those of transformers on the same device within --tolerance (bf16 on both sides). A
process for each family, all at once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
DEVICE = "cuda"
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "phi3": {"head_dim": None, "pad_token_id": 0, "sliding_window": 40},
    "olmo2": {"head_dim": None},
    "glm4": {"pad_token_id": 0},
    "exaone4": {"sliding_window": 32, "sliding_window_pattern": 2},
    "gemma2": {"sliding_window": 48, "query_pre_attn_scalar": 64},
    "gemma3": {"sliding_window": 32, "query_pre_attn_scalar": 64},
    "cohere2": {"sliding_window": 32, "head_dim": None},
    "granite": {"head_dim": None},
    "starcoder2": {"sliding_window": 48, "head_dim": None},
    "hunyuan_v1_dense": {},
    "cohere": {"use_qk_norm": True, "head_dim": None},
    "olmo3": {"sliding_window": 48, "head_dim": None, "pad_token_id": 0},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": None},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1.5e5},
    },
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 8},
}


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 500 + 3 for j in range(n)] for i, n in enumerate((1, 5, 17, 48, 64, 100, 150, 33))]


def answers(path: str, **options: Any) -> list[Any]:
    from fengine import Engine

    sampling = [
        {"max_new_tokens": 40, "ignore_eos": True, "temperature": i % 2 * 1.0, "sampling_seed": i}
        for i in range(len(prompts()))
    ]
    alone = options.pop("alone", False)
    with Engine(model_path=path, device=DEVICE, skip_tokenizer_init=True, **options) as engine:
        asked = {"return_logprob": True, "logprob_start_len": 0}
        if alone:
            outs = [
                engine.generate(input_ids=p, sampling_params=s, **asked)
                for p, s in zip(prompts(), sampling, strict=True)
            ]
        else:
            outs = engine.generate(input_ids=prompts(), sampling_params=sampling, **asked)
    names = ("input_token_logprobs", "output_token_logprobs")
    return [[[list(entry[:2]) for entry in out["meta_info"][name]] for name in names] for out in outs]


def check(family: str) -> dict[str, Any]:
    import tiny_checkpoints  # pyright: ignore[reportMissingImports]
    import torch
    import transformers

    sizes = {key: value for key, value in (SIZES | CASES[family]).items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        path = str(tiny_checkpoints.write(Path(folder) / family, family, dtype=torch.bfloat16, **sizes))
        small = {"max_total_tokens": 8192, "max_running_requests": 16}
        together = answers(path, **small)
        alone = answers(path, alone=True, **small)
        chunked = answers(path, chunked_prefill_size=64, **small)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = loaded.cuda()
        worst = 0.0
        for prompt, (given, _) in zip(prompts(), together, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt], device="cuda")).logits[0].float()
            want = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].tolist()
            got = [entry[0] for entry in given[1:]]
            worst = max([worst, *(abs(a - b) for a, b in zip(want, got, strict=True))])
    return {
        "family": family,
        "alone = together": alone == together,
        "chunked = together": chunked == together,
        "worst |difference| of prompt logprobs to transformers in float32": round(worst, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=150, help="seconds for all of it")
    options = parser.parse_args()
    if options.family:
        print(json.dumps(check(options.family)), flush=True)
        return
    command = [sys.executable, __file__, "--family"]
    running = {f: subprocess.Popen([*command, f], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for f in CASES}
    results = []
    for family, process in running.items():
        try:
            out, err = process.communicate(timeout=options.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = b"", b"took too long"
        told = out.decode().strip().splitlines()
        results.append(json.loads(told[-1]) if told else {"family": family, "error": err.decode()[-600:]})
        print(results[-1], flush=True)
    if options.json:
        told = {"environment": environment(), "settings": {"sizes": SIZES, "cases": CASES}, "rows": results}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
