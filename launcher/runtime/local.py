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
from launcher.runtime.channel import Edge, PeerLost, Worker, workers

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
    """One thread's handle to the sums of its stage, or of several."""

    def __init__(self, meeting: _Meeting, index: int) -> None:
        self.size = meeting.size
        self._meeting, self._index = meeting, index
        self._begun = 0

    def begin_sum_(self, tensor: torch.Tensor) -> _LocalSum:
        self._begun += 1
        return _LocalSum(self._meeting, self._meeting.bring(self._begun, self._index, tensor))

    def sum_(self, tensor: torch.Tensor) -> None:
        self.begin_sum_(tensor).wait()


class _LocalSum:
    def __init__(self, meeting: _Meeting, done: threading.Event) -> None:
        self._meeting, self._done = meeting, done

    def wait(self) -> None:
        if not self._done.wait(self._meeting.timeout_s) or self._meeting.aborted:
            raise PeerLost("a worker did not come to the sum")


class _Meeting:
    """The sums that some threads take together: everybody's n-th belong to one another. The last to come adds them up."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.aborted = False
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[threading.Event, dict[int, torch.Tensor]]] = {}  # by the sum's number

    def bring(self, number: int, index: int, tensor: torch.Tensor) -> threading.Event:
        """Add a member's tensor to a sum; set when every member's has become the sum."""
        with self._lock:
            done, parts = self._waiting.setdefault(number, (threading.Event(), {}))
            parts[index] = tensor
            if len(parts) == self.size:
                del self._waiting[number]
                ordered = [parts[member] for member in range(self.size)]
                total = sum(ordered[1:], start=ordered[0].clone())
                for part in ordered:
                    part.copy_(total)
            if self.aborted or len(parts) == self.size:
                done.set()
            return done

    def abort(self) -> None:
        """Wake every thread that waits for a sum, now or later."""
        with self._lock:
            self.aborted = True
            for done, _ in self._waiting.values():
                done.set()


class LocalTransport:
    """Shared by the threads of a pipeline; :meth:`of` gives each worker its own view."""

    def __init__(self, replicas: Sequence[int], timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._queues: dict[Edge, queue.Queue[tuple[torch.Tensor, ...]]] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}  # by the stages whose workers meet
        self._replicas = tuple(replicas)

    def of(self, worker: Worker) -> _LocalView:
        return _LocalView(self, worker, self._replicas)

    def messages(self, edge: Edge) -> queue.Queue[tuple[torch.Tensor, ...]]:
        with self._lock:
            return self._queues.setdefault(edge, queue.Queue())

    def meeting(self, stages: tuple[int, ...]) -> _Meeting:
        with self._lock:
            size = sum(self._replicas[stage] for stage in stages)
            return self._meetings.setdefault(stages, _Meeting(size, self._timeout_s))

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def abort(self) -> None:
        """Wake every thread that waits in a sum."""
        for meeting in self._meetings.values():
            meeting.abort()


class _LocalView:
    def __init__(self, world: LocalTransport, worker: Worker, replicas: tuple[int, ...]) -> None:
        self._world, self._worker, self._replicas = world, worker, replicas

    def sender(self, edge: Edge, window: int | None) -> _LocalSender:
        return _LocalSender(self._world.messages(edge))

    def receiver(self, edge: Edge, messages: Iterable[Sequence[Value]]) -> _LocalReceiver:
        return _LocalReceiver(edge, self._world.messages(edge), iter(messages), self._world.timeout_s)

    def reducer(self, stage: int) -> _LocalReducer:
        return self.among((stage,))

    def among(self, stages: Sequence[int]) -> _LocalReducer:
        members = [worker for worker in workers(self._replicas) if worker.stage in stages]
        index = members.index(self._worker) if self._worker in members else -1
        return _LocalReducer(self._world.meeting(tuple(stages)), index)
