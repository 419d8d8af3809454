"""`VisionFamily`: a decoder of one of the families, and a tower whose embeddings stand in for placeholder tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fengine.errors import ModelLoadError, UnsupportedArchitectureError
from fengine.models import layers, llama, mistral, qwen
from fengine.models.family import COMMON, READ, Family, Fields, Model, Vision, check_fields, check_model_type
from fengine.models.reader import Acts, ConfigReader, activation_of
from fengine.models.spec import Config, ModelSpec, VisionSpec
from fengine.models.weights import LayerLeaves, Weight, decoder_weights, layer_weights

TEXTS = {family.model_type: family for family in (llama.FAMILY, mistral.TEXT, qwen.QWEN2, qwen.QWEN3)}
WHOLE: Fields = {**COMMON, "text_config": READ, "vision_config": READ, "tie_word_embeddings": READ}


class VisionFamily(NamedTuple):
    """`fields`: of the whole config; `vision_fields`: of its vision_config; `texts`: families of its decoder by the
    model_type of text_config; `read`: the decoder's spec with the tower's facts, by readers of the whole config and of
    its vision_config (errors: ModelLoadError and kinds); `weights`: the tower's leaves, by the decoder's hidden size;
    `rename`: our name of a checkpoint's tensor, or ""."""

    architecture: str
    model_type: str
    fields: Fields
    vision_fields: Fields
    read: Callable[[ConfigReader, ConfigReader, ModelSpec], ModelSpec]
    weights: Callable[[int, Any], list[Weight]]
    vision: Vision
    rename: Callable[[str], str]
    texts: dict[str, Family] = TEXTS
    text_defaults: Config = {}
    vision_defaults: Config = {}
    leaves: LayerLeaves = layer_weights  # of a layer of the decoder
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
        whole, own, part = ConfigReader(config), ConfigReader(text), ConfigReader(self.vision_defaults | vision)
        key = "tie_word_embeddings"  # where neither tells, the decoder's default
        told = [read.flag(key) for read in (whole, own) if read.config.get(key) is not None]
        given = family.defaults | self.text_defaults | text | {"architectures": [self.architecture]}
        own = own.changed(given | ({key: any(told) if self.text_ties else told[0]} if told else {}))
        spec = self.read(whole, part, family.spec_from_hf(own))
        for read in (whole, own, part):
            read.done(self.architecture)
        if spec.vision is None or spec.vision.token >= spec.vocab_size:
            raise ModelLoadError("config.json: the id of image tokens is not within vocab_size.")
        return spec

    def parts(self, config: Config) -> tuple[Config, Config]:
        """text_config and vision_config. Errors: ModelLoadError."""
        text, vision = config.get("text_config"), config.get("vision_config")
        if not isinstance(text, dict) or not isinstance(vision, dict):
            raise ModelLoadError("config.json: text_config and vision_config must be objects.")
        return text, vision


def tower(read: ConfigReader, token: int, acts: Acts, **facts: Any) -> VisionSpec:
    """The facts that all configs of towers share. Problems are collected by `read`."""
    width, heads = read.size("hidden_size", 1 << 16), read.size("num_attention_heads", 1 << 12)
    if width % heads:
        read.problems.append(f"vision_config.hidden_size ({width}) is no multiple of its heads ({heads})")
    values = {
        "token": token, "width": width, "mlp_size": read.size("intermediate_size", 1 << 20),
        "num_layers": read.size("num_hidden_layers", 1 << 10), "num_heads": heads,
        "patch": read.size("patch_size", 1 << 10), "eps": read.number("layer_norm_eps", 0.0, 1.0), 
        "act": activation_of("vision_config.hidden_act", read.config.get("hidden_act"), acts),
        "channels": read.size("num_channels", 16, default=3),
    }  # fmt: skip
    return VisionSpec(**values | facts)


def renamed(prefixes: dict[str, str], name: str) -> str:
    """The name with the first of these prefixes that it has replaced. Pure."""
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
