"""The models that guess, loaded beside their target: an EAGLE-3 draft, and any small model of its vocabulary."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fengine import models
from fengine.config import EngineConfig
from fengine.errors import ConfigError, CorruptCheckpointError
from fengine.models import eagle3
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.rope import rope_tables
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import Weight, param_bytes
from fengine.ops.edges import take
from fengine.worker.checkpoint_checks import listed, misshapen, renamed
from fengine.worker.device import device_of
from fengine.worker.loader import Placement, load_params, place, spec_from_config
from fengine.worker.quantized_weights import Part
from fengine.worker.safetensors_file import DTYPES, TensorEntry, read_shards, reading

UNREAD = ("t2d", "embed_tokens.weight")  # the inverse of d2t; the embedding is the target's


class SmallModel:
    """A model of its own, that reads the tokens alone. Immutable."""

    behind = 0
    feature_layers: tuple[int, ...] = ()

    def __init__(self, directory: Path, config: Config, target: ModelSpec, settings: EngineConfig) -> None:
        """Errors: ConfigError if it has another vocabulary; ModelLoadError and its kinds."""
        self.spec = replace(spec_from_config(config), exact=False)  # no bit depends on it
        if not self.spec.generates or not self.spec.causal or self.spec.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculation.draft {str(directory)!r} is {self.spec.architecture} with a vocabulary of "
                f"{self.spec.vocab_size}; a draft generates text from the target's, of {target.vocab_size}"
            )
        self.params = load_params(directory, self.spec, dtype=settings.model.dtype, device=device_of(settings))
        self.bytes = param_bytes(self.params)
        self.model = models.lookup(self.spec.architecture)

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return feature_TX

    def run(self, kv: KVState, batch: Tensors, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        kv, hidden_TD = self.model.forward(self.params, self.spec, kv, batch)
        return kv, self.model.unembed(self.params, self.spec, take(hidden_TD, batch["logit_index_R"])), None


class EagleHead:
    """Goes on from the target's streams. Immutable."""

    behind = 1  # position p has the token of p + 1

    def __init__(self, directory: Path, config: Config, target: ModelSpec, params: Params) -> None:
        """`params`: the target's. Errors: ConfigError if it is the draft of another; ModelLoadError and its kinds."""
        spec = eagle3.spec_from_hf(config)
        self.feature_layers = eagle3.feature_layers(config, target)
        self.normed = bool(config.get("norm_before_residual"))
        check_pair(directory, config, spec, target)
        self.spec = replace(spec, max_position=max(spec.max_position, target.max_position), exact=False)
        like = params["final_norm_D"]
        self.params = load(directory, self.spec, eagle3.weights(spec, config, target), like)
        self.params |= {n: table.to(like.device) for n, table in rope_tables(self.spec, self.spec.max_position).items()}
        self.bytes = param_bytes(self.params)
        self.params["embed"] = params["embed"]

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return eagle3.fuse(self.params, self.spec, feature_TX)

    def run(self, kv: KVState, batch: Tensors, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        assert stream_TD is not None, "the draft goes on from a stream"
        kv, normed_RD, stream_RD = eagle3.forward(self.params, self.spec, kv, batch, stream_TD, self.normed)
        return kv, eagle3.unembed(self.params, self.spec, normed_RD), stream_RD


def check_pair(directory: Path, config: Config, spec: ModelSpec, target: ModelSpec) -> None:
    """Errors: ConfigError if it is the draft of another model."""
    wrong = [f"vocab_size {spec.vocab_size}, not {target.vocab_size}"] * (spec.vocab_size != target.vocab_size)
    if (size := config.get("target_hidden_size") or spec.hidden_size) != target.hidden_size:
        wrong.append(f"hidden_size {size}, not {target.hidden_size}")
    if spec.hidden_size != target.hidden_size:
        wrong.append(f"hidden_size {spec.hidden_size}, which is not that of the target's embedding")
    layers = eagle3.feature_layers(config, target)
    if len(set(layers)) != len(layers) or len(layers) != 3 or not 0 <= min(layers) <= max(layers) < target.num_layers:
        wrong.append(f"streams in front of the layers {layers}, of {target.num_layers} (three different ones)")
    if wrong:
        raise ConfigError(f"{directory} is no draft of this {target.architecture}: {'; '.join(wrong)}")


def checked_entries(directory: Path, spec: ModelSpec, weights: list[Weight]) -> dict[str, TensorEntry]:
    """The tensors by the names of `weights`, "d2t" too. Errors: CorruptCheckpointError with every problem."""
    entries = renamed(read_shards(directory), eagle3.stored_name)
    entries = {name: entry for name, entry in entries.items() if name not in UNREAD}
    expected = {source.name: Part((source.shape,), tuple(DTYPES)) for weight in weights for source in weight.sources}
    head = expected["lm_head.weight"].shapes[0][:1]
    if head != (spec.vocab_size,) or eagle3.HEAD_IDS in entries:
        expected[eagle3.HEAD_IDS] = Part((head,), ("I64",))
    problems = [f"tensor {name!r} is missing" for name in expected.keys() - entries.keys()]
    problems += [f"tensor {name!r} is not part of an EAGLE-3 draft" for name in entries.keys() - expected.keys()]
    if problems := sorted(problems + misshapen(expected, entries)):
        raise CorruptCheckpointError(f"{directory} does not fit its config.json:{listed(problems)}")
    return entries


def load(directory: Path, spec: ModelSpec, weights: list[Weight], like: Tensor) -> Params:
    """The draft's own leaves, on the device of `like`; on a CPU matrices keep their stored dtype.

    Errors: CorruptCheckpointError with every problem; ModelLoadError and its kinds.
    """
    entries = checked_entries(directory, spec, weights)
    placement = Placement(like.device, DTYPES[entries["fc.weight"].dtype] if like.device.type == "cpu" else like.dtype)
    params: Params = {"layers": [{"kind": spec.kind(0)}]}
    with reading(entries) as read:
        for weight in weights:
            parts = [read(source.name) for source in weight.sources]
            parent: Any = params["layers"][0] if weight.path[0] == "layers" else params
            parent[weight.path[-1]] = place(weight, parts, placement)
        if eagle3.HEAD_IDS in entries:
            offset_H = read(eagle3.HEAD_IDS)
            id_H = offset_H + torch.arange(len(offset_H))
            if len(set(id_H.tolist())) < len(id_H) or not 0 <= int(id_H.min()) <= int(id_H.max()) < spec.vocab_size:
                raise CorruptCheckpointError(f"{directory}: {eagle3.HEAD_IDS!r} must name different ids of the target")
            params["head_ids"] = id_H.to(placement.device)
    return params
