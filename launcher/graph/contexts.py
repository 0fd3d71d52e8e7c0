"""``torch.no_grad()`` and ``torch.autocast()`` regions, operation by operation.

An exported graph holds such a region as one operation with a sub-graph, which nothing could cut or
name: a frozen encoder would be a single layer. Here the region is dissolved, and each of its operations
remembers the contexts around it, outermost first::

    out = wrap_with_set_grad_enabled(False, body, x)     ->     a = linear(x)    # within no_grad
                                                                out = relu(a)    # within no_grad

Until the graph is finished a node's contexts are only a note (:func:`contexts_of`); at the end
:func:`bind` makes each such operation enter them when it runs.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["Context", "bind", "contexts_of", "dissolve", "entered", "put_within", "substitute", "within"]

Context = tuple[Any, ...]  # ("grad", enabled) or ("autocast", device type, dtype, enabled, cache_enabled)
_KEY = "pipedream_contexts"
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def contexts_of(node: Node) -> tuple[Context, ...]:
    """The contexts a node runs in, outermost first."""
    return node.meta.get(_KEY, ())  # type: ignore[no-any-return]


def put_within(node: Node, contexts: tuple[Context, ...]) -> None:
    """Let the node run in these contexts, outermost first, and no other."""
    node.meta[_KEY] = contexts


def entered(contexts: tuple[Context, ...]) -> contextlib.ExitStack:
    """All ``contexts`` as one context manager."""
    stack = contextlib.ExitStack()
    for kind, *settings in contexts:
        if kind == "grad":
            stack.enter_context(torch.set_grad_enabled(settings[0]))
        else:
            device, dtype, enabled, cache_enabled = settings
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled))
    return stack


def within(contexts: tuple[Context, ...], operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operation(*args, **kwargs)`` inside ``contexts``."""
    with entered(contexts):
        return operation(*args, **kwargs)


def dissolve(module: GraphModule) -> None:
    """Replace every such region of ``module`` by its operations, nested regions too."""
    found = True
    while found:
        found = False
        for node in list(module.graph.nodes):
            if node.target in (_GRAD, _AUTOCAST) and all(user.target is operator.getitem for user in node.users):
                _dissolve(module, node)
                found = True
    module.graph.lint()
    module.recompile()


def _dissolve(module: GraphModule, node: Node) -> None:
    """One region: ``wrap_with_set_grad_enabled(enabled, body, *operands)`` or ``wrap_with_autocast(4 settings, body, *operands)``."""
    count = 1 if node.target is _GRAD else 4
    kind = "grad" if node.target is _GRAD else "autocast"
    contexts = (*contexts_of(node), (kind, *node.args[:count]))
    source: Any = node.args[count]
    body: Any = getattr(module, str(source.target))
    operands = iter(node.args[count + 1:])
    copies: dict[Node, Any] = {}
    results: Any = ()
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            copies[inner] = next(operands)
        elif inner.op == "output":
            results = [copies[result] if isinstance(result, Node) else result for result in inner.args[0]]
        else:
            with module.graph.inserting_before(node):
                copies[inner] = module.graph.node_copy(inner, copies.__getitem__)
            if inner.op == "get_attr":  # a sub-graph of a nested region
                name = f"{source.target}_{inner.target}"
                setattr(module, name, getattr(body, str(inner.target)))
                copies[inner].target = name
            copies[inner].meta[_KEY] = (*contexts, *contexts_of(inner))
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not source.users:
        module.graph.erase_node(source)


def bind(module: GraphModule) -> dict[Node, Node]:
    """Make every operation with contexts enter them when it runs; which node took the place of which."""
    made: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        contexts = contexts_of(node)
        if not contexts or node.op != "call_function" or node.target is operator.getitem:
            continue
        arguments: Any = (contexts, node.target, *node.args)
        with module.graph.inserting_before(node):
            made[node] = module.graph.call_function(within, arguments, dict(node.kwargs))
        made[node].meta = {key: value for key, value in node.meta.items() if key != _KEY}
        substitute(module, node, made[node])
    module.recompile()
    return made


def substitute(module: GraphModule, old: Node, new: Node) -> None:
    """Put ``new`` in the place of ``old``, under its name, which profiles and messages show."""
    old.replace_all_uses_with(new)
    module.graph.erase_node(old)
    new.name = old.name
