"""Forward only: between two updates, or as a whole run.

In training, after the update of an evaluated batch each worker runs its evaluation microbatches with the
newest weights and with buffers averaged over the stage's replicas, while the microbatches in training stay
in flight. Training's own buffers, versions and messages are not touched, so a run with evaluation trains
exactly like one without.

A pipeline of no batches does nothing else (:class:`EvaluationWorker`). There is nothing to wait for but the
stage before, so every stage works on a microbatch of its own and the pipeline has no bubble::

    stage 0   0E0 0E1 0E2 0E3 ...
    stage 1       1E0 1E1 1E2 1E3 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from launcher.runtime.assignment import Assignment
from launcher.runtime.channel import Reducer, Transport
from launcher.runtime.links import Links
from launcher.runtime.observer import Observer, awaited
from launcher.runtime.replicas import averaged_buffers, sum_over_replicas
from launcher.runtime.stage import owned, storages
from planner.spec.schedule import Op, operations

__all__ = ["Evaluation", "EvaluationWorker", "OutputSink"]

OutputSink = Callable[[int, Sequence[torch.Tensor]], None]
"""Takes the model's outputs for an evaluation microbatch; called at the last stage, by the replica that ran it."""


class Evaluation:
    """One worker's share of every evaluation. Values are means over samples."""

    def __init__(self, assignment: Assignment, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
                 reducer: Reducer, links: Links, observer: Observer, sink: OutputSink | None = None) -> None:
        assert assignment.evaluation_source is not None
        pipeline, worker = assignment.pipeline, assignment.worker
        self._programs, self._sizes, self._device = assignment.evaluation, assignment.evaluation_sizes, assignment.device
        self._indices = range(worker.replica, pipeline.evaluation_microbatches, pipeline.replicas[worker.stage])
        self._last = worker.stage == len(pipeline.replicas) - 1
        self._source, self._reducer, self._links, self._observer, self._sink = (
            assignment.evaluation_source, reducer, links, observer, sink)
        self._parameters, self._buffers, self._averaged = dict(parameters), dict(buffers), assignment.averaged_buffers
        self._batch = -1
        self._remaining = 0
        self._current: dict[str, torch.Tensor] = {}
        self._changing: frozenset[int] = frozenset()
        self._inputs: Iterator[tuple[torch.Tensor, ...]] = iter(())
        self._sums: dict[str, float] = {}

    def begin(self, batch: int) -> None:
        """Start the evaluation after ``batch``; every replica of the stage must, for they average their buffers."""
        averages = averaged_buffers([self._buffers[name] for name in self._averaged], self._reducer)
        self._current = self._buffers | dict(zip(self._averaged, averages, strict=True))
        positions = next(iter(self._programs.values())).inputs
        self._inputs = self._source.iterate(self._indices, positions)
        self._batch, self._remaining = batch, len(self._indices)
        self._changing = storages(self._parameters.values())
        self._sums = {name: 0.0 for program in self._programs.values() for name in program.results}
        self._finish()  # this replica's share may be empty

    def run(self, op: Op) -> None:
        """Forward of evaluation microbatch ``op.index``; at the last stage its values are summed up here."""
        received = awaited(self._observer, op, self._links.receive_evaluation)
        start = time.monotonic_ns()
        inputs = [tensor.to(self._device) for tensor in next(self._inputs)]
        ready = time.monotonic_ns()
        self._observer.spent(op, "data", start, ready)
        size = self._sizes[op.index]
        program = self._programs[size]
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = program.module(
                *(self._parameters[name] for name in program.parameters), *(self._current[name] for name in program.buffers),
                *received, *inputs,
            )
        if self._last:
            for name, value in zip(program.results, outputs, strict=False):  # the outputs asked for come after them
                self._sums[name] += float(value) * size
            if self._sink is not None:
                self._sink(op.index, outputs[len(program.results):])
        else:
            self._links.send_evaluation(op.index, tuple(owned(output, self._changing) for output in outputs))
        self._observer.spent(op, "evaluate", ready, time.monotonic_ns())
        self._remaining -= 1
        self._finish()

    def _finish(self) -> None:
        """When this replica has run its share: report, at the last stage, the means over all replicas' microbatches."""
        if self._remaining:
            return
        self._current, self._inputs = {}, iter(())
        if self._last:
            totals = sum_over_replicas(list(self._sums.values()), self._reducer, self._device)
            self._observer.evaluated(self._batch, {name: total / sum(self._sizes) for name, total in zip(self._sums, totals, strict=True)})


class EvaluationWorker:
    """Runs an assignment whose pipeline has no batches: one evaluation of the weights given, which are not changed.

    They are reported as those after ``batch`` of the run that made them.
    """

    def __init__(self, assignment: Assignment, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor],
                 transport: Transport, observer: Observer | None = None, sink: OutputSink | None = None, batch: int = -1) -> None:
        self._pipeline, self._worker, self._batch = assignment.pipeline, assignment.worker, batch
        self._links = Links(self._pipeline, self._worker, assignment.program, assignment.evaluation, assignment.evaluation_sizes, transport)
        self._evaluation = Evaluation(assignment, parameters, buffers, transport.reducer(self._worker.stage), self._links,
                                      observer or Observer(), sink)

    def run(self) -> None:
        """Run every operation of this worker.

        Raises:
            PeerLost: another worker went away.
            Exception: whatever the user's model or data raised.
        """
        self._evaluation.begin(self._batch)
        for op in operations(self._pipeline, *self._worker):
            self._evaluation.run(op)
        self._links.flush()
