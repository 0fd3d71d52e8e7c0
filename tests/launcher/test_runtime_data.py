"""Which samples each worker reads: every one once an epoch, the same for all stages, whatever the replicas."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from launcher import Job
from launcher.graph.capture import capture_training
from launcher.runtime.channel import Worker, workers
from launcher.runtime.local import LocalTransport
from launcher.runtime.source import Source
from launcher.runtime.worker import StageWorker
from launcher.supervision.rundir import RunDirectory, RunSettings
from launcher.supervision.task import Task, assign, capture_programs, pipeline_of, stage_state
from planner.spec.profile import JobReference
from tests.launcher.launching import make_plan
from tests.launcher.toy import run_made

SAMPLES, SIZE, EPOCHS = 26, 4, 4  # two samples of each epoch are left out
PER_EPOCH = SAMPLES // SIZE


class Both(nn.Module):
    """Uses its input again after its middle layer, which has none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.skip = nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))) + self.skip(x)


class Stream:
    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples)).tolist()  # by the generator that all readers share
        return (self.samples[index] for index in order)


class Recording:
    """A source that notes the samples of each microbatch handed out."""

    def __init__(self, source: Source, seen: dict[int, list[list[float]]]) -> None:
        self._source, self._seen = source, seen

    def iterate(self, indices: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[torch.Tensor, ...]]:
        for index, tensors in zip(indices, self._source.iterate(indices, positions), strict=True):
            self._seen.setdefault(index, []).extend(tensor.flatten().tolist() for tensor in tensors)
            yield tensors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("replicas", "seed"), [((1, 1, 1), 0), ((2, 1, 3), 0), ((3, 1, 2), 9)])
def test_every_sample_once_an_epoch_in_one_order_for_all_stages(stream: bool, replicas: tuple[int, ...], seed: int) -> None:
    samples = [(torch.tensor([float(index)]), torch.tensor([float(index)])) for index in range(SAMPLES)]
    job = Job(model=Both(), loss=nn.functional.mse_loss, train_data=Stream(samples) if stream else samples, microbatch_size=SIZE,
              optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5))
    captured = capture_training(job)
    names = list(captured.layers)
    place = names.index("middle")
    cut = [names[:place], ["middle"], names[place + 1:]]
    plan = make_plan(JobReference("in memory", {}), replicas, captured=captured, cut=cut)
    updates = EPOCHS * PER_EPOCH // plan.batch_microbatches
    settings = RunSettings(JobReference("in memory", {}), "", updates, None, 0, seed, 0, 1, True, 30.0)
    task = Task(plan, settings, pipeline_of(plan, updates, 0, 0), RunDirectory(None), 0)  # type: ignore[arg-type]
    transport, programs = LocalTransport(replicas, timeout_s=30), capture_programs(task, job)
    seen: dict[Worker, dict[int, list[list[float]]]] = {worker: {} for worker in workers(replicas)}
    made = {}
    for worker in workers(replicas):
        assignment = assign(task, job, programs, worker, torch.device("cpu"))
        recording = Recording(assignment.train_source, seen[worker])
        parameters, buffers = stage_state(assignment, copy.deepcopy(job.model))
        made[worker] = StageWorker(dataclasses.replace(assignment, train_source=recording), parameters, buffers, job.optimizer,
                                   transport.of(worker))
    run_made(made, transport, lambda worker: None)

    microbatches = task.pipeline.microbatches
    orders = []
    for stage, r in enumerate(replicas):
        for replica in range(r):
            assert sorted(seen[Worker(stage, replica)]) == list(range(replica, microbatches, r))
        read = [seen[Worker(stage, microbatch % r)][microbatch] for microbatch in range(microbatches)]
        assert len(read[0]) == (1, 0, 2)[stage], "inputs, nothing, inputs and targets"
        if stage != 1:
            assert all(tensor == tensors[0] for tensors in read for tensor in tensors), "a target of another sample"
            orders.append([tensors[0] for tensors in read])
    assert orders[0] == orders[1], "the stages do not read the same samples"
    epochs = [[sample for microbatch in orders[0][first:first + PER_EPOCH] for sample in microbatch]
              for first in range(0, microbatches, PER_EPOCH)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert all(len(epoch) == PER_EPOCH * SIZE for epoch in epochs[:-1])
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "two epochs have one order"
