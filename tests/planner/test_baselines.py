"""What a plan is compared with is what it says: held against exhaustive search and sums by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.baselines import baselines
from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.published.pipedream2019.plan import make_plan_2019
from planner.search.exact import exhaustive
from planner.search.problem import Problem
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.plan import Baseline
from planner.spec.profile import Profile
from planner.straight import straight_pipeline
from tests.planner.graphs import graph_profiles
from tests.planner.instances import clusters, flat, layer, profile, two_level, unequal
from tests.planner.instances import profiles as chain_profiles
from tests.planner.test_search import many, options_strategy
from tests.planner.test_solve import model


def named(plan_baselines: tuple[Baseline, ...], name: str) -> Baseline:
    return next(one for one in plan_baselines if one.name == name)


def asked(source: Profile, cluster: Cluster, options: PlanOptions) -> Problem:
    chain, topology = chain_of(source), Topology(cluster)
    return problem_of(chain, topology, dataclasses.replace(options, stages=None, pins=()))


def straight_and_exhaustive(source: Profile, cluster: Cluster, options: PlanOptions, batch: int) -> tuple[Baseline, float | None]:
    problem = asked(source, cluster, options)
    problem = dataclasses.replace(problem, batch_microbatches=batch)
    best = exhaustive(dataclasses.replace(problem, max_replicas=1, equal_replicas=False))
    stages = straight_pipeline(problem, batch)
    assert stages is not None
    found = named(baselines(problem, source, stages or (), batch), "straight pipeline")
    if stages:
        assert all(stage.replicas == 1 for stage in stages)
        assert [stage.first for stage in stages[1:]] == [stage.last for stage in stages[:-1]] and stages[-1].last == problem.chain.end
    return found, None if best is None else best.microbatch_us


@many
@given(st.one_of(chain_profiles(), graph_profiles(most_layers=5)), clusters(), options_strategy)
def test_a_straight_pipeline_is_never_better_than_the_best_and_on_one_server_it_is_the_best(
        source: Profile, cluster: Cluster, options: PlanOptions) -> None:
    problem = asked(source, cluster, options)
    if problem.max_devices == 1 or problem.chain.most_stages == 1 or problem.policy == "vertical":
        return
    batch = problem.max_devices if problem.policy == "2bw" else options.batch_microbatches or 4
    found, best_us = straight_and_exhaustive(source, cluster, options, batch)
    assert found.microbatch_us is not None
    if found.fits:
        assert best_us is not None and found.microbatch_us >= best_us * (1 - 1e-9)
    if len(problem.topology.places) == 1:
        assert found.fits == (best_us is not None)
        assert best_us is None or found.microbatch_us == pytest.approx(best_us, rel=1e-9)


def test_one_device_and_data_parallelism_are_sums() -> None:
    source = model()
    plan = make_plan(source, flat(4, bandwidth=1e9), PlanOptions(batch_microbatches=12), command="x")
    compute_us = sum(x.forward_us + x.backward_us for x in source.layers)
    update_us = sum(x.update_us for x in source.layers)
    ring_us = 2 * 3 / 4 * sum(x.parameter_bytes for x in source.layers) / 1e9 * 1e6
    found = plan.predicted.baselines
    assert named(found, "one device").microbatch_us == pytest.approx(compute_us + update_us / 12)
    for name, batch in (("data parallelism", 4), ("data parallelism, rare updates", 12)):
        assert named(found, name).microbatch_us == pytest.approx(compute_us / 4 + (update_us + ring_us) / batch)
        assert f"after every {batch} microbatches" in named(found, name).note


def test_a_batch_that_data_parallelism_has_by_itself_is_named_once() -> None:
    plan = make_plan(model(), flat(4), PlanOptions(), command="x")
    assert plan.batch_microbatches <= 4
    assert [one.name for one in plan.predicted.baselines].count("data parallelism") == 1
    assert not any("rare" in one.name for one in plan.predicted.baselines)


@pytest.mark.parametrize("devices", [2, 3, 5, 8, 20])
def test_an_equal_split_has_equal_numbers_of_layers(devices: int) -> None:
    layers = [layer(f"l{i}", forward_us=float(2**i)) for i in range(10)]
    source = profile(layers)
    found = named(make_plan(source, flat(devices), PlanOptions(), command="x").predicted.baselines, "equal split")
    stages = min(devices, 10)
    cuts = [round(k * 10 / stages) for k in range(stages + 1)]
    assert found.note == f"{stages} stages of equal numbers of layers"
    slowest = max(sum(2**i for i in range(a, b)) for a, b in itertools.pairwise(cuts))
    assert found.microbatch_us == pytest.approx(slowest)


def test_draining_costs_what_the_document_says() -> None:
    """(A times the slowest stage's time, and once every other stage's) / A."""
    source = profile([layer("a", forward_us=100.0, backward_us=200.0), layer("b", forward_us=150.0, backward_us=100.0)])
    plan = make_plan(source, flat(2), PlanOptions(batch_microbatches=5, stages=2), command="x")
    assert named(plan.predicted.baselines, "synchronous flush").microbatch_us == pytest.approx((5 * 300 + 250) / 5)
    flushed = make_plan(source, flat(2), PlanOptions(batch_microbatches=5, stages=2, policy="flush"), command="x")
    assert "synchronous flush" not in [one.name for one in flushed.predicted.baselines]


@pytest.mark.parametrize("cluster", [flat(4, bandwidth=1e9), two_level(2, 3, intra=1e9, inter=1e8)])
def test_the_originals_plan_is_its_own_under_our_cost_model(cluster: Cluster) -> None:
    source = model(9, seed=5)
    theirs = make_plan_2019(source, cluster, command="x")
    found = named(make_plan(source, cluster, PlanOptions(), command="x").predicted.baselines, "PipeDream 2019")
    counts = "-".join(map(str, theirs.replicas))
    assert found.note.startswith(f"replicas {counts},")
    same = [dict.fromkeys(stage.layers, stage.devices) for stage in theirs.stages]
    assert found.microbatch_us is not None and len(same) == len(theirs.replicas)
    slowest_us = max(sum(x.forward_us + x.backward_us for x in source.layers if x.name in stage.layers) / len(stage.devices)
                     for stage in theirs.stages)
    assert found.microbatch_us >= slowest_us


def test_what_is_left_out_says_why() -> None:
    plan = make_plan(model(), unequal(2, 2, speed=0.5), PlanOptions(), command="x")
    found = named(plan.predicted.baselines, "PipeDream 2019")
    assert found.microbatch_us is None and "equal devices" in found.note
    assert plan.predicted.baseline_us("PipeDream 2019") == float("inf")
    part = make_plan(model(), two_level(2, 2), PlanOptions(devices=3), command="x")
    assert named(part.predicted.baselines, "PipeDream 2019").microbatch_us is None


def test_what_does_not_fit_is_marked_and_recomputation_helps_where_it_may() -> None:
    layers = [layer(f"l{i}", forward_us=100.0, backward_us=200.0, saved_bytes=10**6, parameter_bytes=1000) for i in range(4)]
    source = profile(layers)
    small = make_plan(source, flat(4, memory_bytes=2_100_000), PlanOptions(recompute="never"), command="x").predicted.baselines
    assert not named(small, "one device").fits
    # All four layers: 4 MB saved, twice the weights; recomputing saves nothing with one microbatch in flight.
    again = make_plan(source, flat(4, memory_bytes=2_100_000), PlanOptions(), command="x").predicted.baselines
    assert not named(again, "one device").fits
    assert not named(small, "equal split").fits and named(again, "equal split").fits  # stage 0 keeps four microbatches, or their inputs
