"""The least memory with which there is a plan, by a dynamic program in plain Python: the oracle of planner.least_memory."""


from typing import NamedTuple

from planner.memory import depth_within_batch, replica_memory
from planner.search.problem import Problem, Scenario, prime_powers, scenarios

__all__ = ["LeastMemory", "least_memory"]


class LeastMemory(NamedTuple):
    """``stages`` are (first, last, replicas)."""

    memory_bytes: int
    batch_microbatches: int
    stages: tuple[tuple[int, int, int], ...]


_State = tuple[int, int]  # devices after the cut; prime powers covered and, above those bits, stages so far
_Plan = tuple[int, tuple[tuple[int, int, int], ...]]


def least_memory(problem: Problem, *, below_bytes: float = float("inf")) -> LeastMemory | None:
    """The least need of all scenarios, if it is below ``below_bytes``; None otherwise, or when no plan has the other limits."""
    best: LeastMemory | None = None
    for scenario in scenarios(problem):
        limit = below_bytes if best is None else best.memory_bytes
        found = _of_scenario(problem, scenario, limit)
        if found is not None:
            best = LeastMemory(found[0], scenario.batch_microbatches, found[1])
    return best


def _of_scenario(problem: Problem, scenario: Scenario, below_bytes: float) -> _Plan | None:
    chain, n = problem.chain, problem.chain.end
    powers = prime_powers(scenario.multiple) if scenario.exact else ()
    one_stage = (1 << len(powers)) if problem.stages is not None else 0
    counts = [r for r in range(1, min(problem.max_replicas, scenario.max_devices) + 1) if scenario.admits(r)]
    masks = {r: sum(1 << bit for bit, power in enumerate(powers) if r % power == 0) for r in counts}
    needs: dict[tuple[int, int, int, int], int] = {}

    def need_bytes(first: int, last: int, r: int, in_flight: int) -> int:
        in_flight = depth_within_batch(problem.policy, in_flight, r, scenario.batch_microbatches)
        versions = scenario.versions(problem.policy, r, in_flight)
        key = (first, last, in_flight, versions)
        if key not in needs:
            needs[key] = min(replica_memory(chain, first, last, in_flight=in_flight, versions=versions, recompute=recompute).total_bytes
                             for recompute in problem.recompute_choices)
        return needs[key]

    best: dict[int, dict[_State, _Plan]] = {cut: {} for cut in range(n + 1)}
    best[n][0, 0] = (0, ())
    for first, last in sorted(chain.intervals(), reverse=True):
        if need_bytes(first, last, counts[0], 1) >= below_bytes:
            continue  # it cannot fit whatever follows
        here = best[first]
        for (after, covered), (rest_bytes, path) in best[last].items():
            for r in counts:
                devices = after + r
                if devices > scenario.max_devices or (first == 0 and not scenario.allows_first(problem.policy, r, after)):
                    continue
                largest = max(rest_bytes, need_bytes(first, last, r, 1 + -(-after // r)))
                state = (devices, (covered | masks[r]) + one_stage)
                if largest < below_bytes and (state not in here or largest < here[state][0]):
                    here[state] = (largest, ((first, last, r), *path))
    wanted = (problem.stages or 0) << len(powers) | (1 << len(powers)) - 1
    ends = [plan for (devices, state), plan in best[0].items() if state == wanted and devices >= scenario.min_devices]
    return min(ends, default=None)
