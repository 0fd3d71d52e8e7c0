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
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.cost import Stage
from planner.graph import Chain
from planner.memory import copies_weights, live_versions, stashed_versions
from planner.spec.plan import Policy
from planner.topology import Topology

__all__ = ["Problem", "Scenario", "default_batch", "prime_powers", "scenarios"]


@dataclass(frozen=True)
class Problem:
    """``max_devices`` is at most what the cluster has; ``stages`` fixes their number."""

    chain: Chain
    topology: Topology
    policy: Policy
    max_devices: int
    max_replicas: int
    stages: int | None = None
    batch_microbatches: int | None = None

    def batch(self, stages: tuple[Stage, ...]) -> int:
        """The A that a plan has here."""
        if self.batch_microbatches is not None:
            return self.batch_microbatches
        return default_batch(self.policy, tuple(stage.replicas for stage in stages))


@dataclass(frozen=True)
class Scenario:
    """Plans with a batch of ``batch_microbatches``, replica counts that divide ``multiple``, and further limits.

    ``exact``: the least common multiple of the replica counts is ``multiple`` itself.
    ``vertical_versions``: weight versions of ``vertical``, which depend on the first stage; its plans need at most these.
    """

    batch_microbatches: int
    multiple: int
    exact: bool
    min_devices: int
    max_devices: int
    vertical_versions: int | None = None

    def versions(self, policy: Policy, replicas: int, in_flight: int) -> int:
        """Weight versions of a stage, all that :func:`live_versions` says of the plans here."""
        if self.vertical_versions is not None:
            return self.vertical_versions
        return live_versions(policy, (replicas,), (in_flight,), self.batch_microbatches, 0)

    def copies(self, policy: Policy, *, is_first: bool, is_last: bool) -> bool:
        """Whether a stage's update copies its weights: never where nothing else is in flight."""
        alone = is_last and (policy == "stash" or is_first)
        return copies_weights(policy, 1 if alone else 2)

    def allows_first(self, policy: Policy, replicas: int, devices_after: int) -> bool:
        """Whether a first stage of ``replicas`` before ``devices_after`` devices keeps within ``vertical_versions``."""
        if self.vertical_versions is None:
            return True
        return stashed_versions(replicas, 1 + -(-devices_after // replicas), self.batch_microbatches) <= self.vertical_versions


def default_batch(policy: Policy, replicas: tuple[int, ...]) -> int:
    """A when none is given: the least common multiple, for ``2bw`` as often as its workers need.

    ``2bw`` holds two versions only if a batch is at least as long as the pipeline is deep: A is at
    least the number of workers.
    """
    multiple = math.lcm(*replicas)
    return multiple if policy != "2bw" else -(-sum(replicas) // multiple) * multiple


def scenarios(problem: Problem, *, memory_matters: bool = True) -> list[Scenario]:
    """Every scenario of the problem: each plan it may return belongs to at least one, at its true cost.

    Unless ``memory_matters``, plans of ``vertical`` are not told apart by their weight versions.
    """
    n, given = problem.max_devices, problem.batch_microbatches
    found: list[Scenario] = []
    if given is not None:
        found.append(Scenario(given, given, False, 1, min(n, given) if problem.policy == "2bw" else n))
    else:
        for multiple in range(1, n + 1):
            if max(prime_powers(multiple), default=1) > problem.max_replicas:
                continue
            if problem.policy != "2bw":
                found.append(Scenario(multiple, multiple, True, 1, n))
                continue
            for batch in range(multiple, n + multiple, multiple):
                found.append(Scenario(batch, multiple, True, batch - multiple + 1, min(n, batch)))
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
