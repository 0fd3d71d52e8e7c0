"""The integer program against exhaustive search, on small random models and clusters."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import planner.search as search_module
from planner.exact import exhaustive
from planner.graph import chain_of
from planner.search import search
from planner.solve import PlanOptions, problem_of
from planner.spec.cluster import Cluster
from planner.spec.profile import Profile
from planner.topology import Topology
from tests.planner.instances import clusters, flat, layer, profiles, two_level
from tests.planner.instances import profile as make_profile

EXAMPLES = int(os.environ.get("PIPEDREAM_EXAMPLES", "120"))
many = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def compare(profile: Profile, cluster: Cluster, options: PlanOptions) -> str:
    """Assert that both find the same time, and the same device count unless times tie within the solver's tolerance."""
    chain, topology = chain_of(profile), Topology(cluster)
    devices = min(options.devices or topology.device_count, topology.device_count)
    if (options.stages or 1) > min(len(chain.allowed_cuts) - 1, devices):
        return "impossible"
    problem = problem_of(chain, topology, options)
    best, found = exhaustive(problem), search(problem)
    note(f"oracle {best}\nfound  {found}")
    assert (best is None) == (found is None)
    if best is None or found is None:
        return "infeasible"
    assert found.microbatch_us == pytest.approx(best.microbatch_us, rel=2e-6)
    assert found.every_allocation and found.bound_us == pytest.approx(best.microbatch_us, rel=2e-6)
    if found.microbatch_us == pytest.approx(best.microbatch_us, rel=1e-9):
        assert sum(stage.replicas for stage in found.stages) == best.devices
    return "link" if len(found.stages) > 1 and topology.shared else "stage"


options_strategy = st.builds(
    PlanOptions,
    policy=st.sampled_from(["stash", "stash", "stash", "vertical", "2bw", "latest"]),
    batch_microbatches=st.sampled_from([None, None, None, 1, 2, 4, 6, 8]),
    stages=st.sampled_from([None, None, None, 1, 2, 3]),
    max_replicas=st.sampled_from([None, None, 1, 2]),
    devices=st.sampled_from([None, None, 2, 3]),
)


@many
@given(profiles(), clusters(), options_strategy)
def test_equals_exhaustive_search(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    compare(profile, cluster, options)


@many
@given(profiles(most_layers=4), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.sampled_from([1e7, 1e8, 1e9]), st.integers(2, 4))
def test_equals_exhaustive_search_where_servers_must_be_left(profile: Profile, shape: tuple[int, int], inter: float, stages: int) -> None:
    """More stages than a server has devices: transfers over slow links decide."""
    compare(profile, two_level(*shape, intra=1e10, inter=inter), PlanOptions(stages=stages))


@settings(parent=many, max_examples=EXAMPLES // 2)
@given(profiles(most_layers=4), clusters(), options_strategy)
def test_the_coarse_network_gives_the_same_plans(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "MOST_ARCS", -1)  # nothing is small enough for the full network
        compare(profile, cluster, options)


def test_one_replica_more_can_cost_more_and_then_pay() -> None:
    """A stage's cost is not monotone in its replicas: 2 are slower than 1, 4 are faster. Both must be looked at."""
    model = make_profile([layer("heavy", forward_us=1000.0, parameter_bytes=1_600_000)])
    for devices, replicas in ((2, 1), (3, 1), (4, 4), (8, 8)):
        problem = problem_of(chain_of(model), Topology(flat(devices)), PlanOptions(batch_microbatches=None))
        found = search(problem)
        assert found is not None
        by_hand = min((1000 / r + 2 * (r - 1) / r * 1_600_000 / 1e9 * 1e6 / r, r) for r in range(1, devices + 1))
        assert (found.microbatch_us, found.stages[0].replicas) == (pytest.approx(by_hand[0]), by_hand[1])
        assert found.stages[0].replicas == replicas
