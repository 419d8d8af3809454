"""Qwen2, Qwen2.5 and Qwen3: Llama's decoder with biases on q, k and v, or from Qwen3 on with an RMS norm on every query
and key head; dense, or with experts in place of the MLP, beside which Qwen2 has one behind a gate for every token."""

from dataclasses import replace

from fengine.errors import ModelLoadError
from fengine.models.family import DECODER, READ, Family
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import FULL, SLIDING, ConfigReader, decoder_spec, stated, windowed
from fengine.models.spec import Config, ModelSpec

WINDOWED = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
FIELDS = {**DECODER, **dict.fromkeys(WINDOWED, READ)}
SPARSE = ("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
SPARSE_FIELDS = {**EXPERT_FIELDS, **dict.fromkeys(SPARSE, READ)}
FIELDS3_MOE = {
    **DECODER, **SPARSE_FIELDS, "attention_bias": READ, "use_sliding_window": READ, "sliding_window": READ,
    "use_qk_norm": "transformers norms always",
    "max_window_layers": "is not read by transformers' Qwen3-MoE: its layers slide all, or none",
}  # fmt: skip


def spec2_from_hf(config: Config) -> ModelSpec:
    return qwen_windows(config, decoder_spec(config, qkv_bias=True))


def spec3_from_hf(config: Config) -> ModelSpec:
    if config.get("head_dim") is None:
        raise ModelLoadError("config.json: head_dim is missing; Qwen3 does not derive it from hidden_size.")
    return qwen_windows(config, decoder_spec(config, qk_norm=True))


def moe2_from_hf(config: Config) -> ModelSpec:
    read = ConfigReader(config)
    spec = decoder_spec(config, qkv_bias=read.flag("qkv_bias", default=True))
    shared = read.size("shared_expert_intermediate_size", 1 << 22)
    spec = qwen_windows(config, with_sparse_layers(read, spec), alternate=True)
    return replace(spec, experts=replace(spec.experts, shared_size=shared)) if spec.experts else spec


def moe3_from_hf(config: Config) -> ModelSpec:
    read = ConfigReader(config)
    spec = decoder_spec(config, qk_norm=True)
    window = read.size("sliding_window", 1 << 27, 4096) if read.flag("use_sliding_window") else None
    return windowed(with_sparse_layers(read, spec), window)


def qwen_windows(config: Config, spec: ModelSpec, alternate: bool = False) -> ModelSpec:
    """With `use_sliding_window` the layers from `max_window_layers` on slide, or, with `alternate`, every other one in
    front of it. Pure."""
    read = ConfigReader(config)
    first = read.size("max_window_layers", 1 << 12, 28, least=0)
    window = read.size("sliding_window", 1 << 27, 4096) if read.flag("use_sliding_window") else None
    read.done(spec.architecture)
    slides = range(0, first, 2) if alternate else range(first, spec.num_layers)
    found = [SLIDING if window is not None and index in slides else FULL for index in range(spec.num_layers)]
    return windowed(spec, window, stated(config, window) or found)


def with_sparse_layers(read: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Experts in every `decoder_sparse_step`th layer, but for `mlp_only_layers`. Errors: as `with_experts`."""
    step, dense = read.size("decoder_sparse_step", 1 << 12, default=1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        read.problems.append(f"mlp_only_layers must be a list of layers, got {dense!r}"[:200])
        dense = []
    renormalise = read.flag("norm_topk_prob")
    spec = with_experts(read, spec, "moe_intermediate_size", renormalise)
    layers = tuple(index for index in range(spec.num_layers) if index in dense or (index + 1) % step)
    return replace(spec, experts=replace(spec.experts, dense_layers=layers)) if spec.experts else spec


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", FIELDS, spec2_from_hf)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", {**FIELDS, "attention_bias": READ}, spec3_from_hf)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM", "qwen2_moe",
    {**FIELDS, **SPARSE_FIELDS, "shared_expert_intermediate_size": READ, "qkv_bias": READ}, moe2_from_hf,
    leaves=moe_layer(),
)  # fmt: skip
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", FIELDS3_MOE, moe3_from_hf, leaves=moe_layer())
