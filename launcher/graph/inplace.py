"""In-place operations on activations become out-of-place ones, so that a graph can be cut anywhere.

A stage receives tensors as autograd leaves, which must not be written to, and a tensor that was sent
must not change while it is on its way. So::

    a = linear(x)                   a = linear(x)
    b = relu_(a)          ->        b = relu(a)
    c = a + b                       c = b + b        (a means b from here on)

Buffers are written in place as before. A write that cannot be expressed so (through a view whose base
is used later, ``x[:, 0] = 0``) stays, and all operations that touch that storage stay in one layer.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from launcher.graph.facts import Facts

__all__ = ["copy_written_inputs", "out_of_place"]


def copy_written_inputs(module: GraphModule, facts: Facts, inputs: Collection[Node]) -> bool:
    """Give the graph a copy of each data input that it writes to; whether there was one."""
    written = frozenset().union(*facts.writes.values()) if facts.writes else frozenset()
    changed = [node for node in inputs if facts.storages[node] & written]
    for node in changed:
        first = min(node.users, key=_positions(module).__getitem__)
        with module.graph.inserting_before(first):
            copy = module.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(first.meta)
        for user in list(node.users):
            if user is not copy:
                user.replace_input_with(node, copy)
    return bool(changed)


def out_of_place(module: GraphModule, facts: Facts, keep: frozenset[int]) -> list[frozenset[Node]]:
    """Rewrite ``module`` as described above; storages in ``keep`` (buffers) stay written in place.

    Returns:
        Groups of nodes that must stay together: what touches a storage up to the last write left to it.
    """
    rewriter = _Rewriter(module, facts)
    remaining: dict[int, Node] = {}  # storage -> its last write that stays
    for node in list(module.graph.nodes):
        if facts.writes.get(node, frozenset()) & keep and _functional(node) is not None and isinstance(node.args[0], Node):
            node.replace_all_uses_with(node.args[0])  # `buffer.add_(1)` returns the buffer
        for storage in sorted(facts.writes.get(node, frozenset()) - keep):
            if not rewriter.convert(node, storage):
                remaining[storage] = node
    module.graph.lint()
    module.recompile()
    return [rewriter.touching(storage, last) for storage, last in remaining.items()]


class _Rewriter:
    def __init__(self, module: GraphModule, facts: Facts) -> None:
        self.graph = module.graph
        self.values = dict(facts.values)
        self.positions = _positions(module)
        self.aliases: dict[int, set[Node]] = {}
        for node, storages in facts.storages.items():
            for storage in storages:
                self.aliases.setdefault(storage, set()).add(node)

    def touching(self, storage: int, last: Node) -> frozenset[Node]:
        """Everything that makes or uses ``storage`` up to ``last``; later readers see a finished value."""
        aliases = self.aliases[storage]
        nodes = aliases | {user for alias in aliases for user in alias.users}
        return frozenset(node for node in nodes if self.positions.get(node, 0) <= self.positions[last])

    def convert(self, node: Node, storage: int) -> bool:
        """Replace one in-place node by its out-of-place variant; False when that would change a result."""
        functional = _functional(node)
        target = node.args[0] if node.args else None
        aliases, now = self.aliases[storage], self.positions[node]
        if functional is None or not isinstance(target, Node) or target not in aliases:
            return False
        if torch.Tag.inplace_view in functional.tags or torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            kind = self.values[node].dtype  # only this tensor's own shape changes, its aliases keep theirs
            made = self.values[node]
        else:
            others = [alias for alias in aliases if alias is not target and alias is not node and self.positions[alias] < now]
            if any(self.positions[user] > now for alias in others for user in alias.users):
                return False  # a view made earlier shows the write later
            kind, made = self.values[node].dtype, self._try(functional, node)
            if made is None or made.shape != self.values[node].shape:
                return False
        with self.graph.inserting_before(node):
            result = self.graph.call_function(functional, node.args, node.kwargs)
            self._register(result, node, made, aliases)
            if made.dtype != kind:  # `a.add_(b)` keeps a's type where `a.add(b)` promotes
                result = self.graph.call_function(torch.ops.aten.to.dtype, (result, kind))
                self._register(result, node, made.to(kind), aliases)
        target.replace_all_uses_with(result, delete_user_cb=lambda user: self.positions[user] > now)
        node.replace_all_uses_with(result)
        for group in self.aliases.values():
            group.discard(node)
        self.graph.erase_node(node)
        return True

    def _register(self, made: Node, instead_of: Node, value: torch.Tensor, aliases: set[Node]) -> None:
        made.meta = dict(instead_of.meta)
        self.positions[made] = self.positions[instead_of]
        self.values[made] = value
        aliases.add(made)  # later views of it are views of what the in-place result was

    def _try(self, functional: torch._ops.OpOverload, node: Node) -> torch.Tensor | None:
        """What the out-of-place variant returns for the observed operands."""
        try:
            with torch.no_grad():
                made = functional(*map_arg(node.args, self.values.__getitem__), **map_arg(node.kwargs, self.values.__getitem__))
        except Exception:
            return None
        return made if isinstance(made, torch.Tensor) else None


def _functional(node: Node) -> torch._ops.OpOverload | None:
    """``aten.relu_.default`` -> ``aten.relu.default``; None when there is no such operation."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    writes = [argument for argument in target._schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    if len(writes) != 1 or writes[0].name != target._schema.arguments[0].name:
        return None
    packets = getattr(torch.ops, namespace)
    for candidate in (name[:-1], f"{name[:-1]}_functional"):
        packet = getattr(packets, candidate, None)
        if packet is not None and target._overloadname in packet.overloads():
            functional = getattr(packet, target._overloadname)
            if [a.name for a in functional._schema.arguments] == [a.name for a in target._schema.arguments]:
                return functional  # type: ignore[no-any-return]
    return None


def _positions(module: GraphModule) -> dict[Node, int]:
    return {node: position for position, node in enumerate(module.graph.nodes)}
