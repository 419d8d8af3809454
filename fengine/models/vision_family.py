"""`VisionFamily`: a decoder of one of the families, and a tower whose embeddings stand in for placeholder tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fengine.errors import ModelLoadError, UnsupportedArchitectureError
from fengine.models import layers, llama, mistral, qwen
from fengine.models.family import COMMON, READ, Family, Fields, Model, Vision, check_fields, check_model_type
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec, VisionSpec
from fengine.models.weights import LayerLeaves, Weight, decoder_weights, prenorm_layer

TEXTS = {family.model_type: family for family in (llama.FAMILY, mistral.TEXT, qwen.QWEN2, qwen.QWEN3)}
WHOLE: Fields = {**COMMON, "text_config": READ, "vision_config": READ, "tie_word_embeddings": READ}


class VisionFamily(NamedTuple):
    """`fields`: of the whole config; `vision_fields`: of its vision_config; `texts`: families of its decoder by the
    model_type of text_config; `read`: the facts of the tower (errors: ModelLoadError and kinds); `weights`: its leaves,
    by the decoder's hidden size; `rename`: our name of a checkpoint's tensor, or ""."""

    architecture: str
    model_type: str
    fields: Fields
    vision_fields: Fields
    read: Callable[[Config, Config, ModelSpec], ModelSpec]  # of the whole config, its vision_config, the decoder's spec
    weights: Callable[[int, Any], list[Weight]]
    vision: Vision
    rename: Callable[[str], str]
    texts: dict[str, Family] = TEXTS
    text_defaults: Config = {}
    vision_defaults: Config = {}
    leaves: LayerLeaves = prenorm_layer  # of a layer of the decoder
    text_ties: bool = False  # tie_word_embeddings of text_config counts beside that of the whole config

    def models(self) -> dict[str, Model]:
        def weights(spec: ModelSpec) -> list[Weight]:
            return decoder_weights(spec, layer=self.leaves) + self.weights(spec.hidden_size, spec.vision)

        layer = layers.decoder_layer
        own = (layers.decoder(layer), layers.unembed, weights, layer, lambda _, name: self.rename(name), self.vision)
        return {self.architecture: Model(self.spec_from_hf, *own)}

    def spec_from_hf(self, config: Config) -> ModelSpec:
        """Errors: ModelLoadError and kinds."""
        check_model_type(config, self.model_type, self.architecture)
        check_fields(config, self.fields, self.architecture)
        text, vision = self.parts(config)
        kind = text.get("model_type")
        if not isinstance(kind, str) or kind not in self.texts:
            known = ", ".join(self.texts)
            raise UnsupportedArchitectureError(f"text_config.model_type = {kind!r:.80} is not supported; {known} are.")
        family = self.texts[kind]
        check_fields(text, family.fields, f"{self.architecture}'s text_config")
        check_fields(vision, self.vision_fields, f"{self.architecture}'s vision_config")
        given = family.defaults | self.text_defaults | text
        reads = ConfigReader(config), ConfigReader(text)
        key = "tie_word_embeddings"  # where neither tells, the decoder's default
        told = [read.flag(key) for read in reads if read.config.get(key) is not None]
        for read in reads:
            read.done(self.architecture)
        given |= {key: any(told) if self.text_ties else told[0]} if told else {}
        spec = family.spec_from_hf(given | {"architectures": [self.architecture]})
        spec = self.read(config, self.vision_defaults | vision, spec)
        if spec.vision is None or spec.vision.token >= spec.vocab_size:
            raise ModelLoadError("config.json: the id of image tokens is not within vocab_size.")
        return spec

    def parts(self, config: Config) -> tuple[Config, Config]:
        """text_config and vision_config. Errors: ModelLoadError."""
        text, vision = config.get("text_config"), config.get("vision_config")
        if not isinstance(text, dict) or not isinstance(vision, dict):
            raise ModelLoadError("config.json: text_config and vision_config must be objects.")
        return text, vision


def tower(read: ConfigReader, token: int, acts: dict[str, str], **facts: Any) -> VisionSpec:
    """The facts that all configs of towers share. Problems are collected by `read`."""
    config = read.config
    act = config.get("hidden_act")
    if not isinstance(act, str) or act not in acts:
        raise UnsupportedArchitectureError(
            f"vision_config.hidden_act = {act!r} is not supported; {', '.join(acts)} are."
        )
    width, heads = read.size("hidden_size", 1 << 16), read.size("num_attention_heads", 1 << 12)
    if width % heads:
        read.problems.append(f"vision_config.hidden_size ({width}) is no multiple of its heads ({heads})")
    values = {
        "token": token, "width": width, "mlp_size": read.size("intermediate_size", 1 << 20),
        "num_layers": read.size("num_hidden_layers", 1 << 10), "num_heads": heads,
        "patch": read.size("patch_size", 1 << 10), "eps": read.number("layer_norm_eps", 0.0, 1.0), "act": acts[act],
        "channels": read.size("num_channels", 16, default=3),
    }  # fmt: skip
    return VisionSpec(**values | facts)


def with_vision(spec: ModelSpec, vision: VisionSpec, *reads: ConfigReader, **facts: Any) -> ModelSpec:
    """Pure. Errors: ModelLoadError with every problem."""
    for read in reads:
        read.done(spec.architecture)
    return replace(spec, vision=vision, **facts)


def renamed(prefixes: dict[str, str], name: str) -> str:
    """The name with the first of these prefixes that it has replaced. Pure."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
