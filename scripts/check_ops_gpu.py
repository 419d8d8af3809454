"""Checks every CUDA op on this machine: against float64, bit for bit across schedules, and in time against torch.

    python scripts/check_ops_gpu.py --out scripts/results/ops_gpu.json

Ends with status 1 if an op is wrong, if bits differ that must not, or if a negative control finds no difference; with
3 if nothing is wrong, but --budget left parts out.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from measure import Budget, add_budget, graph_us
from torch import Tensor

from fengine.models.rope import rope_table
from fengine.models.spec import RopeSpec
from fengine.ops import activations, attention, attention_launch, e4m3, linear, norm_kernels, rms_norm, rope, sampling

BF16 = torch.bfloat16
LINEARS = {  # name: (N, K)
    "llama-8b qkv": (6144, 4096), "llama-8b o": (4096, 4096), "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336), "llama-8b lm_head": (128256, 4096), "qwen-0.5b qkv": (1152, 896),
    "qwen-0.5b o": (896, 896), "qwen-0.5b gate_up": (9728, 896), "qwen-0.5b down": (896, 4864),
    "qwen-0.5b lm_head": (151936, 896),
}  # fmt: skip
HEADS = {"llama-8b": (32, 8, 128), "qwen-0.5b": (14, 2, 64)}  # H, G, K
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm of the reference; infinite if a NaN is in either."""
    value = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return value if math.isfinite(value) else math.inf


def differing(got: Tensor, want: Tensor) -> int:
    """Elements that are not bitwise equal; NaN and unequal shapes count."""
    return int((got != want).sum()) if got.shape == want.shape else got.numel()


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def paged(
    k_TGK: Tensor, v_TGK: Tensor, lengths: list[int], tokens: list[int], size: int, spare: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments 2 to 6 of attention for rows whose keys follow each other in k_TGK; unowned slots hold NaN."""
    pages = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(pages), device="cuda") + 1
    table = torch.zeros(len(lengths), max(pages) + spare, dtype=torch.int32, device="cuda")
    k, v = (x.new_full((sum(pages) + 1, size, *x.shape[1:]), math.nan) for x in (k_TGK, v_TGK))
    keys = torch.arange(max(lengths), device="cuda")
    for r, own in enumerate(order.split(pages)):
        table[r, : len(own)] = own
        first, position = sum(lengths[:r]), keys[: lengths[r]]
        slot = own[position // size] * size + position % size
        for pool, x in ((k, k_TGK), (v, v_TGK)):
            pool.flatten(0, 1)[slot] = x[first : first + lengths[r]]
    start = torch.tensor([0, *tokens], device="cuda").cumsum(0).int()
    return k, v, start, integers(lengths), table


def product(x: Tensor, w: Tensor, n: int) -> Tensor:
    return linear.linear(x, linear.Dense(w, n))


def matmul(x: Tensor, w: Tensor, n: int) -> Tensor:
    return torch.mm(x, w.T)


# -- 1. against float64 -----------------------------------------------------------------------------------------------


def linear_errors(dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for m, n, k in ((1, 70, 96), (3, 1152, 896), (33, 896, 4864), (100, 4096, 4096), (1000, 333, 200)):
        x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=k**-0.5), random(n, dtype=dtype)
        want = linear.reference(x.double(), w.double(), n, bias.double(), None)
        found[f"linear {m}x{n}x{k}"] = error(linear.linear(x, linear.pack(w), bias), want)
    return found


def row_op_errors(dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for width in (36, 896, 4096, 8192):
        x, delta, weight = random(33, width, dtype=dtype), random(33, width, dtype=dtype), random(width, dtype=dtype)
        want = rms_norm.reference(x.double(), weight.double(), 1e-6)
        found[f"rms_norm {width}"] = error(rms_norm.rms_norm(x, weight, 1e-6), want)
        y, total = rms_norm.add_rms_norm(delta, x, weight, 1e-6)
        found[f"add_rms_norm {width}"] = error(y, rms_norm.reference((x + delta).double(), weight.double(), 1e-6))
        found[f"add_rms_norm sum {width}"] = error(total, x.double() + delta.double())
        found[f"silu_mul {width}"] = error(activations.silu_mul(x), activations.reference(x.double()))
    return found


def rope_errors(dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for heads, groups, width in ((32, 8, 128), (14, 2, 64), (3, 3, 80)):
        table = rope_table(RopeSpec(5e5), width, 9000).cuda()
        x = random(50, (heads + 2 * groups) * width, dtype=dtype)
        k, v = random(20, 16, groups, width, dtype=dtype), random(20, 16, groups, width, dtype=dtype)
        position = torch.randint(0, 9000, (50,), device="cuda").int()
        slot = torch.randperm(320, device="cuda")[:50].int()
        for norms in ((None, None, 0.0), (random(width, dtype=dtype), random(width, dtype=dtype), 1e-6)):
            wide: list[Any] = [t.double() if isinstance(t, Tensor) else t for t in (x, table, k, v, *norms)]
            want = rope.reference(wide[0], wide[1], position, slot, wide[2], wide[3], heads, *wide[4:])
            got = rope.rope_kv_write(x, table, position, slot, k.clone(), v.clone(), heads, *norms)
            for name, a, b in zip("qkv", got, want, strict=True):
                found[f"rope {name} {heads}/{groups}x{width} norm={norms[0] is not None}"] = error(a, b)
    return found


def attention_errors(dtype: torch.dtype) -> dict[str, float]:
    found = {}
    shapes = ((32, 8, 128, 16), (14, 2, 64, 16), (2, 2, 64, 1), (4, 2, 80, 4), (8, 1, 96, 64))
    for heads, groups, width, size in shapes[: 5 if dtype == BF16 else 2]:
        for lengths, tokens in (([700, 5, 1300, 64], [700, 5, 33, 1]), ([1500, 600, 1, 512, 513], [1] * 5)):
            k, v = random(sum(lengths), groups, width, dtype=dtype), random(sum(lengths), groups, width, dtype=dtype)
            pages = paged(k, v, lengths, tokens, size)
            q = random(sum(tokens) + 3, heads, width, dtype=dtype)
            got = attention.attention(q, *pages, width**-0.5)
            want = attention.reference(q.double(), pages[0].double(), pages[1].double(), *pages[2:], width**-0.5)
            name = f"attention {heads}/{groups}x{width} page {size} T={sum(tokens)}"
            found[name] = error(got, want) + got[sum(tokens) :].abs().sum().item()
    return found


def draw_case(rows: int, vocab: int, kinds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> tuple[Tensor, ...]:
    """Rows that cycle through: greedy, unfiltered, top-k 20, top-p 0.9, min-p 0.05, all three."""
    kind = torch.tensor(kinds, device="cuda")[torch.arange(rows, device="cuda") % len(kinds)]

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, device="cuda", dtype=dtype)[kind]

    top_k = pick([1, vocab, 20, vocab, vocab, 50], torch.int32)
    top_p, min_p = pick([1, 1, 1, 0.9, 1, 0.7], torch.float32), pick([0, 0, 0, 0, 0.05, 0.01], torch.float32)
    seed = torch.randint(-(2**62), 2**62, (rows,), device="cuda")
    logits, temperature = random(rows, vocab, dtype=torch.float32, scale=3), torch.rand(rows, device="cuda") + 0.5
    return logits, temperature, top_k, top_p, min_p, seed, torch.arange(rows, device="cuda").int() * 17


def draw_errors() -> dict[str, float]:
    """Share of tokens that differ from the reference, and the largest error of a log-probability."""
    found = {}
    for rows, vocab in ((60, 128256), (48, 151936), (48, 1001)):
        case = draw_case(rows, vocab)
        token, logprob = sampling.draw(*case)
        want_token, want_logprob = sampling.reference(*case)
        found[f"draw {rows}x{vocab} tokens"] = differing(token, want_token) / rows
        found[f"draw {rows}x{vocab} logprob"] = (logprob - want_logprob)[token == want_token].abs().max().item()
    return found


# -- 2. bits ----------------------------------------------------------------------------------------------------------


ROWS = (1, 7, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 384, 512, 1024, 2048)


def linear_rows(call: Callable[[Tensor, Tensor, int], Tensor], control: bool) -> dict[str, int]:
    """Elements in which `call` on M rows differs from the op on the largest batch; with the control, K split in two."""
    found = {}
    for name, (n, k) in LINEARS.items():
        x, w = random(1024 if n > 100000 else 4096, k), random(n, k, scale=k**-0.5)
        whole = product(x, w, n)
        for m in (m for m in ROWS if m < len(x)):
            found[f"{name} M={m}"] = differing(call(x[5 : 5 + m].clone(), w, n), whole[5 : 5 + m])
        if control:
            half = [linear.linear(a.contiguous(), linear.pack(b), out_dtype=torch.float32)
                    for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]  # fmt: skip
            found[f"control: {name} split K"] = differing((half[0] + half[1]).to(BF16), whole)
    return found


def linear_bits() -> dict[str, int]:
    return linear_rows(product, True)


def library_bits() -> dict[str, int]:
    """Where torch.mm computes the tree of our op. For information: a library may choose otherwise."""
    return linear_rows(matmul, False)


def attention_bits(name: str) -> dict[str, int]:
    """One row prefilled whole against chunks, single tokens, page sizes, schedules, splits and company."""
    heads, groups, width = HEADS[name]
    length, found = 2300, {}
    q, k, v = random(length, heads, width), random(length, groups, width), random(length, groups, width)
    scale = width**-0.5
    k_pages, v_pages, start, kv_len, table = paged(k, v, [length], [length], 64)
    whole = attention.attention(q, k_pages, v_pages, start, kv_len, table, scale)
    rows = attention_launch.reference_schedule(q, k_pages).rows
    edges = (0, 1, 62, 63, 64, 65, 127, 128, 511, 1000, 1023, 1024, 1025, 2047, 2048, 2299)

    def part(first: int, last: int, chosen: attention_launch.Schedule | None = None) -> Tensor:
        bounds = integers([0, last - first])
        return attention.launch(
            q[first:last].clone(), k_pages, v_pages, bounds, integers([last]), table, scale, chosen=chosen
        )

    tiles = [attention_launch.Tiles(False, *t) for t in ((64, 4, 5), (128, 8, 3))] + [attention_launch.HOPPER]
    for each in tiles:
        if each.hopper or each.tile >= heads // groups:
            found[f"{name} {each}"] = differing(part(0, length, attention_launch.Schedule(rows, each)), whole)
    for tile, warps, stages in ((16, 2, 5), (16, 4, 5), (64, 4, 2)):
        for splits in (1, 2, 3):
            chosen = attention_launch.Schedule(attention_launch.Rows(tile, warps, stages, splits), None)
            found[f"{name} one token, {tuple(chosen.rows)}"] = sum(
                differing(part(p, p + 1, chosen), whole[p : p + 1]) for p in edges
            )
    found[f"{name} one token"] = sum(differing(part(p, p + 1), whole[p : p + 1]) for p in edges)
    chunked = [part(a, b) for a, b in ((0, 100), (100, 101), (101, 700), (700, 1590), (1590, 1602), (1602, 2300))]
    found[f"{name} chunked prefill"] = differing(torch.cat(chunked), whole)
    for size in (16, 128):
        found[f"{name} page size {size}"] = differing(
            attention.attention(q, *paged(k, v, [length], [length], size), scale), whole
        )
    lengths, tokens = [600, 2300, 40, 2300], [600, 1, 1, 300]
    more = [random(600, groups, width), random(40, groups, width)]
    k, v = (torch.cat((more[0], x, more[1], x)) for x in (k, v))
    company = attention.attention(torch.cat((random(600, heads, width), q[-1:], random(1, heads, width), q[-300:])),
                                  *paged(k, v, lengths, tokens, 64), scale)  # fmt: skip
    found[f"{name} in company"] = differing(company[600:601], whole[-1:]) + differing(company[602:], whole[-300:])
    used = attention_launch.CHUNK
    attention_launch.CHUNK = 256
    found[f"control: {name} other chunks"] = differing(part(0, length), whole)
    attention_launch.CHUNK = used
    return found


def row_bits() -> dict[str, int]:
    """Row-wise ops: a row alone against the row in a batch."""
    found = {}
    for width in (896, 4096):
        x, delta, weight = random(300, width), random(300, width), random(width)

        def outputs(rows: slice, x: Tensor = x, delta: Tensor = delta, weight: Tensor = weight) -> list[Tensor]:
            added = rms_norm.add_rms_norm(delta[rows], x[rows], weight, 1e-5)
            return [rms_norm.rms_norm(x[rows], weight, 1e-5), *added, activations.silu_mul(x[rows])]

        post = random(width)
        for shift in (0.0, 1.0):  # one kernel against three, whether or not it is proved here
            want = rms_norm.add_rms_norm(rms_norm.rms_norm(delta, post, 1e-5, shift), x, weight, 1e-5, shift)
            got = norm_kernels.run(x, delta, None, weight, 1e-5, shift, post)[:2]
            found[f"norm, sum, norm {width} {shift}"] = sum(differing(a, b) for a, b in zip(got, want, strict=True))
            codes, _, scale = norm_kernels.run(x, delta, None, weight, 1e-5, shift, post, width)
            rows = e4m3.launch(want[0], width)
            found[f"norm to e4m3 {width} {shift}"] = differing(codes, rows[0]) + differing(scale, rows[1])
        whole = outputs(slice(None))
        found[f"norms and silu_mul {width}"] = sum(
            differing(a, w[r : r + 1])
            for r in (0, 1, 77, 299)
            for a, w in zip(outputs(slice(r, r + 1)), whole, strict=True)
        )
    for vocab in (128256, 151936, 1001):
        case = draw_case(24, vocab)
        whole = sampling.draw(*case)
        alone = [sampling.draw(*(t[r : r + 1] for t in case)) for r in range(24)]
        found[f"draw {vocab}"] = sum(differing(torch.cat([a[i] for a in alone]), whole[i]) for i in (0, 1))
    return found


# -- 3. times ---------------------------------------------------------------------------------------------------------


def microseconds(call: Callable[..., Any], sets: list[tuple], repeats: int = 5) -> float:
    """Median time of one call, from replays of a CUDA graph that calls with every set of arguments in turn."""
    return statistics.median(graph_us(lambda i: call(*sets[i]), len(sets), repeats))


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def linear_times(budget: Budget) -> dict[str, list[float]]:
    """[ours, torch.mm], weights out of cache."""
    found = {}
    for name, (n, k) in LINEARS.items():
        weights = [random(n, k, scale=k**-0.5) for _ in range(max(2, min(40, int(3e8 // (n * k * 2)))))]
        for m in (1, 32, 128, 256, 8192)[: 4 if n > 100000 else 5]:
            if not budget.allows(f"{name} M={m}"):
                return found
            x = random(m, k)
            sets = [(x, w, n) for w in (weights if m < 8192 else weights[:4])]
            found[f"{name} M={m}"] = [microseconds(product, sets), microseconds(matmul, sets)]
    return found


def bounded_times(budget: Budget) -> dict[str, list[float]]:
    """[µs with sinks, with a window of 128 and sinks, with neither] for the heads of gpt-oss, 64/8 of width 64."""
    found, heads, groups, width = {}, 64, 8, 64
    for rows, length, new in ((1, 8192, 1), (32, 1024, 1), (2, 4096, 4096)):
        if not budget.allows(f"bounded attention {rows} x {length} + {new}"):
            return found
        k, v = (random(rows * length, groups, width) for _ in "kv")
        call = (random(rows * new, heads, width), *paged(k, v, [length] * rows, [new] * rows, 64), width**-0.5)
        sinks = random(heads)
        bounds = ((True, 0, 0.0, sinks), (True, 128, 0.0, sinks), ())
        times = [microseconds(attention.attention, [(*call, *bound)]) for bound in bounds]
        found[f"bounded attention {rows} x {length} + {new}"] = times
    return found


def attention_times(budget: Budget) -> dict[str, list[float]]:
    """[ours, torch's SDPA on contiguous keys, TB/s of keys and values (decode) or TFLOP/s (prefill)].

    Pages of 64 and a page table for 17,408 keys, as in the engine. Last the mixed step that a scheduler makes.
    """
    found = {}
    decode = ((1, 256), (1, 1024), (1, 16384), (16, 16384), (32, 256), (32, 1024), (256, 1024))
    cases = [(*case, 1) for case in decode] + [(1, 8192, 8192), (2, 4096, 4096), (8, 1024, 1024)]
    for name, (heads, groups, width) in HEADS.items():

        def pools(lengths: list[int], tokens: list[int], copies: int = 1) -> list[tuple]:
            k, v = (random(sum(lengths), groups, width) for _ in "kv")  # noqa: B023
            spare = 272 - -(-max(lengths) // 64)
            return [paged(k, v, lengths, tokens, 64, spare) for _ in range(copies)]

        for rows, length, new in cases:
            if not budget.allows(f"{name} attention {rows} x {length} + {new}"):
                return found
            size = rows * length * groups * width * 4
            copies = max(1, min(20, int(2e8 // size))) if new == 1 else 1
            q, scale = random(rows * new, heads, width), width**-0.5
            sets = [(q, *pool, scale) for pool in pools([length] * rows, [new] * rows, copies)]
            ours = microseconds(attention.attention, sets)
            dense = [random(rows, h, t, width) for h, t in ((heads, new), (groups, length), (groups, length))]
            theirs = microseconds(sdpa, [tuple(x.clone() for x in dense) + (new > 1,) for _ in range(copies)])
            work = size if new == 1 else rows * length**2 * heads * width * 2
            found[f"{name} attention {rows} x {length} + {new}"] = [ours, theirs, work / ours / 1e6]
        lengths = torch.randint(100, 2049, (256,), generator=torch.Generator().manual_seed(9)).tolist() + [4096, 3840]
        tokens = [1] * 256 + [4096, 3840]
        q = random(sum(tokens), heads, width)
        mixed = [(q, *pool, width**-0.5) for pool in pools(lengths, tokens)]
        work = (4096**2 + 3840**2) * heads * width * 2
        ours = microseconds(attention.attention, mixed)
        found[f"{name} attention 256 rows, 2 prompts"] = [ours, math.nan, work / ours / 1e6]
    return found


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x + y, weight.shape, weight, eps)


def silu_times_up(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def small_op_times(budget: Budget) -> dict[str, list[float]]:
    """[ours, torch] of the memory-bound ops of Llama-8B; beside rope a copy, beside draw log_softmax and max."""
    found = {}
    weight, table = random(4096), rope_table(RopeSpec(5e5), 128, 8192).cuda()
    for m in (1, 32, 256, 8192):
        if not budget.allows(f"small ops T={m}"):
            return found
        x, y, gate_up, qkv = random(m, 4096), random(m, 4096), random(m, 28672), random(m, 6144)
        pages, index = random(2, m // 16 + 1, 16, 8, 128), torch.arange(m, device="cuda").int()
        for name, ours, theirs, sets in (
            ("add_rms_norm", rms_norm.add_rms_norm, add_norm, (x, y, weight, 1e-5)),
            ("silu_mul", activations.silu_mul, silu_times_up, (gate_up,)),
        ):
            found[f"{name} T={m}"] = [microseconds(ours, [sets] * 20), microseconds(theirs, [sets] * 20)]
        found[f"norm, sum, norm in one kernel, in two T={m}"] = [
            microseconds(rms_norm.add_rms_norm, [(x, y, weight, 1e-5, 1.0, weight)] * 20),
            microseconds(
                lambda x, y: rms_norm.add_rms_norm(rms_norm.rms_norm(x, weight, 1e-5, 1.0), y, weight, 1e-5, 1.0),
                [(x, y)] * 20,
            ),
        ]
        arguments = (qkv, table, index, index, pages[0], pages[1], 32)
        found[f"rope_kv_write T={m}"] = [
            microseconds(rope.rope_kv_write, [arguments] * 20), microseconds(torch.clone, [(qkv,)] * 20)
        ]  # fmt: skip
    for rows in (1, 32, 256):
        for kind, label in enumerate(("greedy", "unfiltered", "top-k", "top-p")):
            case = draw_case(rows, 128256, (kind,))
            theirs = microseconds(lambda z: z.log_softmax(-1).max(-1), [(case[0],)] * 3)
            found[f"draw {label} R={rows}"] = [microseconds(sampling.draw, [case] * 3), theirs]
    return found


# -- report -----------------------------------------------------------------------------------------------------------

Section = Callable[..., Any]  # runs one part, keeps its figures in the report and returns them


def check_errors(section: Section) -> list[str]:
    failures = []
    for dtype in (BF16, torch.float32, torch.float16):
        for part in (linear_errors, row_op_errors, rope_errors, attention_errors):
            found = section(f"{part.__name__} {str(dtype)[6:]}", part, dtype)
            failures += [f"{dtype} {name}: error {e:.1e}" for name, e in found.items() if not e < ERROR[dtype]]
    for name, e in section("draw_errors", draw_errors).items():
        failures += [f"{name}: {e:.1e}"] if e > (0 if name.endswith("tokens") else 1e-5) else []
    return failures


def check_bits(section: Section) -> list[str]:
    parts = [section("linear_bits", linear_bits)]
    parts += [section(f"attention_bits {name}", attention_bits, name) for name in HEADS]
    found = {name: count for part in (*parts, section("row_bits", row_bits)) for name, count in part.items()}
    return [f"{name}: {count} elements" for name, count in found.items() if (count == 0) == name.startswith("control")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    add_budget(parser)
    options = parser.parse_args()
    budget = Budget(options.budget)
    torch.manual_seed(0)
    device = torch.cuda.get_device_properties(0)
    report: dict[str, Any] = {
        "gpu": device.name, "multiprocessors": device.multi_processor_count, "torch": torch.__version__,
        "cuda": torch.version.cuda, "triton": triton.__version__, "python": sys.version.split()[0],
    }  # fmt: skip
    began, broken = time.time(), []

    def section(name: str, part: Callable[..., Any], *args: Any) -> Any:
        report[name] = {}
        if not budget.allows(name):
            return report[name]
        try:
            report[name] = part(*args)
        except Exception as problem:
            broken.append(f"{name}: {type(problem).__name__}: {str(problem)[:500]}")
        print(f"{time.time() - began:6.1f} s  {name}", flush=True)
        return report[name]

    failures = check_errors(section) + check_bits(section)
    section("linear_elements_of_torch_mm_that_differ", library_bits)
    for part in (linear_times, attention_times, bounded_times, small_op_times):
        for name, times in section(part.__name__, part, budget).items():
            print(f"    {name:36s}" + "".join(f"{t:11.1f}" for t in times))
    report["failures"], report["left_out"] = broken + failures, budget.left_out
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    print(f"{len(broken + failures)} failures", *broken, *failures, sep="\n")
    print(f"{len(budget.left_out)} parts left out for want of time", *budget.left_out, sep="\n")
    return 1 if broken or failures else 3 if budget.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
