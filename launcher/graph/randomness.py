"""Randomness that depends on (seed, microbatch, layer) and on nothing else.

A random operation of the captured graph is called through :func:`seeded`, which seeds the generator
for that one operation. So a dropout mask is the same whichever worker computes it, however often it
is recomputed, and whatever ran before it: replicas, recomputation and resumed runs reproduce it.

::

    with keyed(seed=0, microbatch=17):     # the runtime, around a forward (or a recomputation)
        module(*arguments)                 # dropout -> seeded(KEY, aten.dropout, ...)
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from launcher import devices
from launcher.graph.contexts import Context, substitute, within

__all__ = ["data_randomness", "is_random", "key_operations", "keyed", "seeded", "stable_hash"]

# The default generators belong to the process, not to the thread: seeding one and drawing from it must not be interleaved.
_GENERATORS = threading.RLock()
_CURRENT = threading.local()


def stable_hash(*parts: str | int) -> int:
    """63 bits that are the same in every process and on every machine (``hash()`` is not)."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class keyed:
    """Set this thread's (seed, microbatch), for the ``with`` block or, without one, until the next call."""

    def __init__(self, seed: int, microbatch: int) -> None:
        self._previous = getattr(_CURRENT, "key", None)
        _CURRENT.key = (seed, microbatch)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _CURRENT.key = self._previous


def seeded(key: int, strides: tuple[int, ...] | None, contexts: tuple[Context, ...], operation: Callable[..., Any],
           *args: Any, **kwargs: Any) -> Any:
    """``operation(*args, **kwargs)`` within ``contexts``, with generators seeded from ``key`` and the thread's (seed, microbatch).

    Random numbers fill a tensor in the order of its memory. A tensor that was received is contiguous
    where the uncut model has perhaps a transposed one, so the first operand is given ``strides`` first.
    Without :class:`keyed` around it the operation draws from the generators as they are.
    """
    if strides is not None and args[0].stride() != strides:
        laid_out = torch.empty_strided(args[0].shape, strides, dtype=args[0].dtype, device=args[0].device)
        args = (laid_out.copy_(args[0]), *args[1:])
    current = getattr(_CURRENT, "key", None)
    if current is None:
        return within(contexts, operation, *args, **kwargs)
    with _GENERATORS:
        devices.seed_generators(stable_hash("operation", *current, key))
        return within(contexts, operation, *args, **kwargs)


def is_random(node: Node, module: GraphModule) -> bool:
    """Whether a node of ``module`` draws random numbers, itself or in a sub-graph it runs.

    A dropout with probability 0 or in evaluation does not.
    """
    _, target, operands = _call(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(is_random(inner, body) for body in _bodies(node, module) for inner in body.graph.nodes)
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    declared = target._schema.arguments
    named = {argument.name: argument.default_value for argument in declared}
    named |= dict(zip((argument.name for argument in declared), operands, strict=False)) | dict(node.kwargs)
    if named.get("train", True) is False or named.get("training", True) is False:
        return False
    probability = named.get("dropout_p", named.get("dropout", named.get("p") if "dropout" in str(target) else None))
    return not (isinstance(probability, int | float) and probability == 0)


def key_operations(module: GraphModule, layers: Mapping[str, Sequence[Node]],
                   values: Mapping[Node, Any]) -> dict[str, tuple[Node, ...]]:
    """Call every random operation through :func:`seeded`, keyed by its layer and its place there.

    ``values`` are the nodes' values in the uncut model, for their layout in memory.

    Returns:
        The layers, with the nodes that took the places of others.
    """
    keyed_layers: dict[str, tuple[Node, ...]] = {}
    for name, members in layers.items():
        ordinals = iter(range(len(members) + sum(len(body.graph.nodes) for node in members for body in _bodies(node, module))))
        keyed_layers[name] = tuple(_key(node, module, name, ordinals, values) for node in members)
    module.recompile()
    return keyed_layers


def _key(node: Node, module: GraphModule, layer: str, ordinals: Iterator[int], values: Mapping[Node, Any]) -> Node:
    if not is_random(node, module):
        return node
    contexts, target, operands = _call(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        for body in _bodies(node, module):
            for inner in list(body.graph.nodes):
                _key(inner, body, layer, ordinals, values)
            body.recompile()
        return node
    key = stable_hash("layer", layer, next(ordinals))
    operand = values.get(operands[0]) if operands and isinstance(operands[0], Node) else None
    strides = operand.stride() if isinstance(operand, torch.Tensor) else None
    with module.graph.inserting_before(node):
        arguments: Any = (key, strides, contexts, target, *operands)
        made = module.graph.call_function(seeded, arguments, dict(node.kwargs))
    made.meta = dict(node.meta)
    substitute(module, node, made)
    return made


def _call(node: Node) -> tuple[tuple[Context, ...], Any, tuple[Any, ...]]:
    """The contexts, operation and operands of a node, bound to its contexts or not."""
    if node.target is within:
        contexts, target, *operands = node.args
        return contexts, target, tuple(operands)  # type: ignore[return-value]
    return (), node.target, node.args


def _bodies(node: Node, module: GraphModule) -> list[GraphModule]:
    """The sub-graphs that a higher-order operation runs."""
    attributes = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    return [attribute for attribute in attributes if isinstance(attribute, GraphModule)]


@contextlib.contextmanager
def data_randomness(*key: str | int) -> Iterator[None]:
    """Seed torch, ``random`` and numpy (if loaded) from ``key`` for the block; restore them after it.

    A data set that draws random numbers (augmentation, mixing) then gives the same microbatch to every
    stage that reads a part of it.
    """
    seed = stable_hash("data", *key)
    numpy = sys.modules.get("numpy")
    with _GENERATORS:
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        numpy_state = numpy.random.get_state() if numpy is not None else None
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
