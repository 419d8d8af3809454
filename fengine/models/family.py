"""`Family`: what one file of a model family brings, and the architectures that it makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fengine.models import layers
from fengine.models.fields import Fields, check_fields, check_model_type
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec, VisionSpec, embedding_spec
from fengine.models.weights import LayerLeaves, Weight, decoder_weights, prenorm_layer

SpecReader = Callable[[Config], ModelSpec]  # pure; errors: as `reader.decoder_spec`
Forward = Callable[[Params, ModelSpec, KVState, Tensors], tuple[KVState, Tensor]]
Unembed = Callable[[Params, ModelSpec, Tensor], Tensor]
Weights = Callable[[ModelSpec], list[Weight]]
Rename = Callable[[ModelSpec, str], str]  # our name of a checkpoint's tensor; "": it is not read


class Piece(NamedTuple):
    """What an encoder takes at once: arrays of numpy by name; how many embeddings come of it, from how many patches."""

    arrays: dict[str, Any]
    tokens: int
    patches: int
    before: str = ""  # what stands in front of its placeholders, and behind them
    after: str = ""


class Vision(NamedTuple):
    """What a family that takes images brings beside its decoder, of its own kind of VisionSpec. `encode`: by the
    tower's leaves a piece's arrays to its embeddings [tokens, D]; whole numbers stay on the host. `pieces`: of what
    transformers' processor makes of one image. `positions`: of a prompt of so many tokens on three rotary axes."""

    encode: Callable[[Params, Any, dict[str, Tensor]], Tensor]
    pieces: Callable[[Any, dict[str, Any]], list[Piece]]
    positions: Callable[[VisionSpec, int, Sequence[Any]], Any] | None = None
    options: tuple[tuple[str, Any], ...] = ()  # of the processor's call


class Model(NamedTuple):
    """One architecture as pure functions."""

    spec_from_hf: SpecReader
    forward: Forward
    unembed: Unembed
    weights: Weights
    layer: layers.LayerFn | None = None  # of which `forward` is made, if it is made of one
    rename: Rename = lambda spec, name: name
    vision: Vision | None = None  # of a model that takes images


class Family(NamedTuple):
    """By default Llama's decoder. `fields`: what its config may contain."""

    architecture: str  # of the language model: "…ForCausalLM"
    model_type: str
    fields: Fields
    spec_from_hf: SpecReader
    defaults: Config = {}  # of keys that a config.json may leave out, where they are not those of `decoder_spec`
    layer: layers.LayerFn = layers.decoder_layer
    unembed: Unembed = layers.unembed
    base: str | None = None  # what the names of its other classes begin with; None: with that of the language model
    leaves: LayerLeaves = prenorm_layer  # of one layer
    weights: Weights | None = None  # of all, where there are others than decoders have
    rename: Rename = lambda spec, name: name

    def models(self) -> dict[str, Model]:
        """The language model, its decoder alone (an embedding model), and its classifier or reward model. Pure."""
        base = self.base or self.architecture.removesuffix("ForCausalLM")
        names = (self.architecture, f"{base}Model", f"{base}ForSequenceClassification")
        forward = layers.decoder(self.layer)
        weights = self.weights or partial(decoder_weights, layer=self.leaves)
        shared = (forward, self.unembed, weights, self.layer, self.rename)
        return {name: Model(partial(self._read, name), *shared) for name in names}

    def _read(self, architecture: str, config: Config) -> ModelSpec:
        check_model_type(config, self.model_type, architecture)
        check_fields(config, self.fields, architecture)
        spec = self.spec_from_hf({**self.defaults, **config, "architectures": [architecture]})
        if architecture.endswith("ForSequenceClassification"):
            return classifier_spec(spec, architecture, config)
        return spec if architecture == self.architecture else embedding_spec(spec, architecture)


def classifier_spec(spec: ModelSpec, architecture: str, config: Config) -> ModelSpec:
    """The same decoder under a head with one output per label of `config`. Pure. Errors: ModelLoadError. As
    transformers: as many labels as `id2label` has entries; else `num_labels`; else 2."""
    read = ConfigReader(config)
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else read.size("num_labels", 1 << 20, default=2)
    if labels is not None and not isinstance(labels, dict):
        read.problems.append(f"id2label must be an object or null, got {labels!r}"[:200])
    read.done(architecture)
    return replace(embedding_spec(spec, architecture), num_labels=count)
