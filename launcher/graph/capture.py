"""From a job to one flat graph of its training or evaluation step, grouped into layers.

``torch.export`` gives the graph, with parameters and buffers as inputs. Here it is put in the form
that :mod:`launcher.graph.split` cuts: names as in ``model.state_dict()``, tied parameters once, constants
inside, autocast written out as casts, in-place operations on activations removed, randomness keyed, operations in layers.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from launcher.data.microbatches import evaluation_source, length_of, training_source
from launcher.data.samples import collate
from launcher.explain import explain
from launcher.graph.casts import write_casts
from launcher.graph.contexts import bind
from launcher.graph.export import export
from launcher.graph.facts import Facts, observe
from launcher.graph.fingerprint import fingerprint
from launcher.graph.inplace import copy_written_inputs, out_of_place
from launcher.graph.layers import align, group
from launcher.graph.lifted import Lifted, lift
from launcher.graph.program import Value
from launcher.graph.randomness import is_random, key_operations
from launcher.graph.step import Step, layout_of, without_targets
from launcher.job import Job
from launcher.precision import autocasting, half_type
from planner.spec.errors import BadInput

__all__ = ["Captured", "capture_evaluation", "capture_training"]


@dataclass(frozen=True)
class Captured:
    """A step of the model as one graph, called ``module(*parameters, *buffers, *inputs) -> results``.

    ``values`` has the tensors that may cross a cut. ``free`` operations (masks, position indices,
    reshaped targets) belong to no layer and are repeated in each stage that uses them. ``tied`` maps
    what several layers use (a tied parameter; a buffer that is updated, which must be in one stage) to those
    layers; ``aliases`` maps further names of a parameter to the one in ``parameters``.
    """

    module: GraphModule
    training: bool
    layers: Mapping[str, tuple[Node, ...]]
    parameters: tuple[str, ...]  # trainable, as in model.state_dict()
    buffers: tuple[str, ...]  # and parameters that do not require a gradient
    inputs: tuple[str, ...]  # flattened data tensors, such as "inputs" and "targets"
    results: tuple[str, ...]  # the loss first, then metrics
    outputs: tuple[Value, ...]  # returned after the results: what the model itself returns, where that was asked for
    values: Mapping[Node, Value]
    free: frozenset[Node]
    tied: Mapping[str, tuple[str, ...]]
    updated: frozenset[str]  # buffers and constants that the step writes to
    aliases: Mapping[str, str]
    fingerprint: str


# What evaluation needs to know of training, by model: so that a worker, which needs both, exports once each.
_TRAINING: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, Captured]] = weakref.WeakKeyDictionary()


def capture_training(job: Job) -> Captured:
    """The training step of ``job`` for microbatches of ``job.microbatch_size`` samples.

    Raises:
        BadInput: the data or the model cannot be used, with the user's own source line.
    """
    with contextlib.redirect_stdout(sys.stderr), explain("the job's data", None):
        samples = training_source(job.train_data, job.microbatch_size, shuffle=False).first()
    captured = _capture(job, samples, evaluation=False)
    loss = next(iter(captured.module.graph.output_node().args[0]))  # type: ignore[arg-type]
    if not captured.values[loss].requires_grad:
        raise BadInput("the loss does not depend on any trainable parameter",
                       hint="remove torch.no_grad(), .detach() or .item() between the parameters and the loss")
    with contextlib.suppress(TypeError):
        _TRAINING.setdefault(job.model, {})[job.microbatch_size] = captured
    return captured


def capture_evaluation(job: Job, microbatch_size: int, *, outputs: bool = False) -> Captured:
    """The evaluation step for ``microbatch_size`` samples: the loss, then the job's metrics.

    With ``outputs`` what the model returns comes after them, and the evaluation data may lack the targets; then
    there is no loss and no metric. The step's layers are a subset of training's, and each uses only parameters and buffers that training's
    layer uses, so that both are cut at the same names.

    Raises:
        BadInput: as :func:`capture_training`.
    """
    training = next(iter(_TRAINING.get(job.model, {}).values()), None) or capture_training(job)
    data = job.train_data if job.evaluation_data is None else job.evaluation_data
    size = min(microbatch_size, length_of(data) or microbatch_size)
    with contextlib.redirect_stdout(sys.stderr), explain("the job's data", None):
        samples = evaluation_source(data, size, size).first()
    return _capture(job, samples, evaluation=True, training=training, outputs=outputs)


def _capture(job: Job, samples: Sequence[Any], *, evaluation: bool, training: Captured | None = None, outputs: bool = False) -> Captured:
    with contextlib.redirect_stdout(sys.stderr), explain("the job's data", None):
        unlabelled = without_targets(job, samples[0], training.inputs) if outputs and training is not None else None
        layout = unlabelled or layout_of(job, samples[0])
        device = next(iter(job.model.parameters())).device
        tensors = tuple(tensor.to(device) for tensor in collate(samples, None))
    step = Step(job, layout, evaluation=evaluation, outputs=outputs, labelled=unlabelled is None)
    lifted = lift(job, export(step, tensors, autocasting(job, device), training=not evaluation), step, layout.names)
    arguments = (*lifted.state, *tensors)
    write_casts(lifted.module, arguments, half_type(job.autocast, "autocast"), grad=not evaluation)
    facts = observe(lifted.module, arguments, grad=not evaluation)
    if copy_written_inputs(lifted.module, facts, lifted.placeholders[len(lifted.state):]):
        facts = observe(lifted.module, arguments, grad=not evaluation)
    together = out_of_place(lifted.module, facts, _kept(lifted, facts))
    lifted.module.graph.eliminate_dead_code(lambda node: node.op == "placeholder" or _has_effect(node, facts))
    lifted.module.recompile()
    if any(node not in facts.values for node in lifted.module.graph.nodes):  # something was rewritten
        facts = observe(lifted.module, arguments, grad=not evaluation)
    return _assemble(lifted, facts, together, step, training)


def _kept(lifted: Lifted, facts: Facts) -> frozenset[int]:
    """Storages that stay written in place: parameters, buffers and constants."""
    constants = [node for node in lifted.module.graph.nodes if node.op == "get_attr"]
    return frozenset().union(*(facts.storages[node] for node in (*lifted.placeholders[: len(lifted.state)], *constants)))


def _has_effect(node: Node, facts: Facts) -> bool:
    if node.op == "output" or node.target is torch.ops.aten._assert_tensor_metadata.default:
        return node.op == "output"
    return bool(facts.writes.get(node)) or node.is_impure()


def _assemble(lifted: Lifted, facts: Facts, together: list[frozenset[Node]], step: Step, training: Captured | None) -> Captured:
    module, count = lifted.module, len(lifted.state)
    nodes = list(module.graph.nodes)
    names = dict(zip(lifted.placeholders, (*lifted.parameters, *lifted.buffers, *lifted.inputs), strict=True))
    names |= {node: str(node.target) for node in nodes if node.op == "get_attr"}
    state = {*lifted.placeholders[:count], *(node for node in nodes if node.op == "get_attr")}
    written = frozenset().union(*facts.writes.values())
    changing = {node for node in state if facts.storages[node] & written}
    if training is not None:  # what training updates is not constant in evaluation either
        changing |= {node for node in state if names[node] in training.updated}
    trainable = lifted.placeholders[: len(lifted.parameters)]
    _refuse_written_parameters(trainable, changing, names)
    owned = {*trainable, *changing, *(node for node in state if names[node] in lifted.frozen)}
    stuck = frozenset().union(*together)
    free = _free(module, owned, stuck, facts)
    layered = [node for node in nodes if node.op == "call_function" and node not in free]
    living = frozenset().union(*(facts.storages[node] for node in changing))  # a view of a buffer cannot be shipped: it would go stale
    values = {node: value for node in nodes if not facts.storages.get(node, frozenset()) & living
              and (value := _value(node, facts, grad=training is None)) is not None}
    together = [*together, *(frozenset({node, *node.users}) for node in layered if node not in values)]

    def is_leaf(path: str) -> bool:
        return next(step.get_submodule(path).children(), None) is None

    def owns(node: Node) -> str:
        return next((names[source] for source in node.all_input_nodes if source in owned), "")

    layers = group(layered, owns, is_leaf, together)
    if training is not None:
        layers = _aligned(layers, training, names, together)
    digest = fingerprint(module, layers, [names[node] for node in lifted.placeholders], facts.values)
    uses = {names[node]: _layers_using(node, layers) for node in (*trainable, *changing)}
    outputs = _outputs(module, facts, step)
    bound = bind(module)
    before = {name: tuple(bound.get(node, node) for node in members) for name, members in layers.items()}
    layers = key_operations(module, before, {bound.get(node, node): value for node, value in facts.values.items()})
    keyed = {old: new for name in layers for old, new in zip(before[name], layers[name], strict=True)}

    def now(node: Node) -> Node:
        return keyed.get(bound.get(node, node), bound.get(node, node))

    values = {now(node): value for node, value in values.items()}
    free = frozenset(map(now, free))
    return Captured(module, training is None, layers, lifted.parameters, lifted.buffers, lifted.inputs, step.results, outputs, values, free,
                    {name: where for name, where in uses.items() if len(where) > 1}, frozenset(names[node] for node in changing),
                    lifted.aliases, digest)


def _refuse_written_parameters(trainable: Sequence[Node], changing: set[Node], names: Mapping[Node, str]) -> None:
    for node in trainable:
        if node in changing:
            raise BadInput(f"the model's forward changes its parameter {names[node]!r} in place",
                           hint="move that into the optimizer, or make it a buffer")


def _free(module: GraphModule, owned: set[Node], stuck: frozenset[Node], facts: Facts) -> frozenset[Node]:
    """Operations on constants and data alone, without gradient, randomness or effect: cheaper to repeat than to ship."""
    known = {node for node in module.graph.nodes if node.op in ("placeholder", "get_attr") and node not in owned}
    free = {node for node in known if node.op == "get_attr"}
    for node in module.graph.nodes:
        if node.op != "call_function" or node in stuck or facts.writes[node] or node.is_impure() or is_random(node, module):
            continue
        if all(source in known for source in node.all_input_nodes):
            known.add(node)
            free.add(node)
    return frozenset(free)


def _value(node: Node, facts: Facts, *, grad: bool) -> Value | None:
    """What crosses a cut for ``node``; None when it is not one dense tensor of a size known before the run."""
    tensor, exported = facts.tensor(node), node.meta.get("val")
    if tensor is None or tensor.layout is not torch.strided:
        return None
    if not all(isinstance(length, int) for seen in (tensor, exported) if isinstance(seen, torch.Tensor) for length in seen.shape):
        return None
    return Value(node.name, tuple(tensor.shape), tensor.dtype, grad and tensor.requires_grad)


def _outputs(module: GraphModule, facts: Facts, step: Step) -> tuple[Value, ...]:
    """What the step returns after its results."""
    nodes: tuple[Node, ...] = tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]
    tensors = [facts.values[node] for node in nodes[len(step.results):]]
    return tuple(Value(name, tuple(tensor.shape), tensor.dtype, False) for name, tensor in zip(step.output_names, tensors, strict=True))


def _layers_using(node: Node, layers: Mapping[str, Sequence[Node]]) -> tuple[str, ...]:
    return tuple(name for name, members in layers.items() if any(user in node.users for user in members))


def _aligned(layers: dict[str, tuple[Node, ...]], training: Captured, names: Mapping[Node, str],
             together: Sequence[frozenset[Node]]) -> dict[str, tuple[Node, ...]]:
    """Evaluation's operations in training's layers, see :func:`launcher.graph.layers.align`."""
    owners = dict(zip((*training.parameters, *training.buffers), training.module.graph.nodes, strict=False))
    owned = {*training.parameters, *training.updated}
    homes = {name: _layers_using(node, training.layers) for name, node in owners.items() if name in owned}
    own = {node: name for name, members in layers.items() for node in members}

    def possible(node: Node) -> list[tuple[str, ...]]:
        return [where for source in node.all_input_nodes if (where := homes.get(names.get(source, ""), ()))]

    def home(node: Node) -> str | None:
        """Where several layers use a parameter, the one that evaluation too calls so."""
        found = [where[0] if len(where) == 1 else own[node] for where in possible(node) if len(where) == 1 or own[node] in where]
        return next(iter(found), None)

    aligned = align(layers, training.layers, home)
    everything = {node for members in aligned.values() for node in members}
    for name, members in aligned.items():
        for node in members:
            wanted = next((where for where in possible(node) if name not in where), None)
            if wanted is not None:
                raise BadInput(f"evaluation uses the parameters of layer {wanted[0]!r} in or after layer {name!r}, training does not",
                               hint="let the model's forward run its layers in the same order in both modes")
        if any(nodes & set(members) and not nodes & everything <= set(members) for nodes in together):
            raise BadInput(f"evaluation needs layers apart from {name!r} together with it, training does not",
                           hint="let the model's forward do the same operations in both modes")
    return aligned
