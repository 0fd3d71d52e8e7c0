"""A plan file under the original's cost model: what :mod:`planner.published.pipedream2019.solve` found, with its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.memory import live_versions, replica_memory
from planner.model.graph import Chain, chain_of, chain_over
from planner.model.ideals import edges_of, predecessor_masks
from planner.model.neighbours import around
from planner.model.states import Searched
from planner.published.pipedream2019.solve import Answer, Level, Part, best_plan, levels_of, pipeline_us, replica_devices
from planner.published.pipedream2019.stages import Model, model_of
from planner.search.problem import default_batch
from planner.solver import solver_name
from planner.spec.cluster import Cluster
from planner.spec.files import digest
from planner.spec.plan import Baseline, LinkPrediction, Plan, Policy, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import Profile
from planner.spec.schedule import default_in_flight
from planner.spec.units import format_bytes

__all__ = ["make_plan_2019"]

PROVEN = 2e-7  # relative gap below which a plan is called optimal
MOST_STATES = 3000  # all pairs of them are stages
MOST_NESTED = 800  # and all pairs have inner pipelines
MOST_NEAR = 1200  # states around the cuts of a plan
ROUNDS = 3


def make_plan_2019(profile: Profile, cluster: Cluster, *, policy: Policy = "stash", max_replicas: int | None = None, command: str) -> Plan:
    """The plan that the original's formulas call fastest; ``command`` is recorded in it.

    Memory, the optimizer and the sharing of links are not in these formulas: what a device needs is
    predicted, and said where it is more than there is, but limits nothing.

    Raises:
        BadInput: the cluster has unequal devices or servers.
    """
    levels, devices = levels_of(cluster), list(cluster.devices())
    chain, model, answer = _searched(profile, levels, max_replicas)
    placed = replica_devices(levels, answer.parts)
    replicas = tuple(len(numbers) for _, _, numbers in placed)
    batch, in_flight = default_batch(policy, replicas, cluster.device_count), default_in_flight(replicas)
    costs = [(cost, numbers) for cost, (_, _, numbers) in zip(_costs(model, levels, answer.parts), placed, strict=True)]
    stages = tuple(
        StagePlan(chain.stage_names(first, last), tuple(devices[number][0] for number in numbers), depth, recompute=False)
        for (first, last, numbers), depth in zip(placed, in_flight, strict=True)
    )
    predictions = tuple(
        StagePrediction(cost.compute_us, 0.0, cost.stage_us - cost.compute_us, 0.0,
                        replica_memory(chain, cost.first, cost.last, in_flight=in_flight[k],
                                       versions=live_versions(policy, replicas, in_flight, batch, k)),
                        devices[numbers[0]][1].memory_bytes)
        for k, (cost, numbers) in enumerate(costs)
    )
    links = _links(model, levels, answer.parts, [path for path, _ in devices])
    return Plan(
        command=command, model=profile.model, job=profile.job, fingerprint=profile.fingerprint, profile_digest=digest(profile),
        estimated=profile.estimated, microbatch_size=profile.microbatch_size, policy=policy, batch_microbatches=batch, stages=stages,
        predicted=Prediction(
            microbatch_us=answer.time_us,
            simulated_us=None,
            bottleneck=_bottleneck(predictions, links),
            stages=predictions,
            links=links,
            baselines=(Baseline("one device", float(model.compute_us[-1]), True, "in this cost model"),
                       Baseline("data parallelism", pipeline_us(model, levels, (_data_parallel(chain, levels),)), True,
                                "in this cost model")),
        ),
        solver=_report(chain, levels, model, answer, predictions),
        cluster=cluster,
    )


def _searched(profile: Profile, levels: Sequence[Level], max_replicas: int | None) -> tuple[Chain, Model, Answer]:
    """The best plan over the states of the graph; where these are a selection, over those near its cuts once more."""
    chain = chain_of(profile, MOST_STATES if len(levels) == 1 else MOST_NESTED)
    model = model_of(profile, chain.states)
    answer = best_plan(model, levels, max_replicas=max_replicas)
    if not chain.restricted or len(levels) > 1 or any(tied.one_stage for tied in profile.tied):
        return chain, model, answer
    predecessors = predecessor_masks(len(profile.layers), edges_of(profile))
    for _ in range(ROUNDS):
        near = around(predecessors, [model.states.masks[part.last] for part in answer.parts[:-1]], MOST_NEAR)
        refined_model = model_of(profile, near)
        refined = best_plan(refined_model, levels, max_replicas=max_replicas)
        if refined.time_us > answer.time_us * (1 - PROVEN):
            break
        chain, model, answer = chain_over(profile, Searched(near, chain.restricted, chain.wide)), refined_model, refined
    return chain, model, answer


class _Cost(NamedTuple):
    first: int
    last: int
    compute_us: float
    stage_us: float


def _costs(model: Model, levels: Sequence[Level], parts: Sequence[Part]) -> Iterator[_Cost]:
    """Each innermost stage's time per microbatch of the whole pipeline, with what its copies synchronise at outer levels."""
    level, scale = levels[-1], 1e6 / levels[-1].bandwidth_bytes_per_s
    for part in parts:
        m, parameters = part.units, model.parameter_bytes[part.last] - model.parameter_bytes[part.first]
        sync_us = 4 * (m - 1) * parameters * scale / m / level.devices_each
        own_us = float(model.compute_us[part.last] - model.compute_us[part.first])
        for inner in _costs(model, levels[:-1], part.inner) if part.inner else [_Cost(part.first, part.last, own_us, own_us)]:
            yield _Cost(inner.first, inner.last, inner.compute_us / m, float(inner.stage_us + sync_us) / m)


def _links(model: Model, levels: Sequence[Level], parts: Sequence[Part], paths: Sequence[str]) -> tuple[LinkPrediction, ...]:
    """What the cuts of a stage put on its links, the busier one of each; named by the first device or server of the stage."""
    loads: dict[str, LinkPrediction] = {}

    def visit(depth: int, inside: Sequence[Part], start: int, copies: int) -> None:
        level, unit = levels[depth], 0
        for index, part in enumerate(inside):
            here = start + unit * level.devices_each
            parent = paths[here].split("/")
            name = "/".join(parent[: len(parent) - depth])
            load = float(max(model.crossing_bytes[part.first], model.crossing_bytes[part.last])) / part.units / copies
            if index and load > 0:
                loads[name] = LinkPrediction(name, load, load / level.bandwidth_bytes_per_s * 1e6)
            if part.inner:
                visit(depth - 1, part.inner, here, copies * part.units)
            unit += part.units

    visit(len(levels) - 1, parts, 0, 1)
    return tuple(loads.values())


def _bottleneck(stages: Sequence[StagePrediction], links: Sequence[LinkPrediction]) -> str:
    slowest = max(range(len(stages)), key=lambda k: stages[k].microbatch_us)
    link = max(links, key=lambda link: link.microbatch_us, default=None)
    if link is not None and link.microbatch_us > stages[slowest].microbatch_us:
        return f"link {link.link}"
    return f"stage {slowest}"


def _data_parallel(chain: Chain, levels: Sequence[Level]) -> Part:
    """One stage on everything: copies of copies."""
    inner = (_data_parallel(chain, levels[:-1]),) if len(levels) > 1 else ()
    return Part(0, chain.end, levels[-1].count, inner)


def _least_possible_us(chain: Chain, levels: Sequence[Level], model: Model, time_us: float) -> float:
    """A time that no plan over any cut states is below: a stage on r devices, however nested, works off at most r T of compute.

    So do its links with bytes, at the rate of the fastest level; on one level its copies synchronise besides.
    """
    devices = levels[-1].count * levels[-1].devices_each
    if chain.wide is None:
        return float(model.compute_us[-1]) / devices  # all devices busy, nothing to send
    bandwidth = levels[0].bandwidth_bytes_per_s

    def added(m: int, parameters: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return 4 * (m - 1) * parameters / bandwidth * 1e6 / m

    return chain.wide.least_time_us(devices, bandwidth / 1e6, time_us, added if len(levels) == 1 else None)


def _report(chain: Chain, levels: Sequence[Level], model: Model, answer: Answer, stages: Sequence[StagePrediction]) -> SolverReport:
    bound_us, notes = answer.bound_us, []
    if chain.restricted:
        bound_us = min(bound_us, _least_possible_us(chain, levels, model, answer.time_us))
        notes.append(chain.restricted)
    gap = max(0.0, 1 - bound_us / answer.time_us) if answer.time_us > 0 else 0.0
    over = [k for k, stage in enumerate(stages) if stage.available_bytes is not None and stage.memory.total_bytes > stage.available_bytes]
    if over:
        worst = max(over, key=lambda k: stages[k].memory.total_bytes)
        need, available = stages[worst].memory.total_bytes, stages[worst].available_bytes or 0
        notes.append(f"memory, which this cost model leaves out: stage {worst} needs {format_bytes(need)} of {format_bytes(available)}")
    optimal = gap <= PROVEN
    return SolverReport(f"{solver_name()} (cost model pipedream-2019)", "optimal" if optimal else "feasible",
                        answer.time_us if optimal else bound_us, 0.0 if optimal else gap, "; ".join(notes))
