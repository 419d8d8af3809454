"""The layouts of prove_exact.py: ways to compute the same requests again, and the negative control.

A layout returns the answers it wants to see and those it got; `evidence` tells what shows that it was really exercised,
and `done` is False where it was not.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from proof import Answer, Ask, alone, ask_params, shuffled, total

from fengine import Engine
from fengine.ops import linear
from fengine.ops.e4m3 import Rows

SHORT = 64  # tokens of the longest prompt that the preempted layout takes


@dataclass
class Case:
    """One model under proof; `reference` is filled first."""

    model: str
    device: str
    asks: list[Ask]
    longest: int
    vocab: int
    options: dict[str, Any]  # of every engine
    image: int = 0  # tokens that a picture takes at most; 0: the model takes none
    token: int = -1  # the placeholder of pictures; an answer that holds it is no prompt
    ranks: tuple[int, ...] = ()  # numbers of processes that share the model, each a layout
    reference: list[Answer] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.ids) for ask in self.asks)


class Outcome(NamedTuple):
    """What a layout gives back."""

    want: list[Answer]
    got: list[Answer]
    evidence: str = ""
    done: bool = True


class Layout(NamedTuple):
    """`options` None: it runs in the engine of the reference. A control is an engine that must be caught."""

    name: str
    run: Callable[[Engine, Case], Outcome]
    options: dict[str, Any] | None = None
    control: bool = False


def batches(seed: int, groups: bool) -> Callable[[Engine, Case], Outcome]:
    return lambda llm, case: Outcome(case.reference, shuffled(llm, case.asks, seed, groups))


def chunked(size: int) -> Callable[[Engine, Case], Outcome]:
    def run(llm: Engine, case: Case) -> Outcome:
        cut = sum(len(ask.ids) > size for ask in case.asks)
        return Outcome(case.reference, shuffled(llm, case.asks, size), f"{cut} prompts longer than a chunk")

    return run


def warm(llm: Engine, case: Case) -> Outcome:
    """The cache holds every prompt."""
    shuffled(llm, case.asks, 11)
    return _hits(llm, case, 12)


def partly_warm(llm: Engine, case: Case) -> Outcome:
    """The cache holds a part of each prompt, cut anywhere."""
    draw = random.Random(13)
    cut = [a.cut(draw.randint(1, len(a.ids)), ask_params(i, 1)) for i, a in enumerate(case.asks)]
    shuffled(llm, cut, 14)
    return _hits(llm, case, 15)


def _hits(llm: Engine, case: Case, seed: int) -> Outcome:
    before = llm.stats()["cached_tokens"]
    got = shuffled(llm, case.asks, seed, cold=False)
    cached = llm.stats()["cached_tokens"] - before
    return Outcome(case.reference, got, f"{cached} of {case.prompt_tokens} prompt tokens cached", cached > 0)


def edges(llm: Engine, case: Case) -> Outcome:
    """Prompts that end just before, at and behind an edge of pages, or of attention's chunks: batched, then warm."""
    page, draw = llm.config.cache.page_size or 16, random.Random(16)
    whole = {page * n for n in (1, 2, 5)} | {512, 1024, 2048}
    lengths = sorted({n + d for n in whole for d in (-1, 0, 1) if 1 <= n + d <= case.longest})
    asks = [Ask([draw.randrange(case.vocab) for _ in range(n)], ask_params(i, 4)) for i, n in enumerate(lengths)]
    want = alone(llm, asks)
    got = shuffled(llm, asks, 17) + shuffled(llm, asks, 18, cold=False)
    return Outcome(want * 2, got, f"{len(lengths)} lengths, page size {page}, cold and warm")


def prefilled(llm: Engine, case: Case) -> Outcome:
    """Prompt and half of the answer as a prompt: what was decoded is prefilled, and the rest must come again."""
    longer, want = [], []
    for ask, (tokens, logprobs) in zip(case.asks, case.reference, strict=True):
        half = 0 if case.token in tokens else len(tokens) // 2
        params = ask.params | {"max_new_tokens": len(tokens) - half}
        longer.append(Ask(ask.ids + tokens[:half], params, ask.images, ask.size))
        want.append(Answer(tokens[half:], logprobs[half:]))
    return Outcome(want, shuffled(llm, longer, 19))


def rescored(llm: Engine, case: Case) -> Outcome:
    """Prompt and answer as a prompt, whose logprobs are asked for. Greedy rows: their logprobs are at temperature 1.

    Errors: UnsupportedFeatureError where prompt logprobs are not built.
    """
    pairs = zip(case.asks, case.reference, strict=True)
    rows = [(a, r) for a, r in pairs if a.params["temperature"] == 0 and case.token not in r.tokens]
    llm.flush_cache()
    outputs: Any = llm.generate(
        input_ids=[a.ids + r.tokens for a, r in rows],
        image_data=[[data for _, data in a.images] or None for a, _ in rows],
        sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
    )
    got = []
    for (_, drawn), output in zip(rows, outputs, strict=True):
        scored = output["meta_info"]["input_token_logprobs"][-len(drawn.tokens) :]
        got.append(Answer([token for _, token, *_ in scored], [value for value, *_ in scored]))
    return Outcome([r for _, r in rows], got, f"{len(rows)} greedy requests")


def preempted(llm: Engine, case: Case) -> Outcome:
    """Short prompts, each several times, whose answers outgrow an engine with few and small pages."""
    rows = [(a, r) for a, r in zip(case.asks, case.reference, strict=True) if len(a.ids) <= SHORT]
    rows *= -(-20 // len(rows))
    before = llm.stats()["preemptions"]
    got = shuffled(llm, [a for a, _ in rows], 20)
    count = llm.stats()["preemptions"] - before
    return Outcome([r for _, r in rows], got, f"{count} preemptions of {len(rows)} requests", count > 0)


OTHER_WORK = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("begun", flush=True)
while True:
    for _ in range(50):
        x @ x
    torch.cuda.synchronize()
"""


@contextmanager
def other_work() -> Iterator[None]:
    """While it lasts, another process multiplies on the GPU, which is taken from a kernel in its midst for that."""
    with subprocess.Popen([sys.executable, "-c", OTHER_WORK], stdout=subprocess.PIPE) as other:
        try:
            if other.stdout is None or not other.stdout.readline():
                raise RuntimeError("the process beside did not begin")
            yield
        finally:
            other.kill()


def shared(llm: Engine, case: Case) -> Outcome:
    """In random batches, on a GPU that another process uses, too."""
    with other_work():
        got = [answer for seed in (27, 28, 29) for answer in shuffled(llm, case.asks, seed, True)]
    return Outcome(case.reference * 3, got)


def guessed(llm: Engine, case: Case) -> Outcome:
    """With tokens guessed ahead, batched and alone."""
    few = slice(0, 8)
    got = shuffled(llm, case.asks, 24) + alone(llm, case.asks[few])
    stats = llm.stats()
    told = f"{stats['correct_draft_tokens']} of {stats['draft_tokens']} guesses drawn"
    return Outcome(case.reference + case.reference[few], got, told, stats["draft_tokens"] > 0)


def bare(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids without repetitions: an engine repeats the place of a picture as often as it has embeddings. Pure."""
    return tuple(id for id, _ in groupby(ids))


def drafted(llm: Engine, case: Case) -> Outcome:
    """Guesses by whoever knows the answers, by one who never does, and random ones, 1 to 7 at a time; then those of the
    engine's own proposer."""
    few = sorted(zip(case.asks, case.reference, strict=True), key=lambda pair: len(pair[0].ids))[:12]
    answers = {bare(ask.ids): answer.tokens for ask, answer in few}
    scheduler: Any = llm._parts.core.stepper.scheduler
    own, draw, got, asks = scheduler.speculation, random.Random(26), [], [ask for ask, _ in few]

    def proposer(kind: str, most: int) -> Callable[[Any], list[list[int]]]:
        def propose(drafts: Any) -> list[list[int]]:
            found = []
            for one in drafts:
                ids, at = one.request.token_ids, one.request.num_output + one.skip
                right = answers[bare(ids[: one.request.prompt_len])][at : at + most]
                wrong = [(token + 1) % case.vocab for token in right]
                found.append({"good": right, "wrong": wrong}.get(kind) or [draw.randrange(case.vocab)] * most)
            return found

        return propose

    for most in range(1, 8):
        for kind in ("good", "wrong", "random"):
            propose = proposer(kind, most)
            scheduler.speculation = replace(own, propose=propose, most=most, waits=False)  # the engine is idle
            got += shuffled(llm, asks, most)
        scheduler.speculation = replace(own, most=most)
        got += shuffled(llm, asks, most)
    scheduler.speculation, stats = own, llm.stats()
    told = f"{stats['correct_draft_tokens']} of {stats['draft_tokens']} guesses drawn"
    drawn = 0 < stats["correct_draft_tokens"] < stats["draft_tokens"]
    return Outcome([answer for _, answer in few] * (7 * 4), got, told, drawn)


# -- the negative control ---------------------------------------------------------------------------------------------


def in_halves(x_TK: Any) -> list[Any]:
    """x with zeros in the second half of its columns, and in the first; of e4m3 rows, too. Pure."""
    if isinstance(x_TK, Rows):
        return [x_TK._replace(codes_TK=codes_TK) for codes_TK in in_halves(x_TK.codes_TK)]
    first_K = torch.arange(x_TK.shape[1], device=x_TK.device) < x_TK.shape[1] // 2
    return [torch.where(kept_K, x_TK, 0) for kept_K in (first_K, ~first_K)]


@contextmanager
def careless_linear() -> Iterator[None]:
    """While it lasts, linear layers are summed in two halves of K whenever a step has more than one row.

    For engines without torch.compile: the number of rows is looked at in Python.
    """
    honest = linear.linear

    def careless(
        x_TK: Any, w: Any, bias_N: Any = None, adapters: Any = None, out_dtype: Any = None, **more: Any
    ) -> Any:
        if len(x_TK.codes_TK if isinstance(x_TK, Rows) else x_TK) < 2:
            return honest(x_TK, w, bias_N, adapters, out_dtype, **more)
        halves = [honest(x, w, None, adapters, torch.float32, **more) for x in in_halves(x_TK)]
        y_TN = halves[0] + halves[1]
        return (y_TN if bias_N is None else y_TN + bias_N).to(out_dtype or x_TK.dtype)

    linear.linear = careless
    try:
        yield
    finally:
        linear.linear = honest


def control(llm: Engine, case: Case) -> Outcome:
    """Alone against batched, in an engine under `careless_linear`: must differ."""
    few = [ask.cut(64, ask.params | {"max_new_tokens": 8}) for ask in case.asks[:24]]
    return Outcome(alone(llm, few), shuffled(llm, few, 21))


# -- the list ---------------------------------------------------------------------------------------------------------


def _models(case: Case) -> list[tuple[str, dict[str, Any]]]:
    """Drafts with checkpoints: the model itself, where it has one."""
    if "load_format" in case.options:
        return []
    own = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": case.options["model_path"]}
    return [("a model", own | {"speculative_num_steps": 7, "speculative_adaptive": False})]


def layouts(case: Case) -> list[Layout]:
    """All of them; first those that share the reference's engine, then by what they are worth."""
    gpu = case.device.startswith("cuda")
    room = max(total(ask, case.image) for ask in case.asks if len(ask.ids) <= SHORT) + 8
    few = {"max_running_requests": 32, "chunked_prefill_size": 512}  # fewer sizes to prepare
    tight = few | {"max_total_tokens": room, "page_size": 4, "disable_radix_cache": True}
    chunks = [
        Layout(f"chunks of {n}", chunked(n), {"chunked_prefill_size": n, "max_running_requests": min(n, 128)})
        for n in (256, 512, 2048)
    ]
    flipped = Layout(f"overlap {'off' if gpu else 'on'}", batches(22, False), {"disable_overlap_schedule": gpu})
    plain = {"disable_cuda_graph": True} if gpu else {"enable_torch_compile": True}
    return [
        Layout("batch of all, cold cache", batches(1, False)),
        Layout("random batches 1", batches(2, True)),
        Layout("random batches 2", batches(3, True)),
        Layout("warm prefix", warm),
        Layout("partly warm prefix", partly_warm),
        Layout("page edges -1, 0, +1", edges),
        Layout("decoded, then prefilled", prefilled),
        Layout("re-scored as a prompt", rescored),
        *([Layout("GPU shared", shared)] if gpu else []),
        Layout("control: split sums", control, few | {"enable_torch_compile": False}, control=True),
        Layout("preempted", preempted, tight),
        Layout("guessing ahead", guessed, {"speculative_algorithm": "NGRAM"}),
        Layout("drafts, 1 to 7", drafted, {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}),
        *(Layout(f"drafts of {name}, 1 to 7", drafted, few | more) for name, more in _models(case)),
        *chunks,
        flipped,
        *([Layout("graphs off" if gpu else "compiled", batches(23, False), plain)] if gpu or not case.image else []),
        *(Layout(f"{count} ranks", batches(25, True), {"tp_size": count}) for count in case.ranks),
    ]  # fmt: skip
