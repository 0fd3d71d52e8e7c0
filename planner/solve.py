"""From a profile and a cluster to a plan."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

from planner.baselines import baselines
from planner.cost import Evaluation, evaluate
from planner.depth import with_depth
from planner.hardware.topology import Topology
from planner.infeasible import explain_infeasible
from planner.model.graph import chain_of
from planner.naming import assign_devices, in_order_of_use
from planner.objective import Best, best_for
from planner.options import PlanOptions, kept_together, option_name, problem_of, refuse_too_large
from planner.published.pipedream2019.plan import make_plan_2019
from planner.search.bound import longer_batches_us, may_be_below
from planner.search.problem import Problem
from planner.search.search import Found, search
from planner.solver import solver_name
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, Infeasible, PolicyRefuses, TooSlow
from planner.spec.files import digest
from planner.spec.plan import Baseline, LinkPrediction, Plan, Policy, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import Profile
from planner.spec.units import format_duration_us

__all__ = ["make_plan"]

AUTO: tuple[Policy, ...] = ("flush", "2bw", "stash")  # the least stale first; others are never faster than one of them, nor smaller
_TIGHTER = 4  # attempts to find a plan whose simulated schedule is fast enough
_AFTERWARDS = 0.1  # of the time: for what is done with the plan that the search found
CLOSE = 1.01  # times nearer than this are as good: then the less stale policy is better


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, *, command: str) -> Plan:
    """The best plan for training the profiled model on the cluster; ``command`` is recorded in it.

    Raises:
        BadInput: an option that no plan can have.
        Infeasible: no plan satisfies the limits; code ``infeasible_memory`` when memory is what binds.
    """
    refuse_too_large(cluster, options)
    if options.cost_model == "pipedream-2019":
        return _plan_2019(profile, cluster, options, command)
    plans: list[Plan] = []
    refused: list[Infeasible | _NoPlanError] = []
    start = time.monotonic()
    policies = AUTO if options.policy == "auto" else (options.policy,)
    ways = list(itertools.product(policies, _sizes(profile, options)))
    for number, (policy, size) in enumerate(ways, 1):
        deadline = None if options.time_limit_s is None else start + options.time_limit_s * number / len(ways)
        asked = replace(options, policy=policy)
        try:
            plan = _plan(profile, size, cluster, asked, command, deadline)
            if policy == "2bw" and options.batch_microbatches is None and _waits(plan):  # too short a batch to go deeper
                longer = _plan(profile, size, cluster, replace(asked, batch_microbatches=2 * plan.batch_microbatches), command, deadline)
                plan = longer if _sample_us(longer) * CLOSE < _sample_us(plan) else plan
            plans.append(plan)
        except (Infeasible, _NoPlanError) as error:
            refused.append(error)
        except PolicyRefuses as error:
            if options.policy != "auto":
                raise
            refused.append(Infeasible(error.message, hint=error.hint, code=error.code))
    if plans:
        return _best_of(plans, options)
    worst = max(refused, key=lambda error: error.reached if isinstance(error, TooSlow) else 0.0)  # the first, or the nearest to enough
    raise explain_infeasible(worst.problem, worst.profile, worst.options) if isinstance(worst, _NoPlanError) else worst


def _best_of(plans: list[Plan], options: PlanOptions) -> Plan:
    """By the objective, then by time per sample; a staler policy must be clearly better. The others are told as baselines."""
    best = plans[0]
    for plan in plans[1:]:
        ours, theirs = _need(plan, options), _need(best, options)
        faster = _sample_us(plan) * (1 if plan.policy == best.policy else CLOSE) < _sample_us(best)
        if ours < theirs or (ours == theirs and faster):
            best = plan
    others = tuple(
        Baseline(_way(plan, best), _sample_us(plan) * best.microbatch_size, True,
                 f"{plan.worker_count} workers, an update after every {plan.batch_microbatches * plan.microbatch_size} samples")
        for plan in plans if plan is not best)
    return replace(best, predicted=replace(best.predicted, baselines=best.predicted.baselines + others))


def _need(plan: Plan, options: PlanOptions) -> int:
    """What is to be least before time counts."""
    if options.objective == "devices":
        return plan.worker_count
    return max(stage.memory.total_bytes for stage in plan.predicted.stages) if options.objective == "memory" else 0


def _way(plan: Plan, best: Plan) -> str:
    parts = [f"policy {plan.policy}"] if plan.policy != best.policy else []
    return ", ".join([*parts, *([f"microbatches of {plan.microbatch_size}"] if plan.microbatch_size != best.microbatch_size else [])])


class _NoPlanError(Exception):
    """There is none; why is found out once nothing else is left."""

    def __init__(self, problem: Problem, profile: Profile, options: PlanOptions) -> None:
        super().__init__()
        self.problem, self.profile, self.options = problem, profile, options


def _sizes(profile: Profile, options: PlanOptions) -> tuple[int, ...]:
    """Microbatch sizes to plan for."""
    if options.microbatch_size is None:
        return profile.sizes
    if options.microbatch_size not in profile.sizes:
        raise BadInput(f"--microbatch-size {options.microbatch_size} is asked, measured were {', '.join(map(str, profile.sizes))}",
                       hint=f"profile the job with --microbatch-size {options.microbatch_size} too")
    return (options.microbatch_size,)


def _waits(plan: Plan) -> bool:
    """Whether the simulated schedule is slower than the closed form, in which nothing waits."""
    return plan.predicted.simulated_us is not None and plan.predicted.simulated_us > plan.predicted.microbatch_us * CLOSE


def _sample_us(plan: Plan) -> float:
    predicted = plan.predicted
    return (predicted.microbatch_us if predicted.simulated_us is None else predicted.simulated_us) / plan.microbatch_size


def _plan(whole: Profile, microbatch_size: int, cluster: Cluster, options: PlanOptions, command: str, deadline: float | None) -> Plan:
    profile = whole.at(microbatch_size)
    halfway = None if deadline is None else (time.monotonic() + deadline) / 2
    chain, topology = chain_of(kept_together(profile, options), deadline=halfway), Topology(cluster)
    problem = problem_of(chain, topology, options)
    least_us = math.inf if options.samples_per_s is None else profile.microbatch_size * 1e6 / options.samples_per_s
    searching = None if deadline is None else deadline - _AFTERWARDS * max(deadline - time.monotonic(), 0.0)
    within_us = least_us
    for _ in range(_TIGHTER):
        plan, sure = _planned(whole, profile, problem, cluster, options, command, within_us, searching, deadline)
        found_us = _sample_us(plan) * microbatch_size
        if found_us <= least_us * (1 + 1e-9):
            return plan
        if plan.predicted.microbatch_us > within_us or options.objective == "throughput":
            break  # there is none faster
        within_us = least_us * plan.predicted.microbatch_us / found_us * 0.999  # its schedule takes longer: ask for more
    raise _too_slow(plan, least_us, sure)


def _too_slow(plan: Plan, least_us: float, sure: bool) -> TooSlow:
    reached, asked = 1e6 / _sample_us(plan), plan.microbatch_size * 1e6 / least_us
    error = TooSlow(
        f"--min-samples-per-s asks for {asked:.6g} samples per second, the fastest plan{'' if sure else ' found'} is predicted to reach "
        f"{reached:.6g}, with policy {plan.policy}, microbatches of {plan.microbatch_size} and an update after every "
        f"{plan.batch_microbatches}", hint=f"ask for --min-samples-per-s {math.floor(reached * 1000) / 1000:g}, allow longer batches "
        f"(--batch-microbatches), or give a larger cluster{'' if sure else ' or a longer --time-limit'}")
    error.reached = reached
    return error


def _planned(whole: Profile, profile: Profile, problem: Problem, cluster: Cluster, options: PlanOptions, command: str, least_us: float,
             searching: float | None, deadline: float | None) -> tuple[Plan, bool]:
    """The best plan, and whether it is proven that none of those that were to be faster or smaller is there."""
    answer = best_for(options.objective, problem, least_us, searching)
    if answer is None:
        raise _NoPlanError(problem, profile, options)
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
        predicted=_prediction(profile, problem, found, result, devices),
        solver=_report(within, found, options, deadline, sure),
        cluster=cluster,
    )

    def evaluated(in_flight: tuple[int, ...]) -> Evaluation:
        return evaluate(chain, within.topology, problem.policy, found.stages, found.batch_microbatches, in_flight)

    return with_depth(plan, whole, evaluated, options.extra_in_flight, deadline), sure


def _with_its_batch(best: Best, deadline: float | None) -> Best:
    """The fastest plan with batches as long as this one's: replica counts that would do with shorter ones may be faster then."""
    problem, found, sure = best
    if problem.batch_microbatches is not None or found.batch_microbatches == 1:
        return best
    fixed = replace(problem, batch_microbatches=found.batch_microbatches)
    if not may_be_below(fixed, found.microbatch_us * (1 - 1e-6), deadline):
        return best
    try:
        other = search(fixed, deadline=deadline)
    except Infeasible:  # the time was up
        return best
    return Best(fixed, other, sure) if other is not None and other.microbatch_us < found.microbatch_us * (1 - 1e-6) else best


def _plan_2019(profile: Profile, cluster: Cluster, options: PlanOptions, command: str) -> Plan:
    plain = PlanOptions(policy=options.policy, max_replicas=options.max_replicas, time_limit_s=options.time_limit_s,
                        cost_model=options.cost_model)
    for name, default in vars(plain).items():
        if (value := getattr(options, name)) != default:
            asked = f"{option_name(name)} {value}" if isinstance(value, int | float | str) and value is not True else option_name(name)
            raise BadInput(f"{asked} is asked, which the cost model pipedream-2019 does not know",
                           hint=f"leave {option_name(name)} out, or plan with --cost-model measured")
    if options.policy == "auto":
        raise BadInput("--policy auto is asked, but to the cost model pipedream-2019 all policies cost the same",
                       hint="give --policy stash, or plan with --cost-model measured")
    if options.max_replicas is not None and options.max_replicas < 1:
        raise BadInput(f"--max-replicas {options.max_replicas} is below 1", hint="give --max-replicas a whole number from 1")
    return make_plan_2019(profile, cluster, policy=options.policy, max_replicas=options.max_replicas, command=command)


def _prediction(profile: Profile, problem: Problem, found: Found, result: Evaluation, devices: list[tuple[str, ...]]) -> Prediction:
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
        baselines=baselines(problem, profile, found.stages, found.batch_microbatches),
    )


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


def _report(problem: Problem, found: Found, options: PlanOptions, deadline: float | None, sure: bool) -> SolverReport:
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
