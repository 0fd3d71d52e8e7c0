"""A digest of the captured graph: equal in every process for the same model, different for any other.

It covers the operations with their arguments and shapes, the parameters' names and shapes, constants,
and the layers. It does not cover weights, the optimizer, or which kind of device runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from launcher.graph.contexts import contexts_of

__all__ = ["fingerprint"]


def fingerprint(module: GraphModule, layers: Mapping[str, Sequence[Node]], names: Sequence[str], values: Mapping[Node, Any]) -> str:
    """64 hexadecimal digits.

    Args:
        module: The captured graph.
        layers: Its layers.
        names: The graph's placeholders in order: parameters, buffers, data inputs.
        values: Each node's value, for shapes and types.
    """
    layer_of = {node: name for name, members in layers.items() for node in members}
    digest = hashlib.sha256()
    for line in _lines(module, names, layer_of, values):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _lines(module: GraphModule, names: Sequence[str], layer_of: Mapping[Node, str], values: Mapping[Node, Any]) -> list[str]:
    numbers = {node: index for index, node in enumerate(module.graph.nodes)}
    placeholders = iter(names)
    lines: list[str] = []
    for node in module.graph.nodes:
        value = _shape(values.get(node))
        if node.op == "placeholder":
            lines.append(f"input {next(placeholders, '')} {value}")
        elif node.op == "get_attr":
            lines.extend(_constant(getattr(module, str(node.target))))
        else:
            keywords = sorted((key, item) for key, item in node.kwargs.items() if key != "device")
            arguments = _text([list(node.args), [[key, item] for key, item in keywords]], numbers)
            contexts = _text(contexts_of(node), numbers)
            lines.append(f"{layer_of.get(node, '-')} {_target(node.target)} {arguments} {value} {contexts}")
    return lines


def _constant(value: Any) -> list[str]:
    if isinstance(value, GraphModule):
        return ["begin", *_lines(value, (), {}, {}), "end"]
    tensor = value.detach().cpu().contiguous()
    content = hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"").hexdigest()
    return [f"constant {_shape(tensor)} {content}"]


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        size = ",".join(str(length) if isinstance(length, int) else "?" for length in value.shape)
        return f"{value.dtype}[{size}]{'g' if value.requires_grad else ''}"
    if isinstance(value, tuple | list):
        return f"({' '.join(map(_shape, value))})"
    return ""


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _text(argument: Any, numbers: Mapping[Node, int]) -> str:
    if isinstance(argument, Node):
        return f"%{numbers[argument]}"
    if isinstance(argument, tuple | list):
        return f"[{', '.join(_text(item, numbers) for item in argument)}]"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key}: {_text(item, numbers)}' for key, item in sorted(argument.items(), key=str))}}}"
    if isinstance(argument, torch.device):
        return "device"
    if isinstance(argument, int | float | bool | str | complex | type(None) | torch.dtype | torch.layout | torch.memory_format | slice):
        return repr(argument)
    return _target(argument)
