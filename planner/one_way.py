"""The best plan one way: under one weight policy, with microbatches of one size."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

from planner.cost import Evaluation, Stage, evaluate
from planner.depth import with_depth
from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.naming import assign_devices, in_order_of_use
from planner.objective import Best, best_for
from planner.options import PlanOptions, kept_together, problem_of
from planner.report import solver_report
from planner.search.bound import may_be_below
from planner.search.problem import Problem
from planner.search.search import search
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible, TooSlow
from planner.spec.files import digest
from planner.spec.plan import LinkPrediction, Plan, Policy, Prediction, StagePlan, StagePrediction
from planner.spec.profile import Profile

__all__ = ["NoPlanError", "Planned", "plan_one_way"]

_TIGHTER = 4  # attempts to find a plan whose simulated schedule is fast enough
_AFTERWARDS = 0.1  # of the time: for what is done with the plan that the search found


class Planned(NamedTuple):
    """A plan, and what it was searched in: for what is said about it once it is chosen."""

    plan: Plan
    problem: Problem
    profile: Profile  # at the plan's microbatch size
    stages: tuple[Stage, ...]


class NoPlanError(Exception):
    """There is none; why is found out once nothing else is left."""

    def __init__(self, problem: Problem, profile: Profile, options: PlanOptions) -> None:
        super().__init__()
        self.problem, self.profile, self.options = problem, profile, options


def plan_one_way(whole: Profile, microbatch_size: int, policy: Policy, cluster: Cluster, options: PlanOptions, command: str,
                 deadline: float | None) -> Planned:
    """The best plan under ``policy`` with microbatches of a measured size; ``options.policy`` is not looked at.

    ``deadline`` is a :func:`time.monotonic`.

    Raises:
        NoPlanError: none satisfies the limits.
        TooSlow: none reaches the throughput that is asked for.
        Infeasible: no plan was found in time; or depths that were asked for do not fit.
        BadInput: an option that no plan can have.
    """
    options = replace(options, policy=policy)
    profile = whole.at(microbatch_size)
    halfway = None if deadline is None else (time.monotonic() + deadline) / 2
    chain, topology = chain_of(kept_together(profile, options), deadline=halfway), Topology(cluster)
    problem = problem_of(chain, topology, options)
    least_us = math.inf if options.min_samples_per_s is None else profile.microbatch_size * 1e6 / options.min_samples_per_s
    searching = None if deadline is None else deadline - _AFTERWARDS * max(deadline - time.monotonic(), 0.0)
    within_us = least_us
    for _ in range(_TIGHTER):
        found, sure = _planned(whole, profile, problem, cluster, options, command, within_us, searching, deadline)
        predicted = found.plan.predicted
        if predicted.expected_us <= least_us * (1 + 1e-9):
            return found
        if predicted.microbatch_us > within_us or options.objective == "throughput":
            break  # there is none faster
        within_us = least_us * predicted.microbatch_us / predicted.expected_us * 0.999  # its schedule takes longer: ask for more
    raise _too_slow(found.plan, least_us, sure)


def _too_slow(plan: Plan, least_us: float, sure: bool) -> TooSlow:
    reached, asked = (plan.microbatch_size * 1e6 / us for us in (plan.predicted.expected_us, least_us))
    error = TooSlow(
        f"--min-samples-per-s asks for {asked:.6g} samples per second, the fastest plan{'' if sure else ' found'} is predicted to reach "
        f"{reached:.6g}, with policy {plan.policy}, microbatches of {plan.microbatch_size} and an update after every "
        f"{plan.batch_microbatches}", hint=f"ask for --min-samples-per-s {math.floor(reached * 1000) / 1000:g}, allow longer batches "
        f"(--batch-microbatches), or give a larger cluster{'' if sure else ' or a longer --time-limit'}")
    error.samples_per_s = reached
    return error


def _planned(whole: Profile, profile: Profile, problem: Problem, cluster: Cluster, options: PlanOptions, command: str, least_us: float,
             searching: float | None, deadline: float | None) -> tuple[Planned, bool]:
    """The best plan, and whether it is proven that none of those that were to be faster or smaller is there."""
    answer = best_for(options.objective, problem, least_us, searching)
    if answer is None:
        raise NoPlanError(problem, profile, options)
    within, found, sure = _with_its_batch(answer, searching)
    chain, topology = problem.chain, problem.topology
    found = replace(found, stages=in_order_of_use(problem, found.stages, found.batch_microbatches))
    result = evaluate(chain, topology, problem.policy, found.stages, found.batch_microbatches)
    devices = assign_devices(topology, found.stages)
    plan = Plan(
        command=command,
        model=profile.model,
        job=profile.job,
        fingerprint=profile.fingerprint,
        profile_digest=digest(whole),
        estimated=profile.estimated,
        microbatch_size=profile.microbatch_size,
        policy=problem.policy,
        batch_microbatches=found.batch_microbatches,
        stages=tuple(
            StagePlan(chain.stage_names(stage.first, stage.last), paths, depth, stage.recompute)
            for stage, paths, depth in zip(found.stages, devices, result.in_flight, strict=True)
        ),
        predicted=_prediction(problem, result, devices),
        solver=solver_report(within, found, options, deadline, sure),
        cluster=cluster,
    )

    def evaluated(in_flight: tuple[int, ...]) -> Evaluation:
        return evaluate(chain, within.topology, problem.policy, found.stages, found.batch_microbatches, in_flight)

    return Planned(with_depth(plan, whole, evaluated, options.extra_in_flight, deadline), problem, profile, found.stages), sure


def _with_its_batch(best: Best, deadline: float | None) -> Best:
    """The fastest plan with batches as long as this one's: replica counts that would do with shorter ones may be faster then."""
    problem, found, sure = best
    if problem.batch_microbatches is not None or found.batch_microbatches == 1:
        return best
    fixed = replace(problem, batch_microbatches=found.batch_microbatches)
    if not may_be_below(fixed, found.microbatch_us * (1 - 1e-6), deadline):
        return best
    try:
        other = search(fixed, deadline=deadline, known=found.stages)
    except Infeasible:  # the time was up
        return best
    return Best(fixed, other, sure) if other is not None and other.microbatch_us < found.microbatch_us * (1 - 1e-6) else best


def _prediction(problem: Problem, result: Evaluation, devices: list[tuple[str, ...]]) -> Prediction:
    topology = problem.topology
    links = [
        LinkPrediction(link.name, load, time_us)
        for link, load, time_us in zip(topology.shared, result.shared_link_bytes, result.shared_link_us, strict=True)
        if load > 0
    ]
    bandwidth = {place.device(i): place.link.bandwidth_bytes_per_s for place in topology.places for i in range(place.count)}
    slowest = result.bottleneck
    for k, (load, paths) in enumerate(zip(result.device_link_bytes, devices, strict=True)):
        mine = [LinkPrediction(path, load, load / bandwidth[path] * 1e6) for path in paths if load > 0]
        links += mine
        if slowest == f"link of stage {k}'s devices":
            slowest = f"link {max(mine, key=lambda link: link.microbatch_us).link}"
    return Prediction(
        microbatch_us=result.microbatch_us,
        simulated_us=None,
        bottleneck=slowest,
        stages=tuple(
            StagePrediction(cost.compute_us, cost.update_us, cost.allreduce_us, cost.fill_us, memory, available)
            for cost, memory, available in zip(result.costs, result.memory, result.available_bytes, strict=True)
        ),
        links=tuple(links),
        baselines=(),  # they come with the plan that is chosen
    )
