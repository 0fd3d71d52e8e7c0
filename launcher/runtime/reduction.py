"""The sum of a batch's gradients over the replicas of a stage, on its way while the batch's last backward still runs.

Gradients live in buckets: flat buffers of which every parameter's gradient is a view, so that a bucket is summed as it
lies. A gradient is final once the batch's last backward at this replica has added to it, which happens from the
last used parameter to the first. A bucket whose gradients are all final is on its way at once, the next one only after it::

    backward of the batch's last microbatch   | head | block 3 | block 2 | block 1 |
    bucket 0 (head, block 3)                                   |-------------|
    bucket 1 (block 2, block 1)                                                    |-------------|
    update                                                                                       | waits until here

Who sums what, and in which order, follows from the stage's graph alone, so replicas agree without a word. What reached
a parameter need not be the same on each: what did not come counts as zero, and a flag for each parameter, summed in the
same bucket, says whether it came anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from launcher.graph.program import StageProgram
from launcher.runtime.channel import PendingSum, Reducer

__all__ = ["GradientReduction", "arrival_order"]

MOST_BYTES = 25 * 2**20  # of a bucket, as in torch's DistributedDataParallel
LEAST_BYTES = 2**18  # less would cost more than it hides
BUCKETS = 16  # about, between those: on a slow link the first bucket should not be long in coming, nor the last one large


def arrival_order(program: StageProgram) -> tuple[int, ...]:
    """Positions of the program's parameters in the order in which a backward is done with their gradients.

    Autograd goes back through the operations in the reverse of their order, so a gradient is final after the
    backward of the first operation that uses the parameter. Parameters that nothing uses come last.
    """
    nodes = list(program.module.graph.nodes)
    index = {node: place for place, node in enumerate(nodes)}
    places = [node for node in nodes if node.op == "placeholder"][:len(program.parameters)]
    first_use = [min((index[user] for user in place.users), default=-1) for place in places]
    return tuple(sorted(range(len(places)), key=lambda position: -first_use[position]))


class _Bucket:
    """Some parameters' gradients in one buffer, and after them a flag for each."""

    def __init__(self, parameters: Sequence[nn.Parameter], positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        members = [parameters[position] for position in positions]
        counts = [parameter.numel() for parameter in members]
        self._flat = torch.empty(sum(counts) + len(counts), dtype=members[0].dtype, device=members[0].device)
        *parts, self._flags = self._flat.split([*counts, len(counts)])
        self.views = {position: part.view(parameter.shape)
                      for position, part, parameter in zip(positions, parts, members, strict=True)}
        self.reached: set[int] = set()  # positions whose gradient has come in this batch
        self.awaited = set(positions)  # those whose gradient is not final yet
        self._sum: PendingSum | None = None

    def begin(self, reducer: Reducer) -> None:
        """Start the sum."""
        self._flags.fill_(1)
        for place, position in enumerate(self.positions):
            if position not in self.reached:
                self.views[position].zero_()
                self._flags[place] = 0
        self._sum = reducer.begin_sum_(self._flat)

    def finish(self) -> set[int]:
        """Wait for the sum, and be ready for the next batch; the positions that a gradient has reached on any replica."""
        assert self._sum is not None  # begun before
        self._sum.wait()
        found = self.reached
        if len(found) < len(self.positions):
            found = {position for position, flag in zip(self.positions, self._flags.tolist(), strict=True) if flag}
        self.reached, self.awaited, self._sum = set(), set(self.positions), None
        return found


class GradientReduction:
    """Sums the gradients of ``masters`` over a stage's replicas.

    The loss's gradient was divided by the batch's microbatches, so the sum over replicas is the
    gradient of the batch's mean loss. ``order`` lists the masters' positions as their gradients become final.
    """

    def __init__(self, reducer: Reducer, masters: Sequence[nn.Parameter], order: Sequence[int], bucket_bytes: int | None = None) -> None:
        self._reducer, self._masters = reducer, tuple(masters)
        trainable = [position for position in order if masters[position].requires_grad] if reducer.size > 1 else []
        if bucket_bytes is None:
            total_bytes = sum(masters[position].numel() * masters[position].element_size() for position in trainable)
            bucket_bytes = max(LEAST_BYTES, min(total_bytes // BUCKETS, MOST_BYTES))
        self._buckets = [_Bucket(masters, members) for members in _divided(masters, trainable, bucket_bytes)]
        self._bucket_of = {position: bucket for bucket in self._buckets for position in bucket.positions}
        self._begun = 0

    @contextlib.contextmanager
    def gathering(self, leaves: Sequence[nn.Parameter], *, final: bool) -> Iterator[None]:
        """Around a backward that adds to the gradients of ``leaves``, in the masters' order; ``final``: the batch's last one here."""
        due = [position for position, bucket in self._bucket_of.items() if final or position not in bucket.reached]
        hooks = [leaves[position].register_post_accumulate_grad_hook(partial(self._arrived, position, final)) for position in due]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _arrived(self, position: int, final: bool, leaf: torch.Tensor) -> None:
        bucket = self._bucket_of[position]
        if position not in bucket.reached:  # autograd gave it storage of its own; from now on it adds to ours
            assert leaf.grad is not None  # just accumulated
            leaf.grad = bucket.views[position].copy_(leaf.grad)
            bucket.reached.add(position)
        if final:
            bucket.awaited.discard(position)
            while self._begun < len(self._buckets) and not self._buckets[self._begun].awaited:
                self._begin_next()

    def _begin_next(self) -> None:
        self._buckets[self._begun].begin(self._reducer)
        self._begun += 1

    def begin_rest(self) -> None:
        """Start what the last backward did not: buckets with a gradient that never came."""
        while self._begun < len(self._buckets):
            self._begin_next()

    def finish(self) -> None:
        """Wait until every master's gradient is the sum over the replicas. Those that no microbatch reached have none.

        Every bucket must have begun.
        """
        for bucket in self._buckets:
            reached = bucket.finish()
            for position, view in bucket.views.items():
                self._masters[position].grad = view if position in reached else None
        self._begun = 0


def _divided(masters: Sequence[nn.Parameter], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """The positions in buckets of one dtype and device each, full or nearly so, sorted by when their last member comes."""
    done: list[tuple[int, list[int]]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[int, list[int]]] = {}
    for place, position in enumerate(order):
        master = masters[position]
        kind = master.dtype, master.device
        held_bytes, members = filling.pop(kind, (0, []))
        held_bytes += master.numel() * master.element_size()
        members.append(position)
        if held_bytes >= bucket_bytes:
            done.append((place, members))
        else:
            filling[kind] = held_bytes, members
    done += [(order.index(members[-1]), members) for _, members in filling.values()]
    return [members for _, members in sorted(done)]
