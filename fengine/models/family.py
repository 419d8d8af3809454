"""`Family`: what one file of a model family brings, and the architectures that it makes of it. Of a `config.json` every
key is read, says nothing about the result, or is refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fengine.errors import UnsupportedArchitectureError
from fengine.models import layers
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, ModelSpec, VisionSpec, embedding_spec
from fengine.models.weights import LayerLeaves, Weight, decoder_weights, layer_weights

Fields = Mapping[str, str]  # key -> READ, or the reason why it changes nothing here
READ = "read"

NAMES = "says where the checkpoint comes from"
TRAINING = "of training: dropout, losses and initialisation do nothing in inference"
OUTPUTS = "chooses what a call of transformers returns"
SAMPLING = "a default of sampling, which generation_config.json holds"
SPEED = "how the same result is computed"
SCORES = "what is made of a head's numbers: by the server, the engine tells them as they are"
OTHERS = "of other programs: transformers does not look at it"

COMMON: Fields = {
    "architectures": READ, "model_type": READ, "dtype": READ, "torch_dtype": READ, "bos_token_id": READ,
    "eos_token_id": READ, "id2label": READ, "num_labels": READ, "label2id": "names of labels",
    "matryoshka_dimensions": READ, "is_matryoshka": "said by matryoshka_dimensions", "_num_labels": "id2label counts",
    "pad_token_id": "padding is never computed", "is_decoder": "what a decoder is here in any case",
    "sep_token_id": "a token's name", "cls_token_id": "a token's name", "mask_token_id": "a token's name",
    "decoder_start_token_id": "of encoder-decoders, which are refused",
    **dict.fromkeys(("transformers_version", "_name_or_path", "finetuning_task"), NAMES),
    "auto_map": "code of a checkpoint, which is never imported",
    **dict.fromkeys(("model_max_length", "max_sequence_length", "transformers.js_config"), OTHERS),
    **dict.fromkeys(("sentence_transformers", "sbert_ce_default_activation_function", "problem_type"), SCORES),
    "tokenizer_class": "read by the tokenizer", "unsloth_version": NAMES, "unsloth_fixed": NAMES,
    "initializer_range": TRAINING, "attention_dropout": TRAINING, "gradient_checkpointing": TRAINING,
    "use_cache": SPEED, "return_dict": OUTPUTS, "output_hidden_states": OUTPUTS,
    "output_attentions": OUTPUTS, "torchscript": OUTPUTS, "use_return_dict": OUTPUTS,
    "chunk_size_feed_forward": SPEED, "_attn_implementation": SPEED, "_attn_implementation_autoset": SPEED,
    "attn_implementation": SPEED, "_flash_attn_2_enabled": SPEED, "pretraining_tp": SPEED, "max_length": SAMPLING,
    "min_length": SAMPLING, "do_sample": SAMPLING, "temperature": SAMPLING, "top_k": SAMPLING, "top_p": SAMPLING,
    "typical_p": SAMPLING, "num_beams": SAMPLING, "num_beam_groups": SAMPLING, "diversity_penalty": SAMPLING,
    "length_penalty": SAMPLING, "early_stopping": SAMPLING, "repetition_penalty": SAMPLING,
    "no_repeat_ngram_size": SAMPLING, "encoder_no_repeat_ngram_size": SAMPLING, "bad_words_ids": SAMPLING,
    "num_return_sequences": SAMPLING, "output_scores": SAMPLING, "return_dict_in_generate": SAMPLING,
    "forced_bos_token_id": SAMPLING, "forced_eos_token_id": SAMPLING, "remove_invalid_values": SAMPLING,
    "exponential_decay_length_penalty": SAMPLING, "suppress_tokens": SAMPLING, "begin_suppress_tokens": SAMPLING,
    "prefix": SAMPLING, "quantization_config": READ, "compression_config": READ,
}  # fmt: skip

DECODER: Fields = {
    **COMMON, "vocab_size": READ, "hidden_size": READ, "intermediate_size": READ, "num_hidden_layers": READ,
    "num_attention_heads": READ, "num_key_value_heads": READ, "head_dim": READ, "hidden_act": READ,
    "max_position_embeddings": READ, "rms_norm_eps": READ, "tie_word_embeddings": READ, "rope_theta": READ,
    "rope_scaling": READ, "rope_parameters": READ, "partial_rotary_factor": READ,
    "original_max_position_embeddings": READ, "is_causal": READ,
}  # fmt: skip


def check_fields(config: Config, fields: Fields, architecture: str) -> None:
    """A key that is not in `fields` is refused, unless it is off. Errors: UnsupportedArchitectureError with every such
    key, one a line."""
    unknown = [key for key, value in config.items() if value and key not in fields]
    if unknown:
        shown = "\n  ".join(f"{key} = {config[key]!r}"[:200] for key in unknown)
        raise UnsupportedArchitectureError(
            f"config.json has keys that may change the result and are not built for {architecture}; remove those that "
            f"do not:\n  {shown}"
        )


def refuse_others(config: Config, built: Mapping[str, Any]) -> None:
    """Errors: UnsupportedArchitectureError for another value than the one that is built of a setting."""
    for name, only in built.items():
        if config.get(name, only) != only:
            raise UnsupportedArchitectureError(f"{name} = {config[name]!r:.80} is not supported; {only!r} is.")


def check_model_type(config: Config, model_type: str, architecture: str) -> None:
    """Errors: UnsupportedArchitectureError, naming both, if `model_type` contradicts `architectures`."""
    found = config.get("model_type", model_type)
    if found != model_type:
        raise UnsupportedArchitectureError(
            f"config.json contradicts itself: model_type = {found!r}, but architectures = [{architecture!r}], whose "
            f"model_type is {model_type!r}; correct one of them."
        )


SpecReader = Callable[[ConfigReader], ModelSpec]  # pure; collects problems; errors: as `reader.decoder_spec`
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

    spec_from_hf: Callable[[Config], ModelSpec]  # errors: ModelLoadError and kinds
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
    leaves: LayerLeaves = layer_weights  # of one layer
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
        read = ConfigReader({**self.defaults, **config, "architectures": [architecture]})
        spec = self.spec_from_hf(read)
        if architecture != self.architecture:
            spec = embedding_spec(spec)
        if architecture.endswith("ForSequenceClassification"):
            spec = replace(spec, num_labels=labels(read))
        read.done(architecture)
        return spec


def labels(read: ConfigReader) -> int:
    """How many outputs a classifier has. As transformers: as many as `id2label` has entries; else `num_labels`; else
    2."""
    found = read.config.get("id2label")
    if found is not None and not isinstance(found, dict):
        read.problems.append(f"id2label must be an object or null, got {found!r}"[:200])
        return 1
    return len(found) if found else read.size("num_labels", 1 << 20, default=2)
