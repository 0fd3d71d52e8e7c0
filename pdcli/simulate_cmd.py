"""``pipedream simulate``: what a plan's schedule does on its hardware, operation by operation."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdcli import options

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.simulation.difference import Difference
    from planner.simulation.simulate import Simulation
    from planner.spec.plan import Plan
    from planner.spec.profile import Profile

__all__ = ["command"]

MOST_ROWS = 64  # workers in a timeline
MOST_WORKERS = 24  # with a row of their own in the table; otherwise a row a stage
MOST_LINKS = 8


@click.command("simulate", context_settings=options.SETTINGS)
@click.argument("plan", metavar="PLAN")
@click.option("--profile", metavar="PROFILE",
              help="The profile the plan was made from.  [default: the file its command names, if still there]")
@click.option("--batches", type=click.IntRange(min=1), help="Updates to simulate.  [default: enough for a steady state]")
@click.option("--trace", metavar="FILE", help="Write a Chrome trace, for https://ui.perfetto.dev.")
@click.option("--timeline/--no-timeline", default=True, show_default=True, help="Draw what each worker does when.")
@click.option("--width", type=click.IntRange(min=20, max=1000), default=100, show_default=True, help="Columns of the timeline.")
@options.common
def command(out: Output, plan: str, profile: str | None, batches: int | None, trace: str | None, timeline: bool, width: int) -> None:
    """Simulate the schedule of PLAN: transfers that share links, warm-up, drain, idle time, memory.

    Closed form and simulation are printed side by side; where they differ by more than 1 %, so is why.
    """
    from planner.spec.files import read_document
    from planner.spec.plan import Plan

    document = read_document(Plan, plan)
    model = find_profile(document, plan, profile)

    from planner.simulation.difference import difference
    from planner.simulation.simulate import simulate

    with out.working(f"simulating {document.worker_count} workers"):
        simulation = simulate(document, model, batches)
        why = difference(document, model, simulation)
    if trace is not None:
        write_trace(simulation, trace)
    next_command = shlex.join(["pipedream", "train", plan])
    if model is None:
        out.note(f"the profile of this plan was not given, so it is assumed that {' and that '.join(simulation.assumptions)}")
    if timeline and not out.as_json:
        draw(out, simulation, width)
    show(out, document, simulation, why)
    message = f"simulated {simulation.pipeline.batches} batches of {document.model} on {document.worker_count} workers"
    if trace is not None:
        message += f", trace in {trace}"
    out.text(message)
    out.next(next_command)
    out.json(message, next_command, {"plan": plan, "trace": trace, **facts(document, simulation, why)})


def find_profile(plan: Plan, plan_path: str, given: str | None) -> Profile | None:
    """The profile of ``--profile``; else the file that the plan's own command names, if it is still that profile."""
    from planner.spec.errors import PipedreamError
    from planner.spec.files import digest, read_document
    from planner.spec.profile import Profile

    if given is not None:
        return read_document(Profile, given)
    words = shlex.split(plan.command)
    if len(words) < 3 or words[:2] != ["pipedream", "plan"]:
        return None
    for path in (Path(words[2]), Path(plan_path).parent / Path(words[2]).name):
        try:
            profile = read_document(Profile, path)
        except PipedreamError:
            continue
        if digest(profile) == plan.profile_digest:
            return profile
    return None


def write_trace(simulation: Simulation, path: str) -> None:
    """The Chrome trace, as a file."""
    from planner.simulation.trace import simulated_trace
    from planner.spec.errors import BadInput
    from planner.spec.files import write_text

    try:
        write_text(path, json.dumps(simulated_trace(simulation), separators=(",", ":")) + "\n")
    except BadInput as error:
        raise BadInput(error.message, hint="choose another path with --trace", code=error.code) from error


def draw(out: Output, simulation: Simulation, width: int) -> None:
    """The timeline of the start, and of the steady part."""
    from pdcli.output import plain
    from pdcli.timeline import LEGEND, cells, coloured, labels
    from planner.simulation.trace import worker_spans
    from planner.spec.units import format_duration_us

    workers = [(worker.stage, worker.replica) for worker in simulation.workers][:MOST_ROWS]
    names = labels(workers, simulation.pipeline.replicas)
    columns = max(10, width - len(names[0]) - 3)
    # A pipeline of n stages takes about n microbatches to fill; six columns a microbatch are easy to read,
    # and three are the least that tell a forward from a backward of twice its length.
    each = min(6.0, max(3.0, columns / (len(simulation.pipeline.replicas) + 8)))
    column_us = (simulation.microbatch_us or simulation.mean_us) / each or 1.0
    starts = [("the start", 0.0)]
    if simulation.steady and simulation.total_us > 2 * columns * column_us:
        updates = [done.end_us for done in simulation.record.workers[0][0] if done.op.kind == "U"]
        starts.append(("steady state", updates[simulation.steady.start - 1]))
    for title, start_us in starts:
        if start_us > 0:
            out.text()
        out.text(f"{title} (simulated), a column is {format_duration_us(column_us)}: {LEGEND}")
        for (stage, replica), name in zip(workers, names, strict=True):
            row = cells(worker_spans(simulation, stage, replica, start_us, start_us + columns * column_us), start_us, column_us, columns)
            out.text(coloured(name, row, not plain(out.stdout)))
        if len(simulation.workers) > MOST_ROWS:
            out.text(f"({len(simulation.workers) - MOST_ROWS} more workers are not drawn)")


def show(out: Output, plan: Plan, simulation: Simulation, why: Difference | None) -> None:
    """Tables of workers and links, and closed form against simulation."""
    from planner.spec.units import format_bytes, format_duration_us

    each = len(simulation.workers) <= MOST_WORKERS
    rows = []
    for k, stage in enumerate(plan.stages):
        mine = [worker for worker in simulation.workers if worker.stage == k]
        memory = plan.predicted.stages[k].memory.total_bytes
        for group in [[worker] for worker in mine] if each else [mine]:
            where = group[0].device if len(group) == 1 else f"{len(group)} devices"
            rows.append((str(k), where, str(stage.in_flight), f"{sum(w.idle_share for w in group) / len(group):.1%}",
                         str(max(step.versions for w in group for step in w.memory)), format_bytes(max(w.peak_bytes for w in group)),
                         format_bytes(memory)))
    out.table("workers", ("stage", "device", "in flight", "idle", "versions", "peak memory", "predicted memory"), rows, text=(0, 1))
    busiest = sorted(simulation.links, key=lambda link: -link.use)
    if busiest:
        links = [(link.link, link.way, f"{link.use:.1%}", format_bytes(link.microbatch_bytes)) for link in busiest[:MOST_LINKS]]
        more = f", the {MOST_LINKS} busiest of {len(busiest)}" if len(busiest) > MOST_LINKS else ""
        out.table(f"links{more}", ("link", "way", "use", "per microbatch"), links, text=(0, 1))
    out.text()
    predicted_us = plan.predicted.microbatch_us
    out.text(f"predicted (closed form): {format_duration_us(predicted_us)} per microbatch")
    if simulation.microbatch_us is None:
        out.text(f"simulated: {simulation.pipeline.batches} batches are too few for a steady state; "
                 "give a larger --batches or leave it out")
    else:
        out.text(f"simulated (steady state): {format_duration_us(simulation.microbatch_us)} per microbatch"
                 + _compared(simulation.microbatch_us, predicted_us))
    if why is not None:
        out.text(f"why: {why.sentence()}")
    out.text(f"simulated with warm-up and drain: {format_duration_us(simulation.total_us)} for "
             f"{simulation.pipeline.microbatches} microbatches, {format_duration_us(simulation.mean_us)} each")


def _compared(simulated_us: float, predicted_us: float) -> str:
    if predicted_us <= 0:
        return ""
    return f", {simulated_us / predicted_us - 1:+.1%}"


def facts(plan: Plan, simulation: Simulation, why: Difference | None) -> dict[str, Any]:
    """What ``--json`` says of a simulation."""
    return {
        "batches": simulation.pipeline.batches, "microbatches": simulation.pipeline.microbatches,
        "predicted_microbatch_us": plan.predicted.microbatch_us, "simulated_microbatch_us": simulation.microbatch_us,
        "total_us": simulation.total_us, "assumptions": list(simulation.assumptions),
        "why": None if why is None else why.sentence(),
        "deeper": None if why is None or why.deeper is None else {
            "in_flight": list(why.deeper.in_flight), "microbatch_us": why.deeper.microbatch_us},
        "workers": [
            {"stage": worker.stage, "replica": worker.replica, "device": worker.device, "idle_share": worker.idle_share,
             "peak_bytes": round(worker.peak_bytes), "versions": max(step.versions for step in worker.memory)}
            for worker in simulation.workers
        ],
        "links": [link._asdict() for link in simulation.links],
    }
