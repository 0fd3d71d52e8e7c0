"""``pipedream plan``: stages, replicas and placement for a profile on a cluster."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdcli import options
from pdcli.interrupts import interrupts_deferred
from pdcli.plan_options import decision_options, wanted
from pdcli.plan_view import facts, show, statistics_line
from pdcli.sweep_cmd import run_sweep, sweep_options
from planner.spec.errors import BadInput

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.plan import Plan

__all__ = ["command"]


@click.command("plan", context_settings=options.SETTINGS)
@click.argument("profile", metavar="PROFILE")
@click.option("--cluster", default="local", show_default=True, help="local, SERVERSxDEVICES such as 2x4, a TOML file, or a shipped name.")
@click.option("--intra-bandwidth", metavar="RATE", help="Link of each device inside its server, such as 12GB/s.")
@click.option("--inter-bandwidth", metavar="RATE", help="Link of each server to the others, such as 10Gbit/s.")
@click.option("--memory", metavar="BYTES", help="Memory of each device, such as 16GB.  [default: the cluster's]")
@decision_options
@click.option("-o", "--output", default="plan.json", show_default=True, help="File to write.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file differs from the plan found.")
@click.option("--explain", metavar="LAYER", multiple=True, help="Say why this layer is where it is; may be repeated.")
@sweep_options
@options.common
@click.pass_context
def command(context: click.Context, /, out: Output, profile: str, cluster: str, intra_bandwidth: str | None, inter_bandwidth: str | None,
            memory: str | None, output: str, check: bool, explain: tuple[str, ...], sweep: str | None, plot: str, **decisions: Any) -> int:
    """Find the fastest pipeline for PROFILE on a cluster and write the plan.

    The answer is optimal for the cost model when the solver says so; otherwise its gap is shown.
    """
    from planner.spec.files import document_text, encode, read_document, write_document
    from planner.spec.profile import Profile
    from planner.spec.units import parse_bandwidth, parse_bytes

    intra_bytes_per_s = options.parse_quantity("--intra-bandwidth", intra_bandwidth, parse_bandwidth)
    inter_bytes_per_s = options.parse_quantity("--inter-bandwidth", inter_bandwidth, parse_bandwidth)
    memory_bytes = options.parse_quantity("--memory", memory, parse_bytes)
    document = read_document(Profile, profile)
    asked = wanted(**decisions)

    with interrupts_deferred():
        from planner.explain import bottleneck_sentence, why_slower
        from planner.explain_layer import explain_layer
        from planner.hardware.clusters import load_cluster
        from planner.options import kept_together, layer_index
        from planner.solve import make_plan
        from planner.statistics import collected

    hardware = load_cluster(cluster, device=document.device, intra_bandwidth=intra_bytes_per_s,
                            inter_bandwidth=inter_bytes_per_s, memory_bytes=memory_bytes)
    for name in explain:
        layer_index([layer.name for layer in document.layers], name, "--explain")
        if asked.cost_model != "measured" or sweep is not None:
            raise BadInput(f"--explain {name} is asked with {'--sweep' if sweep is not None else f'--cost-model {asked.cost_model}'}",
                           hint="leave one of them out", code="usage")
    if sweep is not None:
        return run_sweep(context, out, document, hardware, asked, sweep, plot)
    with out.working(f"planning {document.model} on {hardware.device_count} devices"), collected() as statistics:
        plan = make_plan(document, hardware, asked, command=options.command_line(context))
    if not check:
        write_document(plan, output)
    sentence, why = bottleneck_sentence(plan), why_slower(plan, document)
    show(out, plan, sentence, why)
    reports = [explain_layer(plan, kept_together(document.at(plan.microbatch_size), asked), name) for name in explain]
    for report in reports:
        out.text()
        for line in report.sentences():
            out.text(line)
    out.detail(statistics_line(plan, statistics))
    fields = {"plan": output, **facts(plan), "bottleneck_sentence": sentence, "why_slower": why,
              "statistics": dataclasses.asdict(statistics), "explained": [encode(report) for report in reports]}
    if check:
        try:
            same = Path(output).read_text(encoding="utf-8") == document_text(plan)
        except (OSError, UnicodeDecodeError):
            same = False
        message = f"{output} is this plan" if same else f"{output} differs from this plan"
        hint = next_command(plan, cluster, output) if same else write_command(context)
        out.text(message)
        out.next(hint)
        out.json(message, hint, {**fields, "differs": not same}, exit_code=0 if same else 1)
        return 0 if same else 1
    then = next_command(plan, cluster, output)
    message = f"wrote {output}: {len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''} on {plan.worker_count} of "
    message += f"{hardware.device_count} device{'s' if hardware.device_count > 1 else ''}"
    out.text(message)
    out.next(then)
    out.json(message, then, fields)
    return 0


def next_command(plan: Plan, cluster: str, output: str) -> str:
    """Training where the plan is for this machine and has a job, else what needs neither."""
    here = plan.job is not None and cluster == "local"
    return shlex.join(["pipedream", "train" if here else "simulate", output])


def write_command(context: click.Context) -> str:
    """The command that writes the plan that ``--check`` compared with."""
    output = context.params["output"]
    return options.command_line(context) + ("" if output == "plan.json" else f" -o {shlex.quote(output)}")
