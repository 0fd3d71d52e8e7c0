"""The worker's loop: one replica of one stage runs its list of operations, in order.

Every decision is in the schedule: what to run, with which version, whom to send to. Timing decides
only how long a receive waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from launcher.optimizer import OptimizerFactory
from launcher.runtime.assignment import Assignment
from launcher.runtime.channel import Transport
from launcher.runtime.evaluation import Evaluation
from launcher.runtime.links import Links
from launcher.runtime.observer import Observer, awaited
from launcher.runtime.reduction import GradientReduction, arrival_order
from launcher.runtime.replicas import averaged_buffers, sum_over_replicas
from launcher.runtime.scaling import LossScaler
from launcher.runtime.stage import Stage
from launcher.runtime.tied import TiedReduction
from launcher.runtime.update import Update
from launcher.runtime.weights import WeightVersions
from planner.spec.policies import POLICIES
from planner.spec.schedule import Op, operations

__all__ = ["Keyed", "StageWorker"]

Keyed = Callable[[int], AbstractContextManager[None]]


class StageWorker:
    """Runs an assignment over a transport.

    ``parameters`` and ``buffers`` are the stage's own, by the model's names, and may hold more than
    the training program takes (what only evaluation uses). ``keyed(microbatch)`` is entered around a
    forward, so that its randomness depends on the microbatch and not on who runs it.
    """

    def __init__(
        self, assignment: Assignment, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor],
        optimizer: OptimizerFactory, transport: Transport, observer: Observer | None = None,
        keyed: Keyed = lambda microbatch: nullcontext(),
    ) -> None:
        self._pipeline, self._device = assignment.pipeline, assignment.device
        self.worker = assignment.worker
        program = assignment.program
        self._last = assignment.worker.stage == len(self._pipeline.replicas) - 1
        self._program, self._buffers, self._averaged = program, dict(buffers), assignment.averaged_buffers
        policy = POLICIES[assignment.policy]
        policy.check(self._pipeline)
        self._rule = policy.version_rule(self._pipeline)
        self._recomputes = assignment.recompute
        self.weights = WeightVersions([parameters[name] for name in program.parameters], overwrites=policy.overwrites)
        self._stage = Stage(program, self.weights, [buffers[name] for name in program.buffers], self._pipeline.batch_microbatches,
                            recompute=assignment.recompute, alone=self._pipeline.in_flight[self.worker.stage] == 1)
        self._reducer = transport.reducer(self.worker.stage)
        own = [position for position in arrival_order(program) if program.parameters[position] not in assignment.tied]
        self._reduction = GradientReduction(self._reducer, self.weights.masters, own)
        masters = dict(zip(program.parameters, self.weights.masters, strict=True)) if self.weights.trainable else {}
        self._tied = TiedReduction(assignment.tied, masters, self.worker.stage, transport)
        agrees = assignment.clip_norm is not None or assignment.loss_scaling is not None
        self._joint = agrees or bool(self._tied)
        first = {name: assignment.tied.get(name, (self.worker.stage,))[0] for name in masters}
        self._update_weights = Update(
            masters, optimizer, assignment.scheduler, assignment.clip_norm,
            transport.among(range(len(self._pipeline.replicas))) if agrees else None,
            counted=[name for name in masters if self.worker == (first[name], 0)],
            scaler=None if assignment.loss_scaling is None else LossScaler(assignment.loss_scaling, self._device))
        self._observer = observer or Observer()
        self._keyed = keyed
        self._links = Links(self._pipeline, self.worker, program, assignment.evaluation, assignment.evaluation_sizes, transport)
        self._replica_step = self._pipeline.replicas[self.worker.stage]
        self._next_forward = self.worker.replica
        self._inputs = assignment.train_source.iterate(
            range(self.worker.replica, self._pipeline.microbatches, self._replica_step), program.inputs)
        self._losses: dict[int, torch.Tensor] = {}  # by microbatch: more than one batch's may be in flight
        self._evaluation: Evaluation | None = None
        if self._pipeline.evaluation_microbatches and assignment.evaluation_source is not None:
            self._evaluation = Evaluation(assignment, parameters, buffers, self._reducer, self._links, self._observer)

    def run(self) -> None:
        """Run every operation of this worker.

        Raises:
            PeerLost: another worker went away.
            Exception: whatever the user's model, data or optimizer raised.
        """
        steps = {"F": self._forward, "B": self._backward, "U": self._update}
        if self._evaluation is not None:
            steps["E"] = self._evaluation.run
        for op in operations(self._pipeline, *self.worker):
            steps[op.kind](op)
        self._links.flush()

    def final_buffers(self) -> dict[str, torch.Tensor]:
        """The training program's buffers by name, averaged over the replicas; all replicas must ask for them together."""
        averages = averaged_buffers([self._buffers[name] for name in self._averaged], self._reducer)
        own = {name: self._buffers[name] for name in self._program.buffers}
        return own | dict(zip(self._averaged, averages, strict=True))

    def _forward(self, op: Op) -> None:
        received = awaited(self._observer, op, self._links.receive_activations)
        start = time.monotonic_ns()
        inputs = [tensor.to(self._device) for tensor in next(self._inputs)]
        ready = time.monotonic_ns()
        self._observer.spent(op, "data", start, ready)
        version = self._rule(op.index, self.weights.newest)
        with self._keyed(op.index):
            outputs = self._stage.forward(op.index, version, received, inputs)
        self._next_forward = op.index + self._replica_step
        if self._last:
            self._losses[op.index] = outputs[0]
        else:
            self._links.send_activations(op.index, outputs)
        self._observer.spent(op, "forward", ready, time.monotonic_ns())

    def _backward(self, op: Op) -> None:
        if self._recomputes:  # while the gradients are on their way
            start = time.monotonic_ns()
            self._observer.running(op)
            with self._keyed(op.index):
                self._stage.recompute(op.index)
            self._observer.spent(op, "recompute", start, time.monotonic_ns())
        gradients = awaited(self._observer, op, self._links.receive_gradients)
        start = time.monotonic_ns()
        final = self._pipeline.ends_batch(self.worker.stage, op.index)
        results = self._stage.backward(op.index, gradients, partial(self._reduction.gathering, final=final),
                                       loss_scale=self._update_weights.loss_scale)
        self.weights.discard(self._needed_from(self.weights.newest))
        self._links.send_gradients(op.index, results)
        self._observer.spent(op, "backward", start, time.monotonic_ns())

    def _update(self, op: Op) -> None:
        loss = None
        start = time.monotonic_ns()
        if self._reducer.size > 1 or self._joint:
            self._observer.waiting(op)
        self._reduction.begin_rest()  # before any other sum, so that every replica begins its sums in the same order
        if self._last:
            end = (op.index + 1) * self._pipeline.batch_microbatches
            total = sum(float(self._losses.pop(microbatch)) for microbatch in sorted(self._losses) if microbatch < end)
            loss = sum_over_replicas([total], self._reducer, self._device)[0] / self._pipeline.batch_microbatches
        self._reduction.finish()
        reduced = time.monotonic_ns()
        self._tied()
        self._update_weights.agree(self._device)
        agreed = time.monotonic_ns()
        self._observer.running(op)
        self.weights.advance(self._update_weights.step, self._needed_from(self.weights.newest + 1))
        if self._reducer.size > 1:
            self._observer.spent(op, "allreduce", start, reduced)
        if self._joint:
            self._observer.spent(op, "wait", reduced, agreed)
        self._observer.spent(op, "update", agreed, time.monotonic_ns())
        self._observer.updated(op.index, loss, self._update_weights.scaled)
        if self._pipeline.evaluates_after(op.index) and self._evaluation is not None:
            self._evaluation.begin(op.index)

    def _needed_from(self, newest: int) -> int:
        """The oldest version that a forward still to come uses, with ``newest`` updates done."""
        return self._rule(self._next_forward, newest) if self._next_forward < self._pipeline.microbatches else newest
