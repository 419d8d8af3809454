"""Qwen2, Qwen2.5 and Qwen3: Llama's decoder with biases on q, k and v, or from Qwen3 on with an RMS norm on every query
and key head; dense, or with experts in place of the MLP, beside which Qwen2 has one behind a gate for every token."""

from fengine.models.family import DECODER, READ, Family
from fengine.models.moe import EXPERT_FIELDS, moe_layer, with_experts
from fengine.models.reader import FULL, SLIDING, ConfigReader, decoder_spec, stated, windowed
from fengine.models.spec import ModelSpec

WINDOWED = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
FIELDS = {**DECODER, **dict.fromkeys(WINDOWED, READ)}
SPARSE = ("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
SPARSE_FIELDS = {**EXPERT_FIELDS, **dict.fromkeys(SPARSE, READ)}
FIELDS3_MOE = {
    **DECODER, **SPARSE_FIELDS, "attention_bias": READ, "use_sliding_window": READ, "sliding_window": READ,
    "use_qk_norm": "transformers norms always",
    "max_window_layers": "is not read by transformers' Qwen3-MoE: its layers slide all, or none",
}  # fmt: skip


def spec2_from_hf(read: ConfigReader) -> ModelSpec:
    return qwen_windows(read, decoder_spec(read, qkv_bias=True))


def spec3_from_hf(read: ConfigReader) -> ModelSpec:
    if read.config.get("head_dim") is None:
        read.problems.append("head_dim is missing; Qwen3 does not derive it from hidden_size")
    return qwen_windows(read, decoder_spec(read, qk_norm=True))


def moe2_from_hf(read: ConfigReader) -> ModelSpec:
    spec = decoder_spec(read, qkv_bias=read.flag("qkv_bias", default=True))
    spec = with_sparse_layers(read, spec, shared_size=read.size("shared_expert_intermediate_size", 1 << 22))
    return qwen_windows(read, spec, alternate=True)


def moe3_from_hf(read: ConfigReader) -> ModelSpec:
    return windowed(with_sparse_layers(read, decoder_spec(read, qk_norm=True)), window_in_use(read))


def window_in_use(read: ConfigReader) -> int | None:
    return read.size("sliding_window", 1 << 27, 4096) if read.flag("use_sliding_window") else None


def qwen_windows(read: ConfigReader, spec: ModelSpec, alternate: bool = False) -> ModelSpec:
    """With `use_sliding_window` the layers from `max_window_layers` on slide, or, with `alternate`, every other one in
    front of it. Pure."""
    first, window = read.size("max_window_layers", 1 << 12, 28, least=0), window_in_use(read)
    slides = range(0, first, 2) if alternate else range(first, spec.num_layers)
    found = [SLIDING if window is not None and index in slides else FULL for index in range(spec.num_layers)]
    return windowed(spec, window, stated(read.config, window) or found)


def with_sparse_layers(read: ConfigReader, spec: ModelSpec, shared_size: int = 0) -> ModelSpec:
    """Experts in every `decoder_sparse_step`th layer, but for `mlp_only_layers`."""
    step, dense = read.size("decoder_sparse_step", 1 << 12, default=1), read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        read.problems.append(f"mlp_only_layers must be a list of layers, got {dense!r}"[:200])
        dense = []
    layers = tuple(index for index in range(spec.num_layers) if index in dense or (index + 1) % step)
    return with_experts(
        read, spec, read.flag("norm_topk_prob"), "moe_intermediate_size", dense_layers=layers, shared_size=shared_size
    )


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", FIELDS, spec2_from_hf)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", {**FIELDS, "attention_bias": READ}, spec3_from_hf)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM", "qwen2_moe",
    {**FIELDS, **SPARSE_FIELDS, "shared_expert_intermediate_size": READ, "qkv_bias": READ}, moe2_from_hf,
    leaves=moe_layer(),
)  # fmt: skip
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", FIELDS3_MOE, moe3_from_hf, leaves=moe_layer())
