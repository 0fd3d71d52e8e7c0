"""How far a plan is proven, in numbers and in words: the bound, the gap, and what the search left out."""

from __future__ import annotations

from dataclasses import replace

from planner.options import PlanOptions
from planner.search.bound import longer_batches_us
from planner.search.problem import Problem
from planner.search.search import Found
from planner.solver import solver_name
from planner.spec.plan import SolverReport
from planner.spec.units import format_duration_us

__all__ = ["solver_report"]


def _least_possible_us(problem: Problem, time_us: float) -> float:
    """No plan over any cut states is faster: devices that are busy without a pause, and links that only carry what crosses cuts."""
    speeds = sorted((place.device_type.speed for place in problem.topology.places for _ in range(place.count)), reverse=True)
    busy_us = problem.chain.compute_us[problem.chain.end] / sum(speeds[: problem.max_devices])
    if problem.chain.wide is None:
        return busy_us
    # In each direction a device moves at most T * bandwidth bytes, so both ways twice that; the fastest device and link stand for all.
    bandwidth = max(place.link.bandwidth_bytes_per_s for place in problem.topology.places)
    fast_us = problem.chain.wide.least_time_us(problem.max_devices, 2 * bandwidth / 1e6 / speeds[0], time_us * speeds[0]) / speeds[0]
    return max(busy_us, fast_us)


def solver_report(problem: Problem, found: Found, options: PlanOptions, deadline: float | None, sure: bool) -> SolverReport:
    """Of the best plan ``found``; ``sure`` says whether no smaller limit of the objective would do.

    ``deadline`` is a :func:`time.monotonic` from which bounds are no longer improved.
    """
    bound_us = found.bound_us if not problem.chain.restricted else min(found.bound_us, _least_possible_us(problem, found.microbatch_us))
    gap = max(0.0, (found.microbatch_us - bound_us) / found.microbatch_us) if found.microbatch_us > 0 else 0.0
    optimal = gap <= 2e-6  # what the solver's tolerance may leave
    restricted = [problem.chain.restricted] if problem.chain.restricted else []
    if not optimal and not found.every_allocation:
        restricted.append("stages on one server, equally on neighbouring servers, or on whole servers and a rest")
    if not optimal and not found.in_time:
        restricted.append("the search was ended by the time limit, or by its size")
    if options.objective != "throughput":
        more, less = ("more devices", "fewer") if options.objective == "devices" else ("more memory per device", "less")
        restricted.append(f"plans that need {more} (--objective){'' if sure else f'; whether {less} would do was not settled in time'}")
    free = replace(problem, batch_microbatches=options.batch_microbatches)
    longer_us = longer_batches_us(free, found.microbatch_us * 0.99, 0.005, deadline, found.batch_microbatches)
    if longer_us is not None:
        count = found.batch_microbatches
        restricted.append(f"batches of more than {count} microbatch{'es' if count > 1 else ''} (--batch-microbatches), which might reach "
                          f"{format_duration_us(longer_us)} per microbatch and no less")
    return SolverReport(solver_name(), "optimal" if optimal else "feasible", found.microbatch_us if optimal else bound_us,
                        0.0 if optimal else gap, "; ".join(restricted))
