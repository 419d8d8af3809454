"""The Triton kernels against the references: on a CUDA device, and in Triton's interpreter where there is none.

The interpreter must be chosen before Triton is imported, so these tests run a second time in a process of their own.
It multiplies with numpy, which knows no bfloat16 and adds in its own order: tests of bits need a device.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ops import mixed_rows, normal, paged_case, spec
from torch import Tensor

from fengine.ops import attention, linear, rms_norm, rope, sampling, silu_mul
from fengine.ops.registration import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
SPACING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

on_device = [] if INTERPRETED else [pytest.mark.gpu]
kernel_test = pytest.mark.parametrize("dtype", [pytest.param(d, marks=on_device, id=str(d)[6:]) for d in DTYPES])


@pytest.mark.skipif(INTERPRETED or not hasattr(triton, "__version__"), reason="runs in the process that it starts")
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1], timeout=300)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def put(args: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of `args` as dtype, everything on the device."""
    if isinstance(args, Tensor):
        return args.to(DEVICE, dtype if args.is_floating_point() else None)
    return tuple(put(arg, dtype) for arg in args) if isinstance(args, tuple) else args


def assert_close(got: Any, want: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got, want, rtol=SPACING[dtype], atol=SPACING[dtype], equal_nan=True)


@kernel_test
@pytest.mark.parametrize("rows,n,k", [(1, 70, 96), (17, 130, 40), (40, 33, 256), (129, 40, 64)])
def test_linear(dtype: torch.dtype, rows: int, n: int, k: int):
    x, w, bias = put((normal(rows, k) / k**0.5, normal(n, k), normal(n)), dtype)
    for out_dtype in (None, torch.float32):
        assert_close(linear.launch(x, w, n, bias, out_dtype), linear.reference(x, w, n, bias, out_dtype), dtype)
    assert_close(linear.launch(x, w, n, None, None), linear.reference(x, w, n, None, None), dtype)


def test_every_schedule_of_linear():
    if not INTERPRETED:
        pytest.skip("on a device the schedules are compared bit by bit, below")
    x, w = put((normal(150, 200), normal(300, 200)), torch.float32)
    want = linear.reference(x, w, 300, None, None)
    for schedule in (*(entry[-1] for entry in linear.FEW_ROWS), *linear.MANY_ROWS, *linear.FLOAT32):
        assert_close(linear.launch(x, w, 300, None, None, schedule), want, torch.float16)


@kernel_test
@pytest.mark.parametrize("width", [8, 36, 896])
def test_norms(dtype: torch.dtype, width: int):
    x, delta, weight = put((normal(7, width), normal(7, width, seed=1), normal(width)), dtype)
    assert_close(rms_norm.launch(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6), dtype)
    assert_close(rms_norm.add_launch(delta, x, weight, 1e-6), rms_norm.add_reference(delta, x, weight, 1e-6), dtype)


@kernel_test
def test_silu_mul(dtype: torch.dtype):
    x = put(normal(5, 2 * 1037) * 4, dtype)
    assert_close(silu_mul.launch(x), silu_mul.reference(x), dtype)


@kernel_test
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads,groups,width", [(4, 2, 16), (14, 2, 64), (3, 3, 80)])
def test_rope_kv_write(dtype: torch.dtype, heads: int, groups: int, width: int, norm: bool):
    table = rope.rope_table(spec(heads, groups, width), 50).to(DEVICE)
    x, k, v, q_norm, k_norm = put(
        (normal(5, (heads + 2 * groups) * width), *(normal(4, 3, groups, width) for _ in "kv"), normal(width),
         normal(width, seed=1)), dtype,
    )  # fmt: skip
    position, slot = (torch.tensor(index).int().to(DEVICE) for index in ([4, 49, 0, 7, 8], [3, 11, 6, 5, 10]))
    norms = (q_norm, k_norm, 1e-6) if norm else (None, None, 0.0)
    want = rope.reference(x, table, position, slot, k, v, heads, *norms)
    got = rope.launch(x, table, position, slot, k, v, heads, *norms)
    assert_close((got, k, v), want, dtype)


@kernel_test
@pytest.mark.parametrize(
    "heads,groups,width,size", [(2, 2, 64, 4), (4, 2, 80, 1), (7, 1, 96, 16), (8, 1, 128, 64), (4, 1, 64, 16)]
)
def test_attention(dtype: torch.dtype, heads: int, groups: int, width: int, size: int):
    """Every GQA ratio, head width and page size, chunks in one program or two; stale NaN all around."""
    for lengths, tokens, tile, splits in (
        ([70, 5, 130, 1], [30, 5, 1, 1], 16, 1),
        ([70, 5, 130, 1], [30, 5, 1, 1], 32, 1),
        ([600, 33], [2, 1], 16, 1),
        ([600, 33], [2, 1], 16, 2),
    ):
        args = put(paged_case(lengths, tokens, heads, groups, width, size, padding=2), dtype)
        got = attention.launch(*args, chosen=attention.Schedule(tile, 4, 1, splits))
        assert_close(got, attention.reference(*args), dtype)


@pytest.mark.parametrize("most", [pytest.param(most, marks=on_device) for most in (sampling.MOST, 64)])
def test_draw(most: int, monkeypatch: pytest.MonkeyPatch):
    """With room for every candidate, and with so little that rows are searched whole."""
    monkeypatch.setattr(sampling, "MOST", most)
    monkeypatch.setattr(sampling, "BLOCK", 512)
    rows, vocab = 12, 1100
    case = {name: value.to(DEVICE) for name, value in mixed_rows(rows, vocab).items()}
    case["logits_RV"][11, 1099] = torch.nan
    case["logits_RV"][0, [30, 1070]] = 50.0
    token, logprob = sampling.launch(**case)
    want_token, want_logprob = sampling.reference(**case)
    assert token.equal(want_token) and token[0] == 30 and token[11] == 0 and logprob[11].isnan()
    torch.testing.assert_close(logprob, want_logprob, rtol=1e-5, atol=1e-5, equal_nan=True)


# -- bits, on a device ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_linear_bits_follow_no_schedule():
    x, w = put((normal(300, 896), normal(1152, 896) / 30), torch.bfloat16)
    whole = linear.launch(x, w, 1152, None, None)
    for rows in (1, 7, 16, 17, 33, 64, 65, 128, 129, 299):
        assert linear.launch(x[:rows], w, 1152, None, None).equal(whole[:rows])
    for schedule in (*(entry[-1] for entry in linear.FEW_ROWS), *linear.MANY_ROWS):
        assert linear.launch(x, w, 1152, None, None, schedule).equal(whole)


@pytest.mark.gpu
def test_attention_bits_of_prefill_chunks_and_decode_agree():
    length = 1100
    q, k, v, _, _, table, scale = put(paged_case([length], [length], 8, 2, 64, 16), torch.bfloat16)
    start = torch.tensor([0, length, length], device=DEVICE).int()
    whole = attention.launch(q, k, v, start, torch.tensor([length, 0], device=DEVICE).int(), table, scale)
    for first, last in ((0, 1), (63, 64), (64, 65), (511, 512), (512, 513), (700, 1100), (1099, 1100)):
        start = torch.tensor([0, last - first, last - first], device=DEVICE).int()
        kv_len = torch.tensor([last, 0], device=DEVICE).int()
        for chosen in (None, attention.Schedule(16, 4, 3, 1), attention.Schedule(16, 4, 2, 3)):
            part = attention.launch(q[first:last], k, v, start, kv_len, table, scale, chosen)
            assert part.equal(whole[first:last])
