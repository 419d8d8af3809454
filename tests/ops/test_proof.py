"""Prove, then use: results are kept, a torn file is survived, and what failed its proof is not used."""

import json
from pathlib import Path

import pytest
import torch

from fengine.ops import attention_few_hopper, attention_launch, linear_launch, proof, quantized_launch
from fengine.ops.attention_launch import CAUSAL, Bounds, Rows
from fengine.ops.linear_few_hopper import Narrow
from fengine.ops.linear_launch import LIBRARY, REFERENCE, Schedule, gated_schedules, schedules
from fengine.ops.proof import Proofs


def never() -> bool:
    raise AssertionError("compared again")


def test_a_comparison_is_made_once_and_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "proofs.jsonl"
    first = Proofs(path)
    assert first.holds("a", lambda: True) and not first.holds("b", lambda: False)
    assert first.holds("a", never)
    again = Proofs(path)
    assert again.holds("a", never) and not again.holds("b", never)


def test_lines_that_are_no_results_are_compared_again(tmp_path: Path) -> None:
    path = tmp_path / "proofs.jsonl"
    good = json.dumps(["a", True]) + "\n"
    for bad in ('["b", tr', '["b"]', '["b", "yes"]', "5", '{"b": true}', "[3, true]", "\x00\xff"):
        path.write_text(good + bad, encoding="latin-1")
        found = Proofs(path)
        assert found.known == {"a": True}, bad
        assert not found.holds("b", lambda: False)


def test_a_file_that_cannot_be_written_or_read_costs_a_proof_only(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "proofs.jsonl", tmp_path):
        found = Proofs(path)
        assert found.holds("a", lambda: True) and found.holds("a", never)
        assert Proofs(path).known == {}


def test_without_a_file_results_live_as_long_as_the_process() -> None:
    found = Proofs(None)
    assert found.holds("a", lambda: True) and found.holds("a", never)


def test_a_comparison_that_fails_by_an_error_leaves_no_result(tmp_path: Path) -> None:
    found = Proofs(tmp_path / "proofs.jsonl")
    with pytest.raises(AssertionError, match="compared again"):
        found.holds("a", never)
    assert found.holds("a", lambda: True)


def test_another_environment_is_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = {"gpu": "a", "driver": "1", "torch": "2"}
    paths = set()
    for change in ({}, {"gpu": "b"}, {"driver": "2"}, {"torch": "3"}):
        monkeypatch.setattr(proof, "environment", lambda device, change=change: facts | change)
        paths.add(proof.proofs.__wrapped__(0).path)
    assert len(paths) == 4 and None not in paths
    monkeypatch.setattr(proof, "environment", lambda device: facts | {"driver": "unknown"})
    assert proof.proofs.__wrapped__(0).path is None  # what cannot be told apart is not kept


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (896, 4864), (1152, 896), (151936, 896), (33, 40)])
def test_the_library_serves_many_rows_only_and_the_reference_what_is_not_proved(
    n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300, 512, 513, 8192):
        for processors in (None, 132):
            found = schedules(m, n, k, torch.bfloat16, processors)
            assert (LIBRARY in found) <= (m > 64) and len(found) == len(set(found))
            gated = gated_schedules(m, n, k, torch.bfloat16, processors)
            assert LIBRARY not in gated and (m > 64 or gated)
            narrow = [s for s in (*found, *gated) if isinstance(s, Narrow)]
            assert all(s.block_m >= m for s in narrow) and (processors or not narrow)
            assert processors or not any(s.hopper for s in found if isinstance(s, Schedule))
    assert LIBRARY not in schedules(4096, n, k, torch.float32)
    x, w = torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(4, 8, dtype=torch.bfloat16)
    asked = []
    monkeypatch.setattr(linear_launch, "is_proved", lambda *arguments: asked.append(arguments[5]) is not None)
    assert linear_launch.choose(x, w, 4, None, None) == REFERENCE and asked == schedules(1, 4, 8, torch.bfloat16)


def test_fast_products_of_few_rows_are_no_slower_than_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_launch, "hopper_processors", lambda x, w: 132)
    monkeypatch.setattr(linear_launch, "is_proved", lambda *_: True)
    monkeypatch.setattr(linear_launch, "run", lambda x, w, n, bias, dtype, s: s)
    w = torch.empty(4096, 4096, dtype=torch.bfloat16)
    x = torch.empty(300, 4096, dtype=torch.bfloat16)
    assert linear_launch.fast_launch(x[:1], w, 4096, None, None) == schedules(1, 4096, 4096, x.dtype, 132)[0]
    assert linear_launch.fast_launch(x, w, 4096, None, None) == LIBRARY


def test_scratch_is_no_weight_of_kernels_that_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(quantized_launch, "schedules", lambda *sizes: ())
    monkeypatch.setattr(quantized_launch, "decode", lambda matrix, k, dtype: torch.zeros(4, k, dtype=dtype))
    monkeypatch.setattr(linear_launch, "run", lambda *arguments: used.append(arguments[5]))
    monkeypatch.setattr(linear_launch, "choose", lambda *arguments: "chosen")
    for rows in (1, 64, 65):
        x, packed = torch.zeros(rows, 32, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.uint8)
        quantized_launch.launch(x, packed, x[0], None, None, 4, 32, "fp4", x.dtype, None, None)
    assert used == [REFERENCE, REFERENCE, "chosen"]


def test_several_blocks_are_attended_at_once_where_few_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_few_hopper, "usable", lambda q, k: True)

    def first(rows: int, groups: int, width: int, bounds: Bounds, keys: int = 17408) -> Rows:
        q, k = torch.empty(rows, 4 * groups, width), torch.empty(2, 64, groups, width)
        return attention_launch.schedules(q.bfloat16(), k.bfloat16(), rows, keys, 132, bounds)[0].rows

    one = first(1, 1, 256, Bounds(window=512, sinks=True))
    assert (one.at_once, one.parts, one.splits) == (1, 4, 17)  # 68 programs, of which 4 find keys at first
    assert (
        first(2, 8, 128, CAUSAL).parts == first(2, 8, 128, CAUSAL).at_once == 2 and first(1, 8, 64, CAUSAL).parts == 1
    )
    for rows, bounds in ((3, CAUSAL), (1, Bounds(cap=3.0)), (1, Bounds(causal=False)), (1, Bounds(reach=True))):
        assert not first(rows, 8, 128, bounds).at_once
