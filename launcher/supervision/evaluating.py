"""One worker process of ``pipedream eval``: forward only, with the weights that a run left."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher import devices
from launcher.load import load_job
from launcher.runtime.channel import Worker
from launcher.runtime.evaluation import EvaluationWorker, OutputSink
from launcher.supervision.memory import PeakMemory
from launcher.supervision.outputs import OutputFiles, rows
from launcher.supervision.process import connect, disconnect, supervised, write_measurements
from launcher.supervision.recorder import Recorder
from launcher.supervision.status import StatusBoard
from launcher.supervision.task import Task, assign, capture_programs, sized, stage_state

__all__ = ["EvaluationTask", "evaluate"]


@dataclass(frozen=True)
class EvaluationTask(Task):
    """``weights`` have had ``updates``; ``outputs`` says where the model's outputs go, if they are wanted."""

    weights: Path
    updates: int
    outputs: OutputFiles | None


def evaluate(task: EvaluationTask) -> None:
    """The entry point of every worker process that evaluates."""
    supervised(task, _evaluate)


def _evaluate(task: EvaluationTask, rank: int, worker: Worker, board: StatusBoard) -> None:
    device = devices.torch_device(int(os.environ["LOCAL_RANK"]))
    devices.set_threads(task.settings.threads)
    board.set(rank, "preparing", "loading the job")
    job = sized(load_job(task.settings.job, seed=task.settings.seed), task.plan)
    job.model.load_state_dict(torch.load(task.weights, weights_only=True, map_location="cpu", mmap=True))
    board.set(rank, "preparing", "capturing the model")
    assignment = assign(task, job, capture_programs(task, job, outputs=task.outputs is not None), worker, device)
    assignment = dataclasses.replace(  # the run has averaged its replicas' buffers; here loader processes are worth their start
        assignment, averaged_buffers=(), evaluation_source=task.evaluation_source(job, job.loader_processes))
    parameters, buffers = stage_state(assignment, job.model)
    del job  # the other stages' weights
    memory = PeakMemory([*parameters.values(), *buffers.values()])
    transport = connect(task, rank, board, device)
    last = worker.stage == len(task.plan.stages) - 1
    recorder = Recorder(task.pipeline, worker, rank, board, task.plan.microbatch_size,
                        task.directory.metrics if last and worker.replica == 0 else None)
    sink = _sink(task.outputs, assignment.evaluation_sizes) if last and task.outputs is not None else None
    EvaluationWorker(assignment, parameters, buffers, transport, recorder, sink, batch=task.updates - 1).run()
    measurements = recorder.finish(memory.read_bytes())
    board.set(rank, "preparing", "saving")
    write_measurements(task, worker, measurements)
    disconnect()


def _sink(files: OutputFiles, sizes: Sequence[int]) -> OutputSink:
    wholes = files.open()

    def write(microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        for whole, tensor in zip(wholes, tensors, strict=True):
            whole[rows(sizes, microbatch)] = tensor.cpu()

    return write
