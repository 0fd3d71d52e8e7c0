"""What is checked before any worker starts: the plan against the machine, the job and the settings."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Mapping

import torch

from launcher import devices
from launcher.blame import one_line
from launcher.data.microbatches import training_source
from launcher.graph.capture import Captured
from launcher.job import Job
from launcher.supervision.rundir import RunDirectory
from planner.spec.errors import BadInput, Mismatch
from planner.spec.plan import Plan
from planner.spec.policies import POLICIES
from planner.spec.schedule import Pipeline, validate

__all__ = ["check_model", "check_schedule", "check_weights", "count_updates", "threads_per_worker"]


def threads_per_worker(plan: Plan, threads: int | None, oversubscribe: bool) -> int:
    """Threads each worker computes with, when this machine has a device for every worker.

    Raises:
        Mismatch: the plan has more workers than the machine has devices, and ``oversubscribe`` is off.
        BadInput: ``threads`` is below 1.
    """
    workers, cores = plan.worker_count, devices.usable_cores()
    if threads is not None and threads < 1:
        raise BadInput(f"{threads} threads per worker is below 1", hint="use 1 or more threads")
    if devices.device_kind() == "cuda":
        count, what = torch.cuda.device_count(), "CUDA devices"
    else:
        count, what = max(1, cores // (threads or 1)), "CPU cores" if (threads or 1) == 1 else f"CPU devices of {threads} threads"
    if workers > count and not oversubscribe:
        raise Mismatch(f"the plan has {workers} workers, this machine has {count} {what}",
                       hint="plan again for this machine, or share devices between workers with --oversubscribe", code="too_few_devices")
    return threads if threads is not None else max(1, cores // workers)


def check_schedule(plan: Plan, pipeline: Pipeline) -> None:
    """Raise :class:`BadInput` when the plan's policy does not allow its batches, or its depths would deadlock."""
    POLICIES[plan.policy].check(pipeline)
    deepest = 2 * sum(pipeline.replicas)  # a stage that admits more than the workers there are waits for none
    in_flight = tuple(min(depth, deepest) for depth in pipeline.in_flight)
    depth = max(r * d for r, d in zip(pipeline.replicas, in_flight, strict=True))
    common = math.lcm(*pipeline.replicas)
    batch = min(pipeline.batch_microbatches, -(-4 * depth // common) * common)  # a longer batch repeats itself between two updates
    batches = min(pipeline.batches, 2 + 2 * -(-depth // batch))
    validate(dataclasses.replace(pipeline, in_flight=in_flight, batch_microbatches=batch, batches=batches, evaluate_every=1,
                                 evaluation_microbatches=min(pipeline.evaluation_microbatches, 2 * max(pipeline.replicas))))


def check_model(plan: Plan, captured: Captured) -> None:
    """Raise :class:`Mismatch` unless the plan was made for this very model, loss and microbatch size."""
    if plan.fingerprint == captured.fingerprint:
        return
    planned, found = [name for stage in plan.stages for name in stage.layers], list(captured.layers)
    missing = [name for name in planned if name not in set(found)]
    new = [name for name in found if name not in set(planned)]
    if missing or new:
        parts = [f"{len(names)} layers {verb}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
                 for names, verb in ((missing, "are only in the plan"), (new, "are only in the job")) if names]
        difference = "; ".join(parts)
    else:
        difference = "the layers have the same names, so an operation, a shape, the loss or a constant differs"
    raise Mismatch(
        f"the plan is for model {plan.fingerprint[:12]}, the job has model {captured.fingerprint[:12]}: {difference}",
        hint="profile and plan this job again, or train with the job and settings that were profiled", code="other_model")


def check_weights(run: RunDirectory, plan: Plan, captured: Captured, model: torch.nn.Module) -> None:
    """Check that ``run``, which carried out ``plan``, left weights of ``model``, whose step at that plan's microbatch size is ``captured``.

    Raises:
        Mismatch: they are another model's.
        BadInput: the file cannot be read.
    """
    hint = "give the run of this job, or the job and settings of that run"
    if plan.fingerprint != captured.fingerprint:
        raise Mismatch(f"the run {run.path} trained model {plan.fingerprint[:12]}, the job has model {captured.fingerprint[:12]}",
                       hint=hint, code="other_model")
    try:
        found = torch.load(run.weights, weights_only=True, map_location="cpu", mmap=True)
        shapes = _shapes(found)
    except (OSError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise BadInput(f"cannot read the weights {run.weights}: {one_line(error)}", hint="give the directory of another run") from error
    wanted = _shapes(model.state_dict())
    if shapes != wanted:
        name = min(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
        raise Mismatch(f"{name!r} is {shapes.get(name, 'nothing')} in {run.weights} and {wanted.get(name, 'nothing')} in the job's model",
                       hint=hint, code="other_model")


def _shapes(state: Mapping[str, object]) -> dict[str, str]:
    return {name: f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor" for name, value in state.items()}


def count_updates(plan: Plan, job: Job, updates: int | None, epochs: int | None) -> tuple[int, int]:
    """How many updates to run, and how many microbatches of the epochs do not fill a last batch.

    Raises:
        BadInput: neither or both are given, or there would be no update at all.
    """
    if (updates is None) == (epochs is None):
        raise BadInput(f"updates {updates} and epochs {epochs}: exactly one of them is needed", hint="give --steps or --epochs")
    if updates is not None:
        if updates < 1:
            raise BadInput(f"{updates} updates is below 1", hint="train for 1 or more updates")
        return updates, 0
    assert epochs is not None
    per_epoch = training_source(job.train_data, plan.microbatch_size).per_epoch
    if per_epoch is None:
        raise BadInput(f"train_data is an iterable without len(), so how many updates {epochs} epochs have is not known",
                       hint="say how long to train with --steps N", code="unknown_length")
    batches, rest = divmod(epochs * per_epoch, plan.batch_microbatches)
    if batches < 1:
        raise BadInput(f"{epochs} epochs have {epochs * per_epoch} microbatches, one update needs {plan.batch_microbatches}",
                       hint="train for more epochs, or plan with smaller microbatches or batches")
    return batches, rest
