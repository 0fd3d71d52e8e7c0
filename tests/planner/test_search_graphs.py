"""The planner on graphs with branches: against exhaustive search, whose pipelines are those of the definition."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.search.exact import _paths
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.profile import Profile, Tensor
from tests.planner.graphs import every_pipeline, graph_profiles
from tests.planner.instances import GB, clusters, flat, layer, profile
from tests.planner.test_search import compare, options_strategy

EXAMPLES = int(os.environ.get("PIPEDREAM_EXAMPLES", "120"))
many = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def narrow_graphs(draw: st.DrawFn, *, most_layers: int) -> Profile:
    """Each layer uses one of the two before it, and perhaps another: branches that soon join again."""
    n = draw(st.integers(2, most_layers))
    uses = {i: {draw(st.integers(max(0, i - 2), i - 1)), *draw(st.sets(st.integers(0, i - 1), max_size=1))} for i in range(1, n)}
    times, amount = st.sampled_from([0.0, 3.0, 100.0, 251.5]), st.sampled_from([0, 1, 30_000, 1_000_000])
    layers = [layer(f"layer{i}", forward_us=draw(times), backward_us=draw(times), update_us=draw(times) / 3, parameter_bytes=draw(amount),
                    saved_bytes=draw(amount), workspace_bytes=draw(amount)) for i in range(n)]
    tensors = [Tensor(f"tensor{i}", i, tuple(sorted(j for j in uses if i in uses[j])), draw(amount), draw(amount))
               for i in range(n) if any(i in uses[j] for j in uses)]
    return profile(layers, tensors)


@settings(parent=many, max_examples=EXAMPLES // 2)
@given(graph_profiles(most_layers=5) | narrow_graphs(most_layers=7))
def test_exhaustive_search_walks_through_every_pipeline(model: Profile) -> None:
    chain = chain_of(model)
    problem = problem_of(chain, Topology(flat(9)), PlanOptions())
    walked = {tuple(frozenset(chain.layers(*stage)) for stage in path) for path in _paths(problem, 0, 9)}
    assert walked == set(every_pipeline(model))


@many
@given(graph_profiles(most_layers=4), clusters(), options_strategy)
def test_equals_exhaustive_search(model: Profile, cluster: Cluster, options: PlanOptions) -> None:
    compare(model, cluster, options)


@settings(parent=many, max_examples=EXAMPLES // 2)
@given(narrow_graphs(most_layers=9), st.integers(1, 3), st.sampled_from([3e7, 1e9, 1e11]), st.one_of(st.none(), st.integers(10**3, 10**7)),
       options_strategy)
def test_equals_exhaustive_search_on_larger_graphs(model: Profile, devices: int, bandwidth: float, memory: int | None,
                                                  options: PlanOptions) -> None:
    assume(len(chain_of(model).intervals()) < 500)
    compare(model, flat(devices, bandwidth=bandwidth, memory_bytes=memory), options)


def test_a_plan_may_separate_branches() -> None:
    """Two equal branches: one stage each is twice as fast as any cut of the execution order could be."""
    tensors = [Tensor("x", 0, (1, 2), 0, 0), Tensor("y1", 1, (3,), 0, 0), Tensor("y2", 2, (4,), 0, 0), Tensor("z1", 3, (5,), 0, 0),
               Tensor("z2", 4, (5,), 0, 0)]
    times = (0.0, 60.0, 70.0, 60.0, 50.0, 0.0)  # in execution order 0 1 2 3 4 5 the cuts balance to 130 at best
    layers = [layer(f"layer{i}", forward_us=time_us, parameter_bytes=GB) for i, time_us in enumerate(times)]
    plan = make_plan(profile(layers, tensors), flat(2), PlanOptions(), command="x")
    assert plan.predicted.microbatch_us == 120.0
    assert {frozenset({"layer1", "layer3"}), frozenset({"layer2", "layer4"})} == {
        frozenset(stage.layers) - {"layer0", "layer5"} for stage in plan.stages}
