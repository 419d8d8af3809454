"""Train the tokenizer and the model in the box, from the generated corpus to a checkpoint folder.

    python scripts/box_train.py --out fengine/models/box --results scripts/results/box_train.json
    python scripts/box_train.py --start fengine/models/box --out /tmp/box          # goes on from the shipped weights
    python scripts/box_train.py --device cpu --steps 200 --tokens 2000000 --batch-tokens 4096 --out /tmp/box   # tiny

The run is seeded.  `--minutes` bounds its wall time: the learning rate follows whichever of steps and time is further
along, so the schedule always ends.  The checkpoint is saved in bf16, at the middle of the run and at its end.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from box_corpus import BOS, EOS, documents, text_of
from box_model import Box, Shape
from box_tools import CHAT_TEMPLATE, END
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD = "<|pad|>"
SPECIAL = [BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>", END, PAD]
# words with their leading blank, single digits, runs of punctuation with their leading blank, blanks and line ends
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CLASS = 4096  # a packed cell is token + CLASS * weight class
WEIGHTS = (0.0, 0.1, 1.0)  # padding, text to read, text to write
OPEN_DOCUMENTS = 64


def train_tokenizer(seed: int, vocab: int, count: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text_of(d) for _, d in islice(documents(seed), count)), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, positions: int) -> None:
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}, indent=2) + "\n"
    )


def encoded(tokenizer: Tokenizer, seed: int) -> Iterator[np.ndarray]:
    """Endless packed cells, one int16 array per document."""
    stream = documents(seed)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    while True:
        batch = [segments for _, segments in islice(stream, 512)]
        ids = iter(tokenizer.encode_batch([t for segments in batch for t, _ in segments], add_special_tokens=False))
        for segments in batch:
            cells = [bos + CLASS]
            for _, trained in segments:
                weight = CLASS * (2 if trained else 1)
                cells += [i + weight for i in next(ids).ids]
            cells.append(eos + 2 * CLASS)
            yield np.array(cells, dtype=np.int16)


def pack(job: tuple[str, int, int, int]) -> np.ndarray:
    """Rows of whole documents, each row beginning with a bos; `job` is (tokenizer file, seed, row length, rows)."""
    path, seed, length, count = job
    tokenizer = Tokenizer.from_file(path)
    stream = encoded(tokenizer, seed)
    rows = np.full((count, length), tokenizer.token_to_id(PAD), dtype=np.int16)
    waiting: list[np.ndarray] = []
    for row in rows:
        used = 0
        while used < length:
            while len(waiting) < OPEN_DOCUMENTS:
                document = next(stream)
                if len(document) <= length:
                    waiting.append(document)
            fits = next((i for i, d in enumerate(waiting) if len(d) <= length - used), None)
            if fits is None:
                break
            document = waiting.pop(fits)
            row[used : used + len(document)] = document
            used += len(document)
    return rows


def make_corpus(path: str, seed: int, tokens: int, lengths: dict[int, float], workers: int) -> dict[int, torch.Tensor]:
    """Packed rows by row length; `lengths` gives each length's share of the tokens."""
    shards = max(workers, 2)
    jobs = [
        (path, seed * 100_003 + 1000 * i + length, length, max(1, int(tokens * share / length / shards)))
        for length, share in lengths.items()
        for i in range(shards)
    ]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        done = pool.map(pack, jobs, chunksize=1)
    return {
        length: torch.from_numpy(np.concatenate([r for j, r in zip(jobs, done, strict=True) if j[2] == length]))
        for length in lengths
    }


def batches(corpus: dict[int, torch.Tensor], batch_tokens: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches of cells, each of one row length, every row once per epoch in a seeded order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        plan = []
        for length, rows in corpus.items():
            size = max(1, batch_tokens // length)
            order = torch.randperm(len(rows), generator=generator)
            plan += [(length, order[i : i + size]) for i in range(0, len(rows) - size + 1, size)]
        for i in torch.randperm(len(plan), generator=generator).tolist():
            length, index = plan[i]
            yield corpus[length][index.to(corpus[length].device)]


def save_checkpoint(model: Box, out: Path, shape: Shape) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "initializer_range": 0.02,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": [1, 5],
        "pad_token_id": 6,
        "torch_dtype": "bfloat16",
    }
    generation = {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 6}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def train(args: argparse.Namespace, corpus: dict[int, torch.Tensor], shape: Shape, out: Path, deadline: float) -> dict:
    """Run the loop until `--steps` or `deadline`; returns the loss curve and the counts."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = Box(shape)
    if args.start:
        model.load_state_dict({k: w.float() for k, w in load_file(args.start / "model.safetensors").items()})
    model = model.to(args.device)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    fused = args.device == "cuda"
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.decay}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        fused=fused,
    )
    forward = torch.compile(model, dynamic=False) if args.compile else model
    table = torch.tensor(WEIGHTS, device=args.device)
    stream = batches(corpus, args.batch_tokens, args.seed)
    curve, seen, step, half = [], 0, 0, False
    start = now = time.time()
    while True:
        progress = max(step / args.steps, (now - start) / max(deadline - start, 1e-9))
        if progress >= 1.0:
            break
        rate = args.lr * min((step + 1) / args.warmup, 1.0) * (1.0 - progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        cells = next(stream).to(args.device).to(torch.int64)
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=fused):
            loss = forward(cells % CLASS, table[cells // CLASS])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += cells.numel()
        step += 1
        if step % args.log_every == 0:
            value, now = loss.item(), time.time()  # .item() waits for the device, so the clock is honest
            curve.append([step, round(value, 4), round(now - start, 1)])
            if step % (args.log_every * 10) == 0:
                print(f"step {step} loss {value:.4f} lr {rate:.2e} {seen / (now - start) / 1e6:.2f} Mtok/s", flush=True)
        if not half and progress > 0.5:
            half = True
            save_checkpoint(model, out, shape)
    save_checkpoint(model, out, shape)
    return {
        "steps": step,
        "tokens_seen": seen,
        "train_seconds": round(time.time() - start, 1),
        "loss_curve": curve,
        "final_loss": round(sum(v for _, v, _ in curve[-20:]) / max(1, len(curve[-20:])), 4),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--results", type=Path, help="where to write the record of the run")
    parser.add_argument("--start", type=Path, help="checkpoint folder to go on from, with its tokenizer and weights")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--tokens", type=int, default=180_000_000, help="size of the generated corpus")
    parser.add_argument("--steps", type=int, default=16_000)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-time limit up to the saved checkpoint")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    for field, value in Shape._field_defaults.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    begin = time.time()
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    shape = Shape(**{field: getattr(args, field) for field in Shape._fields})
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(args.seed, shape.vocab, 60_000)
    save_tokenizer(tokenizer, args.out, shape.positions)
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {time.time() - begin:.1f} s", flush=True)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    lengths = {256: 0.4, shape.positions: 0.6}
    corpus = make_corpus(str(args.out / "tokenizer.json"), args.seed, args.tokens, lengths, args.workers)
    corpus_seconds = time.time() - begin
    cells = sum(rows.numel() for rows in corpus.values())
    print(f"corpus: {cells} cells, {corpus_seconds:.1f} s", flush=True)
    corpus = {length: rows.to(args.device) for length, rows in corpus.items()}
    record = train(args, corpus, shape, args.out, begin + 60 * args.minutes)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    record = {
        "command": " ".join(["python", "scripts/box_train.py", *sys.argv[1:]]),
        "seed": args.seed,
        "shape": shape._asdict(),
        "learning_rate": args.lr,
        "weight_decay": args.decay,
        "batch_tokens": args.batch_tokens,
        "row_lengths": lengths,
        "corpus_tokens": cells,
        "corpus_seconds": round(corpus_seconds, 1),
        "hardware": hardware,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **record,
        "wall_seconds": round(time.time() - begin, 1),
    }
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(record) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "loss_curve"}, indent=1))


if __name__ == "__main__":
    main()
