"""Why no plan fits: which stage binds, by how much, and changes that were tried and help.

What binds is found by solving: the smallest memory per device with which a plan exists, to the byte.
The stage that needs all of it is the binding one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.bound import Bound, best_sites
from planner.cost import evaluate
from planner.problem import Problem, scenarios
from planner.search import search
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible
from planner.spec.units import format_bytes
from planner.topology import Topology

__all__ = ["exists", "explain_infeasible", "least_memory_bytes", "with_memory"]


def explain_infeasible(problem: Problem) -> Infeasible:
    """The error for a problem without a plan; its hint names changes with each of which there is one."""
    limits = {place.device_type.memory_bytes for place in problem.topology.places if place.device_type.memory_bytes is not None}
    unlimited = replace(problem, topology=with_memory(problem.topology, None))
    if not limits or not exists(unlimited):
        hints = _changes(problem)
        return Infeasible(
            f"no plan has {_limits(problem)} on {problem.max_devices} devices",
            hint=f"there is a plan {hints[0]}" if hints else "relax the limits",
        )
    least = least_memory_bytes(problem)
    found = search(replace(problem, topology=with_memory(problem.topology, least)))
    if found is None:  # only restricted searches can miss what exists
        return Infeasible(f"no plan fits into {format_bytes(max(limits))} per device", code="infeasible_memory", hint="use more memory")
    result = evaluate(problem.chain, problem.topology, problem.policy, found.stages, found.batch_microbatches)
    k = max(range(len(found.stages)), key=lambda index: result.memory[index].total_bytes)
    stage, need = found.stages[k], result.memory[k].total_bytes
    names = problem.chain.names[stage.first:stage.last]
    layers = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
    in_flight = result.in_flight[k]
    memory = f"devices of {need} bytes ({format_bytes(need)}; --memory {need})"
    return Infeasible(
        f"no plan fits in memory: even where least is needed, stage {k} of {len(found.stages)} ({layers}, {in_flight} microbatches in "
        f"flight) needs {need} bytes ({format_bytes(need)}) per device, {max(limits)} bytes ({format_bytes(max(limits))}) are available",
        hint="there is a plan " + ", or ".join([f"with {memory}", *_changes(problem)]),
        code="infeasible_memory",
    )


def exists(problem: Problem) -> bool:
    """Whether a plan satisfies the limits, however slow."""
    sites = best_sites(problem.topology, min(problem.max_replicas, problem.max_devices))
    possible = any(Bound(problem, scenario, sites).fewest_devices(math.inf) is not None for scenario in scenarios(problem))
    unequal = len({place.device_type.memory_bytes for place in problem.topology.places}) > 1
    short = any(scenario.min_devices > 1 for scenario in scenarios(problem))
    # With equal memory everywhere any devices will do, so the position-free relaxation is exact.
    return possible and (search(problem) is not None if unequal or short else True)


def least_memory_bytes(problem: Problem) -> int:
    """The smallest memory with which, given to every device, there is a plan; one exists without a limit."""
    low, high = 0, 1
    while not exists(replace(problem, topology=with_memory(problem.topology, high))):
        low, high = high, high * 4
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exists(replace(problem, topology=with_memory(problem.topology, middle))) else (middle, high)
    return high


def with_memory(topology: Topology, memory_bytes: int | None) -> Topology:
    """The same hardware with ``memory_bytes`` on every device."""
    cluster = topology.cluster
    kinds = tuple(replace(kind, memory_bytes=memory_bytes) for kind in cluster.device_types)
    return Topology(Cluster(cluster.name, kinds, cluster.nodes))


def _changes(problem: Problem) -> list[str]:
    """Single changes of the request that make it feasible."""
    tried: list[tuple[str, Problem]] = []
    devices = problem.topology.device_count
    if problem.stages is not None:
        tried.append(("without --stages", replace(problem, stages=None)))
    if problem.max_devices < devices:
        tried.append((f"with --devices {devices}", replace(problem, max_devices=devices)))
    if problem.max_replicas < problem.max_devices:
        tried.append(("without --max-replicas", replace(problem, max_replicas=problem.max_devices)))
    base = problem.batch_microbatches or problem.max_devices
    for batch in (2 * base, 4 * base, 8 * base):
        tried.append((f"with --batch-microbatches {batch}", replace(problem, batch_microbatches=batch)))
    if problem.policy in ("stash", "vertical"):
        tried.append(("with --policy 2bw", replace(problem, policy="2bw")))
    helping: list[str] = []
    for change, changed in tried:
        option = change.rsplit(" ", 1)[0] if change[-1].isdigit() else change
        if not any(other.startswith(option) for other in helping) and exists(changed):
            helping.append(change)
    return helping


def _limits(problem: Problem) -> str:
    limits = [f"{problem.stages} stages"] if problem.stages is not None else []
    if problem.batch_microbatches is not None:
        limits.append(f"batches of {problem.batch_microbatches} microbatches under policy {problem.policy}")
    return " and ".join(limits) or f"at most {problem.max_replicas} replicas a stage"
