"""The leaves of Params as a family declares them: checkpoint names, shape letters, the axis that ranks cut. Loading,
dummy weights, weight updates and LoRA work from these declarations alone."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fengine.models.kv_state import Params
from fengine.models.sources import HeadOrder, Source
from fengine.models.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_BLOCK = 32  # rows of the head, where ranks cut it
Fill = Literal["unit", "residual", "one", "small"]


class Weight(NamedTuple):
    """A leaf of Params and the checkpoint tensors it is joined from, along dimension 0."""

    path: tuple[str | int, ...]  # ("layers", 3, "wqkv")
    sources: tuple[Source, ...]
    letters: str  # of the shape, e.g. "CD"; two or more: a matrix, packed for its device
    shard: str = ""  # the axis that the ranks of a group cut, always an output; "": every rank holds all
    fill: Fill = "unit"  # of dummy weights: keeps the variance, writes to the residual stream, is one, is near zero
    adapts: bool = False  # LoRA may change it
    optional: bool = False  # a checkpoint may do without; then Params has no such leaf
    stack: int = 0  # so many matrices of equal shape, each of as many sources; 0: one
    wide: bool = False  # kept in float32
    blocks: tuple[int, ...] = ()  # rows of which ranks hold equal parts: those of each source, unless given

    @property
    def whole(self) -> bool:
        """Whether every rank needs all outputs: what goes to the residual stream, and logits."""
        return self.shard in ("D", "V")

    @property
    def axis(self) -> int:
        """The axis of a source, in our order, that ranks cut; behind the experts where one source holds all."""
        return self.letters.find(self.shard) - bool(self.stack) if self.shard else 0

    def rows(self, rank: int, size: int) -> list[list[slice]]:
        """Of each source, the rows that a rank of so many holds. The rows of a vocabulary are cut at multiples of
        VOCAB_BLOCK, so that the last rank may have fewer. Pure."""
        lengths = [source.plain.shape[self.axis] for source in self.sources]
        found, start, blocks = [], 0, list(self.blocks or lengths)
        for length in lengths:
            slices, end = [], start + length
            while blocks and start < end:
                count = blocks.pop(0)
                each, first = self.each(count, size), start - (end - length)
                slices.append(slice(first + min(rank * each, count), first + min((rank + 1) * each, count)))
                start += count
            found.append(slices)
        return found

    def each(self, rows: int, size: int) -> int:
        """How many of so many rows the first rank of a group holds. Pure."""
        return -(-rows // (size * VOCAB_BLOCK)) * VOCAB_BLOCK if self.shard == "V" else rows // size

    @property
    def matrix(self) -> bool:
        """Packed for its device, in the dtype of matrices; vectors, those of each head or expert too, are not."""
        return len(self.letters) > 1 and self.fill in ("unit", "residual")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the joined leaf, before it is packed."""
        shapes = [source.plain.shape for source in self.sources]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1:]
        return (self.stack, rows // self.stack, *columns) if self.stack else (rows, *columns)


def with_bias(norm: Weight) -> Weight:
    """A norm whose leaf holds the bias behind the weight. Pure."""
    weight = norm.sources[0]
    return norm._replace(sources=(weight, weight._replace(name=weight.name.removesuffix("weight") + "bias")))


Parts = list[tuple[str, int]]  # (module name, rows) of what is joined to one leaf


class LayerWeights(NamedTuple):
    """Makes the leaves of layer `index`, whose tensors are named "model.layers.<index>.<module>.<weight or bias>"."""

    index: int

    def _leaf(self, key: str, parts: Parts, columns: tuple[int, ...], tensor: str, letters: str, **facts) -> Weight:
        order = facts.pop("order", {})
        sources = tuple(
            Source(f"model.layers.{self.index}.{name}.{tensor}", (rows, *columns), order.get(name))
            for name, rows in parts
        )
        return Weight(("layers", self.index, key), sources, letters, **facts)

    def matrix(self, key: str, parts: Parts, columns: int, letters: str, **facts) -> Weight:
        """The matrix of a linear layer, cut along its outputs; a LoRA adapter may change it."""
        facts = {"shard": letters[0], "adapts": True} | facts
        return self._leaf(key, parts, (columns,), "weight", letters, **facts)

    def bias(self, key: str, parts: Parts, **facts) -> Weight:
        """The bias of a linear layer, cut with its outputs."""
        letter = key.rpartition("_")[2][-1]
        return self._leaf(key, parts, (), "bias", letter, **{"shard": letter, "fill": "small"} | facts)

    def linear(
        self, key: str, parts: Parts, columns: int, letters: str, bias: str, biased: bool, **facts
    ) -> list[Weight]:
        """The matrix and, if `biased`, its bias under the key `bias`."""
        shared = {name: facts[name] for name in ("order", "blocks") if name in facts}
        found = [self.matrix(key, parts, columns, letters, **facts)]
        return [*found, self.bias(bias, parts, **shared)] if biased else found

    def norm(self, key: str, name: str, *shape: int, bias: bool = False, **facts) -> Weight:
        """The weight of a norm, its bias behind it."""
        letters = key.rpartition("_")[2]
        found = self._leaf(key, [(name, shape[0])], shape[1:], "weight", letters, **{"fill": "one"} | facts)
        return with_bias(found) if bias else found


def attention_weights(spec: ModelSpec, layer: LayerWeights, fused: bool = False) -> list[Weight]:
    """Joined q, k and v, the norms of their heads, and the output projection. `fused`: joined as stored. Pure."""
    width = spec.head_dim
    q, kv = spec.num_heads * width, spec.num_kv_heads * width
    heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
    normed = [("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)]
    qkv = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    if fused:
        heads, qkv = {"self_attn.qkv_proj": spec.num_heads + spec.num_kv_heads}, [("self_attn.qkv_proj", q + 2 * kv)]
    turned = spec.rotary_dim or width
    plain = turned == width and not spec.interleaved

    def order(heads: int) -> HeadOrder | None:
        return None if plain else HeadOrder(heads, width, turned, spec.interleaved)

    orders = {name: order(heads) for name, heads in heads.items()}
    how = {"order": orders, "blocks": (q, kv, kv)}
    found = layer.linear("wqkv", qkv, spec.hidden_size, "CD", "bqkv_C", spec.qkv_bias, **how)
    for name, heads in normed if spec.qk_norm else ():
        path, letters, shape = f"self_attn.{name}", "K", (width,)
        if spec.layer_norm or spec.qk_norm_whole:
            letters, shape = ("HK", (heads, width)) if spec.layer_norm else ("C", (heads * width,))
        cut, turns = "H" if letters == "HK" else "", order(1 if letters == "K" else heads)
        found.append(layer.norm(f"{name}_{letters}", path, *shape, order={path: turns}, shard=cut))
    out = [("self_attn.o_proj", spec.hidden_size)]
    return found + layer.linear("wo", out, q, "DC", "bo_D", spec.o_bias, fill="residual")


def mlp_weights(
    spec: ModelSpec, layer: LayerWeights, ups: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj"),
    down: str = "mlp.down_proj", gated: bool = True,
) -> list[Weight]:  # fmt: skip
    """Gate above up, or up alone, and down. `ups`: the names of the first; one for both: so joined as stored. Pure."""
    blocks = (spec.mlp_size,) * (2 if gated else 1)
    parts = [(name, sum(blocks) // len(ups)) for name in ups]
    key, bias = ("wgate_up", "bgate_up_2F") if gated else ("wup", "bup_F")
    found = layer.linear(key, parts, spec.hidden_size, "FD", bias, spec.mlp_bias, blocks=blocks)
    parts = [(down, spec.hidden_size)]
    return found + layer.linear("wdown", parts, spec.mlp_size, "DF", "bdown_D", spec.mlp_bias, fill="residual")


joined_mlp = partial(mlp_weights, ups=("mlp.gate_up_proj",))
plain_mlp = partial(mlp_weights, ups=("mlp.up_proj",), gated=False)
NORMS = ("attn_norm_D", "attn_post_norm_D", "mlp_norm_D", "mlp_post_norm_D")
PRENORM = ("input_layernorm", None, "post_attention_layernorm", None)


def layer_weights(
    spec: ModelSpec, layer: LayerWeights, norms: tuple[str | None, ...] = PRENORM, fused_qkv: bool = False,
    mlp: "LayerLeaves" = mlp_weights,
) -> list[Weight]:  # fmt: skip
    """Attention, and the leaves of `mlp`. `norms`: the names of those before and behind each; None:
    there is none. Pure."""
    before, behind, before_mlp, behind_mlp = (
        [layer.norm(key, name, spec.hidden_size, bias=spec.norm_bias)] if name is not None else []
        for key, name in zip(NORMS, norms, strict=True)
    )
    attention = attention_weights(spec, layer, fused_qkv)
    return [*before, *attention, *behind, *before_mlp, *mlp(spec, layer), *behind_mlp]


def head_weight(vocab: int, hidden: int) -> Weight:
    """The matrix from hidden states to logits. Pure."""
    return Weight(("unembed",), (Source(HEAD, (vocab, hidden)),), "VD", "V")


LayerLeaves = Callable[[ModelSpec, LayerWeights], list[Weight]]


def decoder_weights(spec: ModelSpec, layer: LayerLeaves = layer_weights) -> list[Weight]:
    """Every leaf of Params that a checkpoint holds, in the order of the forward pass, embeddings first. Pure. Tied,
    "unembed" is "embed" itself; so it is for a model that does not generate, where nobody looks at the logits."""
    table = (spec.vocab_size, spec.hidden_size)
    found = [Weight(("embed",), (Source(EMBEDDING, table),), "VD")]
    for index in range(spec.num_layers):
        found += layer(spec, LayerWeights(index))
    norm = Weight(("final_norm_D",), (Source("model.norm.weight", table[1:]),), "D", fill="one")
    found.append(with_bias(norm) if spec.norm_bias else norm)
    if spec.generates and not spec.tie_embeddings:
        found.append(head_weight(*table))
    if spec.num_labels is not None:
        shape = (spec.num_labels, spec.hidden_size)
        found.append(Weight(("score",), (Source("score.weight", shape),), "CD"))
        found.append(Weight(("score_bias_C",), (Source("score.bias", shape[:1]),), "C", fill="small", optional=True))
    return found


def param_bytes(params: Params) -> int:
    return sum(x.nbytes for x in tree_leaves(params) if isinstance(x, Tensor))
