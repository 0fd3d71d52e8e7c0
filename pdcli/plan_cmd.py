"""``pipedream plan``: stages, replicas and placement for a profile on a cluster."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdcli import options
from pdcli.interrupts import interrupts_deferred
from pdcli.sweep_cmd import run_sweep, sweep_options

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.plan import Plan

__all__ = ["command"]

COST_MODELS = ("measured", "pipedream-2019")
POLICIES = ("stash", "vertical", "2bw", "flush", "latest")


@click.command("plan", context_settings=options.SETTINGS)
@click.argument("profile", metavar="PROFILE")
@click.option("--cluster", default="local", show_default=True, help="local, SERVERSxDEVICES such as 2x4, a TOML file, or a shipped name.")
@click.option("--intra-bandwidth", metavar="RATE", help="Link of each device inside its server, such as 12GB/s.")
@click.option("--inter-bandwidth", metavar="RATE", help="Link of each server to the others, such as 10Gbit/s.")
@click.option("--memory", metavar="BYTES", help="Memory of each device, such as 16GB.  [default: the cluster's]")
@click.option("--policy", type=click.Choice(POLICIES), default="stash", show_default=True,
              help="Which weights a microbatch sees.")
@click.option("--batch-microbatches", type=options.COUNT,
              help="Microbatches between two updates.  [default: as few as the replicas allow]")
@click.option("--stages", type=options.COUNT, help="Exactly so many stages.  [default: the fastest number]")
@click.option("--max-replicas", type=options.COUNT, help="At most so many replicas of a stage.")
@click.option("--devices", type=options.COUNT, help="Use at most so many devices.")
@click.option("--time-limit", type=options.SECONDS, default=60.0, show_default=True, metavar="SECONDS",
              help="After this, give the best plan found with its gap.")
@click.option("--cost-model", type=click.Choice(COST_MODELS), default="measured", show_default=True,
              help="What a plan costs: our formulas, or those of the original PipeDream.")
@click.option("-o", "--output", default="plan.json", show_default=True, help="File to write.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file differs from the plan found.")
@sweep_options
@options.common
@click.pass_context
def command(context: click.Context, out: Output, profile: str, cluster: str, intra_bandwidth: str | None, inter_bandwidth: str | None,
            memory: str | None, policy: Any, batch_microbatches: int | None, stages: int | None, max_replicas: int | None,
            devices: int | None, time_limit: float, cost_model: Any, output: str, check: bool, sweep: str | None, plot: str) -> int:
    """Find the fastest pipeline for PROFILE on a cluster and write the plan.

    The answer is optimal for the cost model when the solver says so; otherwise its gap is shown.
    """
    from planner.spec.files import document_text, read_document, write_document
    from planner.spec.profile import Profile
    from planner.spec.units import parse_bandwidth, parse_bytes

    intra_bytes_per_s = options.parse_quantity("--intra-bandwidth", intra_bandwidth, parse_bandwidth)
    inter_bytes_per_s = options.parse_quantity("--inter-bandwidth", inter_bandwidth, parse_bandwidth)
    memory_bytes = options.parse_quantity("--memory", memory, parse_bytes)
    document = read_document(Profile, profile)

    with interrupts_deferred():
        from planner.clusters import load_cluster
        from planner.explain import bottleneck_sentence
        from planner.options import PlanOptions
        from planner.solve import make_plan

    hardware = load_cluster(cluster, device=document.device, intra_bandwidth=intra_bytes_per_s,
                            inter_bandwidth=inter_bytes_per_s, memory_bytes=memory_bytes)
    wanted = PlanOptions(policy=policy, batch_microbatches=batch_microbatches, stages=stages, max_replicas=max_replicas,
                         devices=devices, time_limit_s=time_limit, cost_model=cost_model)
    if sweep is not None:
        return run_sweep(context, out, document, hardware, wanted, sweep, plot)
    with out.working(f"planning {document.model} on {hardware.device_count} devices"):
        plan = make_plan(document, hardware, wanted, command=options.command_line(context))
    if not check:
        write_document(plan, output)
    sentence = bottleneck_sentence(plan)
    show(out, plan, sentence)
    fields = {"plan": output, **facts(plan), "bottleneck_sentence": sentence}
    if check:
        try:
            same = Path(output).read_text(encoding="utf-8") == document_text(plan)
        except (OSError, UnicodeDecodeError):
            same = False
        message = f"{output} is this plan" if same else f"{output} differs from this plan"
        hint = f"pipedream train {shlex.quote(output)}" if same else write_command(context)
        out.text(message)
        out.next(hint)
        out.json(message, hint, {**fields, "differs": not same}, exit_code=0 if same else 1)
        return 0 if same else 1
    here = plan.job is not None and cluster == "local"
    next_command = shlex.join(["pipedream", "train" if here else "simulate", output])
    message = f"wrote {output}: {len(plan.stages)} stages on {plan.worker_count} of {hardware.device_count} devices"
    out.text(message)
    out.next(next_command)
    out.json(message, next_command, fields)
    return 0


def write_command(context: click.Context) -> str:
    """The command that writes the plan that ``--check`` compared with."""
    output = context.params["output"]
    return options.command_line(context) + ("" if output == "plan.json" else f" -o {shlex.quote(output)}")


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
