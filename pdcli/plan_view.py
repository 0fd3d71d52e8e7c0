"""How a plan is shown: tables and sentences for people, the same figures for ``--json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdcli.names import device_names, layer_names

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.plan import Baseline, Plan
    from planner.statistics import Statistics

__all__ = ["facts", "show", "statistics_line"]

MOST_STAGES = 64  # rows of a table
MOST_LINKS = 4  # without -v


def facts(plan: Plan) -> dict[str, Any]:
    """What ``--json`` says of a plan."""
    from planner.spec.files import encode

    predicted = encode(plan.predicted)
    for stage, own in zip(predicted["stages"], plan.predicted.stages, strict=True):
        stage["slack"] = _slack(own.microbatch_us, plan)
    for entry, link in zip(predicted["links"], plan.predicted.links, strict=True):
        entry["slack"] = _slack(link.microbatch_us, plan)
    return {
        "model": plan.model, "policy": plan.policy, "batch_microbatches": plan.batch_microbatches,
        "microbatch_size": plan.microbatch_size, "samples_per_s": _samples_per_s(plan), "stages": encode(plan.stages),
        "replicas": list(plan.replicas),
        "predicted": predicted, "solver": encode(plan.solver),
    }


def _samples_per_s(plan: Plan) -> float:
    expected_us = plan.predicted.expected_us
    return plan.microbatch_size * 1e6 / expected_us if expected_us > 0 else 0.0


def show(out: Output, plan: Plan, sentence: str, why: str | None) -> None:
    """The plan as tables and sentences; every figure is a prediction and says so.

    ``sentence`` says what the bottleneck is, ``why`` why the simulated time is another one.
    """
    batch = plan.batch_microbatches
    out.text(f"{plan.model} on {plan.cluster.name}: policy {plan.policy}, an update after every "
             f"{'microbatch' if batch == 1 else f'{batch} microbatches'} of {plan.microbatch_size}")
    _stages(out, plan)
    _memory(out, plan)
    _links(out, plan)
    _baselines(out, plan)
    out.text()
    _time(out, plan, why)
    out.text(f"bottleneck (predicted): {sentence}")
    out.text(_proof(plan))


def _stages(out: Output, plan: Plan) -> None:
    from planner.spec.units import format_duration_us

    where, times = [], []
    again = any(stage.recompute for stage in plan.stages)
    parts = {"compute": "compute_us", "update": "update_us", "all-reduce": "allreduce_us", "fill and drain": "fill_us"}
    shown = [name for name, field in parts.items() if name == "compute" or any(getattr(one, field) for one in plan.predicted.stages)]
    for index, (stage, predicted) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        where.append((str(index), layer_names(stage.layers), str(len(stage.layers)), device_names(stage.devices), str(stage.in_flight),
                      *(["yes" if stage.recompute else ""] if again else [])))
        times.append((str(index), *(format_duration_us(getattr(predicted, parts[name])) for name in shown),
                      format_duration_us(predicted.microbatch_us), f"{_slack(predicted.microbatch_us, plan):.1%}"))
    headings = ("stage", "layers", "count", "devices", "in flight", *(["recomputes"] if again else []))
    out.table("stages", headings, _shortened(where), text=(0, 1, 3, 5))
    out.table("time per microbatch of the pipeline, and the share of it that a stage is idle (predicted)",
              ("stage", *shown, "total", "slack"), _shortened(times))


def _memory(out: Output, plan: Plan) -> None:
    from planner.spec.units import format_bytes

    rows = []
    for index, predicted in enumerate(plan.predicted.stages):
        memory = predicted.memory
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, memory.activations_bytes, memory.workspace_bytes)
        available = "unknown" if predicted.available_bytes is None else format_bytes(predicted.available_bytes)
        rows.append((str(index), *map(format_bytes, parts), format_bytes(memory.total_bytes), available))
    out.table("memory per device (predicted)",
              ("stage", "weights", "gradients", "optimizer", "activations", "workspace", "total", "available"), _shortened(rows))


def _links(out: Output, plan: Plan) -> None:
    from planner.spec.units import format_bytes, format_duration_us

    busiest = sorted(plan.predicted.links, key=lambda link: -link.microbatch_us)
    shown = busiest if out.verbose else busiest[:MOST_LINKS]
    if shown:
        which = "links" if len(shown) == len(busiest) else f"links, the {len(shown)} busiest of {len(busiest)} (-v: all)"
        out.table(f"{which} (predicted, per microbatch of the pipeline)", ("link of", "moves", "in", "slack"),
                  [(link.link, format_bytes(link.load_bytes), format_duration_us(link.microbatch_us),
                    f"{_slack(link.microbatch_us, plan):.1%}") for link in shown])


def _baselines(out: Output, plan: Plan) -> None:
    from planner.spec.units import format_duration_us

    rows = []
    known = "unknown" if all(stage.available_bytes is None for stage in plan.predicted.stages) else "fits"
    for one in plan.predicted.baselines:
        time = "" if one.microbatch_us is None else format_duration_us(one.microbatch_us)
        fits = "" if one.microbatch_us is None else known if one.fits else "too little"
        rows.append((one.name, time, _compared(one, plan), fits, one.note))
    if rows:
        waits = ", if nothing waits" if plan.predicted.waits else ""
        out.table(f"other ways on the same devices (predicted by the same cost model{waits})",
                  ("", "microbatch", "this plan is", "memory", ""), rows, text=(0, 3, 4))


def _compared(one: Baseline, plan: Plan) -> str:
    own_us = plan.predicted.microbatch_us
    if not one.microbatch_us or own_us <= 0:
        return ""
    faster = one.microbatch_us / own_us
    if abs(faster - 1) < 0.005:
        return "as fast"
    return f"{faster:.2f}x faster" if faster > 1 else f"{1 / faster:.2f}x slower"


def _time(out: Output, plan: Plan, why: str | None) -> None:
    from planner.spec.units import format_duration_us

    closed_us, simulated_us = plan.predicted.microbatch_us, plan.predicted.simulated_us

    def per_s(time_us: float) -> str:
        return f"{plan.microbatch_size * 1e6 / time_us if time_us > 0 else 0.0:.1f} samples/s"

    if simulated_us is None or not plan.predicted.waits:
        agrees = "" if simulated_us is None else "; its schedule, simulated, takes as long"
        out.text(f"predicted {format_duration_us(closed_us)} per microbatch, {per_s(closed_us)}{agrees}")
        return
    more = f" ({simulated_us / closed_us - 1:+.1%})" if closed_us > 0 else ""
    out.text(f"predicted {format_duration_us(simulated_us)} per microbatch, {per_s(simulated_us)}: its schedule, simulated")
    out.text(f"predicted {format_duration_us(closed_us)} if nothing waited{more}{f': {why}' if why else ''}")


def _proof(plan: Plan) -> str:
    from planner.spec.units import format_duration_us

    solver, bound = plan.solver, format_duration_us(plan.solver.bound_us)
    if solver.status == "optimal":
        count = plan.batch_microbatches
        batches = "an update after every microbatch" if count == 1 else f"batches of {count} microbatches"
        waits = ", if nothing waits" if plan.predicted.waits else ""
        proof = f"optimal: proven that no plan with {batches} is predicted to be faster than {bound}{waits} (solver {solver.name})"
    else:
        proof = f"best found by {solver.name}: within {solver.gap:.1%} of the bound {bound}, not proven optimal"
    return proof + (f"; left out of the search: {solver.restricted}" if solver.restricted else "")


def statistics_line(plan: Plan, statistics: Statistics) -> str:
    """What the integer programs came to, for ``-v``."""
    from planner.spec.units import format_duration_us

    largest = f", the largest of {statistics.largest_columns} columns and {statistics.largest_rows} rows" if statistics.programs else ""
    return (f"integer programs: {statistics.programs}{largest}; columns in all: {statistics.columns}, rows: {statistics.rows}, "
            f"branch-and-bound nodes: {statistics.nodes}; {statistics.solver_s:.2f} s of {statistics.total_s:.2f} s; "
            f"bound {format_duration_us(plan.solver.bound_us)}, gap {plan.solver.gap:.2%}")


def _slack(time_us: float, plan: Plan) -> float:
    """The share of the pipeline's time in which nothing is done."""
    total_us = plan.predicted.microbatch_us
    return max(0.0, 1 - time_us / total_us) if total_us > 0 else 0.0


def _shortened(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first and the last of many rows."""
    if len(rows) <= MOST_STAGES:
        return rows
    half = MOST_STAGES // 2
    gap = ("...", f"{len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 2))
    return [*rows[:half], gap, *rows[-half:]]
