"""An exported program as a plain graph whose inputs are parameters, buffers and data, under the model's own names.

What the model calls by several names (tied weights) is one input; what is not in ``state_dict()``
(non-persistent buffers, tensor literals, the loss's own buffers) becomes a constant inside the graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from launcher.graph.contexts import dissolve
from launcher.job import Job
from planner.spec.errors import BadInput

__all__ = ["Lifted", "lift"]


@dataclass(frozen=True)
class Lifted:
    """``module(*parameters, *buffers, *inputs)``; ``placeholders`` and ``state`` are in that order."""

    module: GraphModule
    placeholders: tuple[Node, ...]
    state: tuple[torch.Tensor, ...]  # the tensors of parameters and buffers
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]  # frozen parameters among them
    inputs: tuple[str, ...]
    frozen: frozenset[str]
    aliases: Mapping[str, str]


def lift(job: Job, program: torch.export.ExportedProgram, step: torch.nn.Module, inputs: Sequence[str]) -> Lifted:
    """Put an exported :class:`launcher.graph.step.Step` into that form.

    Raises:
        BadInput: the loss has trainable parameters of its own, which no stage would update.
    """
    names, aliases = _names(job.model)
    trainable = {id(parameter) for parameter in job.model.parameters() if parameter.requires_grad}
    frozen = {id(parameter) for parameter in job.model.parameters() if not parameter.requires_grad}
    found: dict[str, torch.Tensor] = {}
    constants: dict[str, torch.Tensor] = {}
    source: dict[Node, str] = {}  # placeholder of the exported graph -> name of an input or a constant
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    positions = iter(inputs)
    for node, specification in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if specification.kind is InputKind.USER_INPUT:
            source[node] = f"data:{next(positions)}"
        elif node.users and specification.target is not None:
            tensor = _tensor(program, step, specification.target)
            if id(tensor) in names:
                source[node] = f"state:{names[id(tensor)]}"
                found[names[id(tensor)]] = tensor
            elif isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                raise BadInput(f"the loss has a trainable parameter, {specification.target!r}, outside the model",
                               hint="make it a part of the model, so that a stage owns and updates it")
            else:
                source[node] = f"constant:{specification.target}"
                constants[specification.target] = tensor.detach()
    order = [name for name in names.values() if name in found]
    parameters = tuple(name for name in order if id(found[name]) in trainable)
    buffers = tuple(name for name in order if id(found[name]) not in trainable)
    graph, attributes, made = Graph(), dict[str, object](), dict[str, Node]()
    for name in (*(f"state:{name}" for name in (*parameters, *buffers)), *(f"data:{name}" for name in inputs)):
        made[name] = graph.placeholder(_identifier(name))
    for target, tensor in constants.items():
        attribute = _identifier(f"constant:{target}")
        attributes[attribute] = tensor
        made[f"constant:{target}"] = graph.get_attr(attribute)
    copies = {node: made[name] for node, name in source.items()}
    for node in program.graph.nodes:
        if node.op == "output":
            graph.output(tuple(copies[result] for result in node.args[0]))
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(program.graph_module, str(node.target))
    module = GraphModule(attributes, graph)
    dissolve(module)
    state = tuple(found[name] for name in (*parameters, *buffers))
    count = len(state) + len(inputs)
    return Lifted(module, tuple(module.graph.nodes)[:count], state, parameters, buffers, tuple(inputs),
                  frozenset(name for name in buffers if id(found[name]) in frozen), aliases)


def _identifier(text: str) -> str:
    """A Python identifier: ``state:0.weight`` becomes ``state_0_weight``."""
    return re.sub(r"\W", "_", text)


def _names(model: torch.nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """The first name of each tensor of ``state_dict()``, and the further names of the same tensor."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        first = names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
    return names, aliases


def _tensor(program: torch.export.ExportedProgram, step: torch.nn.Module, target: str) -> torch.Tensor:
    """The tensor itself, not export's copy of it, so that identity says what is tied."""
    path, _, name = target.rpartition(".")
    try:
        value = getattr(step.get_submodule(path), name)
    except AttributeError:
        value = None
    if isinstance(value, torch.Tensor):
        return value
    constant = program.constants[target]
    if not isinstance(constant, torch.Tensor):
        raise BadInput(f"the model holds a {type(constant).__name__} at {target!r}, which is not a tensor", hint="use tensors only")
    return constant
