"""What families with a mixture of experts share: their config's keys and the leaves of a layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fengine.models.family import OUTPUTS, READ, TRAINING, Fields
from fengine.models.reader import ConfigReader
from fengine.models.sources import ExpertOrder, Source
from fengine.models.spec import ExpertSpec, ModelSpec
from fengine.models.weights import Fill, LayerLeaves, LayerWeights, Parts, Weight, layer_weights, mlp_weights

EXPERT_FIELDS: Fields = {
    "num_experts_per_tok": READ, "num_experts": READ, "num_local_experts": READ, "output_router_logits": OUTPUTS,
    "router_aux_loss_coef": TRAINING, "router_jitter_noise": TRAINING,
}  # fmt: skip
COUNTS = ("num_experts", "num_local_experts")  # one number under two names, the older and the newer
MOST = 1 << 12  # experts


def with_experts(
    read: ConfigReader, spec: ModelSpec, renormalise: bool, size: str = "intermediate_size", **facts: Any
) -> ModelSpec:
    """The spec with experts in every layer; `size` is the name of a key, `facts` are those that families differ in."""
    counts = {name: read.config[name] for name in COUNTS if read.config.get(name) is not None}
    if len(set(map(str, counts.values()))) > 1:
        read.problems.append(f"{counts} contradict each other")
    experts, top_k = read.size(next(iter(counts), COUNTS[0]), MOST), read.size("num_experts_per_tok", MOST)
    if top_k > experts:
        read.problems.append(f"num_experts_per_tok ({top_k}) is more than the experts ({experts})")
    return replace(spec, experts=ExpertSpec(experts, top_k, read.size(size, 1 << 22), renormalise, **facts))


def expert_weights(found: ExpertSpec, hidden: int, layer: LayerWeights, block: str = "mlp",
                   names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> list[Weight]:  # fmt: skip
    """Router, each expert's gate above its up, and each one's down; no adapter changes them. Pure."""
    gate, up, down = names
    each = [f"{block}.experts.{index}" for index in range(found.count)]
    gate_up: Parts = [(f"{name}.{part}", found.size) for name in each for part in (gate, up)]
    facts = {"adapts": False, "stack": found.count}
    return [
        layer.matrix("wrouter", [(f"{block}.gate", found.count)], hidden, "ED", adapts=False, shard=""),
        layer.matrix("wexperts_gate_up", gate_up, hidden, "EFD", shard="F", **facts),
        layer.matrix(
            "wexperts_down", [(f"{name}.{down}", hidden) for name in each], found.size, "EDF", shard="D",
            fill="residual", **facts,
        ),
    ]  # fmt: skip


Experts = Callable[[ExpertSpec, int, LayerWeights], list[Weight]]


def expert_stacks(router: str, gate_up: str, down: str, as_gpt_oss: bool = False) -> Experts:
    """As `expert_weights`, by the names in a layer of one tensor for all experts of each kind. Pure.

    `as_gpt_oss`: transposed, gate and up in turns, with biases.
    """

    def leaves(found: ExpertSpec, hidden: int, layer: LayerWeights) -> list[Weight]:
        def stack(key: str, name: str, shape: tuple[int, ...], letters: str, fill: Fill, paired: bool) -> Weight:
            blocks = (found.size, found.size) if paired else ()
            at = f"model.layers.{layer.index}.{name}"
            source = Source(
                at, (found.count, *(shape[::-1] if as_gpt_oss else shape)), ExpertOrder(paired) if as_gpt_oss else None
            )
            return Weight(("layers", layer.index, key), (source,), letters, letters[1], fill, blocks=blocks)

        wide = 2 * found.size
        biases = [
            layer.bias("brouter_E", [(router, found.count)], shard=""),
            stack("bexperts_gate_up_EF", f"{gate_up}_bias", (wide,), "EF", "small", True),
            stack("bexperts_down_ED", f"{down}_bias", (hidden,), "ED", "small", False),
        ]
        return [
            layer.matrix("wrouter", [(router, found.count)], hidden, "ED", adapts=False, shard=""),
            stack("wexperts_gate_up", gate_up, (wide, hidden), "EFD", "unit", True),
            stack("wexperts_down", down, (hidden, found.size), "EDF", "residual", False),
            *(biases if as_gpt_oss else []),
        ]

    return leaves


def shared_weights(found: ExpertSpec, hidden: int, layer: LayerWeights) -> list[Weight]:
    """The expert that every token uses, and its gate, if it has one, which no adapter changes. Pure."""
    name = "mlp.shared_expert" if found.shared_gate else "mlp.shared_experts"
    parts: Parts = [(f"{name}.{part}_proj", found.shared_size) for part in ("gate", "up")]
    gate = [layer.matrix("wshared_gate", [(f"{name}_gate", 1)], hidden, "CD", adapts=False, shard="")]
    return [
        *(gate if found.shared_gate else []),
        layer.matrix("wshared_gate_up", parts, hidden, "FD"),
        layer.matrix("wshared_down", [(f"{name}.down_proj", hidden)], found.shared_size, "DF", fill="residual"),
    ]


def moe_layer(experts: Experts = expert_weights) -> LayerLeaves:
    """Norm, attention, norm, and experts or a gated MLP."""

    def mlp(spec: ModelSpec, layer: LayerWeights) -> list[Weight]:
        found = spec.experts
        if found is None or layer.index in found.dense_layers:
            return mlp_weights(spec, layer)
        shared = shared_weights(found, spec.hidden_size, layer) if found.shared_size else []
        return [*experts(found, spec.hidden_size, layer), *shared]

    return partial(layer_weights, mlp=mlp)
