"""The schedule as data: which operations each worker runs, in which order.

An operation is written stage, kind, index: ``0F3`` (stage 0, forward of microbatch 3), ``2B17``
(backward), ``1U4`` (the update after batch 4), ``0E2`` (forward-only evaluation of microbatch 2).
The same text stands in logs, traces, errors and tests.

1F1B round robin (PipeDream, SOSP 2019, section 3.2) for two stages, one replica each, an update
after every microbatch::

    stage 0   0F0 0F1 0B0 0U0 0F2 0B1 0U1 0F3 0B2 ...
    stage 1       1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 ...

A replica first admits ``in_flight`` forwards, then alternates one backward and one forward. With ``flush`` it
does so within each batch, and no forward of the next batch runs before the update; batches of three::

    stage 0   0F0 0F1 0B0 0F2 0B1 0B2 0U0 0F3 0F4 0B3 ...
    stage 1       1F0 1B0 1F1 1B1 1F2 1B2 1U0 1F3 1B3 ...

Microbatch m belongs to replica ``m mod r`` for its forward and its backward. An update follows the
replica's last backward of the batch. Everything here is decided before the run starts, so a run is
reproducible, and a simulation of it can be exact.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.spec.errors import InvalidValue
from planner.spec.files import require

__all__ = ["Kind", "Op", "Pipeline", "default_in_flight", "operations", "parse_op", "validate"]

Kind = Literal["F", "B", "U", "E"]
_OP = re.compile(r"(\d+)([FBUE])(\d+)\Z")


class Op(NamedTuple):
    """``index`` is a microbatch for F, B and E, a batch for U."""

    stage: int
    kind: Kind
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.index}"


def parse_op(text: str) -> Op:
    """The operation written as ``text``.

    >>> parse_op("2B17")
    Op(stage=2, kind='B', index=17)
    """
    match = _OP.match(text)
    if match is None:
        raise InvalidValue(f"{text!r} is not an operation such as '2B17'")
    return Op(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]


def default_in_flight(replicas: tuple[int, ...], extra_per_link: int = 0) -> tuple[int, ...]:
    """Forwards each stage's replica admits: ``ceil(sum(r_k..r_{n-1}) / r_k)`` (1F1B-RR).

    A link is itself a pipeline stage when a transfer takes about as long as a stage's compute. With
    ``extra_per_link`` e its transfers are hidden by e microbatches more per link and replica in
    flight: the sum over the later stages grows by ``e * max(r_j, r_{j+1})`` for every later link.
    Without replicas that is ``n - k + e * (n - 1 - k)`` for stage k of n.

    >>> default_in_flight((1, 1, 1)), default_in_flight((2, 1)), default_in_flight((1, 1, 1), 1)
    ((3, 2, 1), (2, 1), (5, 3, 1))
    """
    depths, later = [], 0  # replicas of the later stages, and extra microbatches of the later links
    for k in reversed(range(len(replicas))):
        if k + 1 < len(replicas):
            later += extra_per_link * max(replicas[k], replicas[k + 1])
        later += replicas[k]
        depths.append(-(-later // replicas[k]))
    return tuple(reversed(depths))


@dataclass(frozen=True)
class Pipeline:
    """Everything the order of operations depends on.

    ``evaluate_every`` updates (0: never), all stages evaluate ``evaluation_microbatches`` with the
    weights of that update; the forwards in flight meanwhile stay in flight, so training is not changed.
    ``evaluate_at_end`` does the same once more after the last update; a pipeline of no batches evaluates the weights it
    starts with, and does nothing else. ``flush``: the pipeline is empty at every update.
    """

    replicas: tuple[int, ...]
    in_flight: tuple[int, ...]
    batch_microbatches: int
    batches: int
    evaluate_every: int = 0
    evaluate_at_end: bool = False
    evaluation_microbatches: int = 0
    flush: bool = False

    def __post_init__(self) -> None:
        require(len(self.in_flight) == len(self.replicas) > 0, f"{len(self.in_flight)} in-flight depths for {len(self.replicas)} stages")
        require(min(self.replicas) >= 1, f"replicas {self.replicas} has a count below 1")
        require(min(self.in_flight) >= 1, f"in_flight {self.in_flight} has a depth below 1")
        require(self.batches >= 0, f"batches {self.batches} is below 0")
        for r in self.replicas:
            require(
                self.batch_microbatches >= 1 and self.batch_microbatches % r == 0,
                f"a batch of {self.batch_microbatches} microbatches cannot be dealt to {r} replicas equally",
                hint=f"use a multiple of {math.lcm(*self.replicas)}",
            )

    @property
    def microbatches(self) -> int:
        return self.batches * self.batch_microbatches

    def ends_batch(self, stage: int, microbatch: int) -> bool:
        """Whether the backward of ``microbatch`` is the last one of its batch at its replica of ``stage``.

        >>> pipeline = Pipeline((2, 1), (2, 1), 4, 1)
        >>> [pipeline.ends_batch(0, microbatch) for microbatch in range(4)]
        [False, False, True, True]
        """
        return microbatch % self.batch_microbatches + self.replicas[stage] >= self.batch_microbatches

    def evaluates_after(self, batch: int) -> bool:
        """Whether an evaluation follows the update of ``batch``."""
        if self.evaluation_microbatches == 0:
            return False
        at_end = self.evaluate_at_end and batch == self.batches - 1
        return at_end or (self.evaluate_every > 0 and (batch + 1) % self.evaluate_every == 0)

    def evaluated_batches(self) -> Iterator[int]:
        """The batches whose updates are evaluated; -1 stands for the weights that a pipeline of no batches starts with."""
        return (batch for batch in (range(self.batches) if self.batches else (-1,)) if self.evaluates_after(batch))


def operations(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Op]:
    """The operations of one worker, in order.

    >>> " ".join(map(str, operations(Pipeline((1, 1), (2, 1), 1, 3), 0, 0)))
    '0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2'
    >>> evaluating = Pipeline((2, 1), (1, 1), 2, 0, evaluate_at_end=True, evaluation_microbatches=5)
    >>> " ".join(map(str, operations(evaluating, 0, 1))), " ".join(map(str, operations(evaluating, 1, 0)))
    ('0E1 0E3', '1E0 1E1 1E2 1E3 1E4')
    """
    if not pipeline.batches and pipeline.evaluates_after(-1):
        yield from _evaluation(pipeline, stage, replica)
    batch_size = pipeline.batch_microbatches
    drained = batch_size if pipeline.flush else max(pipeline.microbatches, 1)  # how many microbatches until the pipeline is empty
    for start in range(0, pipeline.microbatches, drained):
        yield from _until_empty(pipeline, stage, replica, range(start + replica, start + drained, pipeline.replicas[stage]))


def _until_empty(pipeline: Pipeline, stage: int, replica: int, microbatches: range) -> Iterator[Op]:
    """One fill and drain over the worker's ``microbatches``."""
    forwards = iter(microbatches)
    for _, microbatch in zip(range(pipeline.in_flight[stage]), forwards, strict=False):
        yield Op(stage, "F", microbatch)
    for microbatch in microbatches:
        yield Op(stage, "B", microbatch)
        if pipeline.ends_batch(stage, microbatch):
            batch = microbatch // pipeline.batch_microbatches
            yield Op(stage, "U", batch)
            if pipeline.evaluates_after(batch):
                yield from _evaluation(pipeline, stage, replica)
        following = next(forwards, None)
        if following is not None:
            yield Op(stage, "F", following)


def _evaluation(pipeline: Pipeline, stage: int, replica: int) -> Iterator[Op]:
    return (Op(stage, "E", index) for index in range(replica, pipeline.evaluation_microbatches, pipeline.replicas[stage]))


def validate(pipeline: Pipeline) -> None:
    """Check by running the schedule that it ends: no operation waits for one that waits for it.

    Raises:
        InvalidValue: with the operation each stuck worker waits at.
    """
    workers = {(k, i): operations(pipeline, k, i) for k, r in enumerate(pipeline.replicas) for i in range(r)}
    heads = {worker: next(ops, None) for worker, ops in workers.items()}
    batch_of = dict.fromkeys(workers, -1)  # the last update each worker has come to
    arrived: dict[tuple[int, int], int] = {}  # (stage, batch) -> replicas that have come to its update
    done: set[Op] = set()  # forwards and backwards
    evaluated: set[tuple[int, Op]] = set()  # the same microbatches recur after every evaluated batch

    def ready(worker: tuple[int, int], op: Op) -> bool:
        stage, kind, index = op
        last = stage == len(pipeline.replicas) - 1
        if kind == "F":
            return stage == 0 or Op(stage - 1, "F", index) in done
        if kind == "B":
            return Op(stage, "F", index) in done and (last or Op(stage + 1, "B", index) in done)
        if kind == "U":  # all replicas of the stage reduce their gradients together
            return arrived[stage, index] == pipeline.replicas[stage]
        return stage == 0 or (batch_of[worker], Op(stage - 1, "E", index)) in evaluated

    progress = True
    while progress:
        progress = False
        for worker in workers:
            while (op := heads[worker]) is not None:
                if op.kind == "U" and batch_of[worker] < op.index:
                    batch_of[worker] = op.index
                    arrived[op.stage, op.index] = arrived.get((op.stage, op.index), 0) + 1
                    progress = True
                if not ready(worker, op):
                    break
                if op.kind == "E":
                    evaluated.add((batch_of[worker], op))
                elif op.kind != "U":
                    done.add(op)
                heads[worker] = next(workers[worker], None)
                progress = True
    stuck = {worker: op for worker, op in heads.items() if op is not None}
    if stuck:
        where = ", ".join(f"stage {k} replica {i} at {op}" for (k, i), op in stuck.items())
        raise InvalidValue(f"the schedule cannot finish: {where}", hint="give every stage a larger in-flight depth")
