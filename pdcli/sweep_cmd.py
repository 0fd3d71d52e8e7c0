"""``pipedream plan --sweep``: the plan as one thing varies, as a table and an SVG plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pdcli import options

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.options import PlanOptions
    from planner.spec.cluster import Cluster
    from planner.spec.profile import Profile
    from planner.sweep import Row, Sweep

__all__ = ["run_sweep", "sweep_options"]

CLOSE = 0.99  # of the best throughput: enough to be worth a recommendation with fewer devices


def sweep_options(function: Any) -> Any:
    """``--sweep`` and ``--plot``."""
    function = click.option("--plot", metavar="FILE", default="sweep.svg", show_default=True,
                            help="SVG plot that --sweep writes.")(function)
    return click.option("--sweep", metavar="WHAT=VALUES", help="Plan for many values and write no plan: devices=1..64, "
                        "microbatch-size=1..32 or bandwidth=1GB/s..100GB/s.")(function)


def run_sweep(context: click.Context, out: Output, profile: Profile, cluster: Cluster, wanted: PlanOptions, text: str, plot: str) -> int:
    """Plan for every value of ``text``, print the table, write the plot.

    Raises:
        BadInput: ``text`` is no sweep, or the plot cannot be written.
        Infeasible: no value has a plan.
    """
    from planner.spec.errors import BadInput, Infeasible
    from planner.spec.files import write_text
    from planner.sweep import parse_sweep, sweep, sweep_plot

    if context.params["check"]:
        raise BadInput("--check compares a plan, but --sweep writes none", hint="give one of them", code="usage")
    varied = parse_sweep(text)
    with out.progress() as update:
        rows = sweep(profile, cluster, wanted, varied, command=options.command_line(context),
                     progress=lambda done: update(f"planning for {varied.what}", done, len(varied.values)))
    if all(row.plan is None for row in rows):
        raise Infeasible(f"--sweep {text}: no value has a plan; at {varied.text(rows[0].value)}: {rows[0].reason}",
                         hint=rows[0].hint or "sweep over other values")
    try:
        write_text(plot, sweep_plot(profile.model, varied, rows))
    except BadInput as error:
        raise BadInput(error.message, hint="choose another path with --plot", code=error.code) from error
    show(out, profile, cluster, varied, rows)
    planned = sum(row.plan is not None for row in rows)
    message = f"wrote {plot}: predicted throughput of {planned} plan{'s' if planned != 1 else ''}"
    next_command = recommended(context, varied, rows, profile)
    out.text(message)
    out.next(next_command)
    out.json(message, next_command, {"plot": plot, "sweep": varied.what, "rows": [facts(row) for row in rows]})
    return 0


def show(out: Output, profile: Profile, cluster: Cluster, varied: Sweep, rows: list[Row]) -> None:
    """One row a value; what is not feasible says why below the table."""
    from planner.spec.units import format_duration_us

    lines = []
    for row in rows:
        if row.plan is None:
            lines.append((varied.text(row.value), "no plan", *[""] * 6))
            continue
        plan, predicted = row.plan, row.plan.predicted
        others = [_times(predicted.baseline_us(name), predicted.microbatch_us) for name in ("one device", "data parallelism")]
        lines.append((varied.text(row.value), f"{row.samples_per_s or 0:.1f}", format_duration_us(predicted.expected_us),
                      "-".join(map(str, plan.replicas)) if len(plan.stages) <= 12 else f"{len(plan.stages)} stages", str(plan.worker_count),
                      *others,
                      "optimal" if plan.solver.status == "optimal" else f"gap {plan.solver.gap:.1%}"))
    headings = (varied.what, "samples/s", "microbatch", "replicas", "workers", "x one device", "x data par.", "proof")
    out.table(f"{profile.model} on {cluster.name} (predicted)", headings, lines, text=(0, 3, 7))
    out.text("x one device, x data par.: how many times as fast as one device, and as data parallelism")
    out.text("on these devices with an update after one microbatch on each")
    reasons = [(row.reason, varied.text(row.value)) for row in rows if row.plan is None]
    for reason in dict.fromkeys(reason for reason, _ in reasons):
        values = [value for why, value in reasons if why == reason]
        out.text(f"no plan for {values[0] if len(values) == 1 else f'{values[0]} .. {values[-1]}'}: {reason}")
    if varied.what == "microbatch-size" and any(value not in profile.sizes for value in varied.values):
        sizes = ", ".join(map(str, sorted(profile.sizes)))
        how = "in proportion" if len(profile.sizes) == 1 else "on a straight line through those nearest"
        out.note(f"estimated: the profile was measured with {sizes} samples in a microbatch; times and activations of other sizes are "
                 f"taken {how}")


def _times(other_us: float, own_us: float) -> str:
    return f"{other_us / own_us:.2f}" if 0 < other_us < float("inf") and own_us > 0 else ""


def recommended(context: click.Context, varied: Sweep, rows: list[Row], profile: Profile) -> str:
    """The command that writes a plan: for ``devices`` with the fewest that are about as fast as the best."""
    command = options.command_line(context)
    if varied.what == "microbatch-size":
        value = max(rows, key=lambda row: row.samples_per_s or 0.0).value
        return f"{command} --microbatch-size {value:g}" if value in profile.sizes else command
    if varied.what != "devices":
        return command
    best = max(row.samples_per_s or 0.0 for row in rows)
    fewest = next(row for row in rows if row.plan is not None and (row.samples_per_s or 0.0) >= CLOSE * best)
    return f"{command} --devices {varied.text(fewest.value)}"


def facts(row: Row) -> dict[str, Any]:
    """What ``--json`` says of one value."""
    if row.plan is None:
        return {"value": row.value, "feasible": False, "reason": row.reason}
    plan, predicted = row.plan, row.plan.predicted
    return {"value": row.value, "feasible": True, "microbatch_us": predicted.expected_us, "samples_per_s": row.samples_per_s,
            "replicas": list(plan.replicas), "workers": plan.worker_count, "one_device_us": predicted.baseline_us("one device"),
            "data_parallel_us": predicted.baseline_us("data parallelism"), "bottleneck": predicted.bottleneck, "status": plan.solver.status,
            "gap": plan.solver.gap}
