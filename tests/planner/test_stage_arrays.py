"""All stages at once cost and need, to the last bit, what each does by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.bound import best_sites
from planner.search.columns import CandidateTable
from planner.search.problem import scenarios
from planner.search.stage_arrays import StageArrays, stage_arrays
from planner.spec.cluster import Cluster
from planner.spec.plan import Policy
from planner.spec.profile import Profile
from tests.planner.graphs import graph_profiles
from tests.planner.instances import clusters, flat, layer, profile, profiles


@settings(max_examples=100)
@given(graph_profiles(most_layers=6) | profiles(most_layers=6), clusters(),
       st.sampled_from(["stash", "vertical", "2bw", "flush", "latest"]), st.sampled_from([None, 6]))
def test_equal_to_single_stages(model: Profile, cluster: Cluster, policy: Policy, batch: int | None) -> None:
    chain, topology = chain_of(model), Topology(cluster)
    problem = problem_of(chain, topology, PlanOptions(policy=policy, batch_microbatches=batch))
    arrays = stage_arrays(chain)
    assert list(zip(arrays.first.tolist(), arrays.last.tolist(), strict=True)) == chain.intervals()
    for scenario in scenarios(problem):
        table = CandidateTable(problem, scenario)
        for site in best_sites(topology, min(problem.max_replicas, scenario.max_devices)):
            for recompute in (False, True):
                singly = [table.cost(first, last, site, recompute) for first, last in chain.intervals()]
                assert arrays.cost_us(problem, scenario, site, recompute).tolist() == [cost_us for cost_us, _ in singly]
                assert arrays.max_after(problem, scenario, site, recompute).tolist() == [limit for _, limit in singly]


def test_numbers_that_do_not_fit_in_64_bits() -> None:
    huge = 4 * 10**17
    model = profile([layer(f"layer{i}", parameter_bytes=huge, saved_bytes=huge, optimizer_bytes=huge) for i in range(4)])
    chain, topology = chain_of(model), Topology(flat(3, memory_bytes=9 * 10**17))
    problem = problem_of(chain, topology, PlanOptions(batch_microbatches=6))
    (scenario,) = scenarios(problem)
    table, arrays = CandidateTable(problem, scenario), StageArrays(chain)
    for site in best_sites(topology, 3):
        singly = [table.cost(first, last, site) for first, last in chain.intervals()]
        assert arrays.cost_us(problem, scenario, site).tolist() == pytest.approx([cost_us for cost_us, _ in singly], rel=1e-14)
        assert arrays.max_after(problem, scenario, site).tolist() == [limit for _, limit in singly]
