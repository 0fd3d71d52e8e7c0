"""What the launcher tells every worker process, and how a job becomes one worker's assignment."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from launcher.data.microbatches import EvaluationSource, evaluation_source, training_source
from launcher.data.stream import EvaluationStream
from launcher.graph.capture import Captured, capture_evaluation, capture_training
from launcher.graph.split import split, tied_stages
from launcher.job import Job
from launcher.precision import half_type, scaling_of
from launcher.runtime.assignment import Assignment
from launcher.runtime.channel import Worker
from launcher.supervision.rundir import RunDirectory, RunSettings
from planner.spec.plan import Plan
from planner.spec.policies import POLICIES
from planner.spec.schedule import Pipeline

__all__ = ["Programs", "Task", "assign", "capture_programs", "pipeline_of", "sized", "stage_state"]


@dataclass(frozen=True)
class Task:
    """The same for every worker; its rank says which stage and replica it runs."""

    plan: Plan
    settings: RunSettings
    pipeline: Pipeline
    directory: RunDirectory
    evaluation_samples: int  # in the job's evaluation data: counted once, where they do not say

    def evaluation_source(self, job: Job, processes: int = 0) -> EvaluationSource | EvaluationStream | None:
        """The job's evaluation data, where the run evaluates."""
        if job.evaluation_data is None or not self.pipeline.evaluation_microbatches:
            return None
        return evaluation_source(job.evaluation_data, self.plan.microbatch_size, self.evaluation_samples, processes)


def sized(job: Job, plan: Plan) -> Job:
    """The job with the microbatch size that was planned for."""
    return dataclasses.replace(job, microbatch_size=plan.microbatch_size)


def pipeline_of(plan: Plan, updates: int, evaluate_every: int, evaluation_samples: int) -> Pipeline:
    """The run's schedule: an evaluation every so often, and one at the end, where the job has samples for it."""
    return Pipeline(
        replicas=plan.replicas, in_flight=tuple(stage.in_flight for stage in plan.stages), batch_microbatches=plan.batch_microbatches,
        batches=updates, evaluate_every=evaluate_every, evaluate_at_end=evaluation_samples > 0,
        evaluation_microbatches=-(-evaluation_samples // plan.microbatch_size),
        flush=POLICIES[plan.policy].flushes,
    )


@dataclass(frozen=True)
class Programs:
    """The job's steps, captured: training, and evaluation for each size of microbatch."""

    training: Captured
    evaluation: dict[int, Captured]


def capture_programs(task: Task, job: Job, *, outputs: bool = False) -> Programs:
    """Capture what the run needs; with ``outputs`` evaluation returns the model's outputs too.

    Raises:
        BadInput: the model cannot be captured.
    """
    source = task.evaluation_source(job)
    sizes = () if source is None else source.sizes
    return Programs(capture_training(job), {size: capture_evaluation(job, size, outputs=outputs) for size in sorted(set(sizes))})


def assign(task: Task, job: Job, programs: Programs, worker: Worker, device: torch.device) -> Assignment:
    """One worker's part of the plan.

    Raises:
        Mismatch: the plan's layers are not this model's.
    """
    plan, settings = task.plan, task.settings
    stages = [stage.layers for stage in plan.stages]
    transfer = half_type(job.transfer_dtype, "transfer_dtype")
    cut = split(programs.training, stages, transfer)
    program = cut[worker.stage]
    held_out = task.evaluation_source(job)
    return Assignment(
        pipeline=task.pipeline, worker=worker, policy=plan.policy, program=program,
        train_source=training_source(job.train_data, plan.microbatch_size, job.shuffle, settings.seed, job.loader_processes),
        evaluation={size: split(captured, stages, transfer)[worker.stage] for size, captured in programs.evaluation.items()},
        evaluation_source=held_out, evaluation_sizes=() if held_out is None else held_out.sizes, device=device,
        averaged_buffers=tuple(name for name in program.buffers if name in program.written), recompute=plan.stages[worker.stage].recompute,
        scheduler=job.scheduler, clip_norm=job.clip_norm, loss_scaling=scaling_of(job), tied=tied_stages(cut),
    )


def stage_state(assignment: Assignment, model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """The parameters and buffers that a stage's programs take, on its device, by the model's names.

    Frozen parameters count as buffers where the programs say so.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    programs = [assignment.program, *assignment.evaluation.values()]
    device = assignment.device
    trained = {name: nn.Parameter(parameters[name].detach().to(device), parameters[name].requires_grad)
               for program in programs for name in program.parameters}
    others = {name: (parameters[name] if name in parameters else buffers[name]).detach().to(device)
              for program in programs for name in program.buffers}
    return trained, others
