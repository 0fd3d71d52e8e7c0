"""The position-free bound, and what is said about batches that were not searched."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.bound import Bound, best_sites, longer_batches_us
from planner.search.exact import exhaustive
from planner.search.problem import scenarios
from planner.search.search import search
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.profile import Profile
from tests.planner.instances import clusters, flat, layer, profiles
from tests.planner.instances import profile as make_profile

some = settings(max_examples=40, deadline=None, derandomize=True)


@some
@given(profiles(most_layers=4), clusters(), st.sampled_from([1, 2, 6]), st.sampled_from([None, 2]))
def test_no_plan_is_below_it_and_one_server_reaches_it(profile: Profile, cluster: Cluster, batch: int, stages: int | None) -> None:
    chain, topology = chain_of(profile), Topology(cluster)
    if (stages or 1) > min(chain.most_stages, topology.device_count):
        return
    problem = problem_of(chain, topology, PlanOptions(batch_microbatches=batch, stages=stages))
    (scenario,) = scenarios(problem)
    bound = Bound(problem, scenario, best_sites(topology, problem.max_devices))
    lowest_us, best = bound.lowest_us(math.inf), exhaustive(problem)
    if best is None:
        assert lowest_us is None or len(topology.places) > 1
        return
    assert lowest_us is not None and lowest_us <= best.microbatch_us * (1 + 1e-9)
    if len(topology.places) == 1:
        assert lowest_us == pytest.approx(best.microbatch_us, rel=1e-9)
        assert bound.fewest_devices(lowest_us) == best.devices
    path = bound.path(lowest_us)
    assert [stage[0] for stage in path] == [0, *(stage[1] for stage in path[:-1])] and path[-1][1] == chain.end
    assert sum(stage[2] for stage in path) == bound.fewest_devices(lowest_us)


@some
@given(profiles(most_layers=4), st.sampled_from([(5, 6), (7, 10), (7, 12), (8, 15)]))
def test_longer_batches_are_bounded(profile: Profile, case: tuple[int, int]) -> None:
    devices, batch = case  # counts that add up to so many devices can have this least common multiple
    problem = problem_of(chain_of(profile), Topology(flat(devices)), PlanOptions())
    longer_us = longer_batches_us(problem)
    found = search(dataclasses.replace(problem, batch_microbatches=batch))
    assert longer_us is not None and found is not None
    assert longer_us <= found.microbatch_us * (1 + 1e-9)


def test_a_plan_says_when_longer_batches_could_be_faster() -> None:
    """Two layers on 2 and 3 devices have batches of 6, longer than 5 devices would need: only their all-reduce gains by it."""
    layers = [layer("a", forward_us=200.0, parameter_bytes=40_000), layer("b", forward_us=300.0, parameter_bytes=40_000)]
    plan = make_plan(make_profile(layers), flat(5), PlanOptions(), command="x")
    assert plan.batch_microbatches <= 5 and "more than 5 microbatches" in plan.solver.restricted
    longer = make_plan(make_profile(layers), flat(5), PlanOptions(batch_microbatches=6), command="x")
    assert longer.predicted.microbatch_us < plan.predicted.microbatch_us and longer.solver.restricted == ""
