"""The C kernels of few bits, built for CPUs with fewer instructions: the same bits, and right with each."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fengine.ops import compiler, cpu, linear, quantized
from fengine.ops.quantized import Codes

SOURCES = [path for path in compiler.SOURCES if path.stem in ("cpu_kernels", "cpu_quantized", "cpu_w8a8")]
DTYPES = (torch.bfloat16, torch.float16)


def random_codes(kind: str, n: int, k: int, group: int) -> Codes:
    torch.manual_seed(n + k)
    code_NK = torch.randint(0, 16 if kind in quantized.FOUR_BITS else 127, (n, k), dtype=torch.uint8)
    scale_NG = ((torch.rand(n, -(-k // group)) + 0.5) * 0.01).half()
    zero_NG = torch.randint(0, 16, scale_NG.shape, dtype=torch.uint8) if kind.startswith("int") else None
    return Codes(kind, code_NK, scale_NG, zero_NG, group)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx512bf16",), ("-mno-avx2", "-mno-avx512f", "-mno-fma")])
def test_other_instructions_give_the_same_bits(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this machine has not are left out by the compiler in any case."""
    if "x86" not in os.uname().machine:
        pytest.skip("flags of x86")
    cases = [(random_codes(kind, 70, k, 8), dtype) for k in (41, 40) for kind in quantized.KINDS for dtype in DTYPES]
    torch.manual_seed(0)
    inputs = torch.randn(9, 41)

    def results() -> list[Tensor]:
        dense = [linear.pack(quantized.dequantized(codes, dtype)) for codes, dtype in cases]
        few = [quantized.pack(codes, dtype) for codes, dtype in cases]
        xs = [[inputs[:m, : codes.code_NK.shape[1]].contiguous() for m in (1, 3, 9)] for codes, _ in cases]
        for a, b, mine in zip(few, dense, xs, strict=True):
            assert all(same_bits(linear.linear(x, a), linear.linear(x, b)) for x in mine)
        return [linear.linear(x, leaf) for leaf, mine in zip(few, xs, strict=True) for x in mine]

    want = results()
    monkeypatch.setattr(compiler, "_compile", with_flags(flags))
    library = compiler.load(f"test{len(flags)}{flags[0][4:]}", SOURCES, compiler.HEADERS, ctypes.PyDLL)
    for name, types in cpu.SIGNATURES.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = types
    monkeypatch.setattr(cpu, "kernels", lambda: (library, library))
    fused = "-mno-fma" not in flags
    assert not fused or all(same_bits(a, b) for a, b in zip(results(), want, strict=True))
    results()


def with_flags(flags: tuple[str, ...]) -> Callable[[list[str], list[Path], Path], None]:
    def compile(command: list[str], sources: list[Path], output: Path) -> None:
        names = [str(source) for source in sources]
        built = ["-march=native", *flags, "-O1", "-shared", *names, "-lm", "-o", str(output)]  # sooner: the same bits
        subprocess.run([*command, *compiler.FLAGS, *built], check=True)

    return compile
