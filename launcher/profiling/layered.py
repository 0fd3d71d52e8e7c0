"""The model's step, run layer by layer: every layer a program of its own on detached tensors.

This is what a pipeline of one-layer stages would do, in one process and in execution order, so each
layer finds its inputs in the caches as the uncut step leaves them::

    forward   L0 | L1 | L2 | ...      each | is a place where a clock or a memory meter is read
    backward  ... | L2 | L1 | L0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from launcher.graph.capture import Captured
from launcher.graph.program import StageProgram, Value
from launcher.graph.split import extract

__all__ = ["LayerProgram", "LayeredStep", "element_bytes"]


@dataclass(frozen=True)
class LayerProgram:
    """``program`` called with the model's own parameters and buffers; ``owned`` are those first used here."""

    name: str
    program: StageProgram
    received: tuple[Node, ...]
    outputs: tuple[Node, ...]
    state: tuple[torch.Tensor, ...]
    owned: tuple[str, ...]


class LayeredStep:
    """One forward and one backward through all layers of ``captured``."""

    def __init__(self, captured: Captured, state: Mapping[str, torch.Tensor], data: Sequence[torch.Tensor]) -> None:
        self.data = data
        self.layers = tuple(_programs(captured, state))
        self.results = frozenset(captured.module.graph.output_node().args[0])  # type: ignore[arg-type]
        self.requires_grad = {node for node, value in captured.values.items() if value.requires_grad}
        self._captured = captured.values
        self._kept: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
        self._values: dict[Node, torch.Tensor] = {}

    def forward(self, around: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        """Every layer's forward; ``around`` is called before and after each, then ``after``."""
        self.clear()
        for layer in self.layers:
            received = [self._values[node].detach().requires_grad_(node in self.requires_grad) for node in layer.received]
            arguments = (*layer.state, *received, *(self.data[position] for position in layer.program.inputs))
            around()
            outputs = layer.program.module(*arguments)
            around()
            after()
            self._kept.append((received, outputs))
            # what is sent is detached, so that no layer's backward reaches into another's
            self._values.update((node, output.detach()) for node, output in zip(layer.outputs, outputs, strict=True))

    def outputs(self) -> list[tuple[torch.Tensor, ...]]:
        """What each layer returned in the last forward."""
        return [outputs for _, outputs in self._kept]

    def clear(self) -> None:
        """Let go of everything the last forward kept."""
        self._kept.clear()
        self._values.clear()

    def gradient_bytes(self, node: Node) -> int:
        """Bytes of the gradient that comes back for a value, 0 when none does."""
        value = self._captured[node]
        return element_bytes(value) if value.requires_grad and node not in self.results else 0

    def backward(self, around: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        """Every layer's backward, last layer first; gradients of what several layers use are summed at its maker.

        Gradients are taken from autograd rather than accumulated in leaves, which would copy those that
        two branches share: the uncut backward does not.
        """
        gradients: dict[Node, list[torch.Tensor]] = {}
        self._values.clear()  # as in an uncut backward, what is used up gives its memory to what comes next
        for layer in reversed(self.layers):
            received, outputs = self._kept.pop()
            pairs = [(output, [torch.ones_like(output)] if node in self.results else gradients.pop(node, []))
                     for node, output in zip(layer.outputs, outputs, strict=True) if output.requires_grad]
            ends, given = [output for output, parts in pairs if parts], [parts for _, parts in pairs if parts]
            weights = [tensor for tensor in layer.state if tensor.requires_grad]
            leaves = [leaf for leaf in received if leaf.requires_grad]
            found: tuple[torch.Tensor | None, ...] = ()
            del outputs, pairs, received
            around()
            if ends:
                found = torch.autograd.grad(ends, [*leaves, *weights], [_sum(parts) for parts in given], allow_unused=True)
            del ends, given
            around()
            after()
            needed = [node for node in layer.received if node in self.requires_grad]
            for node, gradient in zip(needed, found, strict=False):
                if gradient is not None:
                    gradients.setdefault(node, []).append(gradient)
            for weight, gradient in zip(weights, found[len(leaves):], strict=False):
                if gradient is not None:  # a tied weight gets one from each of its layers
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
            del found, leaves


def element_bytes(value: Value) -> int:
    """Bytes of a contiguous tensor of that shape and type."""
    return math.prod(value.shape) * value.dtype.itemsize


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _programs(captured: Captured, state: Mapping[str, torch.Tensor]) -> list[LayerProgram]:
    results = set(captured.module.graph.output_node().args[0])  # type: ignore[arg-type]
    order = {node: index for index, node in enumerate(captured.module.graph.nodes)}
    layer_of = {node: name for name, members in captured.layers.items() for node in members}
    seen: set[str] = set()
    programs = []
    for name, members in captured.layers.items():
        own = set(members)
        received = sorted({source for node in members for source in node.all_input_nodes if source in layer_of and source not in own},
                          key=order.__getitem__)
        outputs = [node for node in sorted(own, key=order.__getitem__)
                   if node in results or any(user in layer_of and user not in own for user in node.users)]
        program = extract(captured, own, received, outputs, last=False)
        names = (*program.parameters, *program.buffers)
        programs.append(LayerProgram(name, program, tuple(received), tuple(outputs), tuple(state[key] for key in names),
                                     tuple(key for key in names if key not in seen)))
        seen.update(names)
    return programs
