"""Train a small vision model on a CPU: a tower before the decoder of the model in the box.

    python scripts/box_vl_train.py --out box-vl --results box-vl/train.json --minutes 55
    fengine eval model.path=box-vl task=pictures

Pictures and questions come from `fengine/eval/tasks/drawn.py`, endlessly and seeded; those that `task=pictures` asks
have other seeds. A picture stands in a sequence once, with several questions behind it that do not see each other. A
linear head on each embedding names the object whose middle is there; the tower learns from it alone for a while, and it
is thrown away at the end.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.nn import functional

from fengine.config.schema import BOX
from fengine.eval.tasks.drawn import COLOURS, PLACES, SHAPES, SIDE, Picture, ask, picture

IMAGE, FAKE, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<|end|>"
VOCAB, PATCH, MERGE = 2112, 8, 2
TOKENS = (SIDE // PATCH // MERGE) ** 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] | trim }}"
    "{% endfor %}"
    "{% endif %}{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CLASSES = {  # of the heads: what, in which colour, in which place; 0: nothing
    "shape": [None, *SHAPES, *map(str, range(10)), "bar"], "colour": [None, *COLOURS], "place": ["", *PLACES],
}  # fmt: skip


def new_model(args: argparse.Namespace) -> transformers.Idefics3ForConditionalGeneration:
    """The tower at random, the decoder as in the box; or what `--start` has."""
    text = json.loads((BOX / "config.json").read_text())
    drop = ("architectures", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
    text = {key: value for key, value in text.items() if key not in drop} | {"vocab_size": VOCAB}
    vision = {
        "hidden_size": args.width, "intermediate_size": args.inner, "num_hidden_layers": args.layers,
        "num_attention_heads": args.width // 32, "image_size": SIDE, "patch_size": PATCH,
    }  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=2048, scale_factor=MERGE, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=[1, 5], pad_token_id=6,
    )  # fmt: skip
    model = transformers.Idefics3ForConditionalGeneration(config)
    own = model.state_dict()
    for name, weight in load_file(BOX / "model.safetensors").items():
        own[name.replace("model.", "model.text_model.", 1)][: len(weight)] = weight.float()
    model.load_state_dict(own)
    if args.start:
        model.load_state_dict(load_file(args.start / "model.safetensors"), strict=False)  # lm_head is the embedding
    model.set_attn_implementation("eager")  # on the CPU the faster one, with a mask
    return model.train()


def save(model: nn.Module, out: Path) -> None:
    """The folder of the model."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file({k: w for k, w in state.items() if k != "lm_head.weight"}, out / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["Idefics3ForConditionalGeneration"], "dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 6}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "resample": 1,
        "size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (out / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    tokenizer().save(str(out / "tokenizer.json"), pretty=False)
    named = json.loads((BOX / "tokenizer_config.json").read_text()) | {"chat_template": CHAT_TEMPLATE}
    (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_file(str(BOX / "tokenizer.json"))
    found.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (IMAGE, FAKE, WHOLE)])
    return found


class Batches:
    """Sequences of `length` tokens: a picture and as many questions about it as have room; 0: pictures alone."""

    def __init__(self, length: int) -> None:
        self.length, self.tokens, self.known = length, tokenizer(), dict[str, list[int]]()
        self.head = self.ids(f"<|begin_of_text|><|user|>\n{FAKE}{WHOLE}{IMAGE * TOKENS}{FAKE}")

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokens.encode(text, add_special_tokens=False).ids
        return self.known[text]

    def sequence(self, drawn: Picture, random: Random) -> np.ndarray:
        """ids, block (0: seen by all, -1: nothing), position, and whether it is of an answer: int64 [4, length]."""
        found, at, number = np.zeros((4, self.length), np.int64), len(self.head), 0
        found[0, :at], found[1], found[2, :at] = self.head, -1, np.arange(at)
        found[1, :at] = 0
        while True:
            asked, number = ask(random, drawn.questions), number + 1
            prompt = self.ids(f"{asked.text}{END}\n<|assistant|>\n")
            answer = self.tokens.encode(asked.answer + END, add_special_tokens=False).ids
            end = at + len(prompt) + len(answer)
            if end > self.length:
                return found
            found[:3, at:end] = [*prompt, *answer], [number] * (end - at), np.arange(end - at) + len(self.head)
            found[3, end - len(answer) : end] = 1
            at = end

    def endless(self, seed: int, size: int, noise: float) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pixels [B, 3, H, W], `sequence`s [4, B, length], and the heads' classes [3, B, tokens]."""
        random, generator = Random(f"train {seed}"), torch.Generator().manual_seed(seed)
        none = np.zeros((4, 0), np.int64)
        while True:
            drawn = [picture(random) for _ in range(size)]
            pixels = torch.from_numpy(np.stack([one.pixels_HWC for one in drawn])).permute(0, 3, 1, 2) / 127.5 - 1
            pixels = pixels + noise * torch.rand(size, 1, 1, 1) * torch.randn(pixels.shape, generator=generator)
            rows = np.stack([self.sequence(one, random) if self.length else none for one in drawn], 1)
            yield pixels, torch.from_numpy(rows), torch.from_numpy(np.stack([classes(one) for one in drawn], 1))


def classes(drawn: Picture) -> np.ndarray:
    """Of each embedding what has its middle there, int64 [3, tokens]."""
    found, step = np.zeros((3, TOKENS), np.int64), PATCH * MERGE
    for thing in drawn.things:
        token = int(thing.y // step) * (SIDE // step) + int(thing.x // step)
        found[:, token] = [known.index(getattr(thing, part)) for part, known in CLASSES.items()]
    return found


def losses(
    model: nn.Module, heads: nn.Linear, pixels: torch.Tensor, rows: torch.Tensor, middle: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the answers' tokens, of the heads, and the share of answers' tokens that are the likeliest; of no tokens the
    heads' alone."""
    body, (ids, block, place, answer) = model.model, rows
    seen = body.connector(body.vision_model(pixel_values=pixels).last_hidden_state)
    guesses = heads(seen).float().split([len(known) for known in CLASSES.values()], -1)
    told = sum(functional.cross_entropy(g.flatten(0, 1), c.flatten()) for g, c in zip(guesses, middle, strict=True))
    if not ids.numel():
        return 0.0 * told, told, torch.zeros(())
    embeds = body.text_model.embed_tokens(ids).to(seen.dtype)
    embeds[ids == 2048] = seen.flatten(0, 1)
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen_by = ((block[:, :, None] == block[:, None]) | (block[:, None] == 0)) & causal
    unseen = torch.where(seen_by, 0.0, -1e9)
    hidden = body.text_model(
        inputs_embeds=embeds, attention_mask=unseen[:, None], position_ids=place, use_cache=False
    ).last_hidden_state
    chosen = answer[:, 1:] == 1
    logits, target = model.lm_head(hidden[:, :-1][chosen]).float(), ids[:, 1:][chosen]
    right = (logits.detach().argmax(-1) == target).float().mean()
    return functional.cross_entropy(logits, target), told, right


def train(args: argparse.Namespace) -> dict[str, object]:
    """The loop until `--minutes` are over, and the model's folder."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model, heads = new_model(args), nn.Linear(256, sum(map(len, CLASSES.values())))
    old = [p for name, p in model.named_parameters() if "text_model" in name]
    new = [p for name, p in model.named_parameters() if "text_model" not in name and "lm_head" not in name]
    groups = [{"params": [*new, *heads.parameters()], "share": 1.0}, {"params": old, "share": args.decoder}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), weight_decay=args.decay)
    start, step, curve, sums = time.time(), 0, [], np.zeros(3)
    pictures, alone = 0, Batches(0).endless(args.seed, 4 * args.batch, args.noise)
    whole = Batches(args.length).endless(args.seed + 1, args.batch, args.noise)
    while (progress := max((time.time() - start) / (60 * args.minutes), step / args.steps)) < 1:
        pixels, rows, middle = next(alone if progress < args.alone else whole)
        pictures += len(pixels)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * group["share"] * min((step + 1) / args.warmup, 1.0) * (1.0 - progress)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answers, told, right = losses(model, heads, pixels, rows, middle)
        (answers + args.heads * told).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *heads.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, sums = step + 1, sums + (answers.item(), told.item(), right.item())
        if step % args.log_every == 0:
            curve.append([step, round(time.time() - start), *(sums / args.log_every).round(4).tolist()])
            print("step {} {} s: answers {} heads {} right {}".format(*curve[-1]), flush=True)
            sums[:] = 0
        if step % (10 * args.log_every) == 0:
            save(model, args.out)
    save(model, args.out)
    seconds = round(time.time() - start, 1)
    return {"steps": step, "pictures": pictures, "train_seconds": seconds, "loss_curve": curve,
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--start", type=Path, help="a folder of this script, to go on with its model")
    parser.add_argument("--results", type=Path, help="where to write the record of the run")
    numbers = {"seed": 11, "minutes": 55.0, "steps": 1_000_000, "batch": 16, "length": 160, "lr": 1e-3, "decoder": 0.5,
               "decay": 0.05, "warmup": 100, "noise": 0.06, "alone": 0.3, "heads": 0.3, "log_every": 50,
               "width": 192, "inner": 512, "layers": 5}  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    record = {name: getattr(args, name) for name in numbers} | train(args)
    record |= {"command": " ".join(["python", "scripts/box_vl_train.py", *sys.argv[1:]]), "threads": 1,
               "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip
    if args.results:
        args.results.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
