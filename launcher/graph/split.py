"""Cut a captured step into stage programs.

A tensor that skips stages is relayed: the stages between receive it and send it on. With a residual
that layer ``a`` makes and ``c`` uses::

    stage 0: a          stage 1: b                  stage 2: c
    sent (x,)    ->     received (x,)
                        sent (x, y)         ->      received (x, y)

so every stage talks to its neighbours only. Data is never shipped, and ``free`` operations are
repeated in every stage that uses them. A tied parameter is a parameter of every stage that uses it; a
buffer that several layers write to is one stage's. With a transfer type, floating-point tensors of more bytes are
cast to it before they are sent and back when they are used, and so are their gradients; a relayed one stays as it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from launcher.graph.capture import Captured
from launcher.graph.program import StageProgram, Value
from planner.spec.errors import Mismatch

__all__ = ["extract", "split", "tied_stages"]


def split(captured: Captured, stages: Sequence[Sequence[str]], transfer: torch.dtype | None = None) -> tuple[StageProgram, ...]:
    """The programs of ``stages``, each a list of layer names.

    Training's layers must all be named, once. An evaluation step has fewer layers: names it does not
    have are skipped, and a stage may be left with nothing but passing tensors on.

    Raises:
        Mismatch: the names are not this model's layers, a stage would need a later stage's result, or
            layers that share a buffer which they update are in two stages.
    """
    place = _stage_of_layers(captured, stages)
    stage_of = {node: place[name] for name, members in captured.layers.items() for node in members}
    _check_updated(captured, place)
    last = len(stages) - 1
    results = _results(captured)
    final: dict[Node, int] = {}  # the last stage that uses each value
    for node in captured.module.graph.nodes:
        if node not in stage_of:
            continue
        users = [stage_of[user] for user in node.users if user in stage_of] + ([last] if node in results else [])
        final[node] = max(users, default=stage_of[node])
        early = min(users, default=last)
        if early < stage_of[node]:
            raise Mismatch(f"stage {early} needs {node.name!r}, which the later stage {stage_of[node]} makes",
                           hint="plan again: a stage may only use what earlier stages make")
    crossing = [[node for node in final if stage_of[node] <= k < final[node]] for k in range(last)]
    programs = []
    for k in range(len(stages)):
        received = crossing[k - 1] if k > 0 else []
        sent = crossing[k] if k < last else []
        own = {node for node, stage in stage_of.items() if stage == k}
        programs.append(extract(captured, own, received, sent if k < last else results, last=k == last, transfer=transfer))
    return tuple(programs)


def tied_stages(programs: Sequence[StageProgram]) -> dict[str, tuple[int, ...]]:
    """The parameters that several of a pipeline's programs take, with those stages."""
    stages: dict[str, tuple[int, ...]] = {}
    for stage, program in enumerate(programs):
        for name in program.parameters:
            stages[name] = (*stages.get(name, ()), stage)
    return {name: where for name, where in stages.items() if len(where) > 1}


def extract(captured: Captured, own: Iterable[Node], received: Sequence[Node], outputs: Sequence[Node], *, last: bool,
            transfer: torch.dtype | None = None) -> StageProgram:
    """A program of the operations ``own``, which gets ``received`` and returns ``outputs``, in those orders."""
    needed = _with_free(captured, {*own}, received, outputs)
    order = list(captured.module.graph.nodes)
    owners = dict(zip(order, (*captured.parameters, *captured.buffers), strict=False))
    first_input = len(owners)
    used = [node for node in order if node.op == "placeholder" and node in needed]
    state, data = [node for node in used if node in owners], [node for node in used if node not in owners]
    values = captured.values
    graph, copies, attributes = Graph(), dict[Node, Node](), dict[str, object]()
    for node in (*state, *received, *data):
        copies[node] = graph.placeholder(node.name)
    arrived = dict(copies)
    for node in received:
        if _sent_as(values[node], transfer) != values[node] and (any(user in needed for user in node.users) or last):
            copies[node] = graph.call_function(torch.ops.aten.to.dtype, (copies[node], values[node].dtype))
    for node in order:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                attributes[str(node.target)] = getattr(captured.module, str(node.target))
    leaving = []
    for node in outputs:
        if last or _sent_as(values[node], transfer) == values[node]:
            leaving.append(copies[node])
        else:
            leaving.append(arrived[node] if node in arrived else graph.call_function(torch.ops.aten.to.dtype, (copies[node], transfer)))
    graph.output(tuple(leaving))
    graph.lint()
    module = GraphModule(attributes, graph)
    return StageProgram(
        module=module,
        parameters=tuple(owners[node] for node in state if owners[node] in captured.parameters),
        buffers=tuple(owners[node] for node in state if owners[node] in captured.buffers),
        received=tuple(_sent_as(values[node], transfer) for node in received),
        inputs=tuple(order.index(node) - first_input for node in data),
        sent=() if last else tuple(_sent_as(values[node], transfer) for node in outputs),
        results=captured.results if last else (),
        written=tuple(name for name in (*(owners[node] for node in state), *attributes) if name in captured.updated),
    )


def _sent_as(value: Value, transfer: torch.dtype | None) -> Value:
    """The value as it crosses a cut."""
    if transfer is None or not value.dtype.is_floating_point or value.dtype.itemsize <= transfer.itemsize:
        return value
    return replace(value, dtype=transfer)


def _with_free(captured: Captured, own: set[Node], received: Sequence[Node], outputs: Sequence[Node]) -> set[Node]:
    """``own`` and all placeholders and free operations that it and the outputs need."""
    needed, given = set(own), set(received)
    pending = [source for node in own for source in node.all_input_nodes] + list(outputs)
    while pending:
        node = pending.pop()
        if node in needed or node in given:
            continue
        if node.op not in ("placeholder", "get_attr") and node not in captured.free:
            raise Mismatch(f"{node.name!r} is neither made nor received by the stage that uses it", hint="plan again from a new profile")
        needed.add(node)
        pending.extend(node.all_input_nodes)
    return needed


def _results(captured: Captured) -> list[Node]:
    return list(captured.module.graph.output_node().args[0])  # type: ignore[arg-type]


def _stage_of_layers(captured: Captured, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    place: dict[str, int] = {}
    for index, names in enumerate(stages):
        for name in names:
            if name in place:
                raise Mismatch(f"layer {name!r} is in stage {place[name]} and in stage {index}", hint="plan again")
            if captured.training and name not in captured.layers:
                raise Mismatch(f"stage {index} has the layer {name!r}, which is not in the model: {_some(captured.layers)}",
                               hint="profile and plan the model as it is now")
            place[name] = index
        if not names:
            raise Mismatch(f"stage {index} of {len(stages)} has no layer", hint="plan again with fewer stages")
    missing = [name for name in captured.layers if name not in place]
    if missing:
        raise Mismatch(f"{len(missing)} of {len(captured.layers)} layers are in no stage: {_some(missing)}",
                       hint="profile and plan the model as it is now")
    return place


def _check_updated(captured: Captured, place: dict[str, int]) -> None:
    for name, layers in captured.tied.items():
        where = sorted({place[layer] for layer in layers})
        if len(where) > 1 and name not in captured.parameters:
            raise Mismatch(f"{name!r} is updated in the forward and used by the layers {', '.join(layers)}, "
                           f"which are in the stages {', '.join(map(str, where))}",
                           hint="profile and plan again: layers that share a buffer which they update must be in one stage")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f", ... ({len(names)})" if len(names) > 5 else "")
