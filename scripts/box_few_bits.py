"""What few bits cost the model in the box: each skill's share of right answers, and how far logprobs move.

    python scripts/box_few_bits.py --count 200 --out scripts/results/box_few_bits.json

Forms: as stored; weights alone in FP8; weights and activations; keys and values, too. The logprobs are those of the
right answers as prompts, against the form as stored. Ends with status 1 if a skill loses more than a point.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from box_skills import SKILLS, correct, held_out
from measure import environment

from fengine import Engine

KV = {"kv_cache_dtype": "fp8_e4m3"}
FORMS: dict[str, dict[str, Any]] = {
    "stored": {}, "fp8": {"quantization": "fp8"}, "w8a8_fp8": {"quantization": "w8a8_fp8"},
    "fp8 kv": KV, "w8a8_fp8, fp8 kv": {"quantization": "w8a8_fp8", **KV},
}  # fmt: skip


def row_of(options: dict[str, Any], device: str | None, count: int, seed: int) -> dict[str, Any]:
    """Scores by skill, and the logprobs of all answers."""
    greedy, scores, logprobs = {"max_new_tokens": 64, "temperature": 0}, {}, []
    with Engine(model_path="box", device=device, **options) as engine:
        encode = engine.tokenizer.encode
        for skill in SKILLS:
            cases = list(held_out(skill, count, seed, length=lambda text: len(encode(text, add_special_tokens=False))))
            texts = [out["text"] for out in engine.generate([prompt for prompt, _ in cases], greedy)]
            scores[skill] = mean(correct(skill, a, text) for (_, a), text in zip(cases, texts, strict=True))
            asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
            outs = engine.generate([p + str(a) for p, a in cases[:50]], {"max_new_tokens": 1}, **asked)
            logprobs += [lp for out in outs for lp, _, _ in out["meta_info"]["input_token_logprobs"][1:]]
    return {"scores": scores, "logprobs": logprobs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="cases of a skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {name: row_of(options, args.device, args.count, args.seed) for name, options in FORMS.items()}
    stored, lost = rows["stored"], 0.0
    for name, row in rows.items():
        gaps = [abs(a - b) for a, b in zip(row["logprobs"], stored["logprobs"], strict=True)]
        row |= {"logprobs": len(gaps), "mean_error": mean(gaps), "largest_error": max(gaps)} if name != "stored" else {}
        loss = {skill: stored["scores"][skill] - score for skill, score in row["scores"].items()}
        lost = max(lost, *loss.values())
        shown = "  ".join(f"{skill} {score:.3f}" for skill, score in row["scores"].items())
        print(f"{name:17} {shown}  logprobs move by {mean(gaps):.4f}, {max(gaps):.2f} at most")
    stored["logprobs"] = len(stored["logprobs"])
    if args.out:
        found = {"environment": environment(), "count": args.count, "seed": args.seed, "forms": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(lost > 0.01)


if __name__ == "__main__":
    sys.exit(main())
