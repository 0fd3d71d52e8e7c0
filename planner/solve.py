"""From a profile and a cluster to a plan: every way that the options leave open is planned, and the best is taken."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from planner.baselines import baselines
from planner.infeasible import explain_infeasible
from planner.one_way import NoPlanError, Planned, plan_one_way
from planner.options import PlanOptions, option_name, refuse_too_large
from planner.published.pipedream2019.plan import make_plan_2019
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, Infeasible, PolicyRefuses, TooSlow
from planner.spec.plan import Baseline, Plan, Policy
from planner.spec.profile import Profile

__all__ = ["make_plan"]

AUTO: tuple[Policy, ...] = ("flush", "2bw", "stash")  # the least stale first; others are never faster than one of them, nor smaller
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
    plans: list[Planned] = []
    refused: list[Infeasible | NoPlanError] = []
    start = time.monotonic()
    policies = AUTO if options.policy == "auto" else (options.policy,)
    ways = list(itertools.product(policies, _sizes(profile, options)))
    for number, (policy, size) in enumerate(ways, 1):
        deadline = None if options.time_limit_s is None else start + options.time_limit_s * number / len(ways)
        try:
            one = plan_one_way(profile, size, policy, cluster, options, command, deadline)
            plans.append(one)
            if policy == "2bw" and options.batch_microbatches is None and one.plan.predicted.waits:  # too short a batch to go deeper
                twice = replace(options, batch_microbatches=2 * one.plan.batch_microbatches)
                longer = plan_one_way(profile, size, policy, cluster, twice, command, deadline)
                if _sample_us(longer.plan) * CLOSE < _sample_us(one.plan):
                    plans[-1] = longer
        except (Infeasible, NoPlanError) as error:
            refused.append(error)
        except PolicyRefuses as error:
            if options.policy != "auto":
                raise
            refused.append(Infeasible(error.message, hint=error.hint, code=error.code))
    if plans:
        return _best_of(plans, options)
    told = max(refused, key=lambda error: error.samples_per_s if isinstance(error, TooSlow) else 0.0)  # the nearest to enough, or the first
    raise explain_infeasible(told.problem, told.profile, told.options) if isinstance(told, NoPlanError) else told


def _best_of(plans: list[Planned], options: PlanOptions) -> Plan:
    """By the objective, then by time per sample; a staler policy must be clearly better. The others are told as baselines."""
    best = plans[0]
    for one in plans[1:]:
        ours, theirs = _need(one.plan, options), _need(best.plan, options)
        faster = _sample_us(one.plan) * (1 if one.plan.policy == best.plan.policy else CLOSE) < _sample_us(best.plan)
        if ours < theirs or (ours == theirs and faster):
            best = one
    plan = best.plan
    others = tuple(
        Baseline(_way(other, plan), _sample_us(other) * plan.microbatch_size, True,
                 f"{other.worker_count} workers, an update after every {other.batch_microbatches * other.microbatch_size} samples")
        for other in (one.plan for one in plans) if other is not plan)
    compared = baselines(best.problem, best.profile, best.stages, plan.batch_microbatches)
    return replace(plan, predicted=replace(plan.predicted, baselines=compared + others))


def _sample_us(plan: Plan) -> float:
    return plan.predicted.expected_us / plan.microbatch_size


def _need(plan: Plan, options: PlanOptions) -> int:
    """What is to be least before time counts."""
    if options.objective == "devices":
        return plan.worker_count
    return max(stage.memory.total_bytes for stage in plan.predicted.stages) if options.objective == "memory" else 0


def _way(plan: Plan, best: Plan) -> str:
    parts = [f"policy {plan.policy}"] if plan.policy != best.policy else []
    return ", ".join([*parts, *([f"microbatches of {plan.microbatch_size}"] if plan.microbatch_size != best.microbatch_size else [])])


def _sizes(profile: Profile, options: PlanOptions) -> tuple[int, ...]:
    """Microbatch sizes to plan for."""
    if options.microbatch_size is None:
        return profile.sizes
    if options.microbatch_size not in profile.sizes:
        raise BadInput(f"--microbatch-size {options.microbatch_size} is asked, measured were {', '.join(map(str, profile.sizes))}",
                       hint=f"profile the job with --microbatch-size {options.microbatch_size} too")
    return (options.microbatch_size,)


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
