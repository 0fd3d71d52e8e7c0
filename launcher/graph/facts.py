"""What each operation of a captured graph really does: its value, the storage it lives in, what it writes to.

The graph is run once on fake tensors (shapes without data), whose storages, version counters and
``requires_grad`` behave exactly as real ones, so views, in-place writes and where gradients flow are
observed instead of being derived from each operation's name. A graph that fake tensors cannot run
(sizes that depend on data) is run once on the real tensors instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target
from torch.utils import _pytree as pytree

from launcher.graph.contexts import contexts_of, entered

__all__ = ["Facts", "Observer", "observe"]

_RUNNING_STATISTICS = {torch.ops.aten.batch_norm.default: 5, torch.ops.aten.instance_norm.default: 5}  # argument: is training


@dataclass(frozen=True)
class Facts:
    """``values`` keeps every result, so that no storage is freed and its identity used again."""

    values: Mapping[Node, Any]
    storages: Mapping[Node, frozenset[int]]  # storages the node's value lives in
    writes: Mapping[Node, frozenset[int]]  # storages the node changes

    def tensor(self, node: Node) -> torch.Tensor | None:
        """The node's value when it is one tensor."""
        value = self.values.get(node)
        return value if isinstance(value, torch.Tensor) else None


def observe(module: GraphModule, arguments: Sequence[torch.Tensor], *, grad: bool) -> Facts:
    """Run ``module`` once without changing ``arguments``; see the module's docstring."""
    with torch.set_grad_enabled(grad), torch.random.fork_rng(devices=[]):
        try:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                return _run(module, arguments, mode.from_tensor)
        except Exception:  # whatever fake tensors cannot do, real ones can
            return _run(module, arguments, _copy)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _run(module: GraphModule, arguments: Sequence[torch.Tensor], stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Facts:
    observer = Observer(module, stand_in)
    observer.run(*map(stand_in, arguments))
    return Facts(observer.values, observer.node_storages, observer.writes)


class Observer(Interpreter):
    """Runs a graph on stand-ins of its arguments and constants, each operation in its contexts, and keeps what it sees."""

    def __init__(self, module: GraphModule, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.stand_in = stand_in
        self.constants: dict[str, Any] = {}
        self.values: dict[Node, Any] = {}
        self.node_storages: dict[Node, frozenset[int]] = {}
        self.writes: dict[Node, frozenset[int]] = {}

    def get_attr(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self.constants:  # a constant may be written to as well: never the real one
            value = super().get_attr(target, args, kwargs)
            self.constants[str(target)] = self.stand_in(value) if isinstance(value, torch.Tensor) else value
        return self.constants[str(target)]

    def run_node(self, n: Node) -> Any:
        operands = [] if n.op == "placeholder" else _tensors([self.env[source] for source in n.all_input_nodes])
        before = [tensor._version for tensor in operands]
        with entered(contexts_of(n)):
            result = super().run_node(n)
        written = {_storage(t) for t, version in zip(operands, before, strict=True) if t._version != version}
        declared = [self.env[source] for source in _updated_statistics(n) + _schema_writes(n)]
        written |= {_storage(tensor) for tensor in declared if isinstance(tensor, torch.Tensor)}
        self.values[n] = result
        self.node_storages[n] = frozenset(_storage(tensor) for tensor in _tensors(result))
        self.writes[n] = frozenset(written)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    with contextlib.suppress(Exception):  # sparse tensors have no storage
        return int(tensor.untyped_storage()._cdata)
    return id(tensor)


def _schema_writes(node: Node) -> list[Node]:
    """Operands that the operation's schema declares as written (``detach_`` writes without a new version)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    declared = node.target._schema.arguments
    pairs = [*zip(declared, node.args, strict=False), *((a, node.kwargs[a.name]) for a in declared if a.name in node.kwargs)]
    return [value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write and isinstance(value, Node)]


def _updated_statistics(node: Node) -> list[Node]:
    """Operands that a normalisation in training mode updates although its schema does not say so."""
    place = _RUNNING_STATISTICS.get(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
    if place is None or not (len(node.args) > place and node.args[place]):
        return []
    return [operand for operand in node.args[3:5] if isinstance(operand, Node)]
