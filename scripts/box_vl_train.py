"""Train a small vision model: a tower before the decoder of the model in the box.

    python scripts/box_vl_train.py --out box-vl --results box-vl/train.json --device cuda --minutes 4
    fengine eval model.path=box-vl task=pictures

Pictures and questions come from `fengine/eval/tasks/drawn.py`, endlessly and seeded; those that `task=pictures` asks
have other seeds. A picture stands in a sequence once, with several questions behind it that do not see each other. A
linear head on each embedding names the object whose middle is there; the tower learns from it alone for a while, and it
is thrown away at the end. `--minutes` count from the start of the program to the last step.
"""

import argparse
import json
import multiprocessing
import platform
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from box_model import Shape
from box_vl_model import BoxVL, Seeing, apply
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn
from torch.nn import functional

from fengine.config.schema import BOX
from fengine.eval.tasks.drawn import COLOURS, PLACES, SHAPES, SIDE, Picture, ask, picture

START = time.time()
IMAGE, FAKE, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<|end|>"
KINDS = ("shape", "colour", "position", "what", "count", "exists", "list", "digit", "bars")
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


def new_model(args: argparse.Namespace) -> BoxVL:
    """The tower at random, the decoder as in the box; or what `--start` has."""
    torch.manual_seed(args.seed)
    model = BoxVL(Seeing(args.width, args.inner, args.layers, SIDE, PATCH, MERGE), Shape(vocab=VOCAB))
    own = model.state_dict()
    nn.init.normal_(own["model.text_model.embed_tokens.weight"], std=0.02)
    nn.init.normal_(own["model.connector.modality_projection.proj.weight"], std=0.02)
    for name, weight in load_file(BOX / "model.safetensors").items():
        own[name.replace("model.", "model.text_model.", 1)][: len(weight)] = weight.float()
    model.load_state_dict(own)
    if args.start:
        model.load_state_dict(load_file(args.start / "model.safetensors"))
    return model.to(args.device).train()


def save(model: BoxVL, out: Path) -> None:
    """The folder of the model."""
    out.mkdir(parents=True, exist_ok=True)
    text, seeing = json.loads((BOX / "config.json").read_text()), model.seeing
    drop = ("architectures", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id")
    ends = {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 6}
    vision = {
        "model_type": "idefics3_vision", "hidden_size": seeing.width, "intermediate_size": seeing.inner,
        "num_hidden_layers": seeing.layers, "num_attention_heads": seeing.width // seeing.head_dim,
        "image_size": SIDE, "patch_size": PATCH, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    }  # fmt: skip
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "dtype": "bfloat16",
        "image_token_id": 2048, "scale_factor": MERGE, "tie_word_embeddings": True, **ends, "vision_config": vision,
        "text_config": {key: value for key, value in text.items() if key not in drop} | {"vocab_size": VOCAB},
    }  # fmt: skip
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "resample": 1,
        "size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE},
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    named = json.loads((BOX / "tokenizer_config.json").read_text()) | {"chat_template": CHAT_TEMPLATE}
    files = {"config": config, "generation_config": ends, "preprocessor_config": processor, "tokenizer_config": named}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer().save(str(out / "tokenizer.json"), pretty=False)
    state = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(state, out / "model.tmp", {"format": "pt"})
    (out / "model.tmp").replace(out / "model.safetensors")


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_file(str(BOX / "tokenizer.json"))
    found.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (IMAGE, FAKE, WHOLE)])
    return found


class Batch(NamedTuple):
    """Pixels uint8 [B, H, W, 3]; ids, block (0: seen by all, -1: nothing) and position int16 [3, B, length]; the heads'
    classes uint8 [3, B, tokens]. Of each answer's token: its place in the flat batch, and the number of its question;
    of each question its kind."""

    pixels: np.ndarray | torch.Tensor
    rows: np.ndarray | torch.Tensor
    middle: np.ndarray | torch.Tensor
    at: np.ndarray | torch.Tensor
    question: np.ndarray | torch.Tensor
    kinds: np.ndarray | torch.Tensor


class Batches:
    """Sequences of `length` tokens: a picture and as many questions about it as have room."""

    def __init__(self, length: int) -> None:
        self.length, self.tokens, self.known = length, tokenizer(), dict[str, list[int]]()
        self.first = len(self.ids(f"<|begin_of_text|><|user|>\n{FAKE}{WHOLE}"))
        self.head = self.ids(f"<|begin_of_text|><|user|>\n{FAKE}{WHOLE}{IMAGE * TOKENS}{FAKE}")

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokens.encode(text, add_special_tokens=False).ids
        return self.known[text]

    def sequence(self, drawn: Picture, random: Random) -> tuple[np.ndarray, list[int], list[int], list[int]]:
        """Its rows; the places of the answers' tokens, each one's question, and the questions' kinds."""
        found, at = np.zeros((3, self.length), np.int16), len(self.head)
        found[0, :at], found[1], found[2, :at] = self.head, -1, np.arange(at)
        found[1, :at] = 0
        places, number, kinds = list[int](), list[int](), list[int]()
        while True:
            asked = ask(random, drawn.questions)
            prompt = self.ids(f"{asked.text}{END}\n<|assistant|>\n")
            answer = self.tokens.encode(asked.answer + END, add_special_tokens=False).ids
            end = at + len(prompt) + len(answer)
            if end > self.length:
                return found, places, number, kinds
            places += range(end - len(answer), end)
            number += [len(kinds)] * len(answer)
            kinds.append(KINDS.index(asked.kind))
            found[:, at:end] = [*prompt, *answer], [len(kinds)] * (end - at), np.arange(end - at) + len(self.head)
            at = end

    def batch(self, randoms: list[Random]) -> Batch:
        """A picture of each."""
        drawn = [picture(random) for random in randoms]
        found = [self.sequence(one, random) for one, random in zip(drawn, randoms, strict=True)]
        at = [i * self.length + place for i, (_, places, _, _) in enumerate(found) for place in places]
        question, before = list[int](), 0
        for _, _, number, kinds in found:
            question += [before + n for n in number]
            before += len(kinds)
        pixels, middle = np.stack([one.pixels_HWC for one in drawn]), np.stack([classes(one) for one in drawn], 1)
        kinds = np.array([kind for one in found for kind in one[3]])
        return Batch(pixels, np.stack([one[0] for one in found], 1), middle, np.array(at), np.array(question), kinds)

    def endless(self, seed: int, size: int) -> Iterator[Batch]:
        random = Random(f"train {seed}")
        while True:
            yield self.batch([random] * size)


def classes(drawn: Picture) -> np.ndarray:
    """Of each embedding what has its middle there, uint8 [3, tokens]."""
    found, step = np.zeros((3, TOKENS), np.uint8), PATCH * MERGE
    for thing in drawn.things:
        token = int(thing.y // step) * (SIDE // step) + int(thing.x // step)
        found[:, token] = [known.index(getattr(thing, part)) for part, known in CLASSES.items()]
    return found


def draw(length: int, seed: int, size: int, out: "multiprocessing.Queue[Batch]") -> None:
    """What a process that draws does for ever."""
    for batch in Batches(length).endless(seed, size):
        out.put(batch)


def feed(args: argparse.Namespace) -> Iterator[Batch]:
    """Batches of `--workers` processes in turn; with none, drawn here."""
    if not args.workers:
        yield from Batches(args.length).endless(args.seed, args.batch)
    context = multiprocessing.get_context("spawn")
    drawn = [context.Queue(4) for _ in range(args.workers)]
    for i, out in enumerate(drawn):
        told = (args.length, 1000 * args.seed + i, args.batch, out)
        context.Process(target=draw, args=told, daemon=True).start()
    ready: queue.Queue[Batch] = queue.Queue(8)

    def collect() -> None:
        while True:
            for out in drawn:  # copies from pinned memory do not wait for the device
                parts = map(torch.from_numpy, out.get())
                ready.put(Batch(*(part.pin_memory() if args.device == "cuda" else part for part in parts)))

    threading.Thread(target=collect, daemon=True).start()
    while True:
        yield ready.get()


def put(part: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(part).to(device, non_blocking=True)


def seen(model: BoxVL, batch: Batch, noise: float) -> torch.Tensor:
    """The embeddings of its pictures, which get up to so much noise."""
    pixels = put(batch.pixels, model.cos.device).permute(0, 3, 1, 2) / 127.5 - 1
    if noise:
        pixels = pixels + noise * torch.rand_like(pixels[:, :1, :1, :1]) * torch.randn_like(pixels)
    return model.see(pixels.contiguous())


def answers(
    model: BoxVL, batch: Batch, seen: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token of an answer: the negative log-probability, and whether it is the likeliest; its question."""
    device = seen.device
    ids, block, place = put(batch.rows, device).long()
    at, question = (put(part, device) for part in (batch.at, batch.question))
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=device).tril()
    shown = ((block[:, :, None] == block[:, None]) | (block[:, None] == 0)) & causal
    kind = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    mask = torch.zeros(shown.shape, dtype=kind, device=device).masked_fill_(~shown, float("-inf"))[:, None]
    hidden = model.read(ids, seen, first, place, mask).flatten(0, 1)[at - 1]
    logits = functional.linear(hidden, model.model["text_model"].embed_tokens.weight).float()
    target = ids.flatten()[at]
    return functional.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target, question


def heads_loss(heads: nn.Linear, seen: torch.Tensor, batch: Batch) -> torch.Tensor:
    guesses = heads(seen).float().split([len(known) for known in CLASSES.values()], -1)
    middle = put(batch.middle, seen.device).long()
    return sum(functional.cross_entropy(g.flatten(0, 1), c.flatten()) for g, c in zip(guesses, middle, strict=True))


@torch.no_grad()
def evaluate(model: BoxVL, args: argparse.Namespace, held: list[Batch]) -> dict[str, tuple[float, int]]:
    """Of each kind of questions the share with the right greedy answer, and how many there are. An answer is right
    where each token is the likeliest after the right ones before it."""
    run, model.run_tower, model.run_decoder = (model.run_tower, model.run_decoder), apply, apply
    right, number = defaultdict(int), defaultdict(int)
    for batch in held:
        with autocast(args):
            _, good, question = answers(model, batch, seen(model, batch, 0.0), Batches(0).first)
        whole = torch.ones(len(batch.kinds), dtype=torch.int64, device=good.device)
        whole = whole.scatter_reduce(0, question, good.long(), "amin").cpu().numpy()
        for name, kind in [(name, k) for k, name in enumerate(KINDS)]:
            right[name] += int(whole[batch.kinds == kind].sum())
            number[name] += int((batch.kinds == kind).sum())
    model.run_tower, model.run_decoder = run
    return {name: (round(right[name] / max(number[name], 1), 4), number[name]) for name in KINDS}


def held_out(args: argparse.Namespace, count: int) -> list[Batch]:
    """The first pictures of `task=pictures`; the first question of each is the one that it asks."""
    batches, size = Batches(args.length), min(args.batch, count)
    return [batches.batch([Random(f"0/{i}") for i in range(at, at + size)]) for at in range(0, count, size)]


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.precision == "bf16")


class Training:
    """The model, the heads and the optimizer. `steps` are those done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.steps, self.first = args, 0, Batches(0).first
        self.model = new_model(args)
        self.heads = nn.Linear(256, sum(map(len, CLASSES.values())), device=args.device)
        named = list(self.model.named_parameters())
        old = [p for name, p in named if "text_model" in name]
        new = [p for name, p in named if "text_model" not in name] + list(self.heads.parameters())
        groups = [{"params": new, "share": 1.0}, {"params": old, "share": args.decoder}]
        self.parameters = [*old, *new]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), weight_decay=args.decay, fused=True)
        if args.compile:
            self.model.run_tower, self.model.run_decoder = (
                torch.compile(lambda layer, *rest: layer(*rest), dynamic=False) for _ in range(2)
            )

    def step(self, batch: Batch, progress: float) -> torch.Tensor:
        """The losses of answers and heads, and the share of answers' tokens that are the likeliest: [3]."""
        try:
            return self._step(batch, progress)
        except Exception as error:
            if self.model.run_tower is apply:
                raise
            print(f"without torch.compile: {error!r:.500}", flush=True)
            self.model.run_tower = self.model.run_decoder = apply
            self.optimizer.zero_grad(set_to_none=True)
            return self._step(batch, progress)

    def _step(self, batch: Batch, progress: float) -> torch.Tensor:
        args, loss, right = self.args, torch.zeros((), device=self.args.device), torch.zeros(1, device=self.args.device)
        for group in self.optimizer.param_groups:
            group["lr"] = args.lr * group["share"] * min((self.steps + 1) / args.warmup, 1.0) * (1.0 - progress)
        with autocast(args):
            embeddings = seen(self.model, batch, args.noise)
            told = heads_loss(self.heads, embeddings, batch)
            if progress >= args.alone:
                each, right, _ = answers(self.model, batch, embeddings, self.first)
                loss = each.mean()
        (loss + args.heads * told).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return torch.stack((loss.detach(), told.detach(), right.float().mean()))


def train(args: argparse.Namespace) -> dict[str, object]:
    """The loop until `--minutes` are over, the model's folder, and what it answers."""
    torch.set_float32_matmul_precision("high")
    batches, curve, reports = feed(args), list[list[float]](), list[dict[str, object]]()
    waiting = next(batches)  # the processes start
    training, held, noted = Training(args), held_out(args, args.held_out), time.time()
    sums, waited = torch.zeros(3, device=args.device), 0.0
    model = training.model
    while (progress := max((time.time() - START) / (60 * args.minutes), training.steps / args.steps)) < 1:
        sums += training.step(waiting, progress)
        before = time.time()
        waiting = next(batches)
        waited += time.time() - before
        if training.steps % args.log_every == 0:
            told = (sums / args.log_every).tolist()
            curve.append([training.steps, round(time.time() - START), *(round(x, 4) for x in told)])
            print("step {} {} s: answers {} heads {} right {}; waited for pictures {:.1f} s"
                  .format(*curve[-1], waited), flush=True)  # fmt: skip
            sums.zero_()
        if time.time() - noted > args.save_every:
            save(model, args.out)
            reports.append({"seconds": round(time.time() - START), **evaluate(model, args, held[:2])})
            print(reports[-1], flush=True)
            noted = time.time()
    save(model, args.out)
    final = evaluate(model, args, held)
    for name, (share, number) in final.items():
        print(f"{name:10} {100 * share:6.2f} % of {number}", flush=True)
    return {
        "steps": training.steps, "pictures": training.steps * args.batch, "seconds": round(time.time() - START, 1),
        "waited_seconds": round(waited, 1), "loss_curve": curve, "reports": reports, "greedy": final,
        "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--start", type=Path, help="a folder of this script, to go on with its model")
    parser.add_argument("--results", type=Path, help="where to write the record of the run")
    numbers = {"seed": 11, "minutes": 4.0, "steps": 1_000_000, "batch": 256, "length": 160, "lr": 1e-3, "decoder": 0.5,
               "decay": 0.05, "warmup": 100, "noise": 0.06, "alone": 0.1, "heads": 0.3, "log_every": 50, "width": 192,
               "inner": 512, "layers": 5, "workers": 0, "device": "cpu", "precision": "bf16", "compile": 0,
               "held_out": 256, "save_every": 60.0}  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    record = {name: getattr(args, name) for name in numbers} | train(args)
    record |= {"command": " ".join(["python", "scripts/box_vl_train.py", *sys.argv[1:]]),
               "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
