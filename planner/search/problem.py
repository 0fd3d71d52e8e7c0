"""What is searched: the model, the hardware, the limits, and the scenarios they fall into.

A batch of A microbatches couples the stages: every replica count divides A, and the once-a-batch
costs are divided by it. A :class:`Scenario` fixes A, so that within it a stage's cost depends on the
stage alone. When A is given there is one. Otherwise A is by definition the least common multiple of
the plan's replica counts and at most the number of devices (a batch no larger than data parallelism
would need on the same devices), and there is a scenario for each such multiple: its plans must have
*exactly* that least common multiple, or they would be charged for a batch that is not theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from planner.cost import Stage
from planner.hardware.topology import Topology
from planner.memory import copies_weights, live_versions, stashed_versions
from planner.model.graph import Chain
from planner.spec.plan import Policy

__all__ = ["Pin", "Problem", "Recompute", "Scenario", "covering", "default_batch", "prime_powers", "scenarios"]

FLUSH_MICROBATCHES = 4  # in a batch, per device: with as many stages, the pipeline is then busy four fifths of the time


Recompute = Literal["never", "auto", "always"]


class Pin(NamedTuple):
    """The layer of this index is in the stage of this number."""

    layer: int
    stage: int


@dataclass(frozen=True)
class Problem:
    """``max_devices`` is at most what the cluster has; ``stages`` fixes their number; ``equal_replicas``: all stages have as many."""

    chain: Chain
    topology: Topology
    policy: Policy
    max_devices: int
    max_replicas: int
    stages: int | None = None
    batch_microbatches: int | None = None
    recompute: Recompute = "never"
    equal_replicas: bool = False
    pins: tuple[Pin, ...] = ()

    @property
    def recompute_choices(self) -> tuple[bool, ...]:
        """What a stage may do; where memory is unlimited, nobody recomputes unless it must."""
        if self.recompute == "auto":
            limited = any(place.device_type.memory_bytes is not None for place in self.topology.places)
            return (False, True) if limited else (False,)
        return (self.recompute == "always",)

    def keeps_pins(self, stages: tuple[Stage, ...]) -> bool:
        """Whether every pinned layer is in its stage."""
        return all(pin.stage < len(stages) and self.chain.has(stages[pin.stage].last, pin.layer)
                   and not self.chain.has(stages[pin.stage].first, pin.layer) for pin in self.pins)

    def batch(self, stages: tuple[Stage, ...]) -> int:
        """The A that a plan has here."""
        if self.batch_microbatches is not None:
            return self.batch_microbatches
        return default_batch(self.policy, tuple(stage.replicas for stage in stages), self.max_devices)


@dataclass(frozen=True)
class Scenario:
    """Plans with a batch of ``batch_microbatches``, replica counts that divide ``multiple``, and further limits.

    ``exact``: the least common multiple of the replica counts is ``multiple`` itself.
    ``only``: every stage has so many replicas.
    ``vertical_versions``: weight versions of ``vertical``, which depend on the first stage; its plans need at most these.
    """

    batch_microbatches: int
    multiple: int
    exact: bool
    min_devices: int
    max_devices: int
    only: int | None = None
    vertical_versions: int | None = None

    def admits(self, replicas: int) -> bool:
        """Whether a stage may have so many replicas."""
        return self.multiple % replicas == 0 and self.only in (None, replicas)

    def versions(self, policy: Policy, replicas: int, in_flight: int) -> int:
        """Weight versions of a stage, all that :func:`live_versions` says of the plans here."""
        if self.vertical_versions is not None:
            return self.vertical_versions
        return live_versions(policy, (replicas,), (in_flight,), self.batch_microbatches, 0)

    def copies(self, policy: Policy, *, is_first: bool, is_last: bool) -> bool:
        """Whether a stage's update copies its weights: never where nothing else is in flight, unless there are always two versions."""
        alone = is_last and policy != "2bw" and (policy == "stash" or is_first)
        return copies_weights(policy, 1 if alone else 2)

    def allows_first(self, policy: Policy, replicas: int, devices_after: int) -> bool:
        """Whether a first stage of ``replicas`` before ``devices_after`` devices keeps within ``vertical_versions``."""
        if self.vertical_versions is None:
            return True
        return stashed_versions(replicas, 1 + -(-devices_after // replicas), self.batch_microbatches) <= self.vertical_versions


def covering(problem: Problem, group: Sequence[Scenario]) -> Scenario | None:
    """A scenario in which no plan of the group costs more, needs more memory, or is left out; None where there is no simple one."""
    if len(group) <= 1:
        return group[0] if group else None
    limited = any(place.device_type.memory_bytes is not None for place in problem.topology.places)
    if problem.policy == "flush" and limited:  # with longer batches a replica holds more
        return None
    counts = {one.only for one in group}
    return Scenario(max(one.batch_microbatches for one in group), math.lcm(*(one.multiple for one in group)), False, 1,
                    max(one.max_devices for one in group), counts.pop() if len(counts) == 1 else None)


def default_batch(policy: Policy, replicas: tuple[int, ...], max_devices: int) -> int:
    """A when none is given: the least common multiple, for ``2bw`` and ``flush`` as often as they need.

    ``2bw`` holds two versions only if a batch is at least as long as the pipeline is deep: A is at
    least the number of workers. ``flush`` drains the pipeline after every batch: A is at least
    :data:`FLUSH_MICROBATCHES` for each device that may be used, so that it is busy most of the time.
    """
    multiple = math.lcm(*replicas)
    least = {"2bw": sum(replicas), "flush": FLUSH_MICROBATCHES * max_devices}.get(policy, 1)
    return -(-least // multiple) * multiple


def scenarios(problem: Problem, *, memory_matters: bool = True) -> list[Scenario]:
    """Every scenario of the problem: each plan it may return belongs to at least one, at its true cost.

    Unless ``memory_matters``, plans of ``vertical`` are not told apart by their weight versions.
    """
    n, given = problem.max_devices, problem.batch_microbatches
    found: list[Scenario] = []
    if given is not None:
        most = min(n, given) if problem.policy == "2bw" else n
        counts = [r for r in range(1, problem.max_replicas + 1) if given % r == 0] if problem.equal_replicas else [None]
        found += [Scenario(given, given, False, 1, most, only) for only in counts]
    else:
        for multiple in range(1, n + 1):
            only = multiple if problem.equal_replicas else None
            if (only or max(prime_powers(multiple), default=1)) > problem.max_replicas:
                continue
            if problem.policy != "2bw":
                found.append(Scenario(default_batch(problem.policy, (multiple,), n), multiple, only is None, 1, n, only))
                continue
            for batch in range(multiple, n + multiple, multiple):
                found.append(Scenario(batch, multiple, only is None, batch - multiple + 1, min(n, batch), only))
    if problem.policy == "vertical" and memory_matters:
        return [narrower for scenario in found for narrower in _by_versions(scenario)]
    return found


def _by_versions(scenario: Scenario) -> Iterator[Scenario]:
    """``vertical``: r_0 (d_0 - 1) is below the number of devices, which bounds the versions."""
    for versions in range(1, stashed_versions(1, scenario.max_devices, scenario.batch_microbatches) + 1):
        yield replace(scenario, vertical_versions=versions)


def prime_powers(number: int) -> tuple[int, ...]:
    """The prime powers whose product is ``number``; it is the lcm of counts that cover each of them.

    >>> prime_powers(12), prime_powers(7), prime_powers(1)
    ((4, 3), (7,), ())
    """
    powers = []
    factor = 2
    while number > 1:
        power = 1
        while number % factor == 0:
            number //= factor
            power *= factor
        if power > 1:
            powers.append(power)
        factor += 1
    return tuple(powers)
