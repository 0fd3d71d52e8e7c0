"""The integer program against exhaustive search, on small random models and clusters."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import planner.search.search as search_module
from planner.cost import evaluate
from planner.hardware.topology import Topology
from planner.least_memory import least_memory
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.exact import exhaustive
from planner.search.problem import Pin
from planner.search.search import search
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible
from planner.spec.plan import Policy
from planner.spec.profile import Profile, Tensor
from tests.planner.instances import clusters, flat, layer, profiles, two_level
from tests.planner.instances import profile as make_profile

POLICIES: tuple[Policy, ...] = ("stash", "vertical", "2bw", "flush")
EXAMPLES = int(os.environ.get("PIPEDREAM_EXAMPLES", "120"))
many = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def compare(profile: Profile, cluster: Cluster, options: PlanOptions) -> str:
    """Assert that both find the same time, and the same device count unless times tie within the solver's tolerance."""
    chain, topology = chain_of(profile), Topology(cluster)
    devices = min(options.devices or topology.device_count, topology.device_count)
    if (options.stages or 1) > min(chain.most_stages, devices):
        return "impossible"
    problem = problem_of(chain, topology, options)
    best, found = exhaustive(problem), search(problem)
    both = f"oracle {best}\nfound  {found}"
    assert (best is None) == (found is None), both
    if best is None or found is None:
        return "infeasible"
    assert found.microbatch_us == pytest.approx(best.microbatch_us, rel=2e-6), both
    assert found.every_allocation and found.bound_us == pytest.approx(best.microbatch_us, rel=2e-6)
    if found.microbatch_us == pytest.approx(best.microbatch_us, rel=1e-9):
        assert sum(stage.replicas for stage in found.stages) == best.devices, both
    evaluation = evaluate(chain, topology, options.policy, found.stages, found.batch_microbatches)
    return "shared link" if evaluation.bottleneck in {f"link {link.name}" for link in topology.shared} else "stage"


options_strategy = st.builds(
    PlanOptions,
    policy=st.sampled_from(["stash", "stash", "stash", "vertical", "2bw", "flush", "latest"]),
    batch_microbatches=st.sampled_from([None, None, None, 1, 2, 4, 6, 8]),
    stages=st.sampled_from([None, None, None, 1, 2, 3]),
    max_replicas=st.sampled_from([None, None, 1, 2]),
    devices=st.sampled_from([None, None, 2, 3]),
    recompute=st.sampled_from(["never", "auto", "auto", "always"]),
    equal_replicas=st.sampled_from([False, False, False, True]),
)


@many
@given(profiles(), clusters(), options_strategy)
def test_equals_exhaustive_search(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    compare(profile, cluster, options)


@st.composite
def tight(draw: st.DrawFn) -> tuple[Profile, Cluster, Policy]:
    """Devices whose memory is about what a plan needs at least, between recomputing everything and nothing."""
    n = draw(st.integers(2, 5))
    layers = [layer(f"layer{i}", forward_us=draw(st.floats(10, 100)), backward_us=draw(st.floats(10, 200)),
                    parameter_bytes=draw(st.integers(0, 2000)), saved_bytes=draw(st.integers(1000, 50_000))) for i in range(n)]
    tensors = [Tensor(f"tensor{i}", i, (i + 1,), draw(st.integers(0, 3000)), draw(st.integers(0, 3000))) for i in range(n - 1)]
    model, policy = make_profile(layers, tensors), draw(st.sampled_from(POLICIES))
    servers, devices = draw(st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 2), (3, 1)]))

    def limited(memory_bytes: int) -> Cluster:
        return two_level(servers, devices, intra=1e10, inter=1e9, memory_bytes=memory_bytes)

    least = [least_memory(problem_of(chain_of(model), Topology(limited(10**12)), PlanOptions(policy=policy, recompute=choice)))
             for choice in ("always", "never")]
    low, high = sorted(one.memory_bytes for one in least if one is not None)
    return model, limited(draw(st.integers(low, high + (high - low) // 2))), policy


def test_equals_exhaustive_search_where_recomputing_helps() -> None:
    recomputed = 0

    @many
    @given(tight())
    def check(case: tuple[Profile, Cluster, Policy]) -> None:
        nonlocal recomputed
        model, cluster, policy = case
        options = PlanOptions(policy=policy, recompute="auto")
        compare(model, cluster, options)
        found = search(problem_of(chain_of(model), Topology(cluster), options))
        recomputed += found is not None and any(stage.recompute for stage in found.stages)

    check()
    assert recomputed >= EXAMPLES // 3  # the cases are what the test is about


@settings(parent=many, max_examples=EXAMPLES // 2)
@given(profiles(most_layers=4), clusters(), st.data())
def test_equals_exhaustive_search_with_pins(profile: Profile, cluster: Cluster, data: st.DataObject) -> None:
    names = [x.name for x in profile.layers]
    most = min(len(names), cluster.device_count)
    pins = data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, most - 1), min_size=1, max_size=2))
    options = PlanOptions(pins=tuple(pins.items()), policy=data.draw(st.sampled_from(["stash", "2bw"])),
                          stages=data.draw(st.sampled_from([None, None, most])))
    chain = chain_of(profile)
    if any(stage >= min(chain.most_stages, most) for stage in pins.values()) or (options.stages or 1) > chain.most_stages:
        return
    try:
        problem_of(chain, Topology(cluster), options)
    except Infeasible:  # told before the search: no plan at all keeps the pins
        free = problem_of(chain, Topology(cluster), dataclasses.replace(options, pins=()))
        names_at = {name: index for index, name in enumerate(names)}
        assert exhaustive(dataclasses.replace(free, pins=tuple(Pin(names_at[name], stage) for name, stage in options.pins))) is None
    else:
        compare(profile, cluster, options)


@many
@given(profiles(most_layers=4), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.sampled_from([1e7, 1e8, 1e9]), st.integers(2, 4))
def test_equals_exhaustive_search_where_servers_must_be_left(profile: Profile, shape: tuple[int, int], inter: float, stages: int) -> None:
    """More stages than a server has devices: transfers over slow links decide."""
    compare(profile, two_level(*shape, intra=1e10, inter=inter), PlanOptions(stages=stages))


@st.composite
def link_bound(draw: st.DrawFn) -> tuple[Profile, Cluster, PlanOptions]:
    """Layers that need every device, or more stages than fit on a server; tensors that fill the links between servers."""
    crowded = draw(st.booleans())
    n = draw(st.integers(3, 4)) if crowded else draw(st.integers(2, 3))
    compute = st.floats(1, 20) if crowded else st.sampled_from([500.0, 1000.0, 1500.0])
    layers = [layer(f"layer{i}", forward_us=draw(compute), parameter_bytes=draw(st.sampled_from([0, 1000, 30_000]))) for i in range(n)]
    amount = st.sampled_from([0, 10_000, 30_000, 70_000, 100_000, 250_000])
    tensors = [Tensor(f"tensor{i}", i, (draw(st.integers(i + 1, n - 1)),), draw(amount), draw(amount)) for i in range(n - 1)]
    shape = draw(st.sampled_from([(2, 2), (3, 1), (3, 2)] if crowded else [(2, 3), (2, 2), (3, 2)]))
    batch = draw(st.sampled_from([None, 6, 12]))
    options = PlanOptions(batch_microbatches=batch)
    if crowded:
        options = PlanOptions(batch_microbatches=batch, stages=draw(st.integers(2, n)), max_replicas=draw(st.sampled_from([1, 2])))
    return make_profile(layers, tensors), two_level(*shape, intra=1e12, inter=draw(st.sampled_from([1e8, 2.5e8, 6e8]))), options


@pytest.mark.parametrize("most_arcs", [search_module.MOST_ARCS, -1], ids=["full", "coarse"])
def test_equals_exhaustive_search_where_links_bind(most_arcs: int) -> None:
    bound_by_links = 0

    @settings(parent=many, max_examples=EXAMPLES // 2)
    @given(link_bound())
    def check(case: tuple[Profile, Cluster, PlanOptions]) -> None:
        nonlocal bound_by_links
        bound_by_links += compare(*case) == "shared link"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "MOST_ARCS", most_arcs)  # -1: nothing is small enough for the full network
        check()
    assert bound_by_links >= EXAMPLES // 20  # the cases are what the test is about


@settings(parent=many, max_examples=EXAMPLES // 2)
@given(profiles(most_layers=4), clusters(), options_strategy)
def test_the_coarse_network_gives_the_same_plans(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "MOST_ARCS", -1)  # nothing is small enough for the full network
        compare(profile, cluster, options)


@pytest.mark.parametrize("most_arcs", [search_module.MOST_ARCS, -1], ids=["full", "coarse"])
def test_pairs_of_allocations_that_keep_less_inside_than_their_shares(most_arcs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas on (1, 1) and three on (2, 1): replica m mod 2 meets every replica m mod 3 equally often.

    server0 then sends 1/2 * 1/3 of the microbatches and receives 1/2 * 2/3, although the shares 1/2 and
    2/3 would let it send none and receive 1/6. A tensor that takes 1800 us crosses in 600 us, not in 300.
    """
    monkeypatch.setattr(search_module, "MOST_ARCS", most_arcs)
    model = make_profile([layer("a", forward_us=1000.0), layer("b", forward_us=1500.0)], [Tensor("x", 0, (1,), 180_000, 0)])
    options = PlanOptions(stages=2, devices=5, batch_microbatches=6)
    cluster = two_level(2, 3, intra=1e12, inter=1e8)
    assert compare(model, cluster, options) == "shared link"
    found = search(problem_of(chain_of(model), Topology(cluster), options))
    assert found is not None and found.microbatch_us == pytest.approx(600.0)
    assert {stage.replicas for stage in found.stages} == {2, 3}


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
