"""The bound that knows places and links: against exhaustive search; and what it finds, against the cost model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost import evaluate
from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.exact import exhaustive
from planner.search.linked import Linked
from planner.search.placings import Placings, placings
from planner.search.problem import Problem, Scenario, scenarios
from planner.search.stage_arrays import stage_arrays
from planner.search.work import Work
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.profile import Profile, Tensor
from tests.planner.graphs import graph_profiles
from tests.planner.instances import clusters, layer, profiles, two_level, unequal
from tests.planner.instances import profile as make_profile

many = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
some = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
options = st.builds(PlanOptions, policy=st.sampled_from(["stash", "stash", "vertical", "2bw", "flush"]),
                    batch_microbatches=st.sampled_from([None, None, 2, 6]), recompute=st.sampled_from(["never", "auto"]),
                    stages=st.sampled_from([None, None, 2]), devices=st.sampled_from([None, None, 3]),
                    equal_replicas=st.sampled_from([False, False, True]))


def linked_for(problem: Problem, group: list[Scenario]) -> Linked | None:
    placed = placings(problem.topology, problem.max_replicas)
    assert placed is not None
    return Linked(problem, group, placed, stage_arrays(problem.chain).first.argsort(kind="stable"), problem.max_devices, Work(10**9))


@some
@given(profiles(most_layers=4) | graph_profiles(most_layers=4), clusters(), options)
def test_no_plan_is_below_it(model: Profile, cluster: Cluster, wanted: PlanOptions) -> None:
    """Neither when its own scenario is asked, nor when all are asked together; and the fewest devices are not more than it has."""
    chain, topology = chain_of(model), Topology(cluster)
    if not topology.shared or (wanted.stages or 1) > min(chain.most_stages, wanted.devices or topology.device_count):
        return
    problem = problem_of(chain, topology, wanted)
    best, every = exhaustive(problem), scenarios(problem)
    if best is None:
        return
    batch, within_us = problem.batch(best.stages), best.microbatch_us * (1 + 1e-9) + 1e-9
    own = [one for one in every if one.batch_microbatches == batch]
    alone = [fewest for one in own if (fewest := linked_for(problem, [one]).within(within_us)) is not None]  # type: ignore[union-attr]
    assert alone and min(alone) <= best.devices
    if wanted.policy != "flush" and len({one.vertical_versions for one in every}) == 1:
        together = linked_for(problem, every).within(within_us)  # type: ignore[union-attr]
        assert together is not None and together <= best.devices


@some
@given(profiles(most_layers=4) | graph_profiles(most_layers=4), clusters(), options, st.floats(1.0, 1.3))
def test_what_it_finds_is_a_plan_within_the_time(model: Profile, cluster: Cluster, wanted: PlanOptions, factor: float) -> None:
    """Where places have no equals, so that nothing depends on their names."""
    chain, topology = chain_of(model), Topology(cluster)
    if not topology.shared or topology.interchangeable or (wanted.stages or 1) > min(chain.most_stages, wanted.devices or 99):
        return
    problem = problem_of(chain, topology, wanted)
    best = exhaustive(problem)
    if best is None:
        return
    for scenario in scenarios(problem):
        linked, within_us = linked_for(problem, [scenario]), best.microbatch_us * factor
        assert linked is not None
        if linked.within(within_us) is None or not (stages := linked.stages()):
            continue
        result = evaluate(chain, topology, problem.policy, stages, scenario.batch_microbatches)
        assert result.fits and result.microbatch_us <= within_us * (1 + 1e-8)
        assert [stage.first for stage in stages] == [0, *(stage.last for stage in stages[:-1])] and stages[-1].last == chain.end
        assert problem.stages in (None, len(stages))


@st.composite
def tight(draw: st.DrawFn, *, equal: bool) -> tuple[Profile, Cluster, PlanOptions]:
    """Layers that need about every device, and tensors and parameters that fill the links between servers, equal or not."""
    n = draw(st.integers(2, 4))
    layers = [layer(f"layer{i}", forward_us=draw(st.sampled_from([500.0, 1000.0, 1500.0])),
                    parameter_bytes=draw(st.sampled_from([0, 1000, 30_000, 100_000]))) for i in range(n)]
    amount = st.sampled_from([0, 10_000, 30_000, 70_000, 100_000, 250_000])
    tensors = [Tensor(f"tensor{i}", i, (draw(st.integers(i + 1, n - 1)),), draw(amount), draw(amount)) for i in range(n - 1)]
    bandwidth = st.sampled_from([1e8, 2.5e8, 6e8])
    if equal:
        cluster = two_level(*draw(st.sampled_from([(2, 2), (3, 1), (3, 2), (2, 3)])), intra=1e12, inter=draw(bandwidth))
    else:
        sizes = draw(st.sampled_from([(2, 1), (1, 2, 1), (3, 2), (1, 3), (2, 2)]))
        servers = tuple(Node(f"server{i}", 1, Link(draw(bandwidth) * (1 + i / 10), 0.0), None,
                             (Node("device", size, Link(1e12, 0.0), "test", ()),)) for i, size in enumerate(sizes))
        cluster = Cluster("unequal", (DeviceType("test", 1.0, None),), servers)
    return make_profile(layers, tensors), cluster, PlanOptions(batch_microbatches=draw(st.sampled_from([None, 6, 12])))


@pytest.mark.parametrize("equal", [False, True])
def test_where_links_bind_it_is_nearly_always_the_optimum(equal: bool) -> None:
    """Just below the best plan there is nothing; at its time there is a plan, found by names, or up to the names of equal servers."""
    below, real, seen = 0, 0, 0

    @many
    @given(tight(equal=equal))
    def run(case: tuple[Profile, Cluster, PlanOptions]) -> None:
        nonlocal below, real, seen
        model, cluster, wanted = case
        problem = problem_of(chain_of(model), Topology(cluster), wanted)
        best, every = exhaustive(problem), scenarios(problem)
        assert best is not None
        seen += 1
        below += all(linked.within(best.microbatch_us * (1 - 1e-6)) is None for one in every if (linked := linked_for(problem, [one])))
        for one in every:
            linked, within_us = linked_for(problem, [one]), best.microbatch_us * (1 + 1e-9)
            assert linked is not None
            possible = linked.within(within_us) is not None
            if stages := linked.stages() if possible else ():
                result = evaluate(problem.chain, problem.topology, problem.policy, stages, one.batch_microbatches)
                real += result.microbatch_us <= within_us * (1 + 1e-8)
                assert equal or result.microbatch_us <= within_us * (1 + 1e-8)
            if one.batch_microbatches == problem.batch(best.stages):
                assert possible
        together = linked_for(problem, every)
        assert together is not None and together.within(best.microbatch_us * (1 + 1e-9)) is not None

    run()
    assert seen >= 100 and below >= 0.97 * seen and real >= 0.97 * seen, (below, real, seen)


@pytest.mark.parametrize("cluster", [two_level(2, 2), two_level(3, 2), two_level(4, 1), unequal(3, 2, speed=0.5)])
def test_every_way_to_lay_stages_is_there_once(cluster: Cluster) -> None:
    """Counted by hand: all sequences of three allocations, up to the names of equal servers."""
    topology = Topology(cluster)
    placed = Placings(topology, topology.device_count)
    steps: dict[tuple[int, int], int] = {}  # from a state to the states after one more stage, and how many steps lead there
    heads = {head: number for number, head in enumerate(placed.heads)}
    for allocation, head, state in zip(placed.step_allocation.tolist(), placed.step_head.tolist(), placed.step_state.tolist(), strict=True):
        u, pattern = placed.heads[head]
        assert pattern == topology.pattern(placed.allocations[allocation]) and heads[u, pattern] == head
        assert sum(placed.states[state][0]) == sum(u) + sum(placed.allocations[allocation])
        steps[head, state] = steps.get((head, state), 0) + 1
    reached = {placed.states[0][0]}
    for _ in range(3):
        reached |= {placed.states[state][0] for (head, state) in steps if placed.heads[head][0] in reached}
    capacities = topology.capacities
    every = [a for a in itertools.product(*(range(c + 1) for c in capacities)) if any(a)]
    wanted = {(0,) * len(capacities)}
    groups = [p for pair in topology.interchangeable for p in pair]
    for count in range(1, 4):
        for several in itertools.product(every, repeat=count):
            total = [sum(column) for column in zip(*several, strict=True)]
            if all(t <= c for t, c in zip(total, capacities, strict=True)):
                equal = sorted((total[p] for p in set(groups)), reverse=True)
                wanted.add(tuple(equal.pop(0) if p in groups else total[p] for p in range(len(total))))
    assert reached == wanted


def test_a_larger_allocation_is_kept_where_its_count_is_what_the_batch_needs() -> None:
    """A batch of 2, as updates are dear: one replica is fast enough, but only two on one server make the batch."""
    problem = problem_of(chain_of(make_profile([layer("a", forward_us=100.0, update_us=1000.0, parameter_bytes=10**7)])),
                         Topology(two_level(2, 2, intra=1e13, inter=1e7)), PlanOptions())
    (scenario,) = [one for one in scenarios(problem) if one.batch_microbatches == 2]
    linked = linked_for(problem, [scenario])
    assert linked is not None and linked.within(700.0) == 2
    assert [stage.allocation for stage in linked.stages()] in ([(2, 0)], [(0, 2)])


def test_a_larger_allocation_is_kept_where_its_batch_is_longer() -> None:
    """Of two and three replicas on each of two servers, two with batches of 4 overfill their links; three with batches of 18 do not."""
    servers = tuple(Node(f"server{i}", 1, Link(bandwidth, 0.0), None, (Node("device", size, Link(1e13, 0.0), "test", ()),))
                    for i, (size, bandwidth) in enumerate([(3, 1e9), (3, 1e9), (1, 1e10)]))
    layers = [layer("a", forward_us=130.0, parameter_bytes=18_000), layer("b", parameter_bytes=10**6)]
    model = make_profile(layers, [Tensor("x", 0, (1,), 68_000, 0)])
    problem = problem_of(chain_of(model), Topology(Cluster("servers", (DeviceType("test", 1.0, None),), servers)), PlanOptions(stages=2))
    linked = linked_for(problem, [Scenario(4, 4, False, 1, 7), Scenario(18, 6, False, 1, 7)])
    assert linked is not None and linked.within(40.0) == 7
    assert [stage.replicas for stage in linked.stages()] == [6, 1]
