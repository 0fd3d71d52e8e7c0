"""The model of the comparison: a decoder-only transformer on random tokens, as a list of pieces that can be cut.

``shape`` is ``compute`` (8 layers, width 256, 128 tokens, vocabulary 6,144) or ``parameters`` (6 layers, width 512,
32 tokens, vocabulary 16,384), in microbatches of 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterable

    from launcher import Job

SHAPES = {"compute": (8, 256, 128, 6144), "parameters": (6, 512, 32, 16384)}
SIZE = 4


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocabulary: int, width: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.token(x) + self.position
        return embedded


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm and added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.mix(self.attention_norm(x)).view(batch, tokens, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        fed: Tensor = x + self.feed(self.feed_norm(x))
        return fed


def pieces(shape: str) -> nn.Sequential:
    """Embedding, blocks, head."""
    layers, width, tokens, vocabulary = SHAPES[shape]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    return nn.Sequential(Embedding(vocabulary, width, tokens), *(Block(width) for _ in range(layers)), head)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """``sgd`` with momentum, or fused ``adamw``."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def data(shape: str, samples: int = 512) -> TensorDataset:
    """Random tokens, and random ones to predict."""
    _, _, tokens, vocabulary = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randint(vocabulary, (samples, tokens), generator=generator) for _ in range(2)))


def job(shape: str = "compute", optimizer_name: str = "sgd") -> Job:
    """For ``pipedream``."""
    from launcher import Job

    return Job(model=pieces(shape), loss=loss, train_data=data(shape), microbatch_size=SIZE,
               optimizer=lambda parameters: optimizer(optimizer_name, parameters))
