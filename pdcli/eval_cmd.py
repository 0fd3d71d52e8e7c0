"""``pipedream eval``: a run's weights on the job's evaluation data, forward only, through a plan's pipeline."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdcli import options
from pdcli.interrupts import interrupts_deferred
from pdcli.phases import phases

if TYPE_CHECKING:
    from pdcli.output import Output
    from planner.spec.profile import JobReference
    from planner.spec.summary import EvaluationSummary

__all__ = ["command"]


@click.command("eval", context_settings=options.SETTINGS)
@click.argument("plan", metavar="PLAN")
@click.option("--resume", metavar="RUN", required=True, help="Run directory whose weights are evaluated; any plan of the model made it.")
@click.option("--outputs", metavar="FILE", help="Write what the model returns for every sample, in order: a torch file.")
@click.option("--job", metavar="JOB", help="The job to evaluate.  [default: the one that was trained]")
@options.settings
@click.option("--run-dir", metavar="DIR", help="Folder for logs, trace and result.  [default: a temporary one]")
@options.threads
@options.oversubscribe
@options.timeout
@options.common
def command(out: Output, plan: str, resume: str, outputs: str | None, job: str | None, settings: tuple[str, ...], run_dir: str | None,
            threads: int | None, oversubscribe: bool, timeout: float) -> None:
    """Evaluate the weights of a run through the pipeline of PLAN.

    Forward only, with one process per worker, on the job's evaluation data: loss and metrics as at the end of training.
    """
    from planner.spec.files import read_document
    from planner.spec.plan import Plan

    document = read_document(Plan, plan)
    reference = job_of_run(Path(resume), job, settings)
    with evaluation_directory(run_dir) as directory:
        with interrupts_deferred():
            from launcher.evaluate import EvaluateSettings, evaluate

        wanted = EvaluateSettings(resume=Path(resume), run_directory=directory, outputs=None if outputs is None else Path(outputs),
                                  threads=threads, oversubscribe=oversubscribe, timeout_s=timeout)
        with out.progress() as update:
            summary = evaluate(document, reference, wanted, on_progress=phases(update, "evaluating"))
    show(out, summary, resume, outputs)
    next_step = following_step(resume, outputs)
    out.next(next_step)
    from planner.spec.files import encode

    message = f"evaluated {summary.samples} samples in {summary.duration_s:.1f} s"
    out.json(message, next_step, {"run_directory": run_dir, "outputs_file": outputs, **encode(summary)})


def job_of_run(run: Path, job: str | None, settings: tuple[str, ...]) -> JobReference:
    """The job that the run trained, unless ``--job`` names another; ``--set`` adds to its settings.

    Raises:
        BadInput: there is no such run, or it has left no weights.
    """
    from launcher.supervision.rundir import RunDirectory, RunSettings
    from planner.spec.files import read_document
    from planner.spec.profile import JobReference

    directory = RunDirectory(run)
    directory.check_finished()
    trained = read_document(RunSettings, directory.settings).job
    return JobReference(trained.target if job is None else job, dict(trained.settings) | options.parse_settings(settings))


@contextlib.contextmanager
def evaluation_directory(chosen: str | None) -> Iterator[Path]:
    """The directory asked for, or a temporary one, which stays only where a worker's failure is explained by its logs."""
    from launcher.supervision.rundir import RunDirectory
    from planner.spec.errors import WorkerFailure

    if chosen is not None:
        RunDirectory(Path(chosen)).check_unused()
        yield Path(chosen)
        return
    path = Path(tempfile.mkdtemp(prefix="pipedream-eval-"))
    try:
        yield path
    except WorkerFailure:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def following_step(resume: str, outputs: str | None) -> str:
    """What to do next: load what was written."""
    from launcher.supervision.rundir import RunDirectory

    if outputs is not None:
        return f"torch.load({outputs!r})"
    return f"model.load_state_dict(torch.load({str(RunDirectory(Path(resume)).weights)!r}))"


def show(out: Output, summary: EvaluationSummary, resume: str, outputs: str | None) -> None:
    """The values, how fast they came, and where the outputs are."""
    out.text(f"evaluated {summary.samples} samples with the weights of {resume}, after update {summary.update}")
    if summary.values:
        out.table("mean over the samples", ("", "value"),
                  [(name, "not finite" if value is None else f"{value:.6f}") for name, value in summary.values.items()])
        out.text()
    else:
        out.text("the data have no targets: no loss, no metrics")
    out.text(f"throughput: {summary.samples_per_s:.1f} samples/s over {summary.duration_s:.2f} s, filling the pipeline included")
    if outputs is not None:
        shapes = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in summary.outputs.items())
        out.text(f"outputs: {outputs}   ({shapes})")
