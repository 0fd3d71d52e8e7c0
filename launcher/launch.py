"""Train a job as a plan says: check, start the workers, watch them, collect what they made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.data.microbatches import evaluation_samples
from launcher.explain import explain as explain_job
from launcher.graph.capture import capture_training
from launcher.graph.split import split
from launcher.load import load_job
from launcher.runtime.channel import workers
from launcher.supervision import engine
from launcher.supervision.collect import collect
from launcher.supervision.failure import explain
from launcher.supervision.preflight import check_model, check_schedule, count_updates, threads_per_worker
from launcher.supervision.process import work
from launcher.supervision.progress import Progress, Training, counting, following, last_update
from launcher.supervision.rundir import RunDirectory, RunSettings
from launcher.supervision.status import StatusBoard
from launcher.supervision.surroundings import folder_kept
from launcher.supervision.task import Task, pipeline_of, sized
from planner.spec.errors import Interrupted
from planner.spec.files import digest
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from planner.spec.summary import Summary

__all__ = ["Progress", "TrainSettings", "train"]


@dataclass(frozen=True)
class TrainSettings:
    """How to train. Exactly one of ``updates`` and ``epochs`` is given.

    ``evaluate_every`` updates the job's evaluation data is run (0: only at the end). ``threads`` each
    worker computes with on CPU (None: the cores divided by the workers). ``oversubscribe`` allows more
    workers than devices. A worker that others wait for longer than ``timeout_s`` has failed.
    """

    run_directory: Path
    updates: int | None
    epochs: int | None
    seed: int = 0
    evaluate_every: int = 0
    threads: int | None = None
    oversubscribe: bool = False
    timeout_s: float = 300.0


def train(plan: Plan, reference: JobReference, settings: TrainSettings, on_progress: Callable[[Progress], None]) -> Summary:
    """Run the plan on this machine, one process a worker, and fill the run directory.

    ``on_progress`` is called from another thread.

    Raises:
        BadInput: the job, the settings or the run directory cannot be used.
        Mismatch: the plan is for another model, or has more workers than the machine has devices.
        WorkerFailure: a worker raised, was killed, or hung.
        Interrupted: a signal stopped the run. As with a failure, no worker is left.
    """
    threads = threads_per_worker(plan, settings.threads, settings.oversubscribe)
    directory = RunDirectory(Path(settings.run_directory))
    directory.check_unused()
    on_progress(Progress("checking the plan", 0, settings.updates or 0, None, None))
    engine.warm_up()
    with folder_kept():
        job = sized(load_job(reference, seed=settings.seed), plan)
        updates, left_out = count_updates(plan, job, settings.updates, settings.epochs)
        with explain_job("the job's data"):
            samples = evaluation_samples(job.evaluation_data, counting(on_progress))
        pipeline = pipeline_of(plan, updates, settings.evaluate_every, samples)
        check_schedule(plan, pipeline)
        captured = capture_training(job)
        check_model(plan, captured)
        split(captured, [stage.layers for stage in plan.stages])

    run = RunSettings(reference, digest(plan), updates, settings.epochs, left_out, settings.seed, settings.evaluate_every, threads,
                      settings.oversubscribe, settings.timeout_s)
    directory.create(plan, run)
    board = StatusBoard.create(directory.status, plan.worker_count)
    outputs = [(directory.stdout(*worker), directory.stderr(*worker)) for worker in workers(plan.replicas)]
    try:
        with following(Training(directory.metrics, board, updates), on_progress):
            task = Task(plan, run, pipeline, RunDirectory(directory.path.absolute()), samples)  # a worker's job may change its folder
            engine.run_workers(work, task, outputs=outputs, log=directory.launcher_log)
    except engine.WorkersFailed as error:
        raise explain(directory, plan.replicas, board, error.exit_codes, settings.timeout_s) from error
    except engine.Stopped as error:
        done = last_update(directory.metrics)
        raise Interrupted(f"stopped by {error.signal_name} after {done} of {updates} updates",
                          hint=f"logs and metrics so far are in {directory.path}") from error
    return collect(directory, plan, run, pipeline, job.model)
