"""A small language model: predicts the next byte of the source text of Python's standard library.

    pipedream profile examples/bytes_gpt.py              with the pipeline
    python examples/bytes_gpt.py --plain --steps 300     without it, in an ordinary loop

The text is on every machine that runs Python, so nothing is downloaded. Files are read in a fixed
order; every twentieth is held out. The validation loss is in nats per byte (divide by ln 2 for bits).
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from launcher import Job

BYTES = 256
BETAS = (0.5, 0.95)  # less momentum than usual: stale gradients act like momentum of their own (Mitliagkas et al., 2016)
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


class Attention(nn.Module):
    """Causal self-attention over ``(batch, positions, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        query, key, value = self.query_key_value(x).view(batch, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, positions, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """Bytes ``(batch, positions)`` to logits ``(batch, positions, 256)``."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``context`` bytes of ``text``, one after the other; the targets are one byte later."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def standard_library() -> list[Path]:
    """The standard library's source files, in an order that depends on their names only."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]))


def read(files: list[Path], limit: int) -> bytes:
    """The text of ``files`` up to ``limit`` bytes."""
    text = bytearray()
    for path in files:
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return bytes(text[:limit])


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def job(
    layers: int = 6,
    width: int = 256,
    heads: int = 4,
    context: int = 128,
    microbatch_size: int = 4,
    learning_rate: float = 5e-4,
    train_bytes: int = 8_000_000,
    evaluation_bytes: int = 32_768,
) -> Job:
    """The job that ``pipedream`` trains: about 5 million parameters by default."""
    from launcher import Job

    files = standard_library()
    held_out = files[10::20]
    seen = [path for path in files if path not in set(held_out)]
    return Job(
        model=ByteGPT(layers, width, heads, context),
        loss=loss,
        train_data=Windows(read(seen, train_bytes), context),
        evaluation_data=Windows(read(held_out, evaluation_bytes), context),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate, betas=BETAS, fused=True),
        microbatch_size=microbatch_size,
    )


if __name__ == "__main__":
    from plain import main

    main(job)
