"""A vision model's shape with random weights: pictures and tokens per second, the tower's share of the GPU's peak, the
longest gap of rows that decode while pictures are encoded, and the encoder's time for pictures that are known.

    python scripts/bench_vision.py                     # Qwen2.5-VL-7B, 64 requests with a picture of 1,024 × 1,024

Pictures are read (decoded and cut into patches, on the CPU) before anything is timed, but for "read, too", where the
call gets data URLs; how long one alone takes is told. The tower's time is that of the call that the engine makes, of
eight in a row.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_gpu import opened
from floors import shape
from measure import parser, save
from proof import picture

from fengine import Engine
from fengine.core.step_trace import StepRecord
from fengine.models.vision_qwen_tower import QwenVision, windows
from fengine.worker.images import ImageInputs

PEAK = 989e12  # of bf16 in its data sheet, dense: an H100's and an H200's
WORDS = 32  # of a prompt beside its picture


def tower_flops(vision: QwenVision, grid: list[int], hidden: int) -> float:
    """Of products alone, for one image of grid[0] × grid[1] patches. Pure."""
    patches, width, square = grid[0] * grid[1], vision.width, vision.merge**2
    inner = vision.channels * vision.frames * vision.patch**2
    lengths = windows(vision, grid[0] // vision.merge, grid[1] // vision.merge)[1] if vision.window else [patches]
    full = len(vision.full_layers) if vision.window else vision.num_layers
    seen = full * patches**2 + (vision.num_layers - full) * sum(length**2 for length in lengths)
    matrices = vision.num_layers * (4 * width**2 + 3 * width * vision.mlp_size) + inner * width
    merged = square * width * (square * width + hidden)
    return 2.0 * (patches * matrices + patches // square * merged) + 4.0 * seen * width


def tower_seconds(engine: Engine, read: Any, runs: int) -> list[float]:
    """Of one picture, which is encoded eight times in a row."""
    images = engine._parts.core.stepper.input_batch.images
    assert images is not None
    found = []
    for _ in range(runs + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(8):
            images.tower.encode(read.pieces[0])
        synchronize()
        found.append((time.perf_counter() - start) / 8)
    return found[1:]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Encoded:
    """Counts the images that the engine encodes while it is open, and the seconds of that."""

    def __enter__(self) -> "Encoded":
        self.count, self.seconds, self.write = 0, 0.0, ImageInputs.write

        def write(inputs: ImageInputs, job: Any) -> None:
            start = time.perf_counter()
            self.write(inputs, job)
            self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - start

        ImageInputs.write = write  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *_: Any) -> None:
        ImageInputs.write = self.write


def ask(engine: Engine, token: int, pictures: list[Any], tokens: int) -> float:
    """Seconds of a request for each picture."""
    ids = [[5 + i % 1000, token, *range(7, 7 + WORDS - 1)] for i in range(len(pictures))]
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    synchronize()
    start = time.perf_counter()
    engine.generate(input_ids=ids, sampling_params=params, image_data=[[one] for one in pictures])
    return time.perf_counter() - start


async def beside(engine: Engine, token: int, pictures: list[Any], rows: int, tokens: int) -> list[StepRecord]:
    """The steps of rows that decode, a while into which pictures come."""
    steps: list[StepRecord] = []
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    with engine.steps_told(steps.append):
        text = asyncio.create_task(
            engine.async_generate(input_ids=[[9, i] for i in range(rows)], sampling_params=params)
        )
        while len(steps) < 20:
            await asyncio.sleep(0.001)
        ids = [[5, token, *range(7, 7 + WORDS - 1)] for _ in pictures]
        await engine.async_generate(
            input_ids=ids, sampling_params=params | {"max_new_tokens": 1}, image_data=[[one] for one in pictures]
        )
        await text
    return steps


def gaps(steps: list[StepRecord], rows: int) -> dict[str, Any]:
    """Between steps in which the first rows draw, before the pictures' first step and until their last. Pure."""
    own = set(steps[0].rids)
    with_rows = [step for step in steps if own & set(step.rids)]
    others = [i for i, step in enumerate(with_rows) if set(step.rids) - own]
    first, last = (others[0], others[-1]) if others else (len(with_rows), len(with_rows))
    apart = [b.landed - a.landed for a, b in zip(with_rows, with_rows[1:], strict=False)]
    alone, mixed = apart[5 : max(first - 6, 6)], apart[max(first - 6, 0) : last + 1]
    missed = [b.step - a.step for a, b in zip(with_rows, with_rows[1:], strict=False)]
    return {
        "alone_median_ms": 1e3 * statistics.median(alone), "with_pictures_median_ms": 1e3 * statistics.median(mixed),
        "longest_ms": 1e3 * max(mixed), "longest_in_steps_with_pictures": max(mixed) / statistics.median(mixed),
        "most_steps_between_two_tokens": max(missed), "steps_with_pictures": len(mixed),
    }  # fmt: skip


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--model", default="qwen2.5-vl-7b", help="a file of scripts/shapes, without .json")
    p.add_argument("--count", type=int, default=64, help="pictures, each of a request of its own")
    p.add_argument("--side", type=int, default=1024, help="of a picture")
    p.add_argument("--tokens", type=int, default=128, help="of an answer")
    p.add_argument("--rows", type=int, default=8, help="that decode while pictures are encoded")
    p.add_argument("--device", default="cuda")
    args = p.parse_args()
    config = shape(args.model)
    token, vision = config["image_token_id"], config["vision_config"]
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": vision["patch_size"],
                 "merge_size": vision["spatial_merge_size"],
                 "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280 * 4}}  # fmt: skip
    options = {"device": args.device, "context_length": 4096, "image_cache_mib": 2048}
    with opened(args.model, processor=processor, **options) as engine:
        urls = [picture(i, args.side, args.side) for i in range(min(args.count, 4))]
        engine._parts.images.read(picture(9, 56, 56))  # imports, a process to decode
        reading, read = timed(lambda: engine._parts.images.read(urls))
        grid = read[0].pieces[0].arrays["grid_2"].tolist()
        seconds = tower_seconds(engine, read[0], args.runs)
        spec = engine._parts.spec
        assert isinstance(spec.vision, QwenVision)
        flops = tower_flops(spec.vision, grid, spec.hidden_size)
        pictures = [changed(read[i % len(read)], i) for i in range(2 * args.count)]
        ask(engine, token, pictures[-1:], 4)
        walls, encoded = {}, {}
        for name in ("first", "again"):
            with Encoded() as count:
                walls[name] = ask(engine, token, pictures[: args.count], args.tokens)
            encoded[name] = {"images": count.count, "seconds_launching": count.seconds}
            engine.flush_cache()
        urls = [picture(100 + i, args.side, args.side) for i in range(args.count)]
        walls["read, too"] = ask(engine, token, urls, args.tokens)
        steps = asyncio.run(beside(engine, token, pictures[args.count : 2 * args.count - 1], args.rows, 1500))
        figures = {
            "model": args.model, "side": args.side, "requests": args.count, "tokens_out": args.tokens,
            "tokens_of_a_picture": read[0].pieces[0].tokens, "reading_s_a_picture": reading / len(urls),
            "tower": {
                "seconds": statistics.median(seconds), "runs": seconds, "flops": flops,
                "tflops": flops / statistics.median(seconds) / 1e12,
                "share_of_peak": flops / statistics.median(seconds) / PEAK,
            },
            "wall_s": walls, "encoded": encoded,
            "images_per_s": {name: args.count / wall for name, wall in walls.items()},
            "tokens_out_per_s": {name: args.count * args.tokens / wall for name, wall in walls.items()},
            "rows_beside": gaps(steps, args.rows),
        }  # fmt: skip
    save("bench_vision", figures, args.out)
    sys.exit(0 if encoded["again"]["images"] == 0 else 1)


def changed(read: Any, number: int) -> Any:
    """The same picture under another key, which is encoded as another one is. Pure."""
    piece = read.pieces[0]
    return replace(read, pieces=(replace(piece, key=b"%d" % number + piece.key),))


if __name__ == "__main__":
    main()
