"""Change single logits in place: penalties, bans and biases, as a sparse list of edits.

x at (row, id) becomes s + after, where b = x + before, s = b * scale if b < 0 else b / scale; then it is clamped to
[-BAN, BAN]. So additive penalties come first, then the repetition penalty (Keskar et al. 2019), then the bias: SGLang's
order. before = -inf bans the id: it ends at -BAN, a finite number that no temperature lifts to a probability above 0
and none divides into an infinity, for `draw` takes that as a fault of the row. A logit that is not finite stays as it
is, so that `draw` sees it. No reduction; every (row, id) may occur once.
"""
# pyright: reportInvalidTypeForm=false

import torch
from torch import Tensor

from fengine.ops.ahead import launcher
from fengine.ops.registration import register, tl, triton

BAN = 1e30  # times or over any temperature of [1e-6, 1e20] it is finite and exp(-z) is 0
EDITS = 256  # of one program


def reference(
    logits_RV: Tensor, row_E: Tensor, id_E: Tensor, before_E: Tensor, scale_E: Tensor, after_E: Tensor
) -> None:
    """The math. Modifies: logits_RV."""
    x_E = logits_RV[row_E.long(), id_E.long()]
    b_E = x_E + before_E
    y_E = torch.where(b_E < 0, b_E * scale_E, b_E / scale_E) + after_E
    logits_RV[row_E.long(), id_E.long()] = torch.where(x_E.isfinite(), y_E.clamp(-BAN, BAN), x_E)


@triton.jit(do_not_specialize=["E"])
def edit_kernel(logits_ptr, row_ptr, id_ptr, before_ptr, scale_ptr, after_ptr, E, V, EDITS: tl.constexpr):
    """A block of edits."""
    e = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    mask = e < E
    at = logits_ptr + tl.load(row_ptr + e, mask=mask, other=0).to(tl.int64) * V
    at += tl.load(id_ptr + e, mask=mask, other=0)
    x = tl.load(at, mask=mask, other=0.0)
    scale = tl.load(scale_ptr + e, mask=mask, other=1.0)
    b = x + tl.load(before_ptr + e, mask=mask, other=0.0)
    y = tl.where(b < 0.0, b * scale, tl.div_rn(b, scale)) + tl.load(after_ptr + e, mask=mask, other=0.0)
    y = tl.minimum(tl.maximum(y, -1e30), 1e30)
    tl.store(at, tl.where(tl.abs(x) < float("inf"), y, x), mask=mask)


def launch(logits_RV: Tensor, row_E: Tensor, id_E: Tensor, before_E: Tensor, scale_E: Tensor, after_E: Tensor) -> None:
    """Runs the kernel. Modifies: logits_RV."""
    assert logits_RV.is_contiguous()
    edits = row_E.shape[0]
    if edits:
        launcher(edit_kernel, (triton.cdiv(edits, EDITS),))(
            logits_RV, row_E, id_E, before_E, scale_E, after_E, edits, logits_RV.shape[1], EDITS, num_warps=4
        )


def fake(logits_RV: Tensor, row_E: Tensor, id_E: Tensor, before_E: Tensor, scale_E: Tensor, after_E: Tensor) -> None:
    return None


_op = register(
    "edit_logits_(Tensor(a!) logits, Tensor row, Tensor id, Tensor before, Tensor scale, Tensor after) -> ()",
    launch, fake,
)  # fmt: skip


def edit_logits(
    logits_RV: Tensor, row_E: Tensor, id_E: Tensor, before_E: Tensor, scale_E: Tensor, after_E: Tensor
) -> Tensor:
    """logits_RV (float32, contiguous), edited. Modifies: its storage; use the returned tensor from here on.

    row, id int32, within logits_RV; before, scale > 0, after float32; each (row, id) at most once.
    """
    _op(logits_RV, row_E, id_E, before_E, scale_E, after_E)
    return logits_RV
