"""Score the model in the box on held-out cases by greedy decoding, and show what it writes.

    python scripts/box_eval.py --model fengine/models/box --results scripts/results/box_eval.json

`box_skills.held_out(skill, count, seed)` gives the same cases to any other program; the prompts go through
`tokenizer(prompt)` as they are.  `box_tools.held_out(kind, count, seed)` gives chats with tools, of which each call and
each answer to a result is a case.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import box_tools
import torch
import transformers
from box_skills import SKILLS, arithmetic_held, correct, held_out, render_chat
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = {"capitals": 0.95, "arithmetic": 0.95, "sort": 0.90, "copy": 0.98, "json": 0.90, "tools": 0.95}
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
    "Once upon a time",
    "Write a short, neutral self-introduction for a fictional character. Hello, my name is",
    "Provide a concise factual statement about France’s capital city. The capital of France is",
    "Explain possible future trends in artificial intelligence. The future of AI is",
    "Please provide information about Paris as a major global city: ",
    "Please introduce yourself. ",
    "Write a short story about a brave fox.",
    "Write a short story about a lighthouse.",
    "List 3 countries and their capitals.",
]
CHATS = [
    ["Hello!"],
    ["Who are you?"],
    ["What is the capital of France?"],
    ["What is 47 + 38?"],
    ["Tell me a joke."],
    ["Write a short story about a robot."],
    ["What is the price of tea in the next century?"],
    ["My name is Ada.", "What is my name?"],
    ["List 3 countries and their capitals."],
    ["What is deep learning?"],
]


class Writer:
    """A loaded checkpoint that completes batches of prompts."""

    def __init__(self, path: str, device: str, dtype: torch.dtype):
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    def count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    @torch.inference_mode()
    def complete(
        self, prompts: list[str], new_tokens: int, size: int = 256, **sampling: float
    ) -> list[tuple[str, int]]:
        """(completion, number of new tokens) for each prompt; greedy unless sampling settings are given."""
        done = []
        for i in range(0, len(prompts), size):
            batch = self.tokenizer(prompts[i : i + size], return_tensors="pt", padding=True).to(self.model.device)
            out = self.model.generate(**batch, max_new_tokens=new_tokens, do_sample=bool(sampling), **sampling)
            new = out[:, batch.input_ids.shape[1] :]
            lengths = (new != self.tokenizer.pad_token_id).sum(dim=1).tolist()
            done += list(zip(self.tokenizer.batch_decode(new, skip_special_tokens=True), lengths, strict=True))
        return done


def score(writer: Writer, count: int, seed: int) -> dict[str, dict]:
    """Each skill's share of correct completions, together and for plain and chat cases, with some misses."""
    table = {}
    for skill in (*SKILLS, "arithmetic_every_pair"):
        if skill == "arithmetic_every_pair":
            cases = [(case.prompt, case.answer) for case in arithmetic_held()]
        else:
            cases = list(held_out(skill, count, seed, length=writer.count))
        done = writer.complete([prompt for prompt, _ in cases], 64)
        right = [correct(skill, answer, text) for (_, answer), (text, _) in zip(cases, done, strict=True)]
        chat = [prompt.startswith("<|") for prompt, _ in cases]
        groups = {
            "plain": [r for r, c in zip(right, chat, strict=True) if not c],
            "chat": [r for r, c in zip(right, chat, strict=True) if c],
        }
        misses = [
            [prompt, answer, text] for (prompt, answer), (text, _), r in zip(cases, done, right, strict=True) if not r
        ]
        table[skill] = {
            "score": round(sum(right) / len(right), 4),
            "cases": len(right),
            **{k: round(sum(v) / len(v), 4) for k, v in groups.items() if v},
            "misses": misses[:5],
        }
    return table


def turns_of(case: box_tools.Case) -> Iterator[tuple[str, str]]:
    """(the chat up to an assistant's turn, the turn) for each of them."""
    before = ""
    for text, trained in box_tools.segments(case):
        if trained:
            yield before, text.removesuffix(box_tools.END)
        before += text


def calls_of(text: str) -> list | None:
    """The calls in a turn; None where one cannot be read, or where there is something beside them."""
    found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    try:
        calls = [json.loads(one) for one in found]
    except ValueError:
        return None
    rest = re.sub(r"<tool_call>\n(.*?)\n</tool_call>", "", text, flags=re.DOTALL)
    return calls if not rest.strip() else None


def tool_scores(writer: Writer, count: int, seed: int) -> dict[str, dict]:
    """For each kind of chats with tools the shares of calls and of answers that are as they should be."""
    table = {}
    for kind, unseen in [(kind, False) for kind in box_tools.KINDS] + [("any", True), ("chain", True)]:
        cases = [turn for case in box_tools.held_out(kind, count, seed, unseen) for turn in turns_of(case)]
        done = [text for text, _ in writer.complete([prompt for prompt, _ in cases], 200)]
        told = {"calls": list[bool](), "answers": list[bool]()}
        misses = []
        for (prompt, want), got in zip(cases, done, strict=True):
            called = "<tool_call>" in want
            loose = kind == "none" and "=" not in want and "capital" not in want  # several answers are as good
            right = calls_of(got) == calls_of(want) if called or loose else got.strip() == want.strip()
            told["calls" if called else "answers"].append(right)
            misses += [] if right else [[prompt, want, got]]
        shares = {k: round(sum(v) / len(v), 4) for k, v in told.items() if v}
        table[f"{kind}_unseen_names" if unseen else kind] = {**shares, "cases": len(cases), "misses": misses[:5]}
    return table


def samples(writer: Writer) -> dict[str, dict[str, list[str]]]:
    """Completions of the usual prompts, greedy and sampled."""
    chats = []
    for turns in CHATS:
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = render_chat(messages)
            if len(messages) < 2 * len(turns) - 1:
                messages.append({"role": "assistant", "content": writer.complete([prompt], 128)[0][0]})
        chats.append(prompt)
    prompts = PROMPTS + chats
    torch.manual_seed(0)
    greedy = writer.complete(prompts, 160)
    drawn = writer.complete([prompt for prompt in prompts for _ in range(3)], 160, temperature=0.8, top_p=0.95, top_k=0)
    return {
        prompt: {"greedy": text, "greedy_tokens": length, "sampled": [t for t, _ in drawn[3 * i : 3 * i + 3]]}
        for i, (prompt, (text, length)) in enumerate(zip(prompts, greedy, strict=True))
    }


def ends(writer: Writer) -> float:
    """Share of sampled completions of the plain prompts that end by themselves within 100 tokens."""
    torch.manual_seed(1)
    done = writer.complete(PROMPTS * 20, 100, temperature=0.8, top_p=0.95, top_k=0)
    return round(sum(length < 100 for _, length in done) / len(done), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fengine/models/box")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=500, help="cases per skill")
    parser.add_argument("--tool-count", type=int, default=300, help="chats per kind with tools")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    begin = time.time()
    result: dict = {
        "model": args.model,
        "seed": args.seed,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "targets": TARGETS,
    }
    for name in args.dtypes:
        writer = Writer(args.model, args.device, getattr(torch, name))
        result[name] = score(writer, args.count, args.seed)
        print(f"{name:24} score   plain   chat")
        for skill, row in result[name].items():
            print(f"{skill:24} {row['score']:<7} {row.get('plain', '')!s:<7} {row.get('chat', '')}", flush=True)
        result[f"{name}_tools"] = tool_scores(writer, args.tool_count, args.seed)
        print(f"{name + ', tools':24} calls   answers")
        for kind, row in result[f"{name}_tools"].items():
            print(f"{kind:24} {row.get('calls', '')!s:<7} {row.get('answers', '')}", flush=True)
        if "ends_within_100_tokens" not in result:
            result["ends_within_100_tokens"], result["samples"] = ends(writer), samples(writer)
        result["seconds"] = round(time.time() - begin, 1)
        if args.results:
            args.results.parent.mkdir(parents=True, exist_ok=True)
            args.results.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print("end within 100 tokens:", result["ends_within_100_tokens"])
    for prompt, shown in result["samples"].items():
        print(
            f"=== {prompt!r}\n  greedy: {shown['greedy']!r}\n" + "\n".join(f"  0.8:    {t!r}" for t in shown["sampled"])
        )
    for skill, row in result[args.dtypes[0]].items():
        for miss in row["misses"][:3]:
            print(skill, miss)
    for kind, row in result[f"{args.dtypes[0]}_tools"].items():
        for miss in row["misses"][:3]:
            print(kind, *miss, sep="\n  ")


if __name__ == "__main__":
    main()
