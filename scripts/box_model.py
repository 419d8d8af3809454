"""The model in the box as it is trained: a plain Llama with the parameter names of its checkpoint."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Shape(NamedTuple):
    vocab: int = 2048
    hidden: int = 256
    inner: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 1024
    theta: float = 10000.0
    eps: float = 1e-5


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, heads, length, head_dim], halves paired as in Llama checkpoints."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def keep_angles(model: nn.Module, s: Shape) -> None:
    """Gives a model what `rotate` takes, as the buffers cos and sin [positions, head_dim / 2]."""
    frequency = s.theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    angle = torch.outer(torch.arange(s.positions).float(), frequency)
    model.register_buffer("cos", angle.cos(), persistent=False)
    model.register_buffer("sin", angle.sin(), persistent=False)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.shape = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        s, (batch, length, _) = self.shape, x.shape
        q, k, v = (
            p(x).view(batch, length, -1, s.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        repeat = s.heads // s.kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Inner(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Inner(s)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)


class Box(nn.Module):
    """Causal language model with tied embeddings; `forward` gives the weighted loss of the next tokens."""

    def __init__(self, s: Shape):
        super().__init__()
        self.model = Body(s)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # the two projections into the residual stream start smaller
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * s.layers) ** 0.5 if deep else 0.02)
        keep_angles(self, s)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ids[:, 1:], each target weighted by its cell of `weight`."""
        logits = self.logits(ids)  # the last position is computed too: even lengths are faster
        target, weight = functional.pad(ids[:, 1:], (0, 1)), functional.pad(weight[:, 1:], (0, 1))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
        return (loss * weight.flatten()).sum() / weight.sum()
