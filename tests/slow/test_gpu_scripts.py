"""What the GPU benchmarks compute beside their measurements: floors, and tables of recorded kernels."""

# pyright: reportMissingImports=false

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_gpu
import check_device
import profile_gpu
from floors import cached_prefixes, floor, shape
from measure import Budget
from profile_gpu import Kernel, Progress
from workloads import suite

import fengine

FLOORS = {  # output tokens/s, but for prefill_4k total tokens/s, as published with the goals
    "llama-3.1-8b": (286, 7940, 14667, 49130, 4900, 260),
    "qwen2.5-0.5b": (4335, 117000, 197000, 678000, 62700, 2980),
}


@pytest.mark.parametrize("model", FLOORS)
def test_floors(model: str) -> None:
    config = shape(model)
    for (name, work), want in zip(suite(model, config["vocab_size"]).items(), FLOORS[model], strict=True):
        tokens = sum(n + (len(ids) if name == "prefill_4k" else 0) for ids, n in work)
        assert tokens / floor(config, work).total == pytest.approx(want, rel=0.005), name


def test_prefixes_are_counted_once() -> None:
    work = [([1, 2, 3, 4], 1), ([1, 2, 9], 1), ([5], 1), ([1, 2, 3, 4], 1)]
    assert sorted(cached_prefixes(work)) == [(1, 0), (3, 2), (4, 0), (4, 3)]


def test_busy_time_counts_overlapping_kernels_once() -> None:
    kernels = [Kernel("a", 10, 20), Kernel("b", 15, 30), Kernel("c", 16, 18), Kernel("d", 40, 41)]
    assert profile_gpu.busy(kernels[::-1]) == 21
    assert profile_gpu.busy([]) == 0


def test_the_critical_path_adds_up_to_the_window() -> None:
    kernels = [Kernel("a", 0, 2000), Kernel("b", 500, 5000), Kernel("a", 600, 5500), Kernel("b", 5400, 9500)]
    rows = profile_gpu.critical(kernels[::-1], 2)
    assert rows[0] == {"name": "b < a", "count": 2, "us_each": 3.5, "us_per_step": 3.5}
    assert rows[1] == {"name": "a < b", "count": 1, "us_each": 0.5, "us_per_step": 0.25}
    assert profile_gpu.critical(kernels[:1], 2) == []


def test_kernels_are_grouped_by_op() -> None:
    kernels = [
        Kernel("linear_kernel", 0, 3000),
        Kernel("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", 3000, 4000),
        Kernel("linear_kernel", 4000, 8000),
        Kernel("Memcpy HtoD (Pinned -> Device)", 8000, 10000),
    ]
    rows = profile_gpu.table(kernels, profile_gpu.op_of, 2)
    assert [row["name"] for row in rows] == ["linear, ours", "copies", "linear, cuBLAS"]
    assert rows[0] == {"name": "linear, ours", "count": 2, "us": 7, "us_per_step": 3.5, "us_each": 3.5, "share": 0.7}
    names = {"rows_kernel": "attention, few tokens a row", "rms_norm_kernel": "norm", "what": "other"}
    names |= {"triton_poi_fused_index_select_0": "compiled glue", "rope_kv_write_kernel": "rope and KV write"}
    names |= {"row_kernel": "draw", "level_kernel": "draw", "activate_kernel": "activation"}
    assert {name: profile_gpu.op_of(name) for name in names} == names
    ops = Path(fengine.__file__).parent / "ops"
    kernels = {name for path in ops.glob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    assert len(kernels) > 20 and [name for name in kernels if profile_gpu.op_of(name) == "other"] == []


def test_steps_and_times_are_read_between_samples() -> None:
    history = [Progress(0, 5), Progress(100, 5), Progress(200, 9)]
    assert profile_gpu.time_of_step(history, 7) == 150
    assert profile_gpu.steps_at(history, 175) == 8
    assert profile_gpu.steps_at(history, 50) == 5
    assert profile_gpu.steps_at(history, 900) == 9


def test_a_row_tells_its_spread_and_its_share_of_the_floor() -> None:
    config = shape("qwen2.5-0.5b")
    work = [([1, 2, 3], 5), ([4], 5)]
    least = floor(config, work).total
    row = bench_gpu.figures(config, work, [2 * least, 4 * least, 3 * least])
    assert row["share_of_floor"] == pytest.approx(1 / 3)
    assert row["spread"] == pytest.approx(2 / 3)
    assert row["out_tok_s"] == pytest.approx(10 / (3 * least)) and row["total_tok_s"] == pytest.approx(14 / (3 * least))


def test_a_budget_leaves_out_what_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, begun = [0.0], []

    class Fake:
        def __enter__(self) -> "Fake":
            now[0] += 30
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def stats(self) -> dict[str, int]:
            return {"compiles": 0, "preemptions": 0}

    def run(engine: Fake, work: list) -> float:
        seconds = 5.0 if len(work) == 512 else 1.0
        now[0] += seconds
        begun.append(seconds)
        return seconds

    monkeypatch.setattr(bench_gpu, "opened", lambda model, **options: Fake())
    monkeypatch.setattr(bench_gpu, "run", run)
    budget = Budget(42.0, lambda: now[0])
    only = ["latency_b1", "shared_prefix"]
    tables = bench_gpu.bench("llama-3.1-8b", ["exact", "fast"], 3, 1, only, budget)
    assert begun == [1, 1, 1, 1, 5] and now[0] < 42
    assert tables["exact"]["latency_b1"]["wall_s"]["runs"] == [1, 1, 1]
    assert tables["exact"]["shared_prefix"]["wall_s"]["runs"] == [5]
    assert tables["fast"] == {"rounds": []}
    assert budget.left_out == ["llama-3.1-8b exact shared_prefix, run 2", "llama-3.1-8b fast"]
    assert Budget(None).allows("anything", 1e9) and Budget(None).left() is None


@pytest.mark.parametrize("script", [bench_gpu, profile_gpu], ids=lambda script: script.__name__)
def test_without_a_gpu_there_is_no_measurement(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2 and "CUDA" in capsys.readouterr().err


def test_a_shape_that_is_none_is_named() -> None:
    with pytest.raises(SystemExit, match="no shape 'qwen9'.*llama-3.1-8b, .*qwen2.5-0.5b"):
        shape("qwen9")


def test_engines_are_named_by_numerics_and_page_size() -> None:
    assert bench_gpu.kinds_of("exact,fast+compile", None) == ["exact", "fast+compile"]
    kinds = bench_gpu.kinds_of("exact,fast", "16,64")
    assert kinds == ["exact+page16", "fast+page16", "exact+page64", "fast+page64"]
    assert bench_gpu.options(kinds[3]) == {"numerics": "fast", "page_size": 64}
    assert bench_gpu.options("exact+compile") == {"numerics": "exact", "enable_torch_compile": True}
    for wrong in ("exact+", "exact+page", "exact+graph"):
        with pytest.raises(SystemExit):
            bench_gpu.options(wrong)


def test_a_case_on_a_device_tells_what_differs_and_how_an_error_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    cases: dict[str, Any] = {
        "good": check_device.Case("plain", {"family": "llama"}, near=True),
        "differs": check_device.Case("plain", {"family": "llama"}, layouts={"in FP8": {"kv_cache_dtype": "fp8_e4m3"}}),
        "fails": check_device.Case("plain", {"family": "llama", "num_key_value_heads": 3}),
        "proves nothing": check_device.Case("plain", {"family": "llama"}, layouts={"preempted": {}}),
    }
    monkeypatch.setattr(check_device, "CASES", cases)
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["check_device.py", "--device", "cpu", "--jobs", "2", "--json", str(found)])
    with pytest.raises(SystemExit) as end:
        check_device.main()
    assert end.value.code == 1 and "1 of 4 ok" in capsys.readouterr().out
    rows = {row["case"]: row for row in json.loads(found.read_text())["rows"]}
    assert [name for name in cases if rows[name]["ok"]] == ["good"]
    assert re.fullmatch(r"\d of 8 rows differ, first row \d .*", rows["differs"]["found"]["in FP8"])
    assert rows["fails"]["error"] and "Traceback" in rows["fails"]["trace"]
    assert rows["proves nothing"]["found"]["preempted"] == "proves nothing: no preemptions"
