"""Proves on this machine that an output's bits belong to its request: the same requests under many layouts, bit by bit.

    python scripts/prove_exact.py                      # the whole on a GPU; a reduced set on a CPU
    python scripts/prove_exact.py --models box --requests 32 --longest 512 --layouts "warm prefix" --layouts preempted

Every request runs alone on an empty prefix cache; that is the reference. Then all of them run again in random batches,
in chunks of other sizes, over warm and partly warm caches, under preemption, with graphs and overlap off, in a fresh
process, and with their decoded tokens prefilled. The table counts tokens and logprob bits (float32) that differ. A
negative control, a linear layer that splits its sum when a step has more than one row, must differ.

Models: "box" and "box-vl" (their context extended), or a file of scripts/shapes with random weights whose variance
keeps the logits depending on the input; the share of distinct tokens and logprobs is told.
Status: 0 all equal and the control differs; 1 a difference, an error, or a control or layout that proves nothing;
3 nothing differs, but a layout was not available or left out by --budget.
"""

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from floors import shape
from layouts import Case, Layout, Outcome, careless_linear, layouts
from measure import Budget, of_this_checkout, write
from proof import Answer, Ask, alone, difference, requests, total, with_images

from fengine import Engine
from fengine.config.schema import PACKAGED
from fengine.errors import ConfigError, UnsupportedFeatureError
from fengine.worker.hub import resolve_model

SIZES = {  # device -> model -> requests, longest prompt
    "cuda": {"box": (256, 4096), "qwen2.5-0.5b": (256, 4096), "llama-3.1-8b": (256, 4096)},
    "cpu": {"box": (256, 4096), "qwen2.5-0.5b": (16, 600)},
}
REFERENCE, RESTART = "alone (reference)", "fresh process, alone"
PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}  # of pictures: 64 tokens at most
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "size": PIXELS, "patch_size": 14, "merge_size": 2}
GEMMA = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896},
         "do_pan_and_scan": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {"qwen2_5_vl": QWEN, "qwen3_vl": QWEN, "gemma3": GEMMA}
IN_PLACE = {"gemma3": 256, "idefics3": 16}  # of pictures with text around them: tokens, of the shape and of box-vl
DISTINCT = 0.9  # least share of distinct first logprobs for logits that react to their input


# -- one row ----------------------------------------------------------------------------------------------------------


def judged(name: str, outcome: Outcome, control: bool) -> dict[str, Any]:
    """A row of the table. Pure."""
    found = difference(outcome.want, outcome.got)
    differs = bool(found.tokens or found.logprobs)
    verdict = "equal" if not differs else "DIFFERS"
    if control:
        verdict = "differs, as it must" if differs else "CONTROL FOUND NOTHING"
    elif not differs and not (outcome.done and found.compared):
        verdict = "NOT EXERCISED"
    counts = {"compared": found.compared, "tokens": found.tokens, "logprobs": found.logprobs, "bits": found.bits}
    return {"layout": name, **counts, "verdict": verdict, "evidence": outcome.evidence}


def status(rows: list[dict[str, Any]]) -> int:
    """1 if a row proves the contrary or nothing, 3 if one is missing or a model has no control, else 0. Pure."""
    verdicts = [row["verdict"] for row in rows]
    if any(verdict.isupper() or verdict.startswith("FAILED") for verdict in verdicts):
        return 1
    controlled = {row["model"] for row in rows if row["verdict"] == "differs, as it must"}
    if any(row["model"] not in controlled for row in rows):
        return 3
    return 3 if any(v not in ("reference", "equal", "differs, as it must") for v in verdicts) else 0


def show(row: dict[str, Any]) -> None:
    counts = " ".join(f"{row.get(key, '-'):>9}" for key in ("compared", "tokens", "logprobs", "bits"))
    print(f"{row['model']:13} {row['layout']:24} {counts} {row.get('seconds', 0):>7.1f} s  {row['verdict']}"
          f"{'; ' + row['evidence'] if row.get('evidence') else ''}", flush=True)  # fmt: skip


# -- one model --------------------------------------------------------------------------------------------------------


class Proof:
    """The rows of one model, made one after the other until the budget is spent."""

    def __init__(self, case: Case, wanted: list[str] | None, budget: float | None) -> None:
        self.case, self.wanted, self.budget = case, wanted, Budget(budget)
        self.rows: list[dict[str, Any]] = []
        self.begin = time.perf_counter()
        self.start = self.alone = 0.0  # seconds of the slowest start of an engine, and of the reference

    def add(self, row: dict[str, Any], seconds: float) -> None:
        self.rows.append({"model": self.case.model, **row, "seconds": seconds})
        show(self.rows[-1])

    def due(self, layout: str, seconds: float) -> bool:
        """Whether it is asked for and there is time for about `seconds`; if there is not, says so in the table."""
        if self.wanted and not any(word in layout for word in self.wanted):
            return False
        if self.budget.allows(layout, seconds):
            return True
        self.add({"layout": layout, "verdict": f"left out: budget of {self.budget.seconds:.0f} s spent"}, 0.0)
        return False

    def attempt(self, name: str, run: Callable[[], Outcome], control: bool = False) -> None:
        start = time.perf_counter()
        try:
            row = judged(name, run(), control)
        except (ConfigError, UnsupportedFeatureError) as error:  # such as ranks that cannot share its heads
            row = {"layout": name, "verdict": "not available", "evidence": str(error)[:200]}
        except Exception as error:  # one layout's failure is a row of the table; the others are still told
            row = {"layout": name, "verdict": f"FAILED {type(error).__name__}", "evidence": str(error)[:500]}
        self.add(row, time.perf_counter() - start)

    def engine(self, options: dict[str, Any]) -> Engine:
        gc.collect()  # what is left of the engine before
        begin = time.perf_counter()
        engine = Engine(**(self.case.options | options))
        self.start = max(self.start, time.perf_counter() - begin)
        print(f"{self.case.model:13} engine {options} in {time.perf_counter() - begin:.1f} s", flush=True)
        return engine

    def run(self) -> dict[str, Any]:
        """Every layout; returns what is known about the reference."""
        every = layouts(self.case)
        self._together([layout for layout in every if layout.options is None])
        for layout in every:
            if layout.options is not None and self.due(layout.name, self.start + self._longest()):
                with careless_linear() if layout.control else nullcontext():
                    self.attempt(layout.name, partial(self._apart, layout), layout.control)
        if self.due(RESTART, self.start + self.alone):
            self.attempt(RESTART, lambda: Outcome(self.case.reference, in_fresh_process(self.case)))
        return self._facts()

    def _together(self, shared: list[Layout]) -> None:
        """The reference, and the layouts that run in its engine."""
        case = self.case
        with self.engine({}) as llm:
            start = time.perf_counter()
            case.reference = alone(llm, case.asks)
            compared = sum(len(answer.tokens) for answer in case.reference)
            self.alone = time.perf_counter() - start
            self.add({"layout": REFERENCE, "compared": compared, "verdict": "reference"}, self.alone)
            for layout in shared:
                if self.due(layout.name, self._longest()):
                    self.attempt(layout.name, partial(layout.run, llm, case))

    def _longest(self) -> float:
        """Seconds of the slowest layout so far."""
        return max((row["seconds"] for row in self.rows if row["layout"] != REFERENCE), default=0.0)

    def _apart(self, layout: Layout) -> Outcome:
        """A layout in an engine of its own."""
        with self.engine(layout.options or {}) as llm:
            return layout.run(llm, self.case)

    def _facts(self) -> dict[str, Any]:
        """Of the reference: shares of what is distinct. Adds a failing row if logits do not react to the input."""
        tokens = [token for answer in self.case.reference for token in answer.tokens]
        firsts = [answer.logprobs[0] for answer in self.case.reference]
        logprobs = [value for answer in self.case.reference for value in answer.logprobs]
        facts = {
            "requests": len(self.case.asks),
            "longest_prompt": self.case.longest,
            "prompt_tokens": sum(len(ask.ids) for ask in self.case.asks),
            "output_tokens": len(tokens),
            "distinct_tokens": len(set(tokens)) / len(tokens),
            "distinct_logprobs": len(set(logprobs)) / len(logprobs),
            "distinct_first_logprobs": len(set(firsts)) / len(firsts),
            "seconds": time.perf_counter() - self.begin,
        }
        print(f"{self.case.model:13} " + ", ".join(f"{k} {v:.3g}" for k, v in facts.items()), flush=True)
        if facts["distinct_first_logprobs"] < DISTINCT:
            self.add({"layout": "logits react to the input", "verdict": "THEY DO NOT"}, 0.0)
        return facts


# -- a fresh process --------------------------------------------------------------------------------------------------


def in_fresh_process(case: Case) -> list[Answer]:
    """The reference, computed again by a process that has just started."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder) / "task.json", Path(folder) / "result.json"
        task.write_text(json.dumps({"options": case.options, "asks": case.asks}))
        command = [sys.executable, __file__, "--answer", str(task), str(result)]
        done = subprocess.run(command, env=of_this_checkout(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the fresh process ended with {done.returncode}: {done.stderr[-400:]}")
        return [Answer(*found) for found in json.loads(result.read_text())]


def answer_task(task: Path, result: Path) -> None:
    """What the fresh process does."""
    given = json.loads(task.read_text())
    with Engine(**given["options"]) as llm:
        result.write_text(json.dumps(alone(llm, [Ask(*ask) for ask in given["asks"]])))


# -- the whole --------------------------------------------------------------------------------------------------------


def make_case(model: str, device: str, count: int, longest: int, folder: Path) -> Case:
    """Writes what the engine reads into `folder`: the box with a longer context, or the config of a shape."""
    directory, options = folder / model, {"device": device, "skip_tokenizer_init": True}
    if model in PACKAGED:
        shutil.copytree(resolve_model(model), directory)
        config = json.loads((directory / "config.json").read_text())
        text = config.get("text_config", config)
        text["max_position_embeddings"] = max(8192, text["max_position_embeddings"])
    else:
        directory.mkdir()
        config = shape(model)
        options |= {"load_format": "dummy", "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    vocab = (config.get("text_config") or config)["vocab_size"]
    token = config.get("image_token_id", config.get("image_token_index", -1))
    kind, image = config.get("model_type", ""), 64 if "vision_config" in config else 0
    vocab = token if image else vocab  # no other token is a placeholder
    asks = requests(vocab, count, longest)
    if image:
        asks = with_images(asks, token, IN_PLACE.get(kind, 1))
        if model not in PACKAGED:
            (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    case = Case(model, device, asks, longest, vocab, options | {"model_path": str(directory)}, image, token)
    context = max(*(total(ask, image) for ask in asks), longest + 8) + 8
    case.options |= {"context_length": context, "max_running_requests": min(256, max(8, count))}
    return case


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--models", action="append", help="box or a file of scripts/shapes; default all that suit the device"
    )
    p.add_argument("--requests", type=int, help="per model")
    p.add_argument("--longest", type=int, help="tokens of the longest prompt")
    p.add_argument("--layouts", action="append", help="only layouts whose name holds this")
    p.add_argument("--quantization", help="of the engines, such as fp8 or w8a8_fp8")
    p.add_argument("--kv-cache-dtype", help="of the engines, such as fp8_e4m3")
    p.add_argument("--tp", help="numbers of processes (on GPUs of their own) that share the model, such as 2,4")
    p.add_argument("--budget", type=float, help="seconds per model; what would not end in them is left out")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", help="JSON file; default scripts/results/prove_exact_{cpu,gpu}.json")
    p.add_argument("--answer", nargs=2, type=Path, help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> None:
    args = parse()
    if args.answer:
        return answer_task(*args.answer)
    kind = "gpu" if args.device.startswith("cuda") else "cpu"
    sizes = SIZES["cuda" if kind == "gpu" else "cpu"]
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    print(
        f"{'model':13} {'layout':24} {'compared':>9} {'tokens':>9} {'logprobs':>9} {'bits':>9}   differing", flush=True
    )
    for model in args.models or sizes:
        count, longest = sizes.get(model, sizes["box"])
        with tempfile.TemporaryDirectory() as folder:
            size = args.requests or count, args.longest or longest
            case = make_case(model, args.device, *size, Path(folder))
            few = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
            case.options |= {name: value for name, value in few.items() if value}
            case.ranks = tuple(int(count) for count in (args.tp or "").split(",") if count not in ("", "1"))
            work = Proof(case, args.layouts, args.budget)
            facts[model] = work.run()
        rows += work.rows
        settings = {k: v for k, v in vars(args).items() if k not in ("answer", "out")}
        record = {"settings": settings, "status": status(rows), "models": facts, "rows": rows}
        path = write(f"prove_exact_{kind}", record, args.out)
    worst = status(rows)
    words = {
        0: "every bit compared is equal, and the control was found",
        1: "NOT PROVED",
        3: "nothing differs, but rows are missing",
    }
    print(f"{words[worst]}; written to {path}")
    sys.exit(worst)


if __name__ == "__main__":
    main()
