"""Loads an EAGLE-3 draft beside its target, and runs it as a head of `DraftModel`."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fengine.errors import ConfigError, CorruptCheckpointError
from fengine.models import eagle3
from fengine.models.kv_state import KVState, Params, Tensors, param_bytes
from fengine.models.rope import rope_tables
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import Weight
from fengine.worker.loader import Placement, place
from fengine.worker.safetensors_file import DTYPES, TensorEntry, open_file, read_shards, read_tensor

UNREAD = ("t2d", "embed_tokens.weight")  # the inverse of d2t; the embedding is the target's


class EagleHead:
    """Goes on from the target's streams. Immutable."""

    behind = 1  # position p has the token of p + 1

    def __init__(self, directory: Path, config: Config, target: ModelSpec, params: Params) -> None:
        """`params`: the target's. Errors: ConfigError if it is the draft of another; ModelLoadError and its kinds."""
        spec = eagle3.spec_from_hf(config)
        check_pair(directory, config, spec, target)
        self.feature_layers, self.normed = (
            eagle3.feature_layers(config, target),
            bool(config.get("norm_before_residual")),
        )
        self.spec = replace(spec, max_position=max(spec.max_position, target.max_position), exact=False)
        tables = rope_tables(self.spec, self.spec.max_position)
        self.params = load(directory, self.spec, eagle3.weights(spec, config, target), params["final_norm_D"])
        self.params |= {name: table.to(params["final_norm_D"].device) for name, table in tables.items()}
        self.bytes = param_bytes(self.params)
        self.params["embed"] = params["embed"]

    def fuse(self, feature_TX: Tensor) -> Tensor:
        """What it goes on from: [T, D]. Pure."""
        return eagle3.fuse(self.params, self.spec, feature_TX)

    def run(self, kv: KVState, batch: Tensors, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        """(KV state, logits_RV, stream_RD) behind each row. Modifies: the storage of `kv`, which is dead then."""
        assert stream_TD is not None, "the draft goes on from a stream"
        kv, normed_TD, stream_TD = eagle3.forward(self.params, self.spec, kv, batch, stream_TD, self.normed)
        logits_RV = eagle3.unembed(self.params, self.spec, normed_TD, batch["logit_index_R"])
        return kv, logits_RV, stream_TD.index_select(0, batch["logit_index_R"])


def check_pair(directory: Path, config: Config, spec: ModelSpec, target: ModelSpec) -> None:
    """Errors: ConfigError if it is the draft of another model."""
    told = {"vocab_size": spec.vocab_size, "hidden_size": config.get("target_hidden_size") or spec.hidden_size}
    wrong = [
        f"{name} {value}, not {found}" for name, value in told.items() if value != (found := getattr(target, name))
    ]
    if spec.hidden_size != target.hidden_size:
        wrong.append(f"hidden_size {spec.hidden_size}, which is not that of the target's embedding")
    layers = eagle3.feature_layers(config, target)
    if len(set(layers)) != len(layers) or len(layers) != 3 or not 0 <= min(layers) <= max(layers) < target.num_layers:
        wrong.append(f"streams in front of the layers {layers}, of {target.num_layers} (three different ones)")
    if wrong:
        raise ConfigError(f"{directory} is no draft of this {target.architecture}: {'; '.join(wrong)}")


def load(directory: Path, spec: ModelSpec, weights: list[Weight], like: Tensor) -> Params:
    """The draft's own leaves, on the device of `like`; on a CPU matrices keep their stored dtype.

    Errors: CorruptCheckpointError with every problem; ModelLoadError and its kinds.
    """
    entries = {eagle3.stored_name(entry.name): entry for entry in read_shards(directory).values()}
    ids = entries.pop(eagle3.HEAD_IDS, None)
    problems = _problems(spec, weights, entries, ids)
    if problems:
        raise CorruptCheckpointError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(sorted(problems)))
    placement = Placement(like.device, DTYPES[entries["fc.weight"].dtype] if like.device.type == "cpu" else like.dtype)
    params: Params = {"layers": [{"kind": spec.kind(0)}]}
    with ExitStack() as stack:
        found = [*entries.values(), *([] if ids is None else [ids])]
        files = {path: stack.enter_context(open_file(path)) for path in sorted({entry.path for entry in found})}
        for weight in weights:
            parts = [read_tensor(files[entries[s.name].path], entries[s.name]) for s in weight.sources]
            parent: Any = params["layers"][0] if weight.path[0] == "layers" else params
            parent[weight.path[-1]] = place(weight, parts, placement)
        if ids is not None:
            id_H = files[ids.path].get_tensor(ids.stored).long() + torch.arange(ids.shape[0])
            if len(set(id_H.tolist())) < len(id_H) or not 0 <= int(id_H.min()) <= int(id_H.max()) < spec.vocab_size:
                raise CorruptCheckpointError(f"{directory}: {eagle3.HEAD_IDS!r} must name different ids of the target")
            params["head_ids"] = id_H.to(placement.device)
    return params


def _problems(
    spec: ModelSpec, weights: list[Weight], entries: dict[str, TensorEntry], ids: TensorEntry | None
) -> list[str]:
    """What is missing, foreign, or of another shape. Pure."""
    expected = {source.name: source.shape for weight in weights for source in weight.sources}
    found = [f"tensor {name!r} is missing" for name in expected.keys() - entries.keys()]
    extra = entries.keys() - expected.keys() - {*UNREAD}
    found += [f"tensor {name!r} is not part of an EAGLE-3 draft" for name in extra]
    for name, shape in expected.items():
        if name in entries and entries[name].shape != shape:
            found.append(f"tensor {name!r}: expected shape {list(shape)}, got {list(entries[name].shape)}")
    head = expected["lm_head.weight"][:1]
    if (ids is None and head != (spec.vocab_size,)) or (ids is not None and (ids.shape != head or ids.dtype != "I64")):
        found.append(f"{eagle3.HEAD_IDS!r} must be an int64 for each of the {head[0]} ids of draft_vocab_size")
    return found
