"""The bound of many scenarios at once: against the bound of each, and against exhaustive search."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.bound import Bound, best_sites
from planner.search.exact import exhaustive
from planner.search.groups import Groups
from planner.search.loose import Loose
from planner.search.problem import Problem, scenarios
from planner.search.stage_arrays import stage_arrays
from planner.spec.cluster import Cluster
from planner.spec.profile import Profile
from tests.planner.graphs import graph_profiles
from tests.planner.instances import clusters, profiles

some = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
options = st.builds(PlanOptions, policy=st.sampled_from(["stash", "stash", "vertical", "2bw", "flush", "latest"]),
                    batch_microbatches=st.sampled_from([None, None, 1, 6]), recompute=st.sampled_from(["never", "auto", "always"]))


def problem_for(model: Profile, cluster: Cluster, wanted: PlanOptions) -> Problem:
    return problem_of(chain_of(model), Topology(cluster), wanted)


@some
@given(profiles(most_layers=4) | graph_profiles(most_layers=4), clusters(), options)
def test_of_all_scenarios_no_plan_is_below_it(model: Profile, cluster: Cluster, wanted: PlanOptions) -> None:
    problem = problem_for(model, cluster, wanted)
    loose = Loose(problem, scenarios(problem), best_sites(problem.topology, problem.max_replicas))
    bounds, best = loose.lowest_us(math.inf), exhaustive(problem)
    assert best is None or (bounds is not None and bounds[0] <= best.microbatch_us * (1 + 1e-8))


@some
@given(profiles(most_layers=5) | graph_profiles(most_layers=4), clusters(), options)
def test_of_one_scenario_it_is_the_bound_over_every_count(model: Profile, cluster: Cluster, wanted: PlanOptions) -> None:
    """Where the least common multiple of the counts does not matter, and no more versions live than there must.

    Where devices differ in speed it is the sharper one.
    """
    problem = problem_for(model, cluster, wanted)
    if len({place.device_type.speed for place in problem.topology.places}) > 1:
        return
    sites = best_sites(problem.topology, problem.max_replicas)
    for scenario in scenarios(problem):
        exact_us, bounds = Bound(problem, scenario, sites).lowest_us(math.inf), Loose(problem, [scenario], sites).lowest_us(math.inf)
        if exact_us is not None:
            assert bounds is not None and bounds[0] <= exact_us * (1 + 1e-8)
        if not scenario.exact and problem.policy in ("2bw", "latest"):
            assert (exact_us is None) == (bounds is None)
            if bounds is not None and exact_us is not None:
                assert bounds[1] >= exact_us * (1 - 1e-8) - 1e-9


@some
@given(profiles(most_layers=5), clusters(), options, st.floats(1.0, 1.5))
def test_narrowed_to_a_time_nothing_within_it_is_lost(model: Profile, cluster: Cluster, wanted: PlanOptions, factor: float) -> None:
    problem = problem_for(model, cluster, wanted)
    sites = best_sites(problem.topology, problem.max_replicas)
    whole = Loose(problem, scenarios(problem), sites)
    bounds = whole.lowest_us(math.inf)
    if bounds is None:
        return
    kept = whole.useful(bounds[1] * factor)
    stages = stage_arrays(problem.chain)
    best = exhaustive(problem)
    if best is not None and best.microbatch_us <= bounds[1] * factor:
        listed = set(zip(stages.first[kept.rows].tolist(), stages.last[kept.rows].tolist(), strict=True))
        assert {(stage.first, stage.last) for stage in best.stages} <= listed
    for scenario in scenarios(problem):
        one, less = Loose(problem, [scenario], sites), Loose(problem, [scenario], sites, kept)
        for part in (1.0, (1 + factor) / 2, factor):
            assert one.fewest_devices(bounds[1] * part) == less.fewest_devices(bounds[1] * part)


@some
@given(profiles(most_layers=4), clusters(), options)
def test_groups_leave_out_no_scenario_with_a_better_plan(model: Profile, cluster: Cluster, wanted: PlanOptions) -> None:
    problem = problem_for(model, cluster, wanted)
    best = exhaustive(problem)
    if best is None:
        return
    groups = Groups(problem, scenarios(problem), best_sites(problem.topology, problem.max_replicas), None)
    batch = problem.batch(best.stages)
    found = [(scenario.batch_microbatches, low_us) for scenario, _, low_us in groups.within(lambda: best.microbatch_us * (1 + 1e-9))]
    assert any(one == batch and low_us <= best.microbatch_us * (1 + 1e-8) for one, low_us in found)
    assert groups.bound_us == math.inf
    assert [low_us for _, low_us in found] == sorted(low_us for _, low_us in found)
