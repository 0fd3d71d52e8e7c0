"""Evaluate a run's weights through a plan's pipeline: check, start the workers, watch them, collect what they found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.data.microbatches import evaluation_samples, evaluation_source
from launcher.data.samples import microbatch_sizes
from launcher.explain import explain as explain_job
from launcher.graph.capture import Captured, capture_evaluation, capture_training
from launcher.graph.outputs import check_batched
from launcher.graph.split import split
from launcher.graph.step import without_targets
from launcher.job import Job
from launcher.load import load_job
from launcher.runtime.channel import workers
from launcher.supervision import engine
from launcher.supervision.collect import measurements, write_trace
from launcher.supervision.evaluating import EvaluationTask
from launcher.supervision.evaluating import evaluate as work
from launcher.supervision.failure import explain
from launcher.supervision.outputs import OutputFiles
from launcher.supervision.preflight import check_model, check_weights, threads_per_worker
from launcher.supervision.progress import Evaluating, Progress, counting, following, read_metrics
from launcher.supervision.rundir import RunDirectory, RunSettings
from launcher.supervision.status import StatusBoard
from launcher.supervision.surroundings import folder_kept
from launcher.supervision.task import pipeline_of, sized
from planner.spec.errors import BadInput, Interrupted
from planner.spec.files import digest, read_document, write_document
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from planner.spec.summary import EvaluationSummary

__all__ = ["EvaluateSettings", "evaluate"]


@dataclass(frozen=True)
class EvaluateSettings:
    """``resume`` is the directory of the run whose weights are evaluated, ``run_directory`` an unused one for this run.

    ``outputs`` is the file for the model's outputs, if they are wanted. The others are as for training.
    """

    resume: Path
    run_directory: Path
    outputs: Path | None = None
    threads: int | None = None
    oversubscribe: bool = False
    timeout_s: float = 300.0


def evaluate(
    plan: Plan, reference: JobReference, settings: EvaluateSettings, on_progress: Callable[[Progress], None]
) -> EvaluationSummary:
    """Run the job's evaluation data through the plan's pipeline on this machine, one process a worker, forward only.

    ``on_progress`` is called from another thread; an "update" is a microbatch here.

    Raises:
        BadInput: the job, the settings or a directory cannot be used, or the job has no evaluation data.
        Mismatch: the plan or the run is for another model, or the plan has more workers than the machine has devices.
        WorkerFailure: a worker raised, was killed, or hung.
        Interrupted: a signal stopped it. As with a failure, no worker is left.
    """
    threads = threads_per_worker(plan, settings.threads, settings.oversubscribe)
    directory, source = RunDirectory(Path(settings.run_directory)), RunDirectory(Path(settings.resume))
    directory.check_unused()
    # The job may change the folder; a link stays, and the file it leads to is replaced.
    place = None if settings.outputs is None else Path(os.path.realpath(settings.outputs))
    if settings.outputs is not None:
        _check_place(settings.outputs)
    source.check_finished()
    trained, trained_plan = read_document(RunSettings, source.settings), read_document(Plan, source.plan)
    on_progress(Progress("checking the plan", 0, 0, None, None))
    engine.warm_up()
    with folder_kept():
        job = sized(load_job(reference, seed=trained.seed), plan)
        if job.evaluation_data is None:
            raise BadInput(f"the job {reference.target} has no evaluation data", hint="give Job(evaluation_data=...) a data set")
        captured = capture_training(job)
        check_model(plan, captured)
        other = capture_training(sized(job, trained_plan)) if trained_plan.microbatch_size != plan.microbatch_size else captured
        stages = [stage.layers for stage in plan.stages]
        split(captured, stages)
        if place is None:
            _check_targets(job, captured)
        with explain_job("the job's data"):
            samples = evaluation_samples(job.evaluation_data, counting(on_progress))
        outputs = None if place is None else _outputs(job, plan, place, stages, samples)
        pipeline = pipeline_of(plan, 0, 0, samples)
    check_weights(source, trained_plan, other, job.model)

    run = RunSettings(reference, digest(plan), 0, None, 0, trained.seed, 0, threads, settings.oversubscribe, settings.timeout_s)
    task = EvaluationTask(plan, run, pipeline, RunDirectory(directory.path.absolute()), samples,  # a worker's job may change its folder
                          source.weights.absolute(), trained.updates, outputs)
    if outputs is not None:
        outputs.create()
    try:
        directory.create(plan, run)
        _run(task, directory, on_progress)
        summary = _collect(task, directory)
        if outputs is not None and place is not None:
            on_progress(Progress("writing the outputs", summary.microbatches, summary.microbatches, None, None))
            outputs.save(place)
    finally:
        if outputs is not None:
            outputs.remove()
    shutil.rmtree(directory.parts, ignore_errors=True)
    return summary


def _check_place(path: Path) -> None:
    device = path.exists() and not path.is_file() and not path.is_dir()  # the file is put in its place, which would take it away
    if device or path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a device or a pipe" if device else "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise BadInput(f"the file for the outputs, {path}, {what}", hint="choose another place for --outputs")


def _check_targets(job: Job, trained: Captured) -> None:
    with explain_job("the job's data"):
        sample = evaluation_source(job.evaluation_data, 1, 1).first()[0]  # type: ignore[arg-type]  # there are evaluation data
    if without_targets(job, sample, trained.inputs) is not None:
        raise BadInput("the evaluation data have no targets, so there is no loss", hint="write the model's outputs: --outputs FILE")


def _outputs(job: Job, plan: Plan, path: Path, stages: list[tuple[str, ...]], samples: int) -> OutputFiles:
    """The files beside ``path`` that the workers will fill, once it is known that the model's outputs have a row a sample."""
    for size in sorted(set(microbatch_sizes(samples, plan.microbatch_size)), reverse=True):
        captured = capture_evaluation(job, size, outputs=True)
        split(captured, stages)
        check_batched(captured.outputs, size)
    return OutputFiles(path.with_name(f".{path.name}.parts-{os.getpid()}"), captured.outputs, samples)


def _run(task: EvaluationTask, directory: RunDirectory, on_progress: Callable[[Progress], None]) -> None:
    replicas = task.plan.replicas
    board = StatusBoard.create(directory.status, sum(replicas))
    streams = [(directory.stdout(*worker), directory.stderr(*worker)) for worker in workers(replicas)]
    look = Evaluating(board, replicas, task.pipeline.evaluation_microbatches)
    try:
        with following(look, on_progress):
            engine.run_workers(work, task, outputs=streams, log=directory.launcher_log)
    except engine.WorkersFailed as error:
        raise explain(directory, replicas, board, error.exit_codes, task.settings.timeout_s) from error
    except engine.Stopped as error:
        done = look().update
        raise Interrupted(f"stopped by {error.signal_name} after {done} of {task.pipeline.evaluation_microbatches} microbatches",
                          hint="run the same command again; nothing has changed") from error


def _collect(task: EvaluationTask, directory: RunDirectory) -> EvaluationSummary:
    pipeline, samples = task.pipeline, task.evaluation_samples
    measured = {worker: measurements(directory, worker) for worker in workers(pipeline.replicas)}
    write_trace(directory, measured)
    duration_s = (max(one.end_ns for one in measured.values()) - min(one.start_ns for one in measured.values())) / 1e9
    values = next(line["evaluation"] for line in read_metrics(directory.metrics) if "evaluation" in line)
    summary = EvaluationSummary(
        plan_digest=task.settings.plan_digest, update=task.updates, microbatches=pipeline.evaluation_microbatches,
        samples=samples, duration_s=duration_s, samples_per_s=samples / duration_s, values=values,
        outputs={} if task.outputs is None else {output.name: (samples, *output.shape[1:]) for output in task.outputs.outputs},
    )
    write_document(summary, directory.evaluation)
    return summary
