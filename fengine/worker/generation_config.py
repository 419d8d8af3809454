"""A checkpoint's `generation_config.json`: ids that end a text, and the sampling parameters that it
recommends: taken, left alone, or refused."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fengine.core.sampling_params import RECOMMENDED, SamplingParams
from fengine.errors import FengineError, ModelLoadError, UnsupportedFeatureError
from fengine.worker.safetensors_file import read_config, read_json

LENGTH = "a request says itself how much it wants"
SPEED = "how the same result is computed"
OUTPUTS = "chooses what a call of transformers returns"
BEAMS = "of beams, which num_beams asks for"
HARMLESS: Mapping[str, str] = {
    "do_sample": "SGLang and vLLM take what stands beside it in any case",
    **dict.fromkeys(("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time",
                     "num_return_sequences"), LENGTH),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config", "max_cache_len", "disable_compile",
                     "compile_config", "prefill_chunk_size", "low_memory", "continuous_batching_config",
                     "prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens",
                     "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
                     "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind", "is_assistant",
                     "speculation_type", "use_mtp"), SPEED),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_logits", "output_scores",
                     "return_dict_in_generate"), OUTPUTS),
    **dict.fromkeys(("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty"), BEAMS),
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), "ids of tokens, read in any case"),
    "decoder_start_token_id": "of encoder-decoders, which are refused",
    "transformers_version": "says where the file comes from", "_from_model_config": "says where the file comes from",
    "remove_invalid_values": "non-finite logits end their own request",
    "renormalize_logits": "probabilities add up to 1 in any case",
}  # fmt: skip
NEUTRAL: Mapping[str, float | None] = {  # values that ask for nothing, where that is not 0; null does so for all
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
}


def read_eos_ids(directory: Path, overrides: str = "") -> frozenset[int]:
    """The ids that end a text, by generation_config.json (optional) and config.json together. Errors:
    ModelLoadError."""
    config, path = read_config(directory, overrides), directory / "generation_config.json"
    generation, found = read_json(path) if os.path.lexists(path) else {}, set[int]()
    for source in (generation, config, config.get("text_config") or {}):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelLoadError(f"eos_token_id must be a token id, a list of them or null, got {value!r}."[:200])
        found.update(ids)
    return frozenset(found)


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """The recommended parameters of a directory's generation_config.json, if it has one. Errors: ModelLoadError;
    UnsupportedFeatureError with all that would change what is drawn and is not built."""
    path = directory / "generation_config.json"
    given = read_json(path) if os.path.lexists(path) else {}
    bad = [name for name, value in given.items() if name not in RECOMMENDED and name not in HARMLESS
           and value not in (None, "", [], {}, NEUTRAL.get(name, 0))]  # fmt: skip
    if bad:
        shown = ", ".join(f"{name} = {given[name]!r:.80}" for name in bad)
        raise UnsupportedFeatureError(
            f"{path} recommends what is not built: {shown}. Remove it there, or set sampling_defaults to openai."
        )
    found = {name: given[name] for name in RECOMMENDED if given.get(name) is not None}
    if found.get("top_k") == 0:  # transformers' word for off
        found["top_k"] = -1
    try:
        SamplingParams.of(found)
    except FengineError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    return found
