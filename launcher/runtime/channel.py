"""Tensors from one worker to another: what a channel is, and which channels a pipeline has.

A channel goes one way between two workers and carries one kind of message in the schedule's order:
activations (F), gradients (B), or evaluation activations (E), which overtake the activations in
flight and therefore have channels of their own. Shapes are static, so receives are posted before
their message is sent, and no send waits for its receiver.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from launcher.graph.program import Value
from planner.spec.schedule import Pipeline

__all__ = [
    "Edge", "EdgeKind", "PeerLost", "PendingSum", "Receiver", "Reducer", "Sender", "Transport", "Worker", "edges", "rank_of", "workers",
]

EdgeKind = Literal["F", "B", "E"]


class Worker(NamedTuple):
    """The process that runs one replica of one stage."""

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"stage {self.stage} replica {self.replica}"


class Edge(NamedTuple):
    """One channel: ``source`` sends messages of ``kind`` to ``destination``."""

    kind: EdgeKind
    source: Worker
    destination: Worker


class PeerLost(Exception):
    """Another worker went away or stayed silent too long: a consequence, seldom the cause."""


class Sender(Protocol):
    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending one message: detached, contiguous tensors that nobody changes afterwards."""

    def flush(self) -> None:
        """Wait until every message has left."""


class Receiver(Protocol):
    def receive(self) -> tuple[torch.Tensor, ...]:
        """The next message, as tensors the caller owns. :class:`PeerLost` when it cannot come."""


class PendingSum(Protocol):
    def wait(self) -> None:
        """Until the sum is there. :class:`PeerLost` when it cannot come."""


class Reducer(Protocol):
    """Sums over the replicas of one stage, or of several; each of them begins the same sums in the same order."""

    size: int

    def begin_sum_(self, tensor: torch.Tensor) -> PendingSum:
        """Start to replace ``tensor`` (contiguous) by its sum over them, the same bits on each.

        Until the sum is waited for, nobody reads or writes the tensor.
        """

    def sum_(self, tensor: torch.Tensor) -> None:
        """The same, and wait for it."""


class Transport(Protocol):
    """How one worker reaches the others.

    ``window`` is how many messages of an edge may be under way before a send waits for the oldest.
    """

    def sender(self, edge: Edge, window: int | None) -> Sender: ...

    def receiver(self, edge: Edge, messages: Iterable[Sequence[Value]]) -> Receiver: ...

    def reducer(self, stage: int) -> Reducer: ...

    def among(self, stages: Sequence[int]) -> Reducer:
        """Over all workers of ``stages``. Every worker of the pipeline asks, in one order; those of other stages must not use it."""


def workers(replicas: Sequence[int]) -> tuple[Worker, ...]:
    """All workers in the order of their ranks: stage by stage, replica by replica.

    >>> [str(worker) for worker in workers((2, 1))]
    ['stage 0 replica 0', 'stage 0 replica 1', 'stage 1 replica 0']
    """
    return tuple(Worker(stage, replica) for stage, count in enumerate(replicas) for replica in range(count))


def rank_of(replicas: Sequence[int], worker: Worker) -> int:
    """The worker's rank."""
    return sum(replicas[: worker.stage]) + worker.replica


def edges(pipeline: Pipeline) -> tuple[Edge, ...]:
    """Every channel of the pipeline, in an order that all workers agree on.

    Only replica pairs that meet have channels: microbatch m goes from replica ``m mod r_k`` to
    replica ``m mod r_(k+1)``.

    >>> [(e.kind, *e.source, *e.destination) for e in edges(Pipeline((2, 1), (2, 1), 2, 1))]
    [('F', 0, 0, 1, 0), ('B', 1, 0, 0, 0), ('F', 0, 1, 1, 0), ('B', 1, 0, 0, 1)]
    """
    result: list[Edge] = []
    for stage, (r, following) in enumerate(itertools.pairwise(pipeline.replicas)):
        for microbatch in range(math.lcm(r, following)):
            before, after = Worker(stage, microbatch % r), Worker(stage + 1, microbatch % following)
            if pipeline.batches:
                result += [Edge("F", before, after), Edge("B", after, before)]
            if pipeline.evaluation_microbatches:
                result.append(Edge("E", before, after))
    return tuple(result)
