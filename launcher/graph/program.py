"""Stage programs: the captured model, cut into callables that one worker can run.

The whole model *and its loss* are captured as one flat graph of ATen operations whose parameters and
buffers are inputs (lifted), so a weight version is nothing but another list of tensors to call with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StageProgram", "Value"]


@dataclass(frozen=True)
class Value:
    """A tensor that crosses a cut: static, known from the capture, so receives can be posted ahead."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool  # whether its gradient comes back over the cut


@dataclass(frozen=True)
class StageProgram:
    """One stage of the model, for training or for evaluation.

    Called as ``module(*parameters, *buffers, *received, *inputs)``; returns a tuple, in the order of
    ``sent`` (every stage but the last) or ``results`` (the last: the loss first, then metrics), after which come
    the model's outputs where they were asked for.
    A tensor that only passes through this stage to a later one is both received and sent.
    Buffers may be updated in place (BatchNorm's running statistics); ``written`` says which.
    """

    module: torch.fx.GraphModule
    parameters: tuple[str, ...]  # the model's own parameter names
    buffers: tuple[str, ...]
    received: tuple[Value, ...]
    inputs: tuple[int, ...]  # positions among the flattened data tensors of a microbatch
    sent: tuple[Value, ...]
    results: tuple[str, ...]
    written: tuple[str, ...] = ()  # the buffers, and the module's own constants, that it writes to
