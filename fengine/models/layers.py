"""What decoders are made of, as functions: a family composes its layer of them.

A layer is a function of its own parameters, `layer(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD, residual_TD,
next_norm)`, which returns (normed_TD, residual_TD, k_PSGK, v_PSGK): the stream, normed for what comes next, and the
written pages. Layers of one kind are alike but for the values of their parameters, so one compiled layer serves all.

Attention reads the pages that `rope_kv_write` returned: read the old names, and a compiler must copy every page.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fengine.errors import ModelLoadError
from fengine.models.kv_state import KVState, Params, Tensors
from fengine.models.spec import ModelSpec
from fengine.ops import activations, attention, columns, e4m3, experts, layer_norm, linear, rms_norm, rope

# What layers read of a step.
OF_LAYERS = (
    "pos_T slot_T q_start_B kv_len_R page_table_RN window_slot_U window_table_RY token_A start_S last_key_J".split()
)
Adapters = tuple[Tensor, Tensor]  # token_A, start_S
Normed = Tensor | e4m3.Rows
Norm = tuple[Tensor, int]  # its weight, and `x_group` of the leaf that reads what is normed: not 0, it goes to e4m3
LayerOut = tuple[Any, Tensor, Tensor, Tensor]  # the first is `Normed`
LayerFn = Callable[[Params, ModelSpec, Tensor, Tensor, Tensor, Tensors, Any, Tensor, Norm | None], LayerOut]


def decoder(layer_fn: LayerFn) -> Callable[[Params, ModelSpec, KVState, Tensors], tuple[KVState, Tensor]]:
    """The forward pass of a family with such layers."""

    def forward(params: Params, spec: ModelSpec, kv: KVState, batch: Tensors) -> tuple[KVState, Tensor]:
        """One step over T tokens: the new KV state and hidden_TD after the final norm, in the activations' dtype.
        Modifies: the storage of `kv` (slots slot_T), which is dead after the call."""
        layers, tables = params["layers"], {kind: params[kind] for kind in {x["kind"].rope for x in params["layers"]}}
        if spec.rope_sections and "rope_pos_3I" in batch:
            tables = {
                kind: axes_table(table, batch["rope_pos_3I"], params["rope_axis_K"]) for kind, table in tables.items()
            }
            pos_T = torch.arange(len(batch["pos_T"]), dtype=torch.int32, device=batch["pos_T"].device)
            batch = {**batch, "pos_T": pos_T}
        adapters, final = adapters_of(batch), (params["final_norm_D"], 0)
        first, *norms = [*(norm_of(layer, "attn_norm_D", adapters, "wqkv") for layer in layers), final]
        normed_TD, residual_TD = embed(params, spec, batch, first)
        k_layers, v_layers, features = [], [], []
        images, batch = batch.get("image_row_I"), {name: batch[name] for name in OF_LAYERS if name in batch}
        for index, (layer, next_norm, k_PSGK, v_PSGK) in enumerate(
            zip(layers, norms, kv.k_PSGK, kv.v_PSGK, strict=True)
        ):
            features += [residual_TD] * (index in spec.feature_layers)
            rope_MK = tables[layer["kind"].rope]
            normed_TD, residual_TD, k_PSGK, v_PSGK = layer_fn(
                layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD, residual_TD, next_norm
            )
            if images is not None and spec.vision is not None and index < spec.vision.deepstack:
                residual_TD = residual_TD + image_rows(params, spec, images, index + 1)
                normed_TD = norm(residual_TD, next_norm, spec)
            k_layers.append(k_PSGK)
            v_layers.append(v_PSGK)
        for feature_PSX in kv.feature_PSX:
            keep_features(feature_PSX, features, batch["slot_T"])
        return kv._replace(k_PSGK=tuple(k_layers), v_PSGK=tuple(v_layers)), normed_TD

    return forward


def norm_of(layer: Params, name: str, adapters: Adapters | None, *readers: str) -> Norm | None:
    """A norm of a layer that may have it, and the first of these leaves that there is reads; adapters read it, too, and
    never in e4m3. Pure."""
    reader = next((layer[key] for key in readers if key in layer and adapters is None), None)
    return (layer[name], 0 if reader is None else reader.x_group) if name in layer else None


def axes_table(rope_MK: Tensor, pos_3I: Tensor, axis_K: Tensor) -> Tensor:
    """A rotary table with a row for each token: column i turns by where it stands on axis axis_K[i]. Pure."""
    return rope_MK[pos_3I.long()].gather(0, axis_K.expand(1, pos_3I.shape[1], -1))[0]


def image_rows(params: Params, spec: ModelSpec, row_I: Tensor, part: int) -> Tensor:
    """Of each token that is of an image, part `part` of its row of the table; 0 for a word. Pure."""
    found_ID = params["image_ED"][:, part * spec.hidden_size :][row_I.long(), : spec.hidden_size]
    return torch.where((row_I >= 0)[:, None], found_ID, 0.0)


def keep_features(feature_PSX: Tensor, features: list[Tensor], slot_T: Tensor) -> None:
    """Writes streams side by side to the tokens' slots. Modifies: feature_PSX."""
    if not features:
        return
    feature_TX = torch.cat(features, 1)  # narrower while one layer of each kind is tried for all
    feature_PSX.flatten(0, 1)[:, : feature_TX.shape[1]].index_copy_(0, slot_T.long(), feature_TX.to(feature_PSX.dtype))


def embed(params: Params, spec: ModelSpec, batch: Tensors, first: Norm | None) -> tuple[Any, Tensor]:
    """(`Normed`, residual): the rows of the tokens, normed if there is a norm. Pure."""
    weight_D, group = (params["final_norm_D"], 0) if first is None else first
    token_T = batch["token_T"] % spec.vocab_size if spec.token_types else batch["token_T"]
    normed_TD, residual_TD = rms_norm.rows_rms_norm(
        params["embed"].packed, token_T, weight_D[: spec.hidden_size], spec.rms_eps, spec.norm_shift
    )
    if spec.embed_scale != 1.0:
        residual_TD = residual_TD * params["embed_scale"]  # as a tensor it is rounded to the activations' dtype
    image_row_I = batch.get("image_row_I")
    if image_row_I is not None:
        images_TD = image_rows(params, spec, image_row_I, 0)
        residual_TD = torch.where((image_row_I >= 0)[:, None], images_TD, residual_TD)
    if spec.token_types:
        residual_TD = residual_TD + params["type_ND"][batch["token_T"] // spec.vocab_size]
    if spec.positions:
        residual_TD = residual_TD + params["position_ND"][batch["pos_T"] + spec.position_offset]
    if spec.embed_scale != 1.0 or spec.layer_norm or image_row_I is not None:
        normed_TD = norm(residual_TD, (weight_D, 0), spec)
    if spec.embed_norm:
        return normed_TD, normed_TD
    if first is None:
        return residual_TD, residual_TD
    return e4m3.rows(normed_TD, group) if group and not spec.layer_norm else normed_TD, residual_TD


def norm(x_TD: Tensor, how: Norm, spec: ModelSpec) -> Any:
    """The rows under the model's kind of norm: `Normed`. Pure."""
    weight_D, group = how
    if spec.layer_norm:
        return layer_norm.layer_norm(x_TD, weight_D, spec.rms_eps)
    normed_TD = rms_norm.rms_norm(x_TD, weight_D, spec.rms_eps, spec.norm_shift)
    return e4m3.rows(normed_TD, group) if group else normed_TD


def add_norm(
    delta_TD: Tensor, residual_TD: Tensor, how: Norm | None, spec: ModelSpec, post_D: Tensor | None = None
) -> tuple[Any, Tensor]:
    """(`Normed`, residual) after the delta is added, scaled or normed by `post_D`; without a norm both are the stream.
    Pure."""
    if spec.residual_scale != 1.0:
        delta_TD = delta_TD * spec.residual_scale
    if spec.layer_norm or (how is None and post_D is None):
        residual_TD = residual_TD + delta_TD
        return residual_TD if how is None else norm(residual_TD, how, spec), residual_TD
    weight_D, group = (None, 0) if how is None else how
    return rms_norm.add_rms_norm(delta_TD, residual_TD, weight_D, spec.rms_eps, spec.norm_shift, post_D, group)


def decoder_layer(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors,
    normed_TD: Normed, residual_TD: Tensor, next_norm: Norm | None,
) -> LayerOut:  # fmt: skip
    """residual += attention(normed); residual += down(act(gate) * up) of rms_norm(residual). Which norms stand before
    and after the two is told by the leaves that there are."""
    adapters = adapters_of(batch)
    delta_TD, k_PSGK, v_PSGK = attend(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, normed_TD)
    mlp_norm = norm_of(layer, "mlp_norm_D", adapters, "wgate_up", "wup")
    normed_TD, residual_TD = add_norm(delta_TD, residual_TD, mlp_norm, spec, layer.get("attn_post_norm_D"))
    delta_TD = mlp(layer, spec, adapters, normed_TD)
    normed_TD, residual_TD = add_norm(delta_TD, residual_TD, next_norm, spec, layer.get("mlp_post_norm_D"))
    return normed_TD, residual_TD, k_PSGK, v_PSGK


def attend(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors, x_TD: Normed
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one layer: what it adds to the residual stream, and the written pages."""
    q_THK, k_PSGK, v_PSGK = write_kv(layer, spec, rope_MK, k_PSGK, v_PSGK, batch, x_TD)
    return attended(layer, spec, q_THK, k_PSGK, v_PSGK, batch), k_PSGK, v_PSGK


def write_kv(
    layer: Params, spec: ModelSpec, rope_MK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors, x_TD: Normed
) -> tuple[Tensor, Tensor, Tensor]:
    """q_THK, and the written pages."""
    qkv_TC = linear.linear(x_TD, layer["wqkv"], layer.get("bqkv_C"), adapters_of(batch), exact=spec.exact)
    where = (rope_MK, batch["pos_T"], places(layer, batch)[0], k_PSGK, v_PSGK, spec.num_heads)
    if "q_norm_C" in layer or "q_norm_HK" in layer:
        return rope.rope_kv_write(norm_qk(layer, spec, qkv_TC), *where)
    turned = layer.get("q_turned_norm_K")
    q_norm_K, k_norm_K = layer.get("q_norm_K"), layer.get("k_norm_K")
    if turned is not None:
        q_norm_K = k_norm_K = torch.ones_like(turned)
    q_THK, k_PSGK, v_PSGK = rope.rope_kv_write(qkv_TC, *where, q_norm_K, k_norm_K, spec.rms_eps, spec.norm_shift)
    if turned is not None:  # turning keeps a norm, so only the weights stand behind it: both may go with q
        q_THK = q_THK * (turned * layer["k_turned_norm_K"])
    return q_THK, k_PSGK, v_PSGK


def attended(layer: Params, spec: ModelSpec, q_THK: Tensor, k_PSGK: Tensor, v_PSGK: Tensor, batch: Tensors) -> Tensor:
    """What attention over written pages adds to the residual stream. Pure."""
    out_THK = attention.attention(
        q_THK, k_PSGK, v_PSGK, batch["q_start_B"], batch["kv_len_R"], places(layer, batch)[1], spec.scale, spec.causal,
        layer["kind"].window, spec.attention_cap, layer.get("sinks_H"), batch.get("last_key_J"),
    )  # fmt: skip
    return linear.linear(out_THK.flatten(1), layer["wo"], layer.get("bo_D"), adapters_of(batch), exact=spec.exact)


def adapters_of(batch: Tensors) -> Adapters | None:
    """Whose tokens have LoRA adapters. Pure."""
    return (batch["token_A"], batch["start_S"]) if "token_A" in batch else None


def places(layer: Params, batch: Tensors) -> tuple[Tensor, Tensor]:
    """Slots and page tables of the group of pages to which the layer belongs. Pure."""
    if not layer["kind"].window or "window_slot_U" not in batch:
        return batch["slot_T"], batch["page_table_RN"]
    return batch["window_slot_U"], batch["window_table_RY"]


def norm_qk(layer: Params, spec: ModelSpec, qkv_TC: Tensor) -> Tensor:
    """q and k normed over all their heads at once, or each head by a layer norm with weights of its own. Pure."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_TC, k_TC, v_TC = qkv_TC.split((q, kv, kv), 1)
    if "q_norm_HK" in layer:
        q_TC, k_TC = norm_heads(q_TC, layer["q_norm_HK"], spec), norm_heads(k_TC, layer["k_norm_HK"], spec)
    else:
        leaf, norms = layer["wqkv"], (layer["q_norm_C"], layer["k_norm_C"])
        q_TC, k_TC = (
            columns.over_all(leaf, x_TC, lambda x_TC, norm_C=norm_C: rms_norm.rms_norm(x_TC, norm_C, spec.rms_eps))
            for x_TC, norm_C in zip((q_TC, k_TC), norms, strict=True)
        )
    return torch.cat((q_TC, k_TC, v_TC), 1)


def norm_heads(x_TC: Tensor, weight_HK: Tensor, spec: ModelSpec) -> Tensor:
    """Each head of each token under a layer norm, times the head's own weights. Pure."""
    x_NK = x_TC.reshape(-1, spec.head_dim)
    normed_NK = layer_norm.layer_norm(x_NK, torch.ones_like(weight_HK[0]), spec.rms_eps)
    return (normed_NK.unflatten(0, (-1, len(weight_HK))) * weight_HK).flatten(1)


def mlp(layer: Params, spec: ModelSpec, adapters: Adapters | None, x_TD: Any) -> Tensor:
    """The experts, the gated MLP or the plain one, told by the leaves that there are. Pure."""
    if "wrouter" in layer:
        return experts_mlp(layer, spec, adapters, x_TD)
    if "wgate_up" in layer:
        return gated_mlp(layer, spec, adapters, x_TD)
    x_TF = linear.linear(x_TD, layer["wup"], layer.get("bup_F"), adapters, exact=spec.exact)
    x_TF = activations.activate(x_TF, spec.act)
    return linear.linear(x_TF, layer["wdown"], layer.get("bdown_D"), adapters, exact=spec.exact)


def gated_mlp(layer: Params, spec: ModelSpec, adapters: Adapters | None, x_TD: Any) -> Tensor:
    """down(act(gate) * up). Pure."""
    w, bias_D = layer["wdown"], layer.get("bdown_D")
    group = w.x_group if adapters is None else 0

    def gated(x_TD: Any) -> Any:
        return linear.gated_linear(
            x_TD, layer["wgate_up"], layer.get("bgate_up_2F"), adapters, spec.exact, spec.act, group
        )

    if isinstance(w, columns.Columns):
        return columns.product(gated, x_TD, w, bias_D, adapters, spec.exact)
    return linear.linear(gated(x_TD), w, bias_D, adapters, exact=spec.exact)


def experts_mlp(layer: Params, spec: ModelSpec, adapters: Adapters | None, x_TD: Tensor) -> Tensor:
    """The sum of each token's experts and, where there is one, the shared expert behind a sigmoid gate. Pure."""
    found, shared_TD, gate_T1 = spec.experts, None, None
    if found is None:
        raise ModelLoadError("a layer has a router, and its spec no experts")
    if "wshared_gate" in layer:
        gate_T1 = linear.linear(x_TD, layer["wshared_gate"], out_dtype=torch.float32, exact=spec.exact)
    if "wshared_down" in layer:
        product_TF = linear.gated_linear(x_TD, layer["wshared_gate_up"], None, adapters, spec.exact)
        shared_TD = linear.linear(product_TF, layer["wshared_down"], None, adapters, exact=spec.exact)
    weights, ranks = experts.weights_of(
        layer["wexperts_gate_up"], layer["wexperts_down"], layer.get("bexperts_gate_up_EF"),
        layer.get("bexperts_down_ED"), layer.get("correction_E"),
    )  # fmt: skip
    routing = experts.Routing(found.top_k, found.renormalise, found.sigmoid, found.scale)
    return experts.moe(
        x_TD, layer["wrouter"], weights, routing, layer.get("brouter_E"), shared_TD, gate_T1, found.limit, ranks,
        found.size,
    )  # fmt: skip


def unembed(params: Params, spec: ModelSpec, hidden_RD: Tensor) -> Tensor:
    """logits_RV in float32. Pure."""
    logits_RV = linear.linear(hidden_RD, params["unembed"], out_dtype=torch.float32, exact=spec.exact)
    logits_RV = logits_RV if spec.logit_scale == 1.0 else logits_RV * spec.logit_scale
    return activations.soft_cap(logits_RV, spec.logit_cap) if spec.logit_cap else logits_RV
