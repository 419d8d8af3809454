"""box-vl as it is trained: SigLIP's tower before the decoder of the box, with the names of Idefics 3's checkpoints."""

from typing import NamedTuple

import torch
from box_model import Body, Shape, keep_angles
from torch import nn
from torch.nn import functional


class Seeing(NamedTuple):
    """The tower's sizes; squares of `merge` × `merge` patches become one embedding of the decoder."""

    width: int
    inner: int
    layers: int
    side: int
    patch: int = 8
    merge: int = 2
    head_dim: int = 32


class Attention(nn.Module):
    def __init__(self, s: Seeing) -> None:
        super().__init__()
        self.head_dim = s.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(s.width, s.width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in
                   (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        return self.out_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def __init__(self, s: Seeing) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(s.width, s.inner), nn.Linear(s.inner, s.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class TowerLayer(nn.Module):
    def __init__(self, s: Seeing) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(s.width, 1e-6) for _ in range(2))
        self.self_attn, self.mlp = Attention(s), Inner(s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Tower(nn.Module):
    def __init__(self, s: Seeing) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({
            "patch_embedding": nn.Conv2d(3, s.width, s.patch, s.patch),
            "position_embedding": nn.Embedding((s.side // s.patch) ** 2, s.width),
        })  # fmt: skip
        nn.init.normal_(self.embeddings["position_embedding"].weight, std=0.02)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(TowerLayer(s) for _ in range(s.layers))})
        self.post_layernorm = nn.LayerNorm(s.width, 1e-6)


class BoxVL(nn.Module):
    """`run` applies a layer: plainly, or compiled."""

    def __init__(self, seeing: Seeing, decoder: Shape) -> None:
        super().__init__()
        self.seeing, columns = seeing, seeing.width * seeing.merge**2
        projection = nn.ModuleDict({"proj": nn.Linear(columns, decoder.hidden, bias=False)})
        self.model = nn.ModuleDict({
            "vision_model": Tower(seeing), "text_model": Body(decoder),
            "connector": nn.ModuleDict({"modality_projection": projection}),
        })  # fmt: skip
        keep_angles(self, decoder)
        self.run_tower = self.run_decoder = apply

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        """The embeddings of pictures [B, 3, H, W]: [B, tokens, D]."""
        tower, s = self.model["vision_model"], self.seeing
        x = tower.embeddings["patch_embedding"](pixels).flatten(2).transpose(1, 2)
        x = x + tower.embeddings["position_embedding"].weight
        for layer in tower.encoder["layers"]:
            x = self.run_tower(layer, x)
        x, side = tower.post_layernorm(x), s.side // s.patch // s.merge
        squares = x.unflatten(1, (side, s.merge, side, s.merge)).transpose(2, 3).flatten(3).flatten(1, 2)
        return self.model["connector"]["modality_projection"]["proj"](squares)

    def read(
        self, ids: torch.Tensor, seen: torch.Tensor, first: int, place: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """What the decoder makes of tokens [B, L] with the embeddings `seen` from token `first` on: [B, L, D]."""
        body = self.model["text_model"]
        x = body.embed_tokens(ids)
        x = torch.cat((x[:, :first], seen.to(x.dtype), x[:, first + seen.shape[1] :]), 1)
        cos, sin = (table[place][:, None] for table in (self.cos, self.sin))
        for layer in body.layers:
            x = self.run_decoder(layer, x, cos, sin, mask)
        return body.norm(x)


def apply(layer: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return layer(*args)
