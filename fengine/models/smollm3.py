"""SmolLM3: Llama's decoder in which some layers have no rotary embedding."""

from dataclasses import replace

from fengine.models.family import DECODER, READ, Family
from fengine.models.reader import FULL, SLIDING, ConfigReader, decoder_spec, sliding_window, stated, windowed
from fengine.models.rope import NONE
from fengine.models.spec import LayerKind, ModelSpec

OWN = ("no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "sliding_window", "layer_types")
FIELDS = {**DECODER, "attention_bias": READ, "mlp_bias": READ, **dict.fromkeys(OWN, READ),
          "max_window_layers": "is not read by transformers"}  # fmt: skip
DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6}


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    spec, interval = decoder_spec(read), read.size("no_rope_layer_interval", 1 << 12, default=4)
    window = sliding_window(read) if read.flag("use_sliding_window") else None
    turns = read.config.get("no_rope_layers")
    if turns is None:
        turns = [int((index + 1) % interval != 0) for index in range(spec.num_layers)]
    if not isinstance(turns, list) or len(turns) != spec.num_layers or any(turn not in (0, 1) for turn in turns):
        read.problems.append(f"no_rope_layers must be a 0 or 1 for each layer, got {turns!r:.200}")
        return spec
    kinds = tuple(LayerKind(rope="rope_MK" if turn else NONE) for turn in turns)
    found = [SLIDING if window is not None and not turn else FULL for turn in turns]
    return windowed(replace(spec, kinds=kinds), window, stated(read.config, window) or found)


FAMILY = Family("SmolLM3ForCausalLM", "smollm3", FIELDS, spec_from_hf, DEFAULTS)
