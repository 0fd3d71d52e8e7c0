"""A model whose layers sleep: schedules can be compared with more workers than cores.

    pipedream profile benchmarks/napping.py --set layers=4 --threads 1

Each layer sleeps ``forward_ms`` and, in its backward, ``backward_ms``; what it computes besides costs nothing. Its gradients
come after that sleep, those of ``weights_bytes`` more weights too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from launcher import Job

WIDTH = 64


@torch.library.custom_op("napping::nap", mutates_args=())
def nap(x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
    """A copy of ``x``, after a while; its gradient comes after another."""
    time.sleep(forward_ms / 1000)
    return x.clone()


@torch.library.custom_op("napping::nap_back", mutates_args=())
def nap_back(gradient: Tensor, backward_ms: float) -> Tensor:
    """A copy of the gradient, after a while."""
    time.sleep(backward_ms / 1000)
    return gradient.clone()


@nap.register_fake
def _(x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
    return torch.empty_like(x)


@nap_back.register_fake
def _(gradient: Tensor, backward_ms: float) -> Tensor:
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.backward_ms = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return nap_back(gradient, ctx.backward_ms), None, None


nap.register_autograd(_backward, setup_context=_setup)


class Napper(nn.Module):
    """``(batch, WIDTH)`` to the same, slowly."""

    def __init__(self, forward_ms: float, backward_ms: float, weights_bytes: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.ballast = nn.Parameter(torch.zeros(weights_bytes // 4)) if weights_bytes else None
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale if self.ballast is None else x * self.scale + self.ballast.sum()
        slow: Tensor = nap(scaled, self.forward_ms, self.backward_ms)
        return slow


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(outputs, targets)


def job(layers: int = 4, forward_ms: float = 10.0, backward_ms: float = 20.0, weights_bytes: int = 0,
        clip_norm: float | None = None) -> Job:
    """Equal layers, with ``weights_bytes`` of weights together."""
    from launcher import Job

    data = torch.randn(4096, WIDTH)
    return Job(
        model=nn.Sequential(*(Napper(forward_ms, backward_ms, weights_bytes // layers) for _ in range(layers))),
        loss=loss,
        train_data=TensorDataset(data, torch.zeros_like(data)),
        evaluation_data=TensorDataset(data[:4], torch.zeros_like(data[:4])),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        microbatch_size=4,
        clip_norm=clip_norm,
    )
