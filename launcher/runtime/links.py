"""One worker's channels: whom a microbatch comes from and goes to, and in which order.

Between stages with r and s replicas, microbatch m goes from replica ``m mod r`` to ``m mod s``, and
its gradient the same way back. All of it is known beforehand, shapes included, so every receiver
gets the endless list of its messages at once and can post receives ahead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from launcher.graph.program import StageProgram, Value
from launcher.runtime.channel import Edge, EdgeKind, Receiver, Sender, Transport, Worker
from launcher.runtime.stage import gradient_values
from planner.spec.schedule import Pipeline

__all__ = ["Links"]

_EVALUATION_WINDOW = 4


class Links:
    """Receives and sends for one worker, by microbatch."""

    def __init__(
        self, pipeline: Pipeline, worker: Worker, program: StageProgram, evaluation: Mapping[int, StageProgram],
        evaluation_sizes: Sequence[int], transport: Transport,
    ) -> None:
        self._replicas, self._worker = pipeline.replicas, worker
        self._senders: dict[Edge, Sender] = {}
        self._receivers: dict[Edge, Receiver] = {}
        stage, in_flight = worker.stage, pipeline.in_flight
        for before in self._neighbours(stage - 1):
            if pipeline.batches:
                forwards = _count(pipeline, before, worker, pipeline.microbatches)
                self._receive("F", before, (program.received for _ in range(forwards)), transport)
                self._send("B", before, in_flight[before.stage], transport)
            if pipeline.evaluation_microbatches:
                self._receive("E", before, self._evaluation_messages(pipeline, before, evaluation, evaluation_sizes), transport)
        for after in self._neighbours(stage + 1):
            if pipeline.batches:
                backwards = _count(pipeline, worker, after, pipeline.microbatches)
                self._send("F", after, in_flight[stage], transport)
                self._receive("B", after, (gradient_values(program.sent) for _ in range(backwards)), transport)
            if pipeline.evaluation_microbatches:
                self._send("E", after, _EVALUATION_WINDOW if _admissions_fall(pipeline) else None, transport)

    def receive_activations(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        return self._receivers[self._edge_from("F", -1, microbatch)].receive() if self._worker.stage else ()

    def send_activations(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        self._senders[self._edge_to("F", 1, microbatch)].send(tensors)

    def receive_gradients(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        last = self._worker.stage == len(self._replicas) - 1
        return () if last else self._receivers[self._edge_from("B", 1, microbatch)].receive()

    def send_gradients(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        if self._worker.stage:
            self._senders[self._edge_to("B", -1, microbatch)].send(tensors)

    def receive_evaluation(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        return self._receivers[self._edge_from("E", -1, microbatch)].receive() if self._worker.stage else ()

    def send_evaluation(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        self._senders[self._edge_to("E", 1, microbatch)].send(tensors)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for sender in self._senders.values():
            sender.flush()

    def _neighbours(self, stage: int) -> list[Worker]:
        """The workers of an adjacent stage that share a microbatch with this one, ascending."""
        if not 0 <= stage < len(self._replicas):
            return []
        r, s = self._replicas[self._worker.stage], self._replicas[stage]
        return [Worker(stage, i) for i in sorted({m % s for m in range(self._worker.replica, math.lcm(r, s), r)})]

    def _peer(self, step: int, microbatch: int) -> Worker:
        stage = self._worker.stage + step
        return Worker(stage, microbatch % self._replicas[stage])

    def _edge_from(self, kind: EdgeKind, step: int, microbatch: int) -> Edge:
        return Edge(kind, self._peer(step, microbatch), self._worker)

    def _edge_to(self, kind: EdgeKind, step: int, microbatch: int) -> Edge:
        return Edge(kind, self._worker, self._peer(step, microbatch))

    def _receive(self, kind: EdgeKind, source: Worker, messages: Iterator[Sequence[Value]], transport: Transport) -> None:
        edge = Edge(kind, source, self._worker)
        self._receivers[edge] = transport.receiver(edge, messages)

    def _send(self, kind: EdgeKind, destination: Worker, window: int | None, transport: Transport) -> None:
        edge = Edge(kind, self._worker, destination)
        self._senders[edge] = transport.sender(edge, window)

    def _evaluation_messages(
        self, pipeline: Pipeline, before: Worker, evaluation: Mapping[int, StageProgram], sizes: Sequence[int]
    ) -> Iterator[Sequence[Value]]:
        shared = [e for e in range(pipeline.evaluation_microbatches) if _meets(pipeline, before, e) and _meets(pipeline, self._worker, e)]
        for _ in pipeline.evaluated_batches():
            for index in shared:
                yield evaluation[sizes[index]].received


def _meets(pipeline: Pipeline, worker: Worker, microbatch: int) -> bool:
    return microbatch % pipeline.replicas[worker.stage] == worker.replica


def _count(pipeline: Pipeline, before: Worker, after: Worker, microbatches: int) -> int:
    """How many of the first ``microbatches`` pass from ``before`` to ``after``."""
    period = math.lcm(pipeline.replicas[before.stage], pipeline.replicas[after.stage])
    firsts = [m for m in range(period) if _meets(pipeline, before, m) and _meets(pipeline, after, m)]
    return sum(len(range(first, microbatches, period)) for first in firsts)


def _admissions_fall(pipeline: Pipeline) -> bool:
    """Whether no stage runs further ahead than the one before it, or none trains at all.

    Then a stage that reaches an evaluation has been sent all it needs to reach it, and the stage
    before may wait for it; otherwise a bounded send could wait in a circle.
    """
    if not pipeline.batches:
        return True
    admitted = [r * depth for r, depth in zip(pipeline.replicas, pipeline.in_flight, strict=True)]
    return all(a >= b for a, b in itertools.pairwise(admitted))
