"""The steady state against closed forms; idle shares, link use and memory against what they must be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.options import PlanOptions
from planner.simulation.depth import least_depth
from planner.simulation.difference import difference
from planner.simulation.simulate import simulate, steady_microbatch_us
from planner.simulation.workload import workload_of
from planner.solve import make_plan
from planner.spec.errors import BadInput, Mismatch
from planner.spec.plan import Plan
from planner.spec.profile import Profile, Tensor
from planner.spec.schedule import default_in_flight
from tests.planner.instances import flat, layer, profile, two_level
from tests.planner.plans import plan_of, stage_layer
from tests.planner.test_simulation_engine import plans

MB = 1_000_000
STAGE_US = 3000.0


def balanced(replicas: tuple[int, ...], transfer: float = 0.0, *, batches: int = 1, update_us: float = 0.0,
             **options: Any) -> tuple[Plan, Profile]:
    """Stages that take 3 ms per microbatch of the pipeline, with 1 MB both ways over links that take ``transfer`` * 3 ms for it."""
    layers = [stage_layer(k, STAGE_US * r / 3, STAGE_US * r * 2 / 3, update_us=update_us) for k, r in enumerate(replicas)]
    bandwidth = MB / (transfer * STAGE_US / 1e6) if transfer else 1e17
    return plan_of(layers, flat(sum(replicas), bandwidth=bandwidth), replicas=replicas, cuts=[(MB, MB)] * (len(replicas) - 1),
                   batch=math.lcm(*replicas) * batches, **options)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
def test_a_balanced_pipeline_is_as_fast_as_the_closed_form_says(stages: int, batches: int) -> None:
    plan, model = balanced((1,) * stages, update_us=300.0, batches=batches)
    assert plan.predicted.microbatch_us == pytest.approx(STAGE_US + 300 / batches)
    result = simulate(plan, model)
    assert result.microbatch_us == pytest.approx(plan.predicted.microbatch_us, rel=1e-6)
    assert all(worker.idle_share == pytest.approx(0, abs=1e-6) for worker in result.workers)
    assert difference(plan, model, result) is None


@pytest.mark.parametrize("transfer", [0.001, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_transfers_at_the_least_depth_cost_a_round_trip(stages: int, transfer: float) -> None:
    """Stage 0 has n microbatches in flight; each comes back after n stages' compute and 2 (n-1) transfers. One more a link hides them."""
    plan, model = balanced((1,) * stages, transfer)
    predicted_us = plan.predicted.microbatch_us
    round_trip_us = stages * STAGE_US + 2 * (stages - 1) * transfer * STAGE_US
    assert steady_microbatch_us(plan, model) == pytest.approx(round_trip_us / stages)
    deeper, model = balanced((1,) * stages, transfer, extra=1)
    assert steady_microbatch_us(deeper, model) == pytest.approx(predicted_us)
    why = difference(plan, model, simulate(plan, model))
    if transfer <= 0.001:
        assert why is None, "within 1 %"
    elif transfer >= 0.1:
        assert why is not None and why.deeper is not None
        assert why.deeper.in_flight == tuple(stage.in_flight for stage in deeper.stages)
        assert why.deeper.microbatch_us == pytest.approx(predicted_us)
        assert sum(why.wait_shares.values()) == pytest.approx(1 - stages * STAGE_US / round_trip_us, abs=0.01)


@pytest.mark.parametrize("transfer", [1.0, 3.0])
def test_a_slow_link_bounds_the_pipeline(transfer: float) -> None:
    """Stage 1 of 3 receives and sends two messages each way per microbatch: its link is the bottleneck, and is full when deep enough."""
    plan, model = balanced((1, 1, 1), transfer, extra=8)
    assert plan.predicted.bottleneck == "link device1"
    assert plan.predicted.microbatch_us == pytest.approx(2 * transfer * STAGE_US)
    result = simulate(plan, model)
    assert result.microbatch_us == pytest.approx(plan.predicted.microbatch_us, rel=1e-6)
    assert {(link.link, link.way): round(link.use, 2) for link in result.links} == {
        (f"device{k}", way): use for k, use in ((0, 0.5), (1, 1.0), (2, 0.5)) for way in ("up", "down")}


@pytest.mark.parametrize(("replicas", "batches"), [((2,), 1), ((8,), 2), ((2, 1), 1), ((3, 1), 1), ((2, 2), 2), ((4, 2), 1)])
def test_replicas_at_the_least_depth(replicas: tuple[int, ...], batches: int) -> None:
    plan, model = balanced(replicas, batches=batches)
    assert steady_microbatch_us(plan, model) == pytest.approx(plan.predicted.microbatch_us)


@pytest.mark.parametrize("replicas", [(1, 2), (2, 3), (3, 2), (1, 2, 1), (4, 1, 1), (1, 1, 4)])
def test_replicas_that_meet_at_updates_need_more_in_flight(replicas: tuple[int, ...]) -> None:
    """Even where transfers cost nothing: a replica that waits for the others at an update has nothing to do meanwhile."""
    plan, model = balanced(replicas)
    assert steady_microbatch_us(plan, model) > 1.1 * plan.predicted.microbatch_us
    deeper, model = balanced(replicas, extra=1)
    assert steady_microbatch_us(deeper, model) == pytest.approx(plan.predicted.microbatch_us)


def test_data_parallelism_pays_its_all_reduce_once_a_batch() -> None:
    """Four replicas, 8 MB over 1 GB/s: a ring of 2 * 3/4 * 8 MB is 12 ms a batch of 8, and 2 * 3 hops of 2 * 5 us."""
    layers = [stage_layer(0, 1000, 2000, update_us=400, parameter_bytes=8 * MB)]
    plan, model = plan_of(layers, flat(4, latency_us=5.0), replicas=(4,), batch=8)
    expected_us = 3000 / 4 + (400 + 12_000 + 60) / 8
    assert plan.predicted.microbatch_us == pytest.approx(expected_us)
    assert steady_microbatch_us(plan, model) == pytest.approx(expected_us)


@settings(max_examples=40)
@given(plans())
def test_never_faster_than_the_closed_form_of_the_stages(given_plan: tuple[Plan, Profile, int]) -> None:
    """Of equal devices; links are left out, as these plans' predictions know no shared ones."""
    plan, model, _ = given_plan
    bound_us = max(stage.compute_us + stage.update_us for stage in plan.predicted.stages)
    assert steady_microbatch_us(plan, model) >= bound_us * (1 - 1e-6) - 1e-6


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(100, 1000), st.integers(1, MB)), min_size=2, max_size=8), st.integers(1, 6),
       st.sampled_from([1e8, 1e9, 1e11]))
def test_what_make_plan_predicts_is_a_bound(sizes: list[tuple[float, int]], devices: int, bandwidth: float) -> None:
    layers = [layer(f"l{i}", forward_us=us, backward_us=2 * us, update_us=us / 9, parameter_bytes=size)
              for i, (us, size) in enumerate(sizes)]
    model = profile(layers, [Tensor(f"t{i}", i, (i + 1,), size, size) for i, (_, size) in enumerate(sizes[:-1])])
    plan = make_plan(model, two_level(2, 3, intra=bandwidth, inter=bandwidth / 4), PlanOptions(devices=devices), command="pipedream plan")
    with_profile = simulate(plan, model)
    assert with_profile.microbatch_us is not None
    assert with_profile.microbatch_us >= plan.predicted.microbatch_us * (1 - 1e-6)
    assert simulate(plan).microbatch_us == pytest.approx(with_profile.microbatch_us, rel=1e-6), "both assumptions hold here"
    loads = {link.link: link.load_bytes for link in plan.predicted.links}
    for link in with_profile.links:  # transfers that straddle the window's ends make a small difference
        assert link.microbatch_bytes <= loads[link.link] * 1.05 + 1


@settings(max_examples=40)
@given(plans())
def test_memory_stays_within_the_prediction_and_reaches_it_when_full(given_plan: tuple[Plan, Profile, int]) -> None:
    plan, model, _ = given_plan
    for worker in simulate(plan, model).workers:
        memory = plan.predicted.stages[worker.stage].memory
        assert worker.peak_bytes <= memory.total_bytes * (1 + 1e-9)
        if plan.worker_count == len(plan.stages):  # replicas admit microbatches that may be back before the depth is used up
            assert worker.peak_bytes == pytest.approx(memory.total_bytes)
        assert worker.memory[-1].in_flight == 0 and worker.memory[-1].versions == 1


@pytest.mark.parametrize(("policy", "batch"), [(policy, batch) for policy in ("stash", "vertical", "2bw", "latest") for batch in (1, 3, 4)
                                               if (policy, batch) != ("2bw", 1)])  # it needs batches as long as the pipeline
def test_versions_by_policy(policy: Any, batch: int) -> None:
    """Three stages, depths 3 2 1. Stash: ceil((d-1)/A) + 1; vertical: that of stage 0 at all; 2bw: two; latest: one."""
    plan, model = balanced((1, 1, 1), batches=batch, policy=policy)
    versions = [max(step.versions for step in worker.memory) for worker in simulate(plan, model).workers]
    stash = [math.ceil((depth - 1) / batch) + 1 for depth in (3, 2, 1)]
    assert versions == {"stash": stash, "vertical": [stash[0]] * 3, "2bw": [2, 2, 2], "latest": [1, 1, 1]}[policy]


def test_recomputing_holds_inputs_and_one_microbatch_and_computes_forward_again() -> None:
    layers = [stage_layer(k, 100, 200, saved_bytes=5 * MB) for k in range(2)]
    plan, model = plan_of(layers, flat(2, bandwidth=1e17), cuts=[(MB, MB)], recompute=True, in_flight=(4, 2))
    memory = dataclasses.replace(plan.predicted.stages[1].memory, activations_bytes=2 * MB + 5 * MB)  # two inputs, one set of activations
    stages = (plan.predicted.stages[0], dataclasses.replace(plan.predicted.stages[1], memory=memory))
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, stages=stages))
    work = workload_of(plan, model).stages[1]
    assert work.forward_us == pytest.approx((100,)) and work.backward_us == pytest.approx((300,))
    steps = simulate(plan, model).workers[1].memory
    assert max(step.total_bytes for step in steps) == 7 * MB
    assert {step.total_bytes for step in steps} == {0, MB, 2 * MB, 6 * MB, 7 * MB}


def test_total_time_counts_warm_up_and_drain() -> None:
    """n stages, M microbatches: (M + n - 1) * (F + B) when nothing else takes time."""
    plan, model = balanced((1, 1, 1, 1))
    result = simulate(plan, model, batches=10)
    assert result.total_us == pytest.approx((10 + 3) * STAGE_US)
    assert result.mean_us == pytest.approx(1.3 * STAGE_US)
    assert simulate(plan, model, batches=3).microbatch_us is None, "too short for a steady part"


@pytest.mark.parametrize("microbatches", [1, 2, 5, 12])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_flush_costs_a_fill_and_a_drain_each_batch(stages: int, microbatches: int) -> None:
    """Each batch of A takes A + n - 1 times a stage's time, as in any synchronous pipeline."""
    plan, model = balanced((1,) * stages, batches=microbatches, policy="flush")
    expected_us = STAGE_US * (microbatches + stages - 1) / microbatches
    assert steady_microbatch_us(plan, model) == pytest.approx(expected_us)


def test_what_cannot_be_simulated_is_refused() -> None:
    plan, model = balanced((1, 1))
    with pytest.raises(BadInput, match="--batches 0"):
        simulate(plan, model, batches=0)
    with pytest.raises(BadInput, match=r"--batches 1000000000 .* 20000000"):
        simulate(plan, model, batches=10**9)
    with pytest.raises(Mismatch, match=model_digest(plan)):
        simulate(plan, dataclasses.replace(model, microbatch_size=9))


def test_plans_changed_by_hand_are_refused() -> None:
    plan, model = balanced((1, 1))
    with pytest.raises(Mismatch, match="only in one of them"):
        fewer = dataclasses.replace(plan.stages[1], layers=("another",))
        simulate(dataclasses.replace(plan, stages=(plan.stages[0], fewer)), model)
    with pytest.raises(BadInput, match="2bw"):
        simulate(dataclasses.replace(plan, policy="2bw"), model)
    with pytest.raises(BadInput, match="one batch of 1000000000 microbatches"):
        simulate(dataclasses.replace(plan, batch_microbatches=10**9), model)
    with pytest.raises(BadInput, match="microbatch_us -1"):
        dataclasses.replace(plan.predicted, microbatch_us=-1.0)


def model_digest(plan: Plan) -> str:
    return plan.profile_digest[:12]


def test_the_least_depth_is_the_smallest_that_reaches_the_closed_form() -> None:
    plan, model = balanced((1, 2, 1))
    depth = least_depth(plan, model)
    assert depth is not None and depth.in_flight == default_in_flight((1, 2, 1), 1)
    assert depth.microbatch_us == pytest.approx(plan.predicted.microbatch_us)
    fast, model = balanced((1, 1, 1))
    already = least_depth(fast, model)
    assert already is not None and already.extra_per_link == 0 and already.in_flight == (3, 2, 1)


def test_depths_that_do_not_fit_are_not_chosen() -> None:
    plan, model = balanced((1, 1, 1), 0.1)
    tried: list[tuple[int, ...]] = []

    def fits(in_flight: tuple[int, ...]) -> bool:
        tried.append(in_flight)
        return in_flight[0] <= 3

    depth = least_depth(plan, model, fits=fits)
    assert depth is not None and depth.in_flight == (3, 2, 1) and tried[1] == (5, 3, 1)
    assert least_depth(plan, model, fits=lambda in_flight: False) is None
