"""Why no plan fits: which stage binds, by how much, and changes of the request with each of which there is a plan.

What binds is found by solving: the smallest memory per device with which a plan exists, to the byte. So is each
change: of every limit the smallest step that helps is searched for, and a change is named only when the problem
relaxed by it has a plan.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.hardware.topology import Topology
from planner.least_memory import LeastMemory, least_memory, may_exist, stage_needs
from planner.memory import depth_within_batch, live_versions
from planner.model.graph import chain_of
from planner.options import PlanOptions, kept_together
from planner.search.problem import Problem
from planner.search.search import search
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible
from planner.spec.plan import Policy
from planner.spec.profile import Profile
from planner.spec.schedule import default_in_flight
from planner.spec.units import format_bytes
from planner.variants import with_count, with_memory, with_microbatch_size

__all__ = ["exists", "explain_infeasible"]

PATIENCE_S = 5.0  # after which no further kinds of changes are looked for; and of one search
MOST_DEVICES = 128  # in a larger cluster that is proposed
MOST_TIMES = 8  # as many outermost nodes as there are
LONGEST_BATCH = 64  # times the batch that was asked for
_SHORTHAND = re.compile(r"[0-9]+(x[0-9]+)*")


def explain_infeasible(problem: Problem, profile: Profile, options: PlanOptions) -> Infeasible:
    """The error for a problem without a plan; its hint names changes with each of which there is one.

    ``profile`` and ``options`` are what ``problem`` was made from.
    """
    if problem.pins and exists(replace(problem, pins=())):
        asked = " ".join(f"--pin {problem.chain.names[pin.layer]}={pin.stage}" for pin in problem.pins)
        changes = ["without --pin", *(["without --stages"] if problem.stages is not None and exists(replace(problem, stages=None)) else [])]
        return Infeasible(f"no plan keeps {asked}" + (f" with {problem.stages} stages" if problem.stages is not None else ""),
                          hint=f"there is a plan {', or '.join(changes)}; layers are pinned in the order in which data flows through them")
    problem = replace(problem, pins=())  # they are not what binds
    changes = list(_changes(problem, profile, options))
    hint = f"there is a plan {', or '.join(changes)}" if changes else "relax several of the limits that were given"
    limits = [limit for limit in _limits(problem) if limit is not None]
    least = least_memory(problem)
    if least is None or not limits:
        return Infeasible(f"no plan has {_request(problem)} on at most {problem.max_devices} devices", hint=hint)
    need, available = least.memory_bytes, max(limits)
    return Infeasible(
        f"no plan fits in memory: even where least is needed, {_binding(problem, least)} needs {need} bytes ({format_bytes(need)}) "
        f"per device, {available} bytes ({format_bytes(available)}) are available", hint=hint, code="infeasible_memory")


def exists(problem: Problem) -> bool:
    """Whether a plan satisfies the limits, however slow."""
    if not may_exist(problem):
        return False
    if len(set(_limits(problem))) == 1 and not problem.pins:
        return True
    try:
        return search(problem, deadline=time.monotonic() + PATIENCE_S) is not None  # which device a stage gets decides
    except Infeasible:
        return False


def _limits(problem: Problem) -> list[int | None]:
    return [place.device_type.memory_bytes for place in problem.topology.places]


def _binding(problem: Problem, least: LeastMemory) -> str:
    """The stage that needs most, in words."""
    replicas = tuple(r for _, _, r in least.stages)
    in_flight = tuple(depth_within_batch(problem.policy, depth, r, least.batch_microbatches)
                      for depth, r in zip(default_in_flight(replicas), replicas, strict=True))
    limited = replace(problem, topology=Topology(with_memory(problem.topology.cluster, 1)))
    k = stage_needs(limited, least.stages, least.batch_microbatches).index(least.memory_bytes)
    versions = live_versions(problem.policy, replicas, in_flight, least.batch_microbatches, k)
    names = problem.chain.stage_names(*least.stages[k][:2])
    layers = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
    flight = f"{in_flight[k]} microbatch{'es' if in_flight[k] > 1 else ''} in flight"
    return f"stage {k} of {len(replicas)} ({layers}; {flight}, {versions} weight version{'s' if versions > 1 else ''})"


def _changes(problem: Problem, profile: Profile, options: PlanOptions) -> Iterator[str]:
    """Single changes of the request that make it feasible: first those that take nothing but the request."""
    relaxed = _Relaxed(problem, profile, options, time.monotonic() + PATIENCE_S)
    kinds = [relaxed.without_limits, relaxed.other_ways, relaxed.memory]
    if len(set(_limits(problem))) == 1:  # else every step would be a whole search
        kinds[2:] = [relaxed.batch, relaxed.devices, relaxed.memory, relaxed.microbatch, relaxed.servers]
    for kind in kinds:
        yield from kind()


@dataclass(frozen=True)
class _Relaxed:
    """A problem without a plan, and what of it may change. After ``end_s`` nothing more is looked for."""

    problem: Problem
    profile: Profile
    options: PlanOptions
    end_s: float

    def without_limits(self) -> Iterator[str]:
        """Limits that need not be given at all."""
        problem, tried = self.problem, []
        if problem.stages is not None:
            tried.append(("without --stages", replace(problem, stages=None)))
        if problem.max_replicas < problem.max_devices:
            tried.append(("without --max-replicas", replace(problem, max_replicas=problem.max_devices)))
        if problem.equal_replicas:
            tried.append(("without --equal-replicas", replace(problem, equal_replicas=False)))
        if problem.batch_microbatches is not None:
            tried.append(("without --batch-microbatches", replace(problem, batch_microbatches=None)))
        yield from (said for said, changed in tried if self._exists(changed))

    def other_ways(self) -> Iterator[str]:
        """Recomputation, and policies that hold fewer versions."""
        if self.problem.recompute == "never" and self._exists(replace(self.problem, recompute="auto")):
            yield "with --recompute auto"
        policies: tuple[Policy, ...] = ("2bw", "flush")
        for policy in policies:
            if policy != self.problem.policy and self._exists(replace(self.problem, policy=policy)):
                yield f"with --policy {policy}"

    def batch(self) -> Iterator[str]:
        """A longer batch has fewer versions alive."""
        base = self.problem.batch_microbatches or self.problem.max_devices
        if self.problem.policy in ("stash", "vertical", "2bw"):
            times = self._least(lambda k: replace(self.problem, batch_microbatches=k * base), 2, LONGEST_BATCH)
            if times is not None:
                yield f"with --batch-microbatches {times * base}"

    def devices(self) -> Iterator[str]:
        """More of the devices that there are."""
        count = self._least(self._with_devices, self.problem.max_devices + 1, self.problem.topology.device_count)
        if count is not None:
            yield f"with --devices {count}"

    def memory(self) -> Iterator[str]:
        """More memory on each device."""
        least, cluster = least_memory(self.problem), self.problem.topology.cluster
        if least is None or all(limit is None for limit in _limits(self.problem)):
            return
        need = least.memory_bytes
        if self._exists(replace(self.problem, topology=Topology(with_memory(cluster, need)))):
            option = _is_shorthand(cluster) or cluster.name == "local"
            yield f"with {format_bytes(need)} " + (f"per device (--memory {need})" if option else (
                f"on every device (memory = \"{need} B\" in the cluster's file)"))

    def servers(self) -> Iterator[str]:
        """More of the outermost nodes, where they are all alike and all may be used."""
        cluster = self.problem.topology.cluster
        if len(cluster.nodes) > 1 or self.options.devices is not None or cluster.name == "local":
            return
        each, now = cluster.nodes[0].devices_each, cluster.nodes[0].count

        def larger(count: int) -> Problem:
            return self._with_devices(count * each, Topology(with_count(cluster, count)))

        count = self._least(larger, now + 1, min(MOST_DEVICES // each, MOST_TIMES * now))
        if count is not None and _is_shorthand(cluster):
            rest = cluster.name.replace("×", "x").split("x")[1:] if cluster.nodes[0].children else []
            yield f"on {count * each} devices (--cluster {'x'.join([str(count), *rest])})"
        elif count is not None:
            yield f"on {count * each} devices (count = {count} of {cluster.nodes[0].name!r} in the cluster's file)"

    def microbatch(self) -> Iterator[str]:
        """The largest smaller microbatch, by proportion where it was not measured."""
        size = self.profile.microbatch_size

        def smaller(less: int) -> Problem:
            return replace(self.problem, chain=chain_of(kept_together(with_microbatch_size(self.profile, size - less), self.options)))

        less = self._least(smaller, 1, size - 1)
        if less is not None:
            yield f"with microbatches of {size - less} (estimated: pipedream profile JOB --microbatch-size {size - less})"

    def _with_devices(self, count: int, topology: Topology | None = None) -> Problem:
        return replace(self.problem, topology=topology or self.problem.topology, max_devices=count,
                       max_replicas=min(count, self.options.max_replicas or count))

    def _exists(self, problem: Problem) -> bool:
        return time.monotonic() < self.end_s and exists(problem)

    def _least(self, changed: Callable[[int], Problem], low: int, high: int) -> int | None:
        """The least number from ``low`` to ``high`` whose problem has a plan, if a plan for one is one for larger ones.

        None when ``high`` has none, or time is up.
        """
        bottom, step = low - 1, 1
        while bottom < high and not self._exists(changed(min(bottom + step, high))):
            if bottom + step >= high or time.monotonic() >= self.end_s:
                return None
            bottom, step = bottom + step, 2 * step
        if bottom >= high:
            return None
        top = min(bottom + step, high)
        while top - bottom > 1:
            middle = (bottom + top) // 2
            bottom, top = (bottom, middle) if exists(changed(middle)) else (middle, top)
        return top


def _is_shorthand(cluster: Cluster) -> bool:
    return _SHORTHAND.fullmatch(cluster.name.replace("×", "x")) is not None


def _request(problem: Problem) -> str:
    limits = [f"{problem.stages} stages"] if problem.stages is not None else []
    if problem.equal_replicas:
        limits.append("equal replicas")
    if problem.batch_microbatches is not None:
        limits.append(f"batches of {problem.batch_microbatches} microbatches under policy {problem.policy}")
    return " and ".join(limits) or f"at most {problem.max_replicas} replicas a stage"
