"""EAGLE-3: a draft of one layer that goes on from a target's own streams. No model by itself.

    fused_D = fc(three streams of the target)          at position p, with the token of position p + 1
    stream  = fused + attention(norm(embed), norm(fused) side by side);  stream += mlp(norm(stream))
    logits  = head(norm(stream)), over a part of the vocabulary;  the next guess goes on from `stream`

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of LLMs via Training-Time Test"."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fengine.errors import UnsupportedFeatureError
from fengine.models import layers
from fengine.models.family import DECODER, NAMES, OTHERS, READ, TRAINING, check_fields
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.reader import ConfigReader, decoder_spec, refuse_layer_types
from fengine.models.sources import Source
from fengine.models.spec import Config, ModelSpec
from fengine.models.weights import LayerWeights, Weight, attention_weights, mlp_weights
from fengine.ops import edges, linear, rms_norm

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # of the target: see `feature_layers`
SPECULATORS = "transformer_layer_config"  # in vLLM's form of speculators: the layer by itself
FIELDS = {
    **DECODER, "draft_vocab_size": READ, "target_hidden_size": READ, "norm_before_residual": READ,
    "eagle_config": READ, "attention_bias": READ, "mlp_bias": READ, "bias": READ, LAYER_IDS: READ, "layer_types": READ,
    "max_window_layers": "of windows, which use_sliding_window would turn on", "speculators_model_type": READ,
    "speculators_config": "the model that it was trained for, and how much to guess", "speculators_version": NAMES,
    "has_no_defaults_at_init": OTHERS, "embed_requires_grad": TRAINING, "base_model_ep_plan": OTHERS,
}  # fmt: skip
SWITCHES = {  # of eagle_config: what is built
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
}  # fmt: skip
BARRED = -1e30  # a finite logit that is never drawn
HEAD_IDS = "d2t"  # int64: what is added to an id of the head to give one of the target


def is_head(config: Config) -> bool:
    """Whether it is that of a head; the paper's own say LlamaForCausalLM. Pure."""
    told = config.get("architectures")
    return told in [[name] for name in ARCHITECTURES] or (told == ["LlamaForCausalLM"] and "draft_vocab_size" in config)


def flat(config: Config) -> Config:
    """The config of a head as SGLang has it, in vLLM's form of speculators too. Pure."""
    layer = config.get(SPECULATORS)
    if not isinstance(layer, dict):
        return config
    own = {key: value for key, value in config.items() if key != SPECULATORS and value is not None}
    return {"norm_before_residual": True} | layer | own


def spec_from_hf(config: Config) -> ModelSpec:
    """Pure. Errors: ModelLoadError, UnsupportedArchitectureError, UnsupportedFeatureError."""
    check_fields(config, FIELDS, config["architectures"][0])
    spec = decoder_spec(read := ConfigReader(config))
    for name in ("draft_vocab_size", "target_hidden_size"):
        read.size(name, 1 << 24, default=1)
    read.flag("norm_before_residual")
    if not isinstance(told := config.get("eagle_config") or {}, dict):
        read.problems.append(f"eagle_config must be an object, got {told!r:.80}")
    read.done("draft of EAGLE-3")
    refuse_layer_types(config)
    known = {LAYER_IDS, "parallel_draft_heads_num_layers", *SWITCHES}
    switched = any(told.get(name) not in (only, None) for name, only in SWITCHES.items())
    unbuilt = {
        "num_hidden_layers": spec.num_layers != 1, "attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias,
        "bias": config.get("bias"), "quantization_config": config.get("quantization_config"),
        "speculators_model_type": config.get("speculators_model_type", "eagle3") != "eagle3",
        "eagle_config": switched or told.keys() - known,
    }  # fmt: skip
    for name, refused in unbuilt.items():
        if refused:
            raise UnsupportedFeatureError(f"config.json of the EAGLE-3 draft: {name}={config.get(name)!r} is not built")
    return replace(spec, tie_embeddings=False)  # whatever it says: a head has its own


def feature_layers(config: Config, target: ModelSpec) -> tuple[int, ...]:
    """In front of which layers the target's stream is taken. Pure. Errors: UnsupportedFeatureError.

    A config names them so by itself, for vLLM, or in `eagle_config` the layers before, for SGLang."""
    ids, before = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    if not ids and not before:
        return (2, target.num_layers // 2, target.num_layers - 3)
    found = ids or before
    if not isinstance(found, list) or not all(type(index) is int for index in found):
        raise UnsupportedFeatureError(f"config.json of the EAGLE-3 draft: {LAYER_IDS}={found!r:.80} are no layers")
    return tuple(found if ids else [index + 1 for index in found])


def weights(spec: ModelSpec, config: Config, target: ModelSpec) -> list[Weight]:
    """Every leaf that a checkpoint holds; the embedding is the target's. Pure."""
    hidden, layer = spec.hidden_size, LayerWeights(0)
    head = (config.get("draft_vocab_size") or spec.vocab_size, hidden)
    found = [
        Weight(("fc",), (Source("fc.weight", (hidden, 3 * target.hidden_size)),), "DX"),
        layer.norm("input_norm_D", "input_layernorm", hidden),
        layer.norm("hidden_norm_D", "hidden_norm", hidden),
        layer.norm("mlp_norm_D", "post_attention_layernorm", hidden),
        *mlp_weights(spec, layer),
        Weight(("final_norm_D",), (Source("norm.weight", (hidden,)),), "D", fill="one"),
        Weight(("unembed",), (Source("lm_head.weight", head),), "VD"),
    ]
    for weight in attention_weights(spec, layer):
        wide = weight.path[-1] == "wqkv"  # of embedding and stream side by side
        sources = [s._replace(shape=(s.shape[0], 2 * hidden)) if wide else s for s in weight.sources]
        found.append(weight._replace(sources=tuple(sources)))
    prefix = "model.layers.0."
    named = {s: s._replace(name=s.name.replace(prefix, "midlayer.")) for w in found for s in w.sources}
    return [weight._replace(sources=tuple(named[source] for source in weight.sources)) for weight in found]


def stored_name(name: str) -> str:
    """The name that `weights` has for a tensor of a checkpoint, in SGLang's form or vLLM's. Pure."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def fuse(params: Params, spec: ModelSpec, feature_TX: Tensor) -> Tensor:
    """The target's streams as one: [T, D]. Pure."""
    return linear.linear(feature_TX, params["fc"], exact=spec.exact)


def forward(
    params: Params, spec: ModelSpec, kv: KVState, batch: Tensors, stream_TD: Tensor, normed: bool
) -> tuple[KVState, Tensor, Tensor]:
    """(KV state, normed_RD, stream_RD) behind the layer, of each row's last token: of those before only keys and values
    are wanted. `normed`: attention is added to the normed stream. Modifies: the storage of `kv`, which is dead after
    the call."""
    layer: Any = params["layers"][0]
    embed_TD, _ = rms_norm.rows_rms_norm(
        params["embed"].packed, batch["token_T"], layer["input_norm_D"], spec.rms_eps, spec.norm_shift
    )
    hidden_TD = rms_norm.rms_norm(stream_TD, layer["hidden_norm_D"], spec.rms_eps)
    x_TX = torch.cat((embed_TD, hidden_TD), 1)
    rope_MK, residual_RD = params[layer["kind"].rope], hidden_TD if normed else stream_TD
    q_RHK, k_PSGK, v_PSGK = layers.write_kv(layer, spec, rope_MK, kv.k_PSGK[0], kv.v_PSGK[0], batch, x_TX)
    index_R = batch["logit_index_R"]
    if len(q_RHK) > len(index_R):
        q_RHK = edges.take(q_RHK.flatten(1), index_R).unflatten(1, q_RHK.shape[1:])
        residual_RD = edges.take(residual_RD, index_R)
        # torch's kernel, so the keys that this pass has written are there for rows that name one token each
        start_B = torch.arange(len(index_R) + 1, dtype=torch.int32, device=index_R.device)
        batch = {**batch, "q_start_B": start_B}
    delta_RD = layers.attended(layer, spec, q_RHK, k_PSGK, v_PSGK, batch)
    normed_RD, residual_RD = layers.add_norm(delta_RD, residual_RD, (layer["mlp_norm_D"], 0), spec)
    delta_RD = layers.gated_mlp(layer, spec, None, normed_RD)
    normed_RD, stream_RD = layers.add_norm(delta_RD, residual_RD, (params["final_norm_D"], 0), spec)
    return KVState((k_PSGK,), (v_PSGK,)), normed_RD, stream_RD


def unembed(params: Params, spec: ModelSpec, normed_RD: Tensor) -> Tensor:
    """logits_RV in float32 over the target's vocabulary; BARRED where the head has no id. Pure."""
    logits_RH = linear.linear(normed_RD, params["unembed"], out_dtype=torch.float32, exact=spec.exact)
    if "head_ids" not in params:
        return logits_RH
    logits_RV = logits_RH.new_full((len(logits_RH), spec.vocab_size), BARRED)
    return logits_RV.index_copy_(1, params["head_ids"], logits_RH)
