"""Forward and backward of one microbatch through one stage's program.

Every received tensor becomes a detached leaf, so a stage's graph ends at its borders; between forward
and backward only the graph's roots and those leaves are kept. Sent tensors are not kept: their
storage lives on only where autograd saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from launcher.graph.program import StageProgram, Value
from launcher.runtime.state import StageState
from launcher.runtime.weights import Version, WeightVersions

__all__ = ["Stage", "gradient_values", "owned", "storages"]

Gathering = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]


def gradient_values(values: Sequence[Value]) -> tuple[Value, ...]:
    """Those of the values that cross a cut whose gradients come back over it."""
    return tuple(value for value in values if value.requires_grad)


@dataclass(frozen=True)
class _Graph:
    """What autograd needs to go back through one microbatch."""

    leaves: tuple[torch.Tensor, ...]  # received tensors whose gradient is sent back
    roots: tuple[GradientEdge | None, ...]  # of the sent tensors that get a gradient, or of the loss
    seed: torch.Tensor | None  # the loss's own gradient


@dataclass
class _Pending:
    """A microbatch in flight: its graph, or what makes it again."""

    version: Version
    graph: _Graph | None
    again: Callable[[], _Graph] | None


class Stage:
    """One stage of the model with its weight versions and buffers.

    ``batch_microbatches`` divides the loss's gradient, so that the gradients of a batch's microbatches
    (over all replicas) sum to the gradient of their mean loss. With ``recompute`` a microbatch in flight
    keeps its inputs and no graph. ``alone``: no other forward runs between a microbatch's forward and
    its backward, so what it writes to need not be copied.
    """

    def __init__(self, program: StageProgram, weights: WeightVersions, buffers: Sequence[torch.Tensor], batch_microbatches: int, *,
                 recompute: bool = False, alone: bool = False) -> None:
        self.program = program
        self.weights = weights
        self._state = StageState(program, buffers)
        self.last = not program.sent
        self._loss_gradient = 1.0 / batch_microbatches
        self._recompute, self._alone = recompute, alone and not recompute
        self._pending: dict[int, _Pending] = {}
        self._state_storages = storages([*buffers, *self._state.written()])

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def forward(
        self, microbatch: int, version: int, received: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors to send on, or the loss and metrics at the last stage; detached, contiguous.

        ``received`` and ``inputs`` are in the program's order. ``version`` is held until the
        microbatch's :meth:`backward`.
        """
        used = self.weights.begin(version)
        for value, tensor in zip(self.program.received, received, strict=True):
            if value.requires_grad:
                tensor.requires_grad_()
        own = self._state.written()
        apart = own if self._alone else self._state.copy()
        run = partial(self._state.run, leaves=used.leaves, received=received, inputs=inputs)
        if self._recompute:
            outputs = run(own)  # with gradients, although its graph goes: what an operation runs may depend on that
        else:
            outputs = run(apart)
            self._state.adopt(apart)
        graph = self._graph(received, outputs)
        if self._recompute and any(graph.roots):
            self._pending[microbatch] = _Pending(used, None, lambda: self._graph(received, run(apart)))
        else:
            self._pending[microbatch] = _Pending(used, graph, None)
        return tuple(owned(output, used.storages | self._state_storages) for output in outputs)

    def _graph(self, received: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> _Graph:
        leaves = tuple(tensor for value, tensor in zip(self.program.received, received, strict=True) if value.requires_grad)
        if self.last:
            rooted = tuple(outputs[:1])
        else:
            rooted = tuple(output for value, output in zip(self.program.sent, outputs, strict=True) if value.requires_grad)
        roots = tuple(get_gradient_edge(output) if output.requires_grad else None for output in rooted)
        seed = torch.full_like(outputs[0], self._loss_gradient, requires_grad=False) if self.last else None
        return _Graph(leaves, roots, seed)

    def recompute(self, microbatch: int) -> None:
        """Make the microbatch's graph again where it was not kept; it needs no gradient for that yet."""
        pending = self._pending[microbatch]
        if pending.again is not None:
            pending.graph, pending.again = pending.again(), None

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor], gathering: Gathering = lambda leaves: nullcontext(), *,
                 loss_scale: float = 1.0) -> tuple[torch.Tensor, ...]:
        """Gradients of the received values that require one, contiguous; zeros where nothing used a value.

        ``gradients`` are those of the sent values that require one; none at the last stage, which multiplies the
        loss's own by ``loss_scale``. The weights' gradients are added to those of the batch, and
        ``gathering(leaves)`` is entered around that.
        """
        self.recompute(microbatch)
        pending = self._pending.pop(microbatch)
        graph = pending.graph
        assert graph is not None  # kept or made again
        arrived = gradients if graph.seed is None else (graph.seed if loss_scale == 1.0 else graph.seed * loss_scale,)
        pairs = [(root, gradient) for root, gradient in zip(graph.roots, arrived, strict=True) if root is not None]
        if pairs:
            self.weights.lend_gradients(pending.version)
            with gathering(pending.version.leaves):
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
            self.weights.take_gradients(pending.version)
        self.weights.end(pending.version)
        return tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous() for leaf in graph.leaves)


def owned(output: torch.Tensor, changing: Collection[int]) -> torch.Tensor:
    """``output`` for sending: detached, contiguous, and its own.

    ``changing`` are the addresses of storages that change in place while a send may be under way
    (weights, buffers); a view of one is copied.
    """
    tensor = output.detach()
    if tensor.untyped_storage().data_ptr() in changing:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """The addresses of the tensors' storages."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
