"""Llama (1 to 3.x), and the decoder body that Qwen2 and Qwen3 share: what differs is in the spec and the parameters.

    hidden = embed[token]
    per layer:  hidden += attention(rms_norm(hidden));  hidden += down(silu(gate) * up) of rms_norm(hidden)
    logits = unembed(rms_norm(hidden))

Norm weights and biases carry the activations' dtype (float32 on the CPU, the model's on CUDA); matrices keep theirs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fengine.models.kv_state import AdapterBatch, KVState, Params, StepBatch
from fengine.models.spec import Config, ModelSpec, bias_flag, decoder_spec
from fengine.ops import attention, linear, lora, qkv, rms_norm, rope, silu_mul

ARCHITECTURE = "LlamaForCausalLM"


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: as `spec.decoder_spec`."""
    bias = bias_flag(config, "attention_bias")
    return decoder_spec(config, ARCHITECTURE, qkv_bias=bias, o_bias=bias, mlp_bias=bias_flag(config, "mlp_bias"))


def forward(params: Params, spec: ModelSpec, kv: KVState, batch: StepBatch) -> tuple[KVState, Tensor]:
    """One step over T tokens: the new KV state and hidden_TD after the final norm, in the activations' dtype.

    Modifies: the storage of `kv` (slots batch.slot_T), which is dead after the call.
    """
    layers = params["layers"]
    norms = [layer["attn_norm_D"] for layer in layers[1:]] + [params["final_norm_D"]]
    normed_TD, residual_TD = rms_norm.rows_rms_norm(
        params["embed"], batch.token_T, layers[0]["attn_norm_D"], spec.rms_eps
    )
    k_layers, v_layers = [], []
    for layer, next_norm_D, k_PSGK, v_PSGK in zip(layers, norms, kv.k_PSGK, kv.v_PSGK, strict=True):
        delta_TD, k_PSGK, v_PSGK = _attend(layer, spec, params["rope_MK"], k_PSGK, v_PSGK, batch, normed_TD)
        normed_TD, residual_TD = rms_norm.add_rms_norm(delta_TD, residual_TD, layer["mlp_norm_D"], spec.rms_eps)
        delta_TD = _mlp(layer, spec, batch.adapters, normed_TD)
        normed_TD, residual_TD = rms_norm.add_rms_norm(delta_TD, residual_TD, next_norm_D, spec.rms_eps)
        del delta_TD  # not beside the next layer's attention: one layer shows what all take (`CudaRunner.prepare`)
        k_layers.append(k_PSGK)
        v_layers.append(v_PSGK)
    return KVState(tuple(k_layers), tuple(v_layers)), normed_TD


def unembed(params: Params, spec: ModelSpec, hidden_RD: Tensor) -> Tensor:
    """logits_RV in float32. Pure."""
    return linear.linear(hidden_RD, params["unembed"], spec.vocab_size, out_dtype=torch.float32, exact=spec.exact)


def _attend(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: StepBatch, x_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one layer: its residual delta_TD and the written pages.

    Attention reads the pages that `qkv_rope_write` returned: read the old names, and the compiler must copy every page.
    """
    where = (rope_MK, batch.pos_T, batch.slot_T, k_PSGK, v_PSGK, spec.num_heads)
    norms = (layer.get("q_norm_K"), layer.get("k_norm_K"), spec.rms_eps)
    if batch.adapters is None:
        q_THK, k_PSGK, v_PSGK = qkv.qkv_rope_write(
            x_TD, layer["wqkv"], layer.get("bqkv_C"), *where, *norms, exact=spec.exact
        )
    else:  # the same bits where no adapter is added
        channels = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv_TC = _linear(layer, "wqkv", channels, layer.get("bqkv_C"), spec, batch.adapters, x_TD)
        q_THK, k_PSGK, v_PSGK = rope.rope_kv_write(qkv_TC, *where, *norms)
    out_THK = attention.attention(
        q_THK, k_PSGK, v_PSGK, batch.q_start_B, batch.kv_len_R, batch.page_table_RN, spec.head_dim**-0.5
    )
    out_TC = out_THK.flatten(1)
    delta_TD = _linear(layer, "wo", spec.hidden_size, layer.get("bo_D"), spec, batch.adapters, out_TC)
    return delta_TD, k_PSGK, v_PSGK


def _mlp(layer: Params, spec: ModelSpec, adapters: AdapterBatch | None, x_TD: Tensor) -> Tensor:
    bias_2F = layer.get("bgate_up_2F")
    if adapters is None:
        product_TF = linear.gated_linear(x_TD, layer["wgate_up"], spec.mlp_size, bias_2F)
    else:  # the same bits where no adapter is added
        both_T2F = _linear(layer, "wgate_up", 2 * spec.mlp_size, bias_2F, spec, adapters, x_TD)
        product_TF = silu_mul.silu_mul(both_T2F)
    return _linear(layer, "wdown", spec.hidden_size, layer.get("bdown_D"), spec, adapters, product_TF)


def _linear(
    layer: Params, key: str, n: int, bias_N: Tensor | None, spec: ModelSpec, adapters: AdapterBatch | None, x_TK: Tensor
) -> Tensor:
    """The linear layer `key`, with the batch's LoRA adapters. Pure."""
    if adapters is None or key not in layer["lora"]:
        return linear.linear(x_TK, layer[key], n, bias_N, exact=spec.exact)
    return lora.lora_linear(x_TK, layer[key], n, bias_N, layer["lora"][key], *adapters, exact=spec.exact)


class Source(NamedTuple):
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


class Weight(NamedTuple):
    """A leaf of Params and the checkpoint tensors it is joined from, along dimension 0. Matrices are packed."""

    path: tuple[str | int, ...]  # ("layers", 3, "wqkv")
    sources: tuple[Source, ...]
    optional: bool = False  # a checkpoint may do without; then Params has no such leaf


def weights(spec: ModelSpec) -> list[Weight]:
    """Every leaf of Params but "rope_MK", in the order of the forward pass. Pure.

    Tied, "unembed" is "embed" itself; so it is for a model that does not generate, where nobody looks at the logits.
    """
    top = [
        Weight(("embed",), (Source("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size)),)),
        Weight(("final_norm_D",), (Source("model.norm.weight", (spec.hidden_size,)),)),
    ]
    if spec.generates and not spec.tie_embeddings:
        top.append(Weight(("unembed",), (Source("lm_head.weight", (spec.vocab_size, spec.hidden_size)),)))
    if spec.num_labels is not None:
        top.append(Weight(("score_CD",), (Source("score.weight", (spec.num_labels, spec.hidden_size)),)))
        top.append(Weight(("score_bias_C",), (Source("score.bias", (spec.num_labels,)),), optional=True))
    return top[:1] + [weight for index in range(spec.num_layers) for weight in _layer_weights(spec, index)] + top[1:]


def _layer_weights(spec: ModelSpec, index: int) -> list[Weight]:
    width, hidden, mlp = spec.head_dim, spec.hidden_size, spec.mlp_size
    q, kv = spec.num_heads * width, spec.num_kv_heads * width
    qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    gate_up = [("mlp.gate_proj", mlp), ("mlp.up_proj", mlp)]
    out, down = [("self_attn.o_proj", hidden)], [("mlp.down_proj", hidden)]

    def weight(key: str, parts: list[tuple[str, int]], columns: int | None, kind: str = "weight") -> Weight:
        shapes = [(name, (rows,) if columns is None else (rows, columns)) for name, rows in parts]
        sources = tuple(Source(f"model.layers.{index}.{name}.{kind}", shape) for name, shape in shapes)
        return Weight(("layers", index, key), sources)

    table = [
        (True, weight("attn_norm_D", [("input_layernorm", hidden)], None)),
        (True, weight("wqkv", qkv, hidden)),
        (spec.qkv_bias, weight("bqkv_C", qkv, None, "bias")),
        (spec.qk_norm, weight("q_norm_K", [("self_attn.q_norm", width)], None)),
        (spec.qk_norm, weight("k_norm_K", [("self_attn.k_norm", width)], None)),
        (True, weight("wo", out, q)),
        (spec.o_bias, weight("bo_D", out, None, "bias")),
        (True, weight("mlp_norm_D", [("post_attention_layernorm", hidden)], None)),
        (True, weight("wgate_up", gate_up, hidden)),
        (spec.mlp_bias, weight("bgate_up_2F", gate_up, None, "bias")),
        (True, weight("wdown", down, mlp)),
        (spec.mlp_bias, weight("bdown_D", down, None, "bias")),
    ]
    return [entry for present, entry in table if present]
