"""The discrete-event simulation: workers run their operations in order, messages travel, replicas meet.

A worker begins its next operation when it is free and what the operation needs has arrived. Sends
never block and receives are posted ahead, as in the runtime::

    stage 0   |  0F0  |  0F1  | wait                 |  0B0  |0U0|
                      \\ 0F0 travels                / 1B0 travels
    stage 1   wait         |  1F0  |    1B0    |1U0|  1F1  | ...

An update waits until every replica of its stage has come to it; then the all-reduce's ring carries the
gradients over the same links as everything else, and each replica steps its optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from planner.simulation.routes import Direction, Routes
from planner.simulation.transport import Clock, Connection, Message, Transfer, Transport
from planner.simulation.workload import StageWorkload
from planner.spec.errors import InvalidValue
from planner.spec.plan import Plan
from planner.spec.schedule import Op, Pipeline, operations

__all__ = ["Done", "Record", "run"]


class Done(NamedTuple):
    """An operation as it happened.

    A worker came to it at ``ready_us`` and waited until ``begin_us``; an update then reduced its
    gradients until ``start_us`` (other operations start at once), and all was done at ``end_us``.
    """

    op: Op
    ready_us: float
    begin_us: float
    start_us: float
    end_us: float


class Record(NamedTuple):
    """Everything that happened. ``workers[k][i]`` has the operations of replica i of stage k, in order."""

    workers: tuple[tuple[list[Done], ...], ...]
    transfers: list[Transfer]
    directions: tuple[Direction, ...]


class _Worker:
    __slots__ = ("arrived", "connections", "done", "ops", "ready_us", "replica", "stage", "waiting")

    def __init__(self, stage: int, replica: int, ops: Iterator[Op]) -> None:
        self.stage, self.replica, self.ops = stage, replica, ops
        self.arrived: set[Op] = set()  # operations of this worker whose input has come
        self.waiting: Op | None = None
        self.ready_us = 0.0  # since when
        self.done: list[Done] = []
        self.connections: dict[tuple[int, int], Connection] = {}  # by stage and replica of the receiver


def run(plan: Plan, pipeline: Pipeline, workload: tuple[StageWorkload, ...]) -> Record:
    """Simulate ``pipeline`` on the plan's devices.

    Raises:
        InvalidValue: the schedule cannot finish; the message has the operation each stuck worker waits at.
    """
    return _Simulation(plan, pipeline, workload).run()


class _Simulation:
    def __init__(self, plan: Plan, pipeline: Pipeline, workload: tuple[StageWorkload, ...]) -> None:
        self._replicas, self._workload, self._last = pipeline.replicas, workload, len(pipeline.replicas) - 1
        self._devices = [stage.devices for stage in plan.stages]
        self._routes = Routes(plan.cluster, [device for devices in self._devices for device in devices])
        self._clock = Clock()
        self._transport = Transport(self._clock, [direction.bytes_per_us for direction in self._routes.directions])
        self._workers = [[_Worker(k, i, operations(pipeline, k, i)) for i in range(r)] for k, r in enumerate(self._replicas)]
        self._rings = [Connection(self._routes.ring(devices)) if len(devices) > 1 else None for devices in self._devices]
        self._gathered: list[list[_Worker]] = [[] for _ in self._replicas]  # replicas that have come to the stage's update

    def run(self) -> Record:
        for stage in self._workers:
            for worker in stage:
                self._advance(worker, 0.0)
        self._clock.run()
        stuck = [worker for stage in self._workers for worker in stage if worker.waiting is not None]
        if stuck:
            where = ", ".join(f"stage {worker.stage} replica {worker.replica} at {worker.waiting}" for worker in stuck)
            raise InvalidValue(f"the schedule cannot finish: {where}", hint="give every stage a larger in-flight depth")
        return Record(tuple(tuple(worker.done for worker in stage) for stage in self._workers), self._transport.transfers,
                      tuple(self._routes.directions))

    def _advance(self, worker: _Worker, now_us: float) -> None:
        """The worker is free: begin its next operation, or wait for what it needs."""
        op = worker.waiting = next(worker.ops, None)
        if op is None:
            return
        worker.ready_us = now_us
        if op.kind == "U":
            self._gather(worker, op, now_us)
        elif worker.stage == (self._last if op.kind == "B" else 0) or op in worker.arrived:
            self._begin(worker, op, now_us, now_us)

    def _begin(self, worker: _Worker, op: Op, begin_us: float, start_us: float) -> None:
        work = self._workload[worker.stage]
        times = work.backward_us if op.kind == "B" else work.update_us if op.kind == "U" else work.forward_us
        worker.waiting = None
        self._clock.at(start_us + times[worker.replica], partial(self._finish, worker, op, begin_us, start_us))

    def _finish(self, worker: _Worker, op: Op, begin_us: float, start_us: float, now_us: float) -> None:
        worker.done.append(Done(op, worker.ready_us, begin_us, start_us, now_us))
        if op.kind != "U":
            worker.arrived.discard(op)
            if op.kind == "F" and worker.stage < self._last:
                self._send(worker, op, worker.stage + 1, self._workload[worker.stage].activation_bytes, now_us)
            elif op.kind == "B" and worker.stage > 0:
                self._send(worker, op, worker.stage - 1, self._workload[worker.stage - 1].gradient_bytes, now_us)
        self._advance(worker, now_us)

    def _send(self, worker: _Worker, op: Op, stage: int, size: float, now_us: float) -> None:
        replica = op.index % self._replicas[stage]
        connection = worker.connections.get((stage, replica))
        if connection is None:
            route = self._routes.path(self._devices[worker.stage][worker.replica], self._devices[stage][replica])
            connection = worker.connections[stage, replica] = Connection(route)
        arrived = partial(self._arrive, self._workers[stage][replica], Op(stage, op.kind, op.index))
        self._transport.send(connection, Message(str(op), size, now_us, arrived))

    def _arrive(self, worker: _Worker, op: Op, now_us: float) -> None:
        """What ``op`` needs is there."""
        worker.arrived.add(op)
        if worker.waiting == op:
            self._begin(worker, op, now_us, now_us)

    def _gather(self, worker: _Worker, op: Op, now_us: float) -> None:
        """A replica has come to its stage's update; the last one starts the all-reduce for all."""
        gathered = self._gathered[op.stage]
        gathered.append(worker)
        if len(gathered) < self._replicas[op.stage]:
            return
        self._gathered[op.stage] = []
        ring = self._rings[op.stage]
        if ring is None:
            self._begin(worker, op, now_us, now_us)
            return
        reduced = partial(self._reduced, gathered, op, now_us)
        self._transport.send(ring, Message(str(op), self._workload[op.stage].ring_bytes, now_us, reduced))

    def _reduced(self, replicas: list[_Worker], op: Op, begin_us: float, now_us: float) -> None:
        for worker in replicas:
            self._begin(worker, op, begin_us, now_us)
