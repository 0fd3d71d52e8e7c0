"""``pipedream train``: carry a plan out with one worker process per replica."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdcli import options
from pdcli.interrupts import interrupts_deferred
from pdcli.phases import phases

if TYPE_CHECKING:
    from launcher.supervision.rundir import RunDirectory
    from pdcli.output import Output
    from planner.spec.plan import Plan
    from planner.spec.profile import JobReference
    from planner.spec.summary import Summary

__all__ = ["command"]


@click.command("train", context_settings=options.SETTINGS)
@click.argument("plan", metavar="PLAN")
@click.option("--job", metavar="JOB", help="The job to train.  [default: the one that was profiled]")
@options.settings
@click.option("--steps", type=options.COUNT, help="Updates of the weights.")
@click.option("--epochs", type=options.COUNT, help="Passes over the training data.  [default: 1, without --steps]")
@click.option("--run-dir", metavar="DIR", help="Folder for logs, metrics, trace and weights.  [default: runs/NAME-N]")
@click.option("--evaluate-every", type=click.IntRange(min=0), default=0, metavar="STEPS", help="Evaluate this often; always at the end.")
@options.seed
@options.threads
@options.oversubscribe
@options.timeout
@options.common
def command(out: Output, plan: str, job: str | None, settings: tuple[str, ...], steps: int | None, epochs: int | None, run_dir: str | None,
            evaluate_every: int, seed: int, threads: int | None, oversubscribe: bool, timeout: float) -> None:
    """Train the job of PLAN through its pipeline.

    One process per worker runs on this machine. The run directory holds everything the run made.
    """
    from planner.spec.errors import BadInput
    from planner.spec.files import read_document
    from planner.spec.plan import Plan

    if steps is not None and epochs is not None:
        raise BadInput(f"both --steps {steps} and --epochs {epochs} are given", hint="give one of them", code="usage")
    document = read_document(Plan, plan)
    reference = job_reference(document, job, settings)
    with run_directory(run_dir, document, reference) as directory:
        with interrupts_deferred():
            from launcher.launch import TrainSettings, train
            from launcher.supervision.rundir import RunSettings

        wanted = TrainSettings(run_directory=directory.path, updates=steps, epochs=epochs if steps or epochs else 1, seed=seed,
                               evaluate_every=evaluate_every, threads=threads, oversubscribe=oversubscribe, timeout_s=timeout)
        with out.progress() as update:
            summary = train(document, reference, wanted, on_progress=phases(update, "training"))
    show(out, document, summary)
    left_out = read_document(RunSettings, directory.settings).left_out_microbatches
    if left_out:
        out.text(f"left out: the last {left_out} microbatches, which do not fill a batch of {document.batch_microbatches}")
    load = f"model.load_state_dict(torch.load({str(directory.weights)!r}))"
    next_step = evaluation_command(plan, directory, threads, oversubscribe) if summary.evaluations else load
    out.text(f"weights: {directory.weights}" + ("" if next_step is load else f"   ({load})"))
    out.text(f"trace:   {directory.trace}   (open it at https://ui.perfetto.dev)")
    out.next(next_step)
    message = f"trained {summary.updates} updates, {summary.samples} samples in {summary.duration_s:.1f} s"
    out.json(message, next_step, facts(document, summary, directory))


def evaluation_command(plan: str, directory: RunDirectory, threads: int | None, oversubscribe: bool) -> str:
    """The command that evaluates the run's weights again, on the devices that it was trained on."""
    words = ["pipedream", "eval", plan, "--resume", str(directory.path)]
    words += ["--threads", str(threads)] if threads is not None else []
    return shlex.join([*words, "--oversubscribe"] if oversubscribe else words)


def job_reference(plan: Plan, job: str | None, settings: tuple[str, ...]) -> JobReference:
    """The job to train: the plan's own, unless ``--job`` names another; ``--set`` adds to its settings."""
    from planner.spec.errors import BadInput
    from planner.spec.profile import JobReference

    if job is None and plan.job is None:
        raise BadInput("the plan does not say which job it is for", hint="name the job: --job JOB.py")
    given = options.parse_settings(settings)
    known = dict(plan.job.settings) if plan.job is not None else {}
    target = job if job is not None else (plan.job.target if plan.job is not None else "")
    return JobReference(target, known | given)


@contextlib.contextmanager
def run_directory(chosen: str | None, plan: Plan, reference: JobReference) -> Iterator[RunDirectory]:
    """A folder of this run's own; taken away again when the run failed before anything was put into it.

    Raises:
        BadInput: the folder exists and is not empty, or cannot be made.
    """
    from launcher.supervision.rundir import RunDirectory
    from planner.spec.errors import BadInput

    if chosen is not None:
        directory = RunDirectory(Path(chosen))
        directory.check_unused()
        yield directory
        return
    try:
        path = _next_free(Path("runs"), _short_name(reference.target) or _short_name(plan.model) or "run")
    except OSError as error:
        message = f"cannot make the run directory {error.filename}: {error.strerror}"
        raise BadInput(message, hint="give another one with --run-dir") from error
    try:
        yield RunDirectory(path)
    except BaseException:
        with contextlib.suppress(OSError):
            path.rmdir()  # only when empty
        raise


def _short_name(target: str) -> str:
    stem = Path(target).stem if target.endswith(".py") else target.rpartition(":")[0] or target
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.")


def _next_free(parent: Path, name: str) -> Path:
    """``parent/name-N`` with the smallest N that is free; two runs that start together get two folders."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / f"{name}-{number}"
        try:
            os.mkdir(path)
            return path
        except FileExistsError:
            number += 1


def facts(plan: Plan, summary: Summary, directory: RunDirectory) -> dict[str, Any]:
    """What ``--json`` says of a run."""
    from planner.spec.files import encode

    return {
        "run_directory": str(directory.path), "weights": str(directory.weights), "trace": str(directory.trace),
        "predicted_microbatch_us": plan.predicted.microbatch_us, **encode(summary),
    }


def show(out: Output, plan: Plan, summary: Summary) -> None:
    """The run's results, and what was predicted against what was measured."""
    from planner.spec.units import format_bytes, format_duration_us

    out.text(f"trained {summary.updates} updates of {plan.model} in {summary.duration_s:.1f} s ({summary.samples} samples)")
    rows = []
    for index, (predicted, measured) in enumerate(zip(plan.predicted.stages, summary.stages, strict=True)):
        rows.append((f"stage {index}", str(len(plan.stages[index].devices)), format_duration_us(predicted.microbatch_us),
                     format_duration_us(measured.microbatch_us), _ratio(measured.microbatch_us, predicted.microbatch_us),
                     f"{measured.idle_share:.0%}", format_bytes(predicted.memory.total_bytes), format_bytes(measured.peak_memory_bytes)))
    rows.append(("pipeline", str(plan.worker_count), format_duration_us(plan.predicted.microbatch_us),
                 format_duration_us(summary.microbatch_us), _ratio(summary.microbatch_us, plan.predicted.microbatch_us), "", "", ""))
    out.table("time per microbatch and memory per device",
              ("", "workers", "predicted", "measured", "ratio", "idle", "predicted memory", "peak memory"), rows)
    out.text()
    out.text(f"throughput: {summary.samples_per_s:.1f} samples/s, without filling and draining the pipeline")
    out.text(f"final training loss: {_number(summary.final_train_loss)} (mean over the last tenth of the updates)")
    if summary.evaluations:
        last = summary.evaluations[-1]
        out.text(f"evaluation after update {last.update}: " + ", ".join(f"{name} {_number(value)}" for name, value in last.values.items()))


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _ratio(measured_us: float, predicted_us: float) -> str:
    return f"{measured_us / predicted_us:.2f}" if predicted_us > 0 else ""
