"""Matrices in few bits as checkpoints hold them: which tensors, of what shapes and dtypes, and the codes in them.

After AutoAWQ's gemm packing, AutoGPTQ (its zero points are one less than meant; those of gptq_v2 are not), the formats
of compressed-tensors, the FP8 of DeepSeek and transformers, and gpt-oss's MXFP4. 32-bit words hold their first code in
the lowest bits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fengine.errors import CorruptCheckpointError
from fengine.models.sources import ExpertOrder, HeadOrder, Source
from fengine.models.spec import Quantization, Scheme
from fengine.models.weights import Weight
from fengine.ops.quantized import FOUR_BITS, Codes, dequantized, encoded
from fengine.worker.safetensors_file import DTYPES, TensorEntry

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where column j of 8 stands in a word
WORDS, BYTES, FLOATS = ("I32",), ("U8",), tuple(DTYPES)
E8M0 = ("U8", "F8_E8M0")  # a power of two, its exponent plus 127
MAIN = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "micro": "weight_packed"}
UNREAD = ("input_scale", "activation_scale", "weight_shape", "k_scale", "v_scale")  # activations stay in 16 bits


class Part(NamedTuple):
    """A tensor of a quantized matrix: the shapes and dtypes that it may have. `optional`: a file may lack it."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


def module_of(source: Source) -> str:
    return source.name.removesuffix(".weight")


def scheme_of(
    weight: Weight, source: Source, spec: Quantization | None, entries: dict[str, TensorEntry]
) -> Scheme | None:
    """How a source is stored: None where it is whole, which the checkpoint's tensors tell; a tower always is. Pure."""
    if spec is None or not weight.matrix or weight.path[0] in ("embed", "vision"):
        return None
    scheme = spec.of(*{module_of(source), _stored(module_of(source), entries)})
    if scheme is None or scheme.layout == "load":
        return scheme
    if (scheme.layout == "mxfp4") != (len(source.shape) == 3):  # experts in one tensor are MXFP4's alone
        return None
    if scheme.layout == "float":
        return scheme if source.name in entries and entries[source.name].dtype == "F8_E4M3" else None
    main = f"{source.name}_blocks" if scheme.layout == "mxfp4" else f"{module_of(source)}.{MAIN[scheme.layout]}"
    return scheme if main in entries or source.name not in entries else None


def _stored(module: str, entries: dict[str, TensorEntry]) -> str:
    """A module's name in the file, by which a tool's rules know it: a decoder beside a tower has another one here."""
    ends = [f".{end}" for end in ("weight", *MAIN.values()) if f"{module}.{end}" in entries]
    return entries[module + ends[0]].stored.removesuffix(ends[0]) if ends else module


def parts_of(source: Source, scheme: Scheme) -> dict[str, Part]:
    """The tensors of a source by name. Pure. Errors: CorruptCheckpointError for sizes that its groups do not divide."""
    module, at = module_of(source), source.name
    if scheme.layout == "load":
        return {at: Part((source.shape,), FLOATS)}
    if scheme.layout == "mxfp4":
        e, k, n = source.shape
        _divides(at, "inputs", k, 32)
        return {f"{at}_blocks": Part(((e, n, k // 32, 16),), BYTES), f"{at}_scales": Part(((e, n, k // 32),), E8M0)}
    n, k = source.shape
    if scheme.layout == "float":
        return {at: Part(((n, k),), ("F8_E4M3",)), **_float_scales(module, n, k, scheme)}
    rows = (scheme.block or (1, 0))[1] or k
    if not scheme.ordered:
        _divides(f"{module}.{MAIN[scheme.layout]}", "inputs", k, rows)
    if scheme.layout in ("awq", "gptq"):
        _divides(f"{module}.qweight", "outputs", n, 32 // _bits(scheme))
        _divides(f"{module}.qweight", "inputs", k, 32 // _bits(scheme) if scheme.layout == "gptq" else 1)
        parts = _transposed(n, k, -(-k // rows), scheme)
    else:
        parts = _compressed(n, k, -(-k // rows), scheme)
    return {f"{module}.{name}": part for name, part in parts.items()}


def _transposed(n: int, k: int, groups: int, scheme: Scheme) -> dict[str, Part]:
    """AWQ and GPTQ: a column for each output. Pure."""
    words, is_gptq = 32 // _bits(scheme), scheme.layout == "gptq"
    parts = {
        "qweight": Part(((k // words, n) if is_gptq else (k, n // words),), WORDS),
        "qzeros": Part(((groups, n // words),), WORDS), "scales": Part(((groups, n),), FLOATS),
    }  # fmt: skip
    return parts | ({"g_idx": Part(((k,),), WORDS, optional=not scheme.ordered)} if is_gptq else {})


def _compressed(n: int, k: int, groups: int, scheme: Scheme) -> dict[str, Part]:
    """compressed-tensors' packed formats. Pure."""
    if scheme.layout == "micro":
        return {"weight_packed": Part(((n, k // 2),), BYTES), "weight_scale": Part(((n, groups),), E8M0)}
    words = 32 // _bits(scheme)
    zeros = Part(((-(-n // words), groups), (n, groups)), ("I32", "I8"))
    return {
        "weight_packed": Part(((n, -(-k // words)),), WORDS), "weight_scale": Part(((n, groups),), FLOATS),
        "weight_g_idx": Part(((k,),), WORDS, optional=not scheme.ordered),
        **({"weight_zero_point": zeros} if scheme.zeros else {}),
    }  # fmt: skip


def _divides(name: str, what: str, size: int, by: int) -> None:
    if size % by:
        raise CorruptCheckpointError(
            f"tensor {name!r}: its {size} {what} are not a multiple of {by}, its group or word."
        )


def _float_scales(module: str, n: int, k: int, scheme: Scheme) -> dict[str, Part]:
    """Under either of its names; one of them is there."""
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (n,), (n, 1), (1, 1))
    if scheme.block is not None:
        rows, columns = scheme.block
        shapes = ((-(-n // rows), -(-k // columns)),)
    part = Part(shapes, (*FLOATS, *E8M0), optional=True)
    return {f"{module}.weight_scale_inv": part, f"{module}.weight_scale": part}


def unread(name: str, modules: set[str]) -> bool:
    """Whether a tensor belongs to a quantized module and changes nothing here. A bias that an old tool stored for a
    layer without one is zero, as `check_unread` sees. Pure."""
    module, _, last = name.rpartition(".")
    return module in modules and (last in UNREAD or last == "bias")


def check_unread(name: str, tensor: Tensor) -> None:
    """Errors: CorruptCheckpointError for a bias that would be left out."""
    if tensor.any():
        raise CorruptCheckpointError(
            f"tensor {name!r} is not part of the model with this config.json, and is not zero."
        )


Read = Callable[[str], Tensor]


def read_codes(source: Source, scheme: Scheme, read: Read, there: dict[str, TensorEntry]) -> Codes:
    """The codes of a matrix [N, K] in the checkpoint's order, of MXFP4 those of all experts below each other. Errors:
    as `read`, and CorruptCheckpointError."""
    module, (n, k) = module_of(source), source.shape[-2:]
    if scheme.layout == "mxfp4":
        return _blocks(source, read)
    if scheme.layout == "float":
        codes = _floats(source, scheme, read, there)
    elif scheme.layout == "micro":
        packed = read(f"{module}.weight_packed")
        codes = Codes("fp4", _unpacked(packed, 4), _powers(read(f"{module}.weight_scale")), None, 32)
    else:
        scale, index = ("weight_scale", "weight_g_idx") if scheme.layout == "packed" else ("scales", "g_idx")
        scale_NG = read(f"{module}.{scale}")
        code_NK, zero_NG = (_awq if scheme.layout == "awq" else _gptq if scheme.layout == "gptq" else _packed)(
            module, scheme, read, (n, k), there
        )
        scale_NG = scale_NG if scheme.layout == "packed" else scale_NG.T
        group, at = (scheme.block or (1, 0))[1] or k, f"{module}.{index}"
        index_K = _order(at, read(at), group, scale_NG.shape[1]) if at in there else None
        codes = Codes(scheme.code, code_NK, scale_NG.contiguous(), zero_NG, group, index_K)
    if not torch.isfinite(codes.scale_NG.float()).all():
        raise CorruptCheckpointError(f"the scales of {module!r} are not finite.")
    return codes


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in the last dimension of words or bytes, lowest bits first, one a byte. Pure."""
    raw = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)  # flat first: of a last dimension of 1
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), -1).flatten(-2)


def _bits(scheme: Scheme) -> int:
    return 4 if scheme.code == "int4" else 8


def _awq(module: str, scheme: Scheme, read: Read, shape: tuple[int, int], there: object) -> tuple[Tensor, Tensor]:
    def columns(name: str) -> Tensor:
        codes = _unpacked(read(f"{module}.{name}"), 4)
        return codes.view(len(codes), -1, 8)[:, :, AWQ_ORDER].flatten(1).T.contiguous()

    return columns("qweight"), columns("qzeros")


def _gptq(module: str, scheme: Scheme, read: Read, shape: tuple[int, int], there: object) -> tuple[Tensor, Tensor]:
    """Zero points are stored less `offset`, taken from whole words: what 0 borrows comes from the next one. Symmetric
    ones tell it themselves: in gptq_v2 all are the middle of the range."""
    bits, words = _bits(scheme), read(f"{module}.qzeros")
    each_word = 0x11111111 if bits == 4 else 0x01010101
    offset = scheme.offset
    if offset is None:
        offset = int((words.contiguous().view(torch.uint8) != (0x88 if bits == 4 else 0x80)).any())
    zero_GN = _unpacked(words + offset * each_word, bits)
    return _unpacked(read(f"{module}.qweight").T, bits), zero_GN.T.contiguous()


def _packed(module: str, scheme: Scheme, read: Read, shape: tuple[int, int], there: dict[str, TensorEntry]):
    """Signed numbers are stored, and their zeros packed, with half of the range added."""
    (n, k), bits = shape, _bits(scheme)
    code_NK = _unpacked(read(f"{module}.weight_packed"), bits)[:, :k].contiguous()
    groups = there[f"{module}.weight_scale"].shape[1]
    if not scheme.zeros:
        return code_NK, torch.full((n, groups), 1 << bits - 1, dtype=torch.uint8)
    zero = read(name := f"{module}.weight_zero_point")
    if len(zero) != (rows := n if zero.dtype == torch.int8 else -(-n * bits // 32)):
        raise CorruptCheckpointError(f"tensor {name!r} of {zero.dtype} has {len(zero)} rows, expected {rows}.")
    if zero.dtype == torch.int8:
        return code_NK, (zero.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    return code_NK, _unpacked(zero.T, bits)[:, :n].T.contiguous()


def _order(name: str, index_K: Tensor, group: int, groups: int) -> Tensor | None:
    """The group of each column, None where that is its place. Errors: CorruptCheckpointError."""
    if torch.equal(index_K, torch.arange(len(index_K), dtype=torch.int32) // group) or (index_K == -1).all():
        return None
    if index_K.min() < 0 or index_K.max() >= groups:
        raise CorruptCheckpointError(f"tensor {name!r} names groups beyond the {groups} that there are.")
    return index_K


def _floats(source: Source, scheme: Scheme, read: Read, there: dict[str, TensorEntry]) -> Codes:
    """FP8: one scale of the whole, of each row, or of blocks, whose last ones may be smaller."""
    module, (n, k) = module_of(source), source.shape
    name = next(
        (f"{module}.{last}" for last in ("weight_scale_inv", "weight_scale") if f"{module}.{last}" in there), None
    )
    if name is None:
        raise CorruptCheckpointError(f"tensor '{module}.weight_scale' is missing")
    scale, code_NK = read(name), read(source.name).view(torch.uint8)
    scale = _powers(scale) if there[name].dtype in E8M0 else scale
    if ((code_NK & 127) == 127).any():
        raise CorruptCheckpointError(f"tensor {source.name!r} holds NaN.")
    rows, columns = scheme.block or (1, k)
    if scheme.block is None:
        return Codes(scheme.code, code_NK, scale.float().reshape(-1, 1).expand(n, 1).contiguous(), None, k)
    return Codes(scheme.code, code_NK, scale.float().repeat_interleave(rows, 0)[:n].contiguous(), None, columns)


def _powers(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as bfloat16, which holds every one of them; 255 is NaN. Pure."""
    return exponent.view(torch.float8_e8m0fnu).to(torch.bfloat16)


def _blocks(source: Source, read: Read) -> Codes:
    """gpt-oss's experts [E N, K], from blocks [E, N, K/32, 16] and scales [E, N, K/32]."""
    e, k, n = source.shape
    codes = _unpacked(read(f"{source.name}_blocks"), 4).view(e * n, k)
    scale = _powers(read(f"{source.name}_scales")).view(e * n, k // 32)
    if not torch.isfinite(scale).all():
        raise CorruptCheckpointError(f"the scales of {source.name!r} are not finite.")
    return Codes("fp4", codes, scale, None, 32)


def in_our_order(source: Source, part: Tensor | Codes) -> Tensor | Codes:
    """In our order of rows. Pure."""
    if isinstance(part, Tensor):
        return source.ours(part)
    if isinstance(source.order, HeadOrder):
        return part.rows(source.order.index(len(part.code_NK)))
    if isinstance(source.order, ExpertOrder) and source.order.paired:
        return part.rows(rearrange(torch.arange(len(part.code_NK)), "(e f two) -> (e two f)", e=source.shape[0], two=2))
    return part


def encoded_by(tensor: Tensor, scheme: Scheme | None, device: torch.device) -> Tensor | Codes:
    """In few bits if the scheme says so, computed on the device; experts not in those that are stored whole. Pure."""
    if scheme is None or tensor.dim() < 2 or (tensor.dim() == 3 and scheme.code not in (*FOUR_BITS, "w8a8")):
        return tensor
    group = 32 if scheme.code == "fp4" else (scheme.block or (1, 0))[1]
    if tensor.shape[-1] % (group or 1):
        return tensor
    return encoded(tensor.to(device).flatten(0, -2), scheme.code, group)


def whole(part: Tensor | Codes, device: torch.device, dtype: torch.dtype) -> Tensor:
    return part.to(device, dtype) if isinstance(part, Tensor) else dequantized(part.to(device), dtype)


def rows_of(part: Tensor | Codes, rows: Sequence[slice], axis: int = 0, experts: int = 1) -> list[Tensor | Codes]:
    """Some of its rows, or of those of each expert, in one. Pure."""
    if axis == 0:
        return [part.rows(each) if isinstance(part, Codes) else part[each] for each in rows]
    index = torch.arange(len(part.code_NK) // experts if isinstance(part, Codes) else part.shape[1])
    index = torch.cat([index[each] for each in rows])
    if isinstance(part, Tensor):
        return [part[:, index.to(part.device)]]
    all_rows = torch.arange(len(part.code_NK)).view(experts, -1)
    return [part.rows(all_rows[:, index].flatten().to(part.code_NK.device))]
