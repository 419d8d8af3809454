"""What a `config.json` may contain: every key is read, says nothing about the result, or is refused by name."""

from collections.abc import Mapping
from typing import Any

from fengine.errors import UnsupportedArchitectureError
from fengine.models.spec import Config

Fields = Mapping[str, str]  # key -> READ, or the reason why it changes nothing here
READ = "read"
OFF = (None, False, 0, "", [], {})  # values of a setting that asks for nothing

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
    "matryoshka_dimensions": READ, "is_matryoshka": "said by matryoshka_dimensions",
    "pad_token_id": "padding is never computed", "is_decoder": "what a decoder is here in any case",
    "sep_token_id": "a token's name", "cls_token_id": "a token's name", "mask_token_id": "a token's name",
    "decoder_start_token_id": "of encoder-decoders, which are refused",
    "transformers_version": NAMES, "_name_or_path": NAMES, "auto_map": "code of a checkpoint, which is never imported",
    **dict.fromkeys(("model_max_length", "max_sequence_length", "transformers.js_config"), OTHERS),
    **dict.fromkeys(("sentence_transformers", "sbert_ce_default_activation_function", "problem_type"), SCORES),
    "tokenizer_class": "read by the tokenizer", "unsloth_version": NAMES, "unsloth_fixed": NAMES,
    "initializer_range": TRAINING, "attention_dropout": TRAINING, "gradient_checkpointing": TRAINING,
    "use_cache": SPEED, "return_dict": OUTPUTS, "output_hidden_states": OUTPUTS,
    "output_attentions": OUTPUTS, "torchscript": OUTPUTS, "use_return_dict": OUTPUTS,
    "chunk_size_feed_forward": SPEED, "_attn_implementation": SPEED, "_attn_implementation_autoset": SPEED,
    "attn_implementation": SPEED, "pretraining_tp": SPEED, "max_length": SAMPLING, "min_length": SAMPLING,
    "do_sample": SAMPLING, "temperature": SAMPLING, "top_k": SAMPLING, "top_p": SAMPLING,
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
    unknown = [key for key, value in config.items() if key not in fields and value not in OFF]
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
