"""Why no plan fits: which stage binds, by how much, and changes that were tried and help.

What binds is found by solving: the smallest memory per device with which a plan exists, to the byte.
The stage that needs all of it is the binding one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.least_memory import LeastMemory, least_memory
from planner.memory import depth_within_batch, live_versions, replica_memory
from planner.problem import Problem
from planner.search import search
from planner.spec.errors import Infeasible
from planner.spec.schedule import default_in_flight
from planner.spec.units import format_bytes

__all__ = ["exists", "explain_infeasible"]


def explain_infeasible(problem: Problem) -> Infeasible:
    """The error for a problem without a plan; its hint names changes with each of which there is one."""
    if problem.pins and exists(replace(problem, pins=())):
        asked = " ".join(f"--pin {problem.chain.names[pin.layer]}={pin.stage}" for pin in problem.pins)
        return Infeasible(f"no plan keeps {asked}" + (f" with {problem.stages} stages" if problem.stages is not None else ""),
                          hint="there is a plan without --pin; layers must be pinned in the order in which data flows through them")
    limits = [limit for limit in _limits(problem) if limit is not None]
    least = least_memory(problem)
    changes = list(_changes(problem))
    if least is None or not limits:
        hint = f"there is a plan {', or '.join(changes)}" if changes else "relax the limits that were given"
        return Infeasible(f"no plan has {_request(problem)} on at most {problem.max_devices} devices", hint=hint)
    need, available = least.memory_bytes, max(limits)
    every = "" if len(set(_limits(problem))) == 1 else " on every device"
    return Infeasible(
        f"no plan fits in memory: even where least is needed, {_binding(problem, least)} needs {need} bytes ({format_bytes(need)}) "
        f"per device, {available} bytes ({format_bytes(available)}) are available",
        hint="there is a plan " + ", or ".join([f"with {format_bytes(need)}{every} (--memory {need})", *changes]),
        code="infeasible_memory",
    )


def exists(problem: Problem) -> bool:
    """Whether a plan satisfies the limits, however slow."""
    limits = set(_limits(problem))
    if len(limits) > 1:
        return search(problem) is not None  # which device a stage gets decides
    limit = limits.pop()
    return least_memory(problem, below_bytes=math.inf if limit is None else limit + 1) is not None


def _limits(problem: Problem) -> list[int | None]:
    return [place.device_type.memory_bytes for place in problem.topology.places]


def _binding(problem: Problem, least: LeastMemory) -> str:
    """The stage that needs most, in words."""
    replicas = tuple(r for _, _, r in least.stages)
    in_flight = tuple(depth_within_batch(problem.policy, depth, r, least.batch_microbatches)
                      for depth, r in zip(default_in_flight(replicas), replicas, strict=True))
    for k, (first, last, _) in enumerate(least.stages):
        versions = live_versions(problem.policy, replicas, in_flight, least.batch_microbatches, k)
        needs = [replica_memory(problem.chain, first, last, in_flight=in_flight[k], versions=versions, recompute=recompute).total_bytes
                 for recompute in problem.recompute_choices]
        if min(needs) == least.memory_bytes:
            break
    names = problem.chain.stage_names(first, last)
    layers = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
    flight = f"{in_flight[k]} microbatch{'es' if in_flight[k] > 1 else ''} in flight"
    return f"stage {k} of {len(replicas)} ({layers}; {flight}, {versions} weight version{'s' if versions > 1 else ''})"


def _changes(problem: Problem) -> Iterator[str]:
    """Single changes of the request that make it feasible."""
    devices = problem.topology.device_count
    tried: list[tuple[str, Problem]] = []
    if problem.stages is not None:
        tried.append(("without --stages", replace(problem, stages=None)))
    if problem.max_devices < devices:
        tried.append((f"with --devices {devices}", replace(problem, max_devices=devices)))
    if problem.max_replicas < problem.max_devices:
        tried.append(("without --max-replicas", replace(problem, max_replicas=problem.max_devices)))
    if problem.policy in ("stash", "vertical"):
        tried.append(("with --policy 2bw", replace(problem, policy="2bw")))
    for change, changed in tried:
        if exists(changed):
            yield change
    base = problem.batch_microbatches or problem.max_devices
    for batch in (2 * base, 4 * base, 8 * base):  # a longer batch has fewer versions alive; the shortest that helps
        if exists(replace(problem, batch_microbatches=batch)):
            yield f"with --batch-microbatches {batch}"
            return


def _request(problem: Problem) -> str:
    limits = [f"{problem.stages} stages"] if problem.stages is not None else []
    if problem.batch_microbatches is not None:
        limits.append(f"batches of {problem.batch_microbatches} microbatches under policy {problem.policy}")
    return " and ".join(limits) or f"at most {problem.max_replicas} replicas a stage"
