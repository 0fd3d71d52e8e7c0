"""Channels between processes, over torch.distributed (gloo on CPU, NCCL on CUDA).

Plain ``isend`` and ``irecv`` with one process group per edge: a group's messages arrive in the order
they were sent, so nothing needs tags, and two edges never wait for each other. Every worker creates
all groups in the same order, as ``new_group`` demands. (``batch_isend_irecv`` can hang on gloo.)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from launcher.graph.program import Value
from launcher.runtime.channel import Edge, PeerLost, Reducer, edges, rank_of, workers
from planner.spec.schedule import Pipeline

__all__ = ["RemoteTransport", "peer_errors"]

_AHEAD = 2  # receives posted before they are needed: one being filled while the other is waited for


class _RemoteSender:
    """Keeps each message's tensors and work handles until the message has left.

    gloo tells that a send is done only to who waits for it. The schedule itself bounds what can be
    under way (a stage admits ``in_flight`` microbatches), so waiting for the message ``window``
    places back is waiting for one that has been answered already, and costs nothing.
    """

    def __init__(self, group: dist.ProcessGroup, edge: Edge, peer: int, window: int | None) -> None:
        self._group, self._edge, self._peer, self._window = group, edge, peer, window
        self._under_way: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        with peer_errors(self._edge):
            message = []
            for tensor in tensors:
                work = dist.isend(tensor, self._peer, group=self._group)
                if work is not None:
                    message.append((work, tensor))
        self._under_way.append(message)
        while self._window is not None and len(self._under_way) > self._window:
            self._wait_oldest()

    def flush(self) -> None:
        while self._under_way:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        with peer_errors(self._edge):
            for work, _ in self._under_way.popleft():
                work.wait()


class _RemoteReceiver:
    def __init__(self, group: dist.ProcessGroup, edge: Edge, peer: int, expected: Iterator[Sequence[Value]], device: torch.device) -> None:
        self._group, self._edge, self._peer, self._expected, self._device = group, edge, peer, expected, device
        self._posted: deque[list[tuple[dist.Work | None, torch.Tensor]]] = deque()
        for _ in range(_AHEAD):
            self._post()

    def receive(self) -> tuple[torch.Tensor, ...]:
        message = self._posted.popleft()
        with peer_errors(self._edge):
            for work, _ in message:
                if work is not None:
                    work.wait()
        self._post()
        return tuple(tensor for _, tensor in message)

    def _post(self) -> None:
        values = next(self._expected, None)
        if values is None:
            return
        message = []
        with peer_errors(self._edge):
            for value in values:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=self._device)
                message.append((dist.irecv(tensor, self._peer, group=self._group), tensor))
        self._posted.append(message)


class _RemoteSum:
    """Keeps the tensor while the backend works on it."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        if self._work is not None:
            with peer_errors(None):
                self._work.wait()


class _RemoteReducer:
    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.size = size
        self._group = group

    def begin_sum_(self, tensor: torch.Tensor) -> _RemoteSum:
        with peer_errors(None):
            work = None if self._group is None else dist.all_reduce(tensor, group=self._group, async_op=True)
        return _RemoteSum(work, tensor)

    def sum_(self, tensor: torch.Tensor) -> None:
        self.begin_sum_(tensor).wait()


class RemoteTransport:
    """The groups of every edge and stage, made in one agreed order. Needs an initialised default group."""

    def __init__(self, pipeline: Pipeline, device: torch.device, timeout_s: float) -> None:
        self._replicas = pipeline.replicas
        self._device = device
        timeout = self._timeout = timedelta(seconds=timeout_s)
        with peer_errors(None):
            self._groups = {
                edge: dist.new_group([rank_of(self._replicas, edge.source), rank_of(self._replicas, edge.destination)], timeout=timeout)
                for edge in edges(pipeline)
            }
            self._stages = []
            for stage, r in enumerate(self._replicas):
                ranks = [rank_of(self._replicas, worker) for worker in workers(self._replicas) if worker.stage == stage]
                self._stages.append(dist.new_group(ranks, timeout=timeout) if r > 1 else None)

    def sender(self, edge: Edge, window: int | None) -> _RemoteSender:
        return _RemoteSender(self._groups[edge], edge, rank_of(self._replicas, edge.destination), window)

    def receiver(self, edge: Edge, messages: Iterable[Sequence[Value]]) -> _RemoteReceiver:
        return _RemoteReceiver(self._groups[edge], edge, rank_of(self._replicas, edge.source), iter(messages), self._device)

    def reducer(self, stage: int) -> Reducer:
        return _RemoteReducer(self._stages[stage], self._replicas[stage])

    def among(self, stages: Sequence[int]) -> Reducer:
        ranks = [rank_of(self._replicas, worker) for worker in workers(self._replicas) if worker.stage in stages]
        with peer_errors(None):
            return _RemoteReducer(dist.new_group(ranks, timeout=self._timeout), len(ranks))


@contextlib.contextmanager
def peer_errors(edge: Edge | None) -> Iterator[None]:
    """Turn torch.distributed's errors into :class:`PeerLost`, which names the other side.

    The death of a loader process is told by a signal handler, wherever this process happens to be: that is no peer's doing.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):
            raise
        where = "the workers" if edge is None else f"{edge.source} and {edge.destination} ({edge.kind})"
        raise PeerLost(f"connection between {where}: {str(error).splitlines()[0]}") from error
