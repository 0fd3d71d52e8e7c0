"""From a profile and a cluster to a plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from planner.bound import longer_batches_us
from planner.cost import Evaluation, Stage, evaluate
from planner.graph import Chain, chain_of
from planner.infeasible import explain_infeasible
from planner.naming import assign_devices, in_order_of_use
from planner.pipedream2019.plan import make_plan_2019
from planner.problem import Problem
from planner.search import Found, search
from planner.solver import solver_name
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, Infeasible
from planner.spec.files import digest
from planner.spec.plan import Baseline, LinkPrediction, Plan, Policy, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import Profile
from planner.spec.units import format_duration_us
from planner.topology import Topology

__all__ = ["CostModel", "PlanOptions", "make_plan", "problem_of"]

CostModel = Literal["measured", "pipedream-2019"]


@dataclass(frozen=True)
class PlanOptions:
    """What the user fixes; None leaves it to the planner. ``devices`` and ``max_replicas`` are upper limits."""

    policy: Policy = "stash"
    batch_microbatches: int | None = None
    stages: int | None = None
    max_replicas: int | None = None
    devices: int | None = None
    time_limit_s: float | None = None
    cost_model: CostModel = "measured"


def make_plan(profile: Profile, cluster: Cluster, options: PlanOptions, *, command: str) -> Plan:
    """The fastest plan for training the profiled model on the cluster; ``command`` is recorded in it.

    Raises:
        BadInput: an option that no plan can have, or a policy that cannot be planned yet.
        Infeasible: no plan satisfies the limits; code ``infeasible_memory`` when memory is what binds.
    """
    if options.cost_model == "pipedream-2019":
        return _plan_2019(profile, cluster, options, command)
    deadline = None if options.time_limit_s is None else time.monotonic() + options.time_limit_s
    chain, topology = chain_of(profile), Topology(cluster)
    problem = problem_of(chain, topology, options)
    found = search(problem, deadline=deadline)
    if found is None:
        raise explain_infeasible(problem)
    found = replace(found, stages=in_order_of_use(problem, found.stages, found.batch_microbatches))
    result = evaluate(chain, topology, options.policy, found.stages, found.batch_microbatches)
    devices = assign_devices(topology, found.stages)
    return Plan(
        command=command,
        model=profile.model,
        job=profile.job,
        fingerprint=profile.fingerprint,
        profile_digest=digest(profile),
        estimated=profile.estimated,
        microbatch_size=profile.microbatch_size,
        policy=options.policy,
        batch_microbatches=found.batch_microbatches,
        stages=tuple(
            StagePlan(chain.stage_names(stage.first, stage.last), paths, depth, recompute=False)
            for stage, paths, depth in zip(found.stages, devices, result.in_flight, strict=True)
        ),
        predicted=_prediction(problem, found, result, devices),
        solver=_report(problem, found),
        cluster=cluster,
    )


def _plan_2019(profile: Profile, cluster: Cluster, options: PlanOptions, command: str) -> Plan:
    for name in ("batch_microbatches", "stages", "devices"):
        value = getattr(options, name)
        if value is not None:
            raise BadInput(f"{_option(name)} {value} is asked, which the cost model pipedream-2019 does not know",
                           hint=f"leave {_option(name)} out, or plan with --cost-model measured")
    if options.max_replicas is not None and options.max_replicas < 1:
        raise BadInput(f"--max-replicas {options.max_replicas} is below 1", hint="give --max-replicas a whole number from 1")
    return make_plan_2019(profile, cluster, policy=options.policy, max_replicas=options.max_replicas, command=command)


def problem_of(chain: Chain, topology: Topology, options: PlanOptions) -> Problem:
    """The options as limits of a search, checked against the model and the cluster.

    Raises:
        BadInput: an option below 1, or a policy that cannot be planned yet.
        Infeasible: more stages than layers can be cut into, or than there are devices.
    """
    for name in ("batch_microbatches", "stages", "max_replicas", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise BadInput(f"{_option(name)} {value} is below 1", hint=f"give {_option(name)} a whole number from 1")
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        raise BadInput(f"--time-limit {options.time_limit_s:g} is not above zero", hint="give --time-limit a number of seconds")
    if options.policy == "flush":
        raise BadInput("policy flush cannot be planned yet: its pipeline drains at every update, which the cost model does not count",
                       hint="plan with --policy stash")
    devices = topology.device_count if options.devices is None else min(options.devices, topology.device_count)
    most_stages = chain.most_stages
    if options.stages is not None and options.stages > most_stages:
        tied = "" if most_stages == chain.layer_count else f", as tied parameters keep some of its {chain.layer_count} layers together"
        raise Infeasible(f"--stages {options.stages} is asked, but the model can be cut into at most {most_stages}{tied}",
                         hint=f"give --stages a number from 1 to {most_stages}")
    if options.stages is not None and options.stages > devices:
        raise Infeasible(f"--stages {options.stages} needs {options.stages} devices, but {devices} may be used",
                         hint=f"give --stages a number from 1 to {devices}, or a cluster with more devices")
    return Problem(chain, topology, options.policy, devices, min(devices, options.max_replicas or devices), options.stages,
                   options.batch_microbatches)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _prediction(problem: Problem, found: Found, result: Evaluation, devices: list[tuple[str, ...]]) -> Prediction:
    topology = problem.topology
    links = [
        LinkPrediction(link.name, load, time_us)
        for link, load, time_us in zip(topology.shared, result.shared_link_bytes, result.shared_link_us, strict=True)
        if load > 0
    ]
    bandwidth = {place.prefix: place.link.bandwidth_bytes_per_s for place in topology.places}
    slowest = result.bottleneck
    for k, (load, paths) in enumerate(zip(result.device_link_bytes, devices, strict=True)):
        mine = [LinkPrediction(path, load, load / bandwidth[path.rstrip("0123456789")] * 1e6) for path in paths if load > 0]
        links += mine
        if slowest == f"link of stage {k}'s devices":
            slowest = f"link {max(mine, key=lambda link: link.microbatch_us).link}"
    return Prediction(
        microbatch_us=result.microbatch_us,
        simulated_us=None,
        bottleneck=slowest,
        stages=tuple(
            StagePrediction(cost.compute_us, cost.update_us, cost.allreduce_us, memory, available)
            for cost, memory, available in zip(result.costs, result.memory, result.available_bytes, strict=True)
        ),
        links=tuple(links),
        baselines=(_one_device(problem, found.batch_microbatches), _data_parallel(problem, found.batch_microbatches)),
    )


def _one_device(problem: Problem, batch: int) -> Baseline:
    """Everything on the fastest single device, with batches as long as the plan's."""
    places = problem.topology.places
    fastest = max(range(len(places)), key=lambda p: (places[p].device_type.speed, -p))
    return _baseline("one device", problem, tuple(int(p == fastest) for p in range(len(places))), batch)


def _data_parallel(problem: Problem, batch: int) -> Baseline:
    """One stage replicated on every device that may be used, with the next batch it can deal equally."""
    left, allocation = problem.max_devices, []
    for count in problem.topology.capacities:
        allocation.append(min(left, count))
        left -= allocation[-1]
    return _baseline("data parallelism", problem, tuple(allocation), -(-batch // problem.max_devices) * problem.max_devices)


def _baseline(name: str, problem: Problem, allocation: tuple[int, ...], batch: int) -> Baseline:
    stage = Stage(0, problem.chain.end, allocation)
    result = evaluate(problem.chain, problem.topology, problem.policy, (stage,), batch)
    return Baseline(name, result.microbatch_us, result.fits)


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


def _report(problem: Problem, found: Found) -> SolverReport:
    bound_us = found.bound_us if not problem.chain.restricted else min(found.bound_us, _least_possible_us(problem, found.microbatch_us))
    gap = max(0.0, (found.microbatch_us - bound_us) / found.microbatch_us) if found.microbatch_us > 0 else 0.0
    optimal = gap <= 2e-6  # what the solver's tolerance may leave
    restricted = [problem.chain.restricted] if problem.chain.restricted else []
    if not optimal and not found.every_allocation:
        restricted.append("stages on one server, equally on neighbouring servers, or on whole servers and a rest")
    if not optimal and not found.in_time:
        restricted.append("the search was ended by the time limit, or by its size")
    longer_us = longer_batches_us(problem, found.microbatch_us * 0.99, tolerance=0.005)
    if longer_us is not None:
        restricted.append(f"batches of more than {problem.max_devices} microbatches (--batch-microbatches): at best "
                          f"{format_duration_us(longer_us)} per microbatch")
    return SolverReport(solver_name(), "optimal" if optimal else "feasible", found.microbatch_us if optimal else bound_us,
                        0.0 if optimal else gap, "; ".join(restricted))
