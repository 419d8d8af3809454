"""Train an EAGLE-3 head for a target from what the target itself writes, and measure what it brings at batch 1.

    python scripts/eagle_train.py --model box --out /tmp/box_eagle                     # on a CPU, some minutes
    python scripts/eagle_train.py --model PATH --device cuda --minutes 1.0 --out /tmp/head --prompts prompts.txt

The engine draws `--tokens` tokens at temperature 1 behind each line of `--prompts` (default: documents of the box). The
head sees the target's streams in front of three layers, and learns the target's distribution behind each token, over
`--unroll` guesses that go on from its own stream, as it will guess. Written in the form that SGLang and vLLM load.
Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test".
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from box_corpus import documents, text_of
from measure import save
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as nn

from fengine import Engine
from fengine.models import lookup
from fengine.models.kv_pages import init_kv, row_batch
from fengine.ops.linear import unpacked
from fengine.worker.hub import resolve_model
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

PAGE = 16


def written(args: argparse.Namespace) -> list[list[int]]:
    """Prompts with what the target drew behind them."""
    draw = random.Random(0)
    if args.prompts:
        texts = Path(args.prompts).read_text().splitlines()
    else:
        stream = documents(7)
        texts = [text[: draw.randint(8, 60)] for text in (text_of(next(stream)[1]) for _ in range(args.count))]
    params = {"temperature": 1.0, "max_new_tokens": args.tokens, "ignore_eos": True}
    with Engine(model_path=args.model, device=args.device, random_seed=1) as llm:
        ids = [llm.tokenizer.encode(text) for text in texts]
        outputs: Any = llm.generate(input_ids=ids, sampling_params=params)
    return [(prompt + out["output_ids"])[: args.tokens] for prompt, out in zip(ids, outputs, strict=True)]


class Target:
    """The target's streams and logits of whole sequences."""

    def __init__(self, args: argparse.Namespace) -> None:
        directory = resolve_model(args.model)
        self.config = read_config(directory)
        spec = spec_from_config(self.config)
        count = spec.num_layers
        self.layers = (2, count // 2, count - 3) if count >= 8 else (1, count // 2, count - 1)
        self.spec, self.device = replace(spec, feature_layers=self.layers, exact=False), args.device
        self.params = load_params(directory, spec, device=args.device)
        self.model = lookup(spec.architecture)
        packed = self.params["embed"].packed
        self.embed_VD = (packed if packed.dim() == 2 else unpacked(packed, spec.vocab_size)).float()
        kind = torch.float32 if args.device == "cpu" else self.params["final_norm_D"].dtype
        self.kv = init_kv(self.spec, args.tokens // PAGE + 2, PAGE, kind, args.device)

    @torch.no_grad()
    def read(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """(streams side by side [T, 3 D], hidden states [T, D])."""
        pages = list(range(1, self.kv.num_pages))
        batch = row_batch(ids, 0, pages, PAGE)
        batch = {name: x.to(self.device) for name, x in batch.items()}
        self.kv, hidden_TD = self.model.forward(self.params, self.spec, self.kv, batch)
        return self.kv.feature_PSX[0].flatten(0, 1)[batch["slot_T"].long()].float(), hidden_TD.clone()

    @torch.no_grad()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.model.unembed(self.params, self.spec, hidden_TD).float()


class Head(torch.nn.Module):
    """The draft, in plain PyTorch; names as in the public form."""

    def __init__(self, target: Target, id_H: Tensor, mlp: int, theta: float) -> None:
        super().__init__()
        spec, self.target = target.spec, target
        d, self.heads, self.groups, self.width = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim
        q, kv, self.eps, self.theta = self.heads * self.width, self.groups * self.width, spec.rms_eps, theta
        shapes = {
            "fc": (d, 3 * d), "midlayer.self_attn.q_proj": (q, 2 * d), "midlayer.self_attn.k_proj": (kv, 2 * d),
            "midlayer.self_attn.v_proj": (kv, 2 * d), "midlayer.self_attn.o_proj": (d, q),
            "midlayer.mlp.gate_proj": (mlp, d), "midlayer.mlp.up_proj": (mlp, d), "midlayer.mlp.down_proj": (d, mlp),
            "lm_head": (len(id_H), d),
        }  # fmt: skip
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
        made = {name: torch.randn(s) * s[-1] ** -0.5 for name, s in shapes.items()} | {n: torch.ones(d) for n in norms}
        if target.spec.tie_embeddings:
            made["lm_head"] = target.embed_VD[id_H].cpu().clone()
        self.w = torch.nn.ParameterDict({n.replace(".", "/"): torch.nn.Parameter(x) for n, x in made.items()})

    def of(self, name: str) -> Tensor:
        return self.w[name.replace(".", "/")]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.of(name)

    def turned(self, x_BTHK: Tensor) -> Tensor:
        half = torch.arange(0, self.width, 2, device=x_BTHK.device) / self.width
        angle = torch.arange(x_BTHK.shape[1], device=x_BTHK.device)[:, None] * self.theta**-half
        cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        first, second = x_BTHK.chunk(2, -1)
        return x_BTHK * cos + torch.cat((-second, first), -1) * sin

    def guess(self, token_BT: Tensor, stream_BTD: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The stream behind the layer. `seen`: keys and values of the guesses before; this one's are added.

        The k-th guess at position p sees keys of the first up to p - k, and of the i-th the one at p - k + i."""
        hidden = self.norm(stream_BTD, "midlayer.hidden_norm")
        embedded = self.norm(self.target.embed_VD[token_BT], "midlayer.input_layernorm")
        x = torch.cat((embedded, hidden), -1)
        q, k, v = (nn.linear(x, self.of(f"midlayer.self_attn.{n}_proj")).unflatten(-1, (-1, self.width)) for n in "qkv")
        repeat = self.heads // self.groups
        q, k, v = self.turned(q), self.turned(k).repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        seen.append((k, v))
        step, count = len(seen) - 1, q.shape[1]
        at = torch.arange(count, device=q.device)
        scores = torch.einsum("bphk,bjhk->bhpj", q, seen[0][0])
        scores = scores.masked_fill(at[None] > at[:, None] - step, -1e9)
        behind = [(x.roll(step - i, 1), y.roll(step - i, 1)) for i, (x, y) in enumerate(seen) if i]
        own = [torch.einsum("bphk,bphk->bhp", q, x)[..., None] for x, _ in behind]
        weights = (torch.cat([scores, *own], -1) * self.width**-0.5).softmax(-1)
        heads = torch.einsum("bhpj,bjhk->bphk", weights[..., :count], seen[0][1])
        for i, (_, y) in enumerate(behind):
            heads = heads + weights[..., count + i].transpose(1, 2)[..., None] * y
        stream = stream_BTD + nn.linear(heads.flatten(2), self.of("midlayer.self_attn.o_proj"))
        y = self.norm(stream, "midlayer.post_attention_layernorm")
        gate, up = (nn.linear(y, self.of(f"midlayer.mlp.{n}_proj")) for n in ("gate", "up"))
        return stream + nn.linear(nn.silu(gate) * up, self.of("midlayer.mlp.down_proj"))

    def loss(self, token_BT: Tensor, feature_BTX: Tensor, want_BTH: Tensor, unroll: int) -> tuple[Tensor, list[float]]:
        """(cross entropy with the target over all guesses, how often each guess's likeliest id is the target's)."""
        stream, seen, losses, right = nn.linear(feature_BTX, self.of("fc")), [], [], []
        for step in range(unroll):
            stream = self.guess(token_BT, stream, seen)
            logits = nn.linear(self.norm(stream, "norm"), self.of("lm_head"))[:, step:]
            want = want_BTH[:, step:]
            losses.append(-(want * logits.log_softmax(-1)).sum(-1).mean() * 0.8**step)
            right.append(float((logits.argmax(-1) == want.argmax(-1)).float().mean()))
            stream = stream.roll(1, 1)
        return torch.stack(losses).sum(), right


def train(args: argparse.Namespace, target: Target, rows: list[list[int]]) -> tuple[Head, Tensor, dict[str, Any]]:
    """For `--minutes`, on batches of rows of one length."""
    count = torch.bincount(torch.tensor([token for row in rows for token in row]), minlength=target.spec.vocab_size)
    id_H = count.topk(min(args.head_ids, target.spec.vocab_size)).indices.sort().values
    head = Head(target, id_H, args.mlp or target.spec.mlp_size, float(target.config.get("rope_theta") or 10000.0))
    head.to(args.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    rows = [row for row in rows if len(row) == args.tokens]
    read = [target.read(row) for row in rows]
    draw, begin, step, told = random.Random(0), time.monotonic(), 0, []
    while (share := (time.monotonic() - begin) / (60 * args.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / 50) * (1 - share)
        some = [draw.randrange(len(rows)) for _ in range(args.rows)]
        ids = torch.tensor([rows[i] for i in some], device=args.device)
        feature = torch.stack([read[i][0] for i in some])[:, :-1]
        hidden = torch.cat([read[i][1][1:] for i in some])
        want = (target.logits(hidden)[:, id_H] / args.temperature).softmax(-1).unflatten(0, (args.rows, -1))
        loss, right = head.loss(ids[:, 1:], feature, want, args.unroll)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            told.append({"step": step, "loss": round(float(loss), 4), "right": [round(x, 4) for x in right]})
            print(told[-1], flush=True)
    return head, id_H, {"steps": step, "sequences": len(rows), "last": told[-1:]}


def write(args: argparse.Namespace, target: Target, head: Head, id_H: Tensor) -> None:
    """The checkpoint in the public form, in bf16."""
    out, spec = Path(args.out), target.spec
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"{n.replace('/', '.')}.weight": x.detach().cpu().bfloat16().contiguous() for n, x in head.w.items()}
    known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    known[id_H] = True
    save_file(tensors | {"d2t": id_H.cpu() - torch.arange(len(id_H)), "t2d": known}, out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": spec.vocab_size,
        "draft_vocab_size": len(id_H), "hidden_size": spec.hidden_size, "num_hidden_layers": 1,
        "intermediate_size": args.mlp or spec.mlp_size, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_position, "rope_theta": head.theta, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in target.layers]},
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Without and with the head at batch 1: tokens per second and per step, bits that differ."""
    stream, draw = documents(11), random.Random(1)
    texts = [text[: draw.randint(8, 60)] for text in (text_of(next(stream)[1]) for _ in range(6))]
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": args.out}
    settings = {"off": {}, "adaptive": drafts}
    settings |= {
        f"{k} guesses": drafts | {"speculative_num_steps": k, "speculative_adaptive": False} for k in (1, 2, 4)
    }
    found, want = {}, {}
    for name, more in settings.items():
        with Engine(model_path=args.model, device=args.device, disable_radix_cache=True, **more) as llm:
            for temperature in (0.0, 1.0):
                params = {"temperature": temperature, "max_new_tokens": 96, "ignore_eos": True, "sampling_seed": 5}
                times, busy, told = [], [], []
                for _ in range(3):
                    start, processor, told = time.perf_counter(), time.process_time(), []
                    for text in texts:
                        told.append(llm.generate(text, params, return_logprob=True)["meta_info"])
                    times.append(time.perf_counter() - start)
                    busy.append(time.process_time() - processor)
                bits = [meta["output_token_logprobs"] for meta in told]
                want.setdefault(temperature, bits)
                steps = sum(meta.get("spec_verify_ct", 95) for meta in told)
                found[f"{name}, temperature {temperature:g}"] = {
                    "tokens per second": round(96 * len(texts) / min(times), 1),
                    "tokens per second of the processor": round(96 * len(texts) / min(busy), 1),
                    "tokens per step": round(95 * len(texts) / steps, 3), "equal": bits == want[temperature],
                }  # fmt: skip
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="box")
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", required=True, help="folder of the checkpoint")
    p.add_argument("--results", help="JSON file; default scripts/results/eagle_train.json")
    p.add_argument("--prompts", help="a file with one prompt a line")
    p.add_argument("--count", type=int, default=1024, help="prompts of the box's documents")
    p.add_argument("--tokens", type=int, default=128, help="of each sequence")
    p.add_argument("--minutes", type=float, default=2.0, help="of training")
    p.add_argument("--rows", type=int, default=8, help="sequences of a batch")
    p.add_argument("--rate", type=float, default=2e-3)
    p.add_argument("--unroll", type=int, default=3)
    p.add_argument("--mlp", type=int, default=None, help="width of the MLP; default the target's")
    p.add_argument("--head-ids", type=int, default=32000)
    p.add_argument("--temperature", type=float, default=1.0, help="of the target's distribution")
    args = p.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    rows = written(args)
    target = Target(args)
    print(f"{sum(map(len, rows))} tokens in {time.monotonic() - begin:.1f} s", flush=True)
    head, id_H, told = train(args, target, rows)
    write(args, target, head, id_H)
    save("eagle_train", {"settings": vars(args), "training": told, "batch 1": measured(args)}, args.results)


if __name__ == "__main__":
    main()
