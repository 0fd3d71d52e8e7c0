"""Channels inside one process, for workers that are threads.

The same schedule, stages and weight versions run in milliseconds and without sockets, which is how
most of the runtime is tested. Sums over replicas are taken in replica order, so results are exact.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from launcher.graph.program import Value
from launcher.runtime.channel import Edge, PeerLost, Worker, rank_of

__all__ = ["LocalTransport"]


class _LocalSender:
    def __init__(self, messages: queue.Queue[tuple[torch.Tensor, ...]]) -> None:
        self._messages = messages

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._messages.put(tuple(tensor.clone() for tensor in tensors))  # like a wire: no shared storage

    def flush(self) -> None:
        pass


class _LocalReceiver:
    def __init__(self, edge: Edge, messages: queue.Queue[tuple[torch.Tensor, ...]], expected: Iterator[Sequence[Value]],
                 timeout_s: float) -> None:
        self._edge, self._messages, self._expected, self._timeout_s = edge, messages, expected, timeout_s

    def receive(self) -> tuple[torch.Tensor, ...]:
        values = next(self._expected)
        try:
            tensors = self._messages.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerLost(f"no {self._edge.kind} from {self._edge.source} within {self._timeout_s:g} s") from None
        for value, tensor in zip(values, tensors, strict=True):
            if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
                raise PeerLost(f"{value.name} came as {tuple(tensor.shape)} {tensor.dtype}, expected {value.shape} {value.dtype}")
        return tensors


class _LocalReducer:
    """A rendezvous of threads, one stage's or all; each has its own handle to the shared state."""

    def __init__(self, shared: _Meeting, index: int) -> None:
        self.size = shared.size
        self._shared, self._index = shared, index

    def sum_(self, tensor: torch.Tensor) -> None:
        shared = self._shared
        shared.tensors[self._index] = tensor
        try:
            shared.barrier.wait()
            total = sum(shared.tensors[1:], start=shared.tensors[0])
            shared.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("a worker did not come to the sum") from None
        tensor.copy_(total)


class _Meeting:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.tensors: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)


class LocalTransport:
    """Shared by the threads of a pipeline; :meth:`of` gives each worker its own view."""

    def __init__(self, replicas: Sequence[int], timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._queues: dict[Edge, queue.Queue[tuple[torch.Tensor, ...]]] = {}
        self._meetings = [_Meeting(size, timeout_s) for size in (*replicas, sum(replicas))]  # the last one is everybody's
        self._replicas = tuple(replicas)

    def of(self, worker: Worker) -> _LocalView:
        return _LocalView(self, worker, rank_of(self._replicas, worker))

    def messages(self, edge: Edge) -> queue.Queue[tuple[torch.Tensor, ...]]:
        with self._lock:
            return self._queues.setdefault(edge, queue.Queue())

    def meeting(self, stage: int) -> _Meeting:
        return self._meetings[stage]

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def abort(self) -> None:
        """Wake every thread that waits in a sum."""
        for meeting in self._meetings:
            meeting.barrier.abort()


class _LocalView:
    def __init__(self, world: LocalTransport, worker: Worker, rank: int) -> None:
        self._world, self._worker, self._rank = world, worker, rank

    def sender(self, edge: Edge, window: int | None) -> _LocalSender:
        return _LocalSender(self._world.messages(edge))

    def receiver(self, edge: Edge, messages: Iterable[Sequence[Value]]) -> _LocalReceiver:
        return _LocalReceiver(edge, self._world.messages(edge), iter(messages), self._world.timeout_s)

    def reducer(self, stage: int) -> _LocalReducer:
        return _LocalReducer(self._world.meeting(stage), self._worker.replica)

    def everyone(self) -> _LocalReducer:
        return _LocalReducer(self._world.meeting(-1), self._rank)
