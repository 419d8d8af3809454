"""Kernels that are asked for ahead: each kind once, nothing runs, and only the thread that asks is concerned."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="only Triton's kernels are compiled ahead")

from fengine.ops import ahead  # noqa: E402
from fengine.ops.proof import Proofs, same_bits  # noqa: E402

CONSTANT, COUNT, PLAIN = (
    SimpleNamespace(is_constexpr=constant, do_not_specialize=general)
    for constant, general in ((True, False), (False, True), (False, False))
)


class Kernel:
    """Writes down what is launched and what is asked for: x, a size it was not specialised on, a number, a constant."""

    params = (PLAIN, COUNT, PLAIN, CONSTANT)

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.asked: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.asked.append((args, options))


x = torch.zeros(64, dtype=torch.bfloat16)


def test_a_launch_runs_outside_and_asks_inside():
    kernel = Kernel()
    ahead.launcher(kernel, (3,))(x, 5, 7, 8, num_warps=4)
    with ahead.compiling():
        assert ahead.asking()
        ahead.launcher(kernel, (3,))(x, 5, 7, 8, num_warps=4)
    ahead.launcher(kernel, (2,))(x, 5, 7, 8)
    assert [grid for grid, _, _ in kernel.launched] == [(3,), (2,)] and not ahead.asking()
    assert kernel.asked == [((x, 5, 7, 8), {"num_warps": 4})]


@pytest.mark.parametrize(
    ("args", "options", "again"),
    [
        ((x, 6, 7, 8), {}, False),  # a size that no kernel is specialised on
        ((x, 5, 9, 8), {}, False),  # neither 1 nor a multiple of 16, as before
        ((x, 5, 32, 8), {}, True),
        ((x, 5, 1, 8), {}, True),
        ((x, 5, 7, 9), {}, True),
        ((x.float(), 5, 7, 8), {}, True),
        ((x[1:], 5, 7, 8), {}, True),  # not aligned
        ((x, 5, 7, 8), {"num_warps": 2}, True),
    ],
)
def test_each_kind_is_asked_for_once(args: tuple[Any, ...], options: dict[str, int], again: bool):
    kernel = Kernel()
    with ahead.compiling():
        ahead.launcher(kernel, (1,))(x, 5, 7, 8)
        ahead.launcher(kernel, (1,))(*args, **options)
    assert len(kernel.asked) == 1 + again and not kernel.launched


def test_another_thread_launches_meanwhile():
    kernel = Kernel()
    with ahead.compiling():
        thread = threading.Thread(target=lambda: ahead.launcher(kernel, (1,))(x, 5, 7, 8))
        thread.start()
        thread.join()
    assert len(kernel.launched) == 1 and not kernel.asked


def test_an_error_inside_ends_the_asking():
    with pytest.raises(ZeroDivisionError), ahead.compiling():
        raise ZeroDivisionError
    assert not ahead.asking()


def test_a_comparison_asks_for_its_kernels_once_and_proves_nothing(tmp_path: Path):
    proofs, kernel = Proofs(tmp_path / "proofs.jsonl"), Kernel()
    proofs.holds("known to differ", lambda: False)

    def compare() -> bool:
        def compute() -> torch.Tensor:
            ahead.launcher(kernel, (3,))(x, 5, 7, 8)
            return x  # equal, of one value: not what proves a schedule

        return same_bits(x, compute)

    with ahead.compiling():
        assert proofs.holds("new", compare) and len(kernel.asked) == 1
        assert proofs.holds("new", lambda: pytest.fail("again"))
        assert not proofs.holds("known to differ", lambda: pytest.fail("known"))
    assert not kernel.launched and not proofs.holds("new", lambda: False)
    assert len((tmp_path / "proofs.jsonl").read_text().splitlines()) == 2


def test_no_op_launches_a_kernel_past_it():
    ops = Path(ahead.__file__).parent
    assert not [path.name for path in ops.glob("*.py") if "_kernel[" in path.read_text()]
