"""`ModelSpec`: the hashable facts of one architecture. No torch."""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

Config = dict[str, Any]  # a parsed config.json


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, in the terms of transformers' `modeling_rope_utils`."""

    theta: float
    kind: str = "default"  # or linear, dynamic, llama3, yarn, longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    short_factor: tuple[float, ...] = ()  # longrope: up to original_max_position tokens of context
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerKind:
    """What tells layers of equal shapes apart; static, stored as "kind" in a layer's parameters."""

    window: int = 0  # keys that a token sees, itself the last; 0: all
    rope: str = "rope_MK"  # which table of Params turns q and k


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP; ops/experts.py says how it is computed."""

    count: int  # E
    top_k: int  # A, the experts of a token
    size: int  # F of one expert
    renormalise: bool  # the weights of a token's experts sum to one
    shared_size: int = 0  # F of the expert that every token uses; 0: there is none
    shared_gate: bool = True  # whose output a sigmoid scales
    sigmoid: bool = False  # experts are chosen by the sigmoid of their logits, plus a correction
    scale: float = 1.0  # of the weights of a token's experts
    limit: float = 0.0  # gate and up of an expert are clamped; 0: they are not
    dense_layers: tuple[int, ...] = ()  # layers with an ordinary MLP


@dataclass(frozen=True)
class VisionSpec:
    """A tower from pixels to embeddings, and how its images stand in a prompt. Families give their own facts."""

    token: int  # the id of placeholders
    width: int  # D of the tower
    mlp_size: int
    num_layers: int
    num_heads: int
    patch: int  # pixels of a patch's side
    eps: float
    act: str
    image_size: int = 0  # pixels of a side, where all images have one size
    merge: int = 1  # patches of a side that become one token
    channels: int = 3
    feature_layers: tuple[int, ...] = ()  # whose outputs are taken, side by side
    begin: int | None = None  # the id that stands in prompts for an image, where it is not `token`
    bidirectional: bool = False  # the tokens of an image see each other
    deepstack: int = 0  # so many layers of the decoder add embeddings of their own

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def pixels(self) -> tuple[int, ...]:
        """The last dimensions of what a processor has to make."""
        return self.channels, self.image_size, self.image_size


@dataclass(frozen=True)
class Scheme:
    """How the matrix of a module is stored in few bits."""

    layout: Literal["awq", "gptq", "packed", "float", "micro", "mxfp4", "load"]  # "load": whole, and encoded at load
    code: Literal["int4", "int8", "fp8", "fp4", "w8a8"]
    block: tuple[int, int] | None  # rows and columns that share a scale, 0: all; None: as the file's scales say
    zeros: bool = False  # zero points are stored
    offset: int | None = 0  # what they are more than stored; None: they tell
    ordered: bool = False  # the group of each column is stored


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's method, and rules: of a module the first whose expression matches one of its whole names holds."""

    method: str
    rules: tuple[tuple[str, Scheme | None], ...]  # None: kept whole

    def of(self, *names: str) -> Scheme | None:
        rules = (scheme for pattern, scheme in self.rules if any(re.fullmatch(pattern, name) for name in names))
        return next(rules, None)


@dataclass(frozen=True)
class ModelSpec:
    """Shapes and switches of one decoder. Closed over by compiled code, never a run-time argument."""

    architecture: str  # HF class name, e.g. "LlamaForCausalLM"
    vocab_size: int  # V, the width of the logits
    hidden_size: int  # D
    mlp_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # K
    rms_eps: float
    rope: RopeSpec
    max_position: int  # the checkpoint's context length in tokens
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False  # of all heads at once
    exact: bool = True  # False: linear layers may add up in any order (numerics=fast)
    generates: bool = True  # False: an embedding model or a classifier, whose checkpoint needs no output head
    num_labels: int | None = None  # C, the outputs of a classification or reward head; None: there is none
    kinds: tuple[LayerKind, ...] = ()  # of each layer; empty: all alike, without a window
    causal: bool = True  # False: a token sees its whole row
    rotary_dim: int | None = None  # columns of a head that turn; None: all
    interleaved: bool = False  # a checkpoint's rotary pairs are neighbours, not halves
    attention_scale: float | None = None  # None: head_dim ** -0.5
    rope_local: RopeSpec | None = None  # of layers of kind "rope_local_MK"
    layer_norm: bool = False  # norms subtract the mean
    norm_shift: float = 0.0  # norms multiply by this plus their weight
    act: str = "silu"  # or gelu_tanh, gelu
    attention_cap: float = 0.0  # scores and logits become cap * tanh(x / cap); 0: no cap
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    experts: ExpertSpec | None = None
    residual_scale: float = 1.0  # of what attention and MLP add to the stream
    logit_scale: float = 1.0
    norm_bias: bool = False  # layer norms have biases
    score_bias: bool = True  # so has the dense layer in front of a classifier's last
    embed_norm: bool = False  # the stream begins with normed embeddings: the first layer's norm
    positions: int = 0  # rows of a table of learned positions; 0: there is none
    position_offset: int = 0  # which of them is the first token's
    token_types: int = 0  # rows of a table of token types; the id of a token of type t is t * vocab_size higher
    score_pool: str = "last"  # which hidden state a classification head looks at: last, cls or mean
    draft_layers: int = 0  # behind the last in the checkpoint, for speculative decoding: they are not read
    feature_layers: tuple[int, ...] = ()  # the stream in front of these layers is kept beside the KV, for a draft
    quantization: Quantization | None = None  # of the checkpoint's matrices
    few_kv: bool = False  # keys and values are kept in FP8: ops/kv_fp8.py
    vision: VisionSpec | None = None  # of a model that takes images
    rope_sections: tuple[int, ...] = ()  # of rotary pairs, which of three axes turns each; (): there is one axis

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def input_ids(self) -> int:
        """Token ids that a prompt may hold are smaller."""
        return self.vocab_size * max(self.token_types, 1)

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer] if self.kinds else LayerKind()

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Those in which a token sees so many keys at most."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.window)

    @property
    def window(self) -> int:
        """The widest of their windows; 0: there is none."""
        return max((kind.window for kind in self.kinds), default=0)

    def part(self, ranks: int) -> "ModelSpec":
        """What each of so many ranks computes: its own heads. Pure."""
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=self.num_kv_heads // ranks)


def embedding_spec(spec: ModelSpec) -> ModelSpec:
    """The same decoder without an output head: its hidden states are the result. Pure."""
    return replace(spec, generates=False)
