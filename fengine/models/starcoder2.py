"""StarCoder2: layer norms and linear layers with biases, an MLP without a gate, and often a window in every layer."""

from functools import partial

from fengine.models.family import DECODER, READ, TRAINING, Family
from fengine.models.reader import GELU_TANH, ConfigReader, decoder_spec, sliding_window, windowed
from fengine.models.spec import ModelSpec
from fengine.models.weights import layer_weights, mlp_weights

FIRST = (
    "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
    "scale_attn_weights",
)  # fmt: skip
FIELDS = {
    **DECODER, "sliding_window": READ, "use_bias": READ, "norm_epsilon": READ, "mlp_type": "what transformers builds",
    "norm_type": "what transformers builds", **dict.fromkeys(FIRST, "of StarCoder 1, and not read by transformers"),
    "residual_dropout": TRAINING, "embedding_dropout": TRAINING,
}  # fmt: skip
DEFAULTS = {
    "norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip


def spec_from_hf(read: ConfigReader) -> ModelSpec:
    bias = read.flag("use_bias", default=True)
    spec = decoder_spec(
        read, norm_eps="norm_epsilon", activation=("hidden_act", GELU_TANH), layer_norm=True, norm_bias=True,
        qkv_bias=bias, o_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    return windowed(spec, sliding_window(read))


FAMILY = Family(
    "Starcoder2ForCausalLM", "starcoder2", FIELDS, spec_from_hf, DEFAULTS,
    leaves=partial(layer_weights, mlp=partial(mlp_weights, ups=("mlp.c_fc",), down="mlp.c_proj", gated=False)),
)  # fmt: skip
