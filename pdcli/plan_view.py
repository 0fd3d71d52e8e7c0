"""How a plan is shown: tables and sentences for people, the same figures for ``--json``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.plan import Plan
    from planner.statistics import Statistics

__all__ = ["facts", "show", "statistics_line"]


def facts(plan: Plan) -> dict[str, Any]:
    """What ``--json`` says of a plan."""
    from planner.spec.files import encode

    return {
        "model": plan.model, "policy": plan.policy, "batch_microbatches": plan.batch_microbatches,
        "microbatch_size": plan.microbatch_size, "stages": encode(plan.stages), "replicas": list(plan.replicas),
        "predicted": encode(plan.predicted), "solver": encode(plan.solver),
    }


def show(out: Output, plan: Plan, sentence: str) -> None:
    """The plan as tables and sentences; every figure is a prediction and says so."""
    from planner.spec.units import format_bytes, format_duration_us

    rows = []
    memory_rows = []
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        first, last = stage.layers[0], stage.layers[-1]
        rows.append((str(index), first if first == last else f"{first} .. {last}", str(len(stage.layers)), _devices(stage.devices),
                     str(stage.in_flight), format_duration_us(predicted.compute_us), format_duration_us(predicted.update_us),
                     format_duration_us(predicted.allreduce_us), format_duration_us(predicted.microbatch_us)))
        memory = predicted.memory
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes, memory.workspace_bytes)
        available = "unknown" if predicted.available_bytes is None else format_bytes(predicted.available_bytes)
        memory_rows.append((str(index), *map(format_bytes, parts), format_bytes(memory.total_bytes), available))
    batch = plan.batch_microbatches
    out.text(f"{plan.model} on {plan.cluster.name}: policy {plan.policy}, an update after every "
             f"{'microbatch' if batch == 1 else f'{batch} microbatches'} of {plan.microbatch_size}")
    out.table("stages (predicted time per microbatch of the pipeline)",
              ("stage", "layers", "count", "devices", "in flight", "compute", "update", "all-reduce", "total"), rows, text=(0, 1, 3))
    out.table("memory per device (predicted)",
              ("stage", "weights", "gradients", "optimizer", "activations", "workspace", "total", "available"), memory_rows)
    out.text()
    predicted_us = plan.predicted.microbatch_us
    samples_per_s = plan.microbatch_size * 1e6 / predicted_us if predicted_us > 0 else 0.0
    out.text(f"predicted {format_duration_us(predicted_us)} per microbatch, {samples_per_s:.1f} samples/s")
    out.text(f"bottleneck (predicted): {sentence}")
    if plan.predicted.links:
        link = max(plan.predicted.links, key=lambda link: link.microbatch_us)
        out.text(f"busiest link (predicted): {link.link}, {format_bytes(link.load_bytes)} in {format_duration_us(link.microbatch_us)} "
                 "per microbatch")
    baselines = (("one device", plan.predicted.baseline_us("one device")),
                 (f"data parallelism on {plan.cluster.device_count} devices", plan.predicted.baseline_us("data parallelism")))
    against = [f"{name} {base_us / predicted_us:.2f}x" for name, base_us in baselines if 0 < base_us < float("inf") and predicted_us > 0]
    if against:
        out.text(f"predicted speed-up over {', over '.join(against)}, with updates as rare as here")
    solver = plan.solver
    bound = format_duration_us(solver.bound_us)
    if solver.status == "optimal":
        proof = f"optimal: proven that no plan is predicted to be faster than {bound} (solver {solver.name})"
    else:
        proof = f"best found by {solver.name}: within {solver.gap:.1%} of the bound {bound}, not proven optimal"
    out.text(proof + (f"; left out of the search: {solver.restricted}" if solver.restricted else ""))


def statistics_line(plan: Plan, statistics: Statistics) -> str:
    """What the integer programs came to, for ``-v``."""
    from planner.spec.units import format_duration_us

    largest = f", the largest of {statistics.largest_columns} columns and {statistics.largest_rows} rows" if statistics.programs else ""
    return (f"integer programs: {statistics.programs}{largest}; columns in all: {statistics.columns}, rows: {statistics.rows}, "
            f"branch-and-bound nodes: {statistics.nodes}; {statistics.solver_s:.2f} s of {statistics.total_s:.2f} s; "
            f"bound {format_duration_us(plan.solver.bound_us)}, gap {plan.solver.gap:.2%}")


def _devices(paths: tuple[str, ...]) -> str:
    """The devices of a stage, neighbours joined.

    >>> _devices(("server0/device0", "server0/device1", "server0/device2", "server1/device0"))
    'server0/device0..2, server1/device0'
    """
    numbered = [(path.rstrip("0123456789"), path) for path in paths]
    words = []
    for prefix, group in itertools.groupby(numbered, key=lambda pair: pair[0]):
        numbers = [path[len(prefix):] for _, path in group]
        consecutive = len(numbers) > 2 and int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1
        words.append(f"{prefix}{numbers[0]}..{numbers[-1]}" if consecutive else ", ".join(prefix + number for number in numbers))
    return ", ".join(words)
