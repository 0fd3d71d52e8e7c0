"""What ``torch.autocast`` does to each operation, written into the graph as casts.

Under autocast an operation casts some of its operands before it runs. Which, is found by running it on fake
tensors (:mod:`launcher.graph.facts`) and watching::

    linear(x, weight)  # within autocast     ->     a = to(x, bfloat16)
                                                    b = to(weight, bfloat16)
                                                    linear(a, b)

Then the graph needs no context when it runs, which would cost more than a small operation, and every tensor
that crosses a cut has the type that it has in the uncut model. An operation is rewritten only if it then runs
the same operations on the same types as within autocast. One that casts inside (einsum) keeps its context.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.graph.contexts import Context, contexts_of, entered, put_within
from launcher.graph.facts import Observer

__all__ = ["write_casts"]


def write_casts(module: GraphModule, arguments: Sequence[torch.Tensor], ambient: torch.dtype | None, *, grad: bool) -> None:
    """Write out the autocast regions of ``module``, and one around all of it in type ``ambient`` if there is one.

    A graph that fake tensors cannot run keeps its contexts.
    """
    device = arguments[0].device.type
    if ambient is not None:
        for node in module.graph.nodes:
            if node.op == "call_function":
                put_within(node, (("autocast", device, ambient, True, False), *contexts_of(node)))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    watcher = _Watcher(module, mode.from_tensor, device)
    if not any(watcher.casting(node) for node in module.graph.nodes):
        return
    try:
        with torch.set_grad_enabled(grad), torch.random.fork_rng(devices=[]), mode:
            watcher.run(*map(mode.from_tensor, arguments))
    except Exception:  # whatever fake tensors cannot do; facts are then observed on real ones
        return
    for node, casts in watcher.casts.items():
        put_within(node, watcher.others(node))
        _rewrite(module, node, casts)
    module.graph.lint()
    module.recompile()


def _rewrite(module: GraphModule, node: Node, casts: Mapping[Node, torch.dtype]) -> None:
    for source, dtype in casts.items():
        with module.graph.inserting_before(node):
            made = module.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
        made.meta = dict(node.meta)
        node.replace_input_with(source, made)


class _Ran(NamedTuple):
    """One operation below autograd: its name, the tensors it got, and the types of what it made."""

    name: str
    operands: list[torch.Tensor]
    types: list[torch.dtype]


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[_Ran] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions, such as for a tensor's device
            self.ran.append(_Ran(str(func), _tensors((args, kwargs)), [tensor.dtype for tensor in _tensors(result)]))
        return result


class _Watcher(Observer):
    """``casts`` has every operation whose context is not needed, and the operands to cast for that."""

    def __init__(self, module: GraphModule, stand_in: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
        super().__init__(module, stand_in)
        self.casts: dict[Node, dict[Node, torch.dtype]] = {}
        self._device = device

    def others(self, node: Node) -> tuple[Context, ...]:
        """Its contexts but the autocasts on the kind of device that the graph is captured on."""
        return tuple(context for context in contexts_of(node) if context[:2] != ("autocast", self._device))

    def casting(self, node: Node) -> bool:
        """Whether it is in such an autocast."""
        return self.others(node) != contexts_of(node)

    def run_node(self, n: Node) -> Any:
        if not self.casting(n) or n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            if n.target is operator.getitem:
                self.casts[n] = {}
            return super().run_node(n)
        log = _Log()
        with log:
            result = super().run_node(n)
        casts = self._operand_casts(n, log)
        if n.target._schema.is_mutable:  # not run twice; autocast leaves it alone
            if not casts:
                self.casts[n] = {}
            return result
        args, kwargs = map_arg((n.args, n.kwargs), lambda node: self.env[node].to(casts[node]) if node in casts else self.env[node])
        plain = _Log()
        with entered(self.others(n)):
            try:
                with plain:
                    n.target(*args, **kwargs)
            except RuntimeError:  # types that do not go together: a cast inside
                return result
        expected = [ran for ran in log.ran if not any(_is_cast(ran, self.env[node], dtype) for node, dtype in casts.items())]
        if [(ran.name, ran.types) for ran in expected] == [(ran.name, ran.types) for ran in plain.ran]:
            self.casts[n] = casts
        return result

    def _operand_casts(self, node: Node, log: _Log) -> dict[Node, torch.dtype]:
        casts: dict[Node, torch.dtype] = {}
        for source in node.all_input_nodes:
            value = self.env[source]
            for ran in log.ran:
                if isinstance(value, torch.Tensor) and _is_cast(ran, value, None):
                    casts[source] = ran.types[0]
        return casts


def _is_cast(ran: _Ran, operand: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return ran.name == "aten._to_copy.default" and ran.operands[0] is operand and dtype in (None, ran.types[0])


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
