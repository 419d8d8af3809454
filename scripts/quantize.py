"""A checkpoint in 16 bits becomes one in few, in compressed-tensors' format, which transformers and other engines read.

    python scripts/quantize.py SOURCE TARGET                  # 4-bit integers, a scale for each 128 inputs (W4A16)
    python scripts/quantize.py SOURCE TARGET --group 32
    python scripts/quantize.py SOURCE TARGET --scheme fp8     # e4m3, a scale for each output

SOURCE is a directory, a hub id, or "box". Values are rounded to their nearest; of the scales of integers, that one is
taken whose squared error is least. Embeddings, heads and routers stay as they are.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fengine import models
from fengine.ops import quantized
from fengine.worker.checkpoint_checks import check_entries, read_entries
from fengine.worker.hub import resolve_model
from fengine.worker.loader import spec_from_config
from fengine.worker.safetensors_file import INDEX, SINGLE, read_config, read_shards, reading

SHRINKS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)  # of the scale that holds a group's largest value
KEPT = ("wrouter", "wshared_gate")
SHARD_BYTES = 4 << 30


def config_of(scheme: str, group: int, ignore: list[str]) -> dict[str, Any]:
    """The quantization_config. Pure."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    if scheme == "fp8":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
    weights |= {
        "dynamic": False,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    form = "float-quantized" if scheme == "fp8" else "pack-quantized"
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": groups, "ignore": ignore, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def nearest(matrix: Tensor, group: int) -> quantized.Codes:
    """4-bit codes under each group's best scale. Pure."""
    best, least = quantized.encoded(matrix, "int4", group), None
    for shrink in SHRINKS:
        codes = quantized.encoded(matrix, "int4", group, shrink)
        error = (quantized.dequantized(codes, torch.float32) - matrix.float()).square()
        error_NG = error.view(*codes.scale_NG.shape, -1).sum(-1)
        better_NG = torch.ones_like(error_NG, dtype=torch.bool) if least is None else error_NG < least
        least = error_NG if least is None else torch.where(better_NG, error_NG, least)
        columns = better_NG.repeat_interleave(codes.group, 1)
        best = best._replace(
            code_NK=torch.where(columns, codes.code_NK, best.code_NK),
            scale_NG=torch.where(better_NG, codes.scale_NG, best.scale_NG),
        )
    return best


def stored(module: str, matrix: Tensor, scheme: str, group: int) -> dict[str, Tensor]:
    """The tensors of a module. Pure."""
    if scheme == "fp8":
        codes = quantized.encoded(matrix, "fp8", 0)
        return {f"{module}.weight": codes.code_NK.view(torch.float8_e4m3fn), f"{module}.weight_scale": codes.scale_NG}
    if group < 1 or matrix.shape[1] % group:
        raise SystemExit(f"{module}: {matrix.shape[1]} inputs are no multiple of --group {group}")
    codes = nearest(matrix, group)
    return {
        f"{module}.weight_packed": quantized.row_bytes(codes).view(torch.int32),
        f"{module}.weight_scale": codes.scale_NG, f"{module}.weight_shape": torch.tensor(matrix.shape),
    }  # fmt: skip


def quantize(source: Path, target: Path, scheme: str, group: int) -> None:
    """Writes the checkpoint. Modifies: the directory `target`, which must not exist."""
    config = read_config(source)
    spec = spec_from_config(config)
    if spec.quantization is not None:
        raise SystemExit(f"{source} is quantized already, by {spec.quantization.method}")
    entries = read_entries(source, spec)
    weights = check_entries(source, spec, models.lookup(spec.architecture).weights(spec), entries, mixed=True)
    few = {
        entries[one.name].stored for weight in weights for one in weight.sources
        if weight.matrix and weight.path[0] == "layers" and weight.path[-1] not in KEPT and len(one.shape) == 2
    }  # fmt: skip
    entries = read_shards(source)  # by the names in the file
    ignore = sorted(name.removesuffix(".weight") for name in entries if name.endswith(".weight") and name not in few)
    ignore = [name for name in ignore if len(entries[f"{name}.weight"].shape) == 2 and "embed" not in name]
    target.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, "config.json"):
            shutil.copyfile(file, target / file.name)
        elif file.is_dir() and file.name[0].isdigit():  # a module of sentence-transformers: 1_Pooling
            shutil.copytree(file, target / file.name)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    with reading(entries) as read:
        for name in entries:
            tensor = read(name)
            made = stored(name.removesuffix(".weight"), tensor, scheme, group) if name in few else {name: tensor}
            if size + sum(part.nbytes for part in made.values()) > SHARD_BYTES and shards[-1]:
                shards, size = [*shards, {}], 0
            shards[-1] |= {key: part.contiguous() for key, part in made.items()}
            size += sum(part.nbytes for part in made.values())
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    )
    for file_name, shard in zip(names, shards, strict=True):
        save_file(shard, target / file_name, {"format": "pt"})
    if len(shards) > 1:
        places = {key: file_name for file_name, shard in zip(names, shards, strict=True) for key in shard}
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    told = config | {"quantization_config": config_of(scheme, group, ignore)}
    (target / "config.json").write_text(json.dumps(told, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    parser.add_argument("--scheme", choices=("w4a16", "fp8"), default="w4a16")
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale, of w4a16")
    args = parser.parse_args()
    quantize(resolve_model(args.source), args.target, args.scheme, args.group)


if __name__ == "__main__":
    main()
