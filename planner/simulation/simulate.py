"""Discrete-event simulation of a plan: what its schedule does, operation by operation, on its hardware.

The closed form of :mod:`planner.cost` says how fast a pipeline can be when nothing waits; the simulation
says how fast this one is, with warm-up and drain, transfers that share links, and as many microbatches in
flight as the plan admits. See ``docs/simulation.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.simulation.engine import Record, run
from planner.simulation.memory import MemoryStep, memory_steps
from planner.simulation.steady import LinkUse, enough_batches, idle_share, link_uses, steady_batches, steady_us
from planner.simulation.workload import Workload, workload_of
from planner.spec.errors import BadInput
from planner.spec.plan import Plan
from planner.spec.policies import POLICIES
from planner.spec.profile import Profile
from planner.spec.schedule import Pipeline

__all__ = ["SimulatedWorker", "Simulation", "operations_to_simulate", "pipeline_of", "simulate", "steady_microbatch_us"]

MOST_OPERATIONS = 20_000_000  # about five minutes and 10 GB


@dataclass(frozen=True)
class SimulatedWorker:
    """One replica of one stage: ``idle_share`` of the steady part, memory from its start to its end."""

    stage: int
    replica: int
    device: str
    idle_share: float
    memory: tuple[MemoryStep, ...]

    @property
    def peak_bytes(self) -> float:
        return max(step.total_bytes for step in self.memory)


@dataclass(frozen=True)
class Simulation:
    """A simulated run of ``pipeline``.

    ``microbatch_us`` is the steady time per microbatch, None when the run is too short to have a steady
    part; ``total_us`` is the whole run with filling and draining. ``assumptions`` says what was made up
    because no profile was given.
    """

    pipeline: Pipeline
    assumptions: tuple[str, ...]
    microbatch_us: float | None
    steady: range  # batches
    total_us: float
    workers: tuple[SimulatedWorker, ...]
    links: tuple[LinkUse, ...]
    record: Record

    @property
    def mean_us(self) -> float:
        """Time per microbatch of the whole run."""
        return self.total_us / max(1, self.pipeline.microbatches)


def pipeline_of(plan: Plan, batches: int) -> Pipeline:
    """The schedule that the plan asks for, over ``batches`` batches."""
    return Pipeline(plan.replicas, tuple(stage.in_flight for stage in plan.stages), plan.batch_microbatches, batches,
                    flush=POLICIES[plan.policy].flushes)


def simulate(plan: Plan, profile: Profile | None = None, batches: int | None = None) -> Simulation:
    """Simulate ``plan``; ``profile``, when given, is the one it was made from.

    ``batches`` None simulates enough for a steady part that can be trusted.

    Raises:
        BadInput: ``batches`` below 1, more operations than can be held, or a policy that cannot be simulated.
        Mismatch: the profile is not the one of the plan.
        InvalidValue: the schedule cannot finish.
    """
    if batches is not None and batches < 1:
        raise BadInput(f"--batches {batches} is below 1", hint="give --batches a whole number from 1")
    pipeline = pipeline_of(plan, enough_batches(pipeline_of(plan, 1)) if batches is None else batches)
    count = _operations(pipeline)
    POLICIES[plan.policy].check(pipeline)
    if _operations(pipeline_of(plan, 1)) > MOST_OPERATIONS:
        raise BadInput(f"one batch of {plan.batch_microbatches} microbatches makes {_operations(pipeline_of(plan, 1))} operations on "
                       f"{len(pipeline.replicas)} stages, the limit is {MOST_OPERATIONS}",
                       hint="simulate a plan with shorter batches: the schedule within a batch repeats itself")
    if count > MOST_OPERATIONS:
        raise BadInput(f"--batches {pipeline.batches} of {pipeline.batch_microbatches} microbatches make {count} operations on "
                       f"{len(pipeline.replicas)} stages, the limit is {MOST_OPERATIONS}",
                       hint=f"give --batches at most {max(1, pipeline.batches * MOST_OPERATIONS // count)}")
    workload = workload_of(plan, profile)
    record = run(plan, pipeline, workload.stages)
    workers = tuple(
        SimulatedWorker(k, i, device, idle_share(record.workers[k][i], pipeline), tuple(memory_steps(
            plan, pipeline, k, record.workers[k][i], workload.stages[k - 1].activation_bytes if k else 0.0)))
        for k, stage in enumerate(plan.stages) for i, device in enumerate(stage.devices)
    )
    total_us = max(done[-1].end_us for stage in record.workers for done in stage)
    return Simulation(pipeline, workload.assumptions, steady_us(record, pipeline), steady_batches(pipeline), total_us, workers,
                      tuple(link_uses(record, pipeline)), record)


def operations_to_simulate(plan: Plan) -> int:
    """Forwards and backwards that :func:`steady_microbatch_us` simulates."""
    return _operations(pipeline_of(plan, enough_batches(pipeline_of(plan, 1))))


def _operations(pipeline: Pipeline) -> int:
    return 2 * pipeline.microbatches * len(pipeline.replicas)


def steady_microbatch_us(plan: Plan, profile: Profile | None = None, workload: Workload | None = None) -> float:
    """Simulated time per microbatch in steady state: what the plan's ``predicted.microbatch_us`` is to be held against.

    ``workload`` is the plan's where it is known already; it does not depend on what is in flight.
    """
    workload = workload or workload_of(plan, profile)
    pipeline = pipeline_of(plan, enough_batches(pipeline_of(plan, 1)))
    result = steady_us(run(plan, pipeline, workload.stages), pipeline)
    assert result is not None  # there are enough batches
    return result

