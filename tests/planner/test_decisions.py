"""What a plan decides beside stages and places: policy, recomputation, depth, and the limits a user sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.one_way import Planned, plan_one_way
from planner.options import PlanOptions, problem_of
from planner.search.exact import exhaustive
from planner.search.problem import Problem
from planner.search.search import Found, search
from planner.simulation.depth import with_in_flight
from planner.simulation.simulate import steady_microbatch_us
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, Infeasible, PolicyRefuses, TooSlow
from planner.spec.files import digest
from planner.spec.plan import Plan, Policy
from planner.spec.profile import AtSize, Profile, Tensor
from planner.spec.schedule import default_in_flight
from planner.variants import with_microbatch_size
from tests.planner.instances import clusters, flat, layer, profile, profiles, two_level


def blocks(count: int = 8, *, saved_bytes: int = 0, parameter_bytes: int = 0, sent_bytes: int = 0, update_us: float = 0.0,
           copy_us: float = 0.0) -> Profile:
    """Equal layers of 300 us."""
    layers = [layer(f"block{i}", forward_us=100.0, backward_us=200.0, saved_bytes=saved_bytes, parameter_bytes=parameter_bytes,
                    update_us=update_us, copy_us=copy_us) for i in range(count)]
    return profile(layers, [Tensor(f"x{i}", i, (i + 1,), sent_bytes, sent_bytes) for i in range(count - 1)])


def plan_for(model: Profile, cluster: Cluster, **options: object) -> Plan:
    return make_plan(model, cluster, PlanOptions(**options), command="x")  # type: ignore[arg-type]


def peak_bytes(plan: Plan) -> int:
    return max(stage.memory.total_bytes for stage in plan.predicted.stages)


def test_memory_decides_which_stages_recompute() -> None:
    """Four stages of two layers hold 4, 3, 2 and 1 times 200 bytes; with room for 500 the first two must recompute."""
    model = blocks(saved_bytes=100)
    free = plan_for(model, flat(4), stages=4)
    assert [stage.memory.total_bytes for stage in free.predicted.stages] == [800, 600, 400, 200]
    tight = plan_for(model, flat(4, memory_bytes=500), stages=4)
    assert [stage.recompute for stage in tight.stages] == [True, True, False, False]
    assert peak_bytes(tight) <= 500 and tight.predicted.microbatch_us == 800
    assert [stage.recompute for stage in plan_for(model, flat(4), stages=4, recompute="always").stages] == [True] * 4
    never = plan_for(model, flat(4, memory_bytes=500), stages=4, recompute="never")
    assert [len(stage.layers) for stage in never.stages] == [1, 1, 2, 4] and never.predicted.microbatch_us == 1200
    with pytest.raises(Infeasible):
        plan_for(model, flat(4, memory_bytes=399), stages=4, recompute="never")


def test_depth_covers_what_transfers_take() -> None:
    """Transfers of half a stage's time: at the least depth the simulation is slower than the closed form, deeper it is not."""
    model = blocks(4, sent_bytes=150_000)
    plan = plan_for(model, flat(4, bandwidth=1e9), stages=4)
    assert plan.predicted.microbatch_us == 300
    least = with_in_flight(plan, default_in_flight(plan.replicas))
    assert steady_microbatch_us(least, model) > 300 * 1.1
    assert plan.predicted.simulated_us == pytest.approx(300, rel=0.01)
    assert plan.stages[0].in_flight > default_in_flight(plan.replicas)[0]
    shallow = plan_for(model, flat(4, bandwidth=1e9), stages=4, extra_in_flight=0)
    assert tuple(stage.in_flight for stage in shallow.stages) == (4, 3, 2, 1)
    assert shallow.predicted.simulated_us == pytest.approx(steady_microbatch_us(least, model))


def test_depth_stays_within_memory() -> None:
    model = blocks(4, sent_bytes=150_000, saved_bytes=1000)
    cluster = flat(4, bandwidth=1e9, memory_bytes=1000 * 3 + 150_000 * 3)  # stage 1 holds three microbatches and no more
    plan = plan_for(model, cluster, stages=4, recompute="never")
    assert plan.stages[1].in_flight == 3 and peak_bytes(plan) <= 1000 * 3 + 150_000 * 3
    with pytest.raises(Infeasible, match="--extra-in-flight 1 needs") as caught:
        plan_for(model, cluster, stages=4, recompute="never", extra_in_flight=1)
    assert caught.value.code == "infeasible_memory"


def test_a_flush_drains_the_pipeline() -> None:
    """Eight microbatches and two stages: nine times a stage's time for a batch, in the closed form and in the simulation."""
    plan = plan_for(blocks(), flat(2), policy="flush", stages=2)
    assert plan.batch_microbatches == 8
    assert plan.predicted.microbatch_us == pytest.approx(1200 * 9 / 8)
    assert plan.predicted.simulated_us == pytest.approx(1200 * 9 / 8)
    long = plan_for(blocks(), flat(2), policy="flush", stages=2, batch_microbatches=100)
    assert long.predicted.microbatch_us == pytest.approx(1200 * 101 / 100)


def test_auto_takes_the_least_stale_of_what_is_fast() -> None:
    """Drains cost a tenth, so 2bw; without weights to copy it is as fast as stash, and less stale; in one stage nothing drains."""
    assert plan_for(blocks(), flat(2), policy="auto", stages=2).policy == "2bw"
    assert plan_for(blocks(), flat(1), policy="auto").policy == "flush"
    assert plan_for(blocks(), flat(2), policy="auto", stages=2, batch_microbatches=1000).policy == "flush"
    assert plan_for(blocks(), flat(2), policy="auto", stages=2, batch_microbatches=1).policy == "stash"  # 2bw needs two


def test_auto_takes_what_fits() -> None:
    """One weight version fits, two do not."""
    model = blocks(parameter_bytes=1000)
    both = plan_for(model, flat(2, memory_bytes=8000), policy="auto", stages=2, batch_microbatches=2)
    assert both.policy == "flush"
    with pytest.raises(Infeasible):
        plan_for(model, flat(2, memory_bytes=8000), policy="stash", stages=2, batch_microbatches=2)
    with pytest.raises(Infeasible):
        plan_for(model, flat(2, memory_bytes=7999), policy="auto", stages=2, batch_microbatches=2)


def test_pins_and_layers_kept_together() -> None:
    model = blocks()
    plan = plan_for(model, flat(4), pins=(("block0", 0), ("block1", 1)))
    assert "block0" in plan.stages[0].layers and "block1" in plan.stages[1].layers
    assert plan.stages[0].layers == ("block0",)
    joined = plan_for(model, flat(4), together=(("block2", "block4"), ("block4", "block5")))
    (stage,) = [stage for stage in joined.stages if "block2" in stage.layers]
    assert {"block2", "block3", "block4", "block5"} <= set(stage.layers)
    assert joined.profile_digest == plan.profile_digest


@pytest.mark.parametrize("cluster", [flat(6), two_level(2, 3, intra=1e10, inter=1e9)])
def test_equal_replicas(cluster: Cluster) -> None:
    model = blocks(3, parameter_bytes=50_000)
    for policy in ("stash", "2bw"):
        plan = plan_for(model, cluster, equal_replicas=True, policy=policy)
        assert len(set(plan.replicas)) == 1
        assert plan.predicted.microbatch_us >= plan_for(model, cluster, policy=policy).predicted.microbatch_us * (1 - 1e-9)
    assert plan_for(model, cluster, equal_replicas=True, stages=3).replicas == (2, 2, 2)


def test_the_fewest_devices_that_are_fast_enough() -> None:
    """Eight layers of 300 us and 8 samples a microbatch: 4 devices reach 600 us, 3 do not."""
    model = blocks()
    assert plan_for(model, flat(8), objective="devices").worker_count == 1
    enough = plan_for(model, flat(8), objective="devices", min_samples_per_s=8e6 / 601)
    assert (enough.worker_count, enough.predicted.microbatch_us) == (4, 600)
    assert "devices" in enough.solver.restricted
    tight = plan_for(blocks(saved_bytes=100), flat(8, memory_bytes=400), objective="devices", recompute="never")
    assert tight.worker_count == 4 and peak_bytes(tight) <= 400  # 4 x 1, 3 x 1, 2 x 2 and 1 x 4 layers in flight
    with pytest.raises(Infeasible, match="--min-samples-per-s"):
        plan_for(model, flat(2), objective="devices", min_samples_per_s=8e6 / 601)


def test_the_least_memory_that_is_fast_enough() -> None:
    model = blocks(saved_bytes=100)
    fast = plan_for(model, flat(4, memory_bytes=10**6))
    small = plan_for(model, flat(4, memory_bytes=10**6), objective="memory")
    assert peak_bytes(small) < peak_bytes(fast)
    assert all(stage.available_bytes == 10**6 for stage in small.predicted.stages)
    floor = plan_for(model, flat(4, memory_bytes=10**6), objective="memory", min_samples_per_s=8e6 / 601)
    assert peak_bytes(small) <= peak_bytes(floor) <= peak_bytes(fast) and floor.predicted.microbatch_us <= 601


def test_what_the_original_cost_model_does_not_know_is_refused() -> None:
    for options in (PlanOptions(policy="auto"), PlanOptions(objective="memory"), PlanOptions(pins=(("block0", 0),)),
                    PlanOptions(recompute="always"), PlanOptions(stages=2)):
        with pytest.raises(BadInput, match="pipedream-2019"):
            make_plan(blocks(), flat(4), dataclasses.replace(options, cost_model="pipedream-2019"), command="x")


def at_sizes(*sizes: int, fixed_us: float = 100.0) -> Profile:
    """Eight layers that take ``fixed_us`` + 20 us a sample forward, and save 100 bytes a sample."""
    def at(size: int) -> Profile:
        layers = [layer(f"block{i}", forward_us=fixed_us + 20.0 * size, saved_bytes=100 * size, parameter_bytes=7) for i in range(8)]
        one = profile(layers, [Tensor(f"x{i}", i, (i + 1,), 10 * size, 10 * size) for i in range(7)])
        return dataclasses.replace(one, microbatch_size=size, fingerprint=f"of {size}")

    others = tuple(AtSize(size, f"of {size}", None, at(size).layers, at(size).tensors) for size in sizes[1:])
    return dataclasses.replace(at(sizes[0]), other_sizes=others)


def test_the_microbatch_size_is_chosen_among_the_measured() -> None:
    """Large microbatches use a device better; memory for 4 x 2 x 1600 bytes of activations has no room for them in four stages."""
    model = at_sizes(8, 4, 16)
    assert model.sizes == (8, 4, 16)
    plan = plan_for(model, flat(4), stages=4)
    assert (plan.microbatch_size, plan.fingerprint, plan.profile_digest) == (16, "of 16", digest(model))
    assert plan.predicted.simulated_us == pytest.approx(2 * (100 + 20 * 16), rel=1e-3)
    assert plan_for(model, flat(4), stages=4, microbatch_size=4).predicted.microbatch_us == 2 * (100 + 20 * 4)
    tight = plan_for(model, flat(4, memory_bytes=4 * 2 * 800 + 3000), stages=4, recompute="never", max_replicas=1)
    assert tight.microbatch_size == 8
    with pytest.raises(BadInput, match="--microbatch-size 5 is asked, measured were 8, 4, 16"):
        plan_for(model, flat(4), microbatch_size=5)


def test_sizes_between_measured_ones_lie_on_a_line() -> None:
    model = at_sizes(8, 4, 16)
    for size in (1, 6, 12, 40):
        found, expected = with_microbatch_size(model, size), at_sizes(size)
        assert [layer.forward_us for layer in found.layers] == pytest.approx([layer.forward_us for layer in expected.layers])
        assert [layer.saved_bytes for layer in found.layers] == [layer.saved_bytes for layer in expected.layers]
        assert [tensor.forward_bytes for tensor in found.tensors] == [tensor.forward_bytes for tensor in expected.tensors]
        assert found.estimated and found.sizes == (size,)
    assert with_microbatch_size(model, 16) == model.at(16)
    assert with_microbatch_size(at_sizes(8), 4).layers[0].forward_us == (100 + 160) / 2  # in proportion


def test_sizes_of_another_model_are_refused() -> None:
    model = at_sizes(8, 4)
    (other,) = model.other_sizes
    for wrong in (dataclasses.replace(other, layers=other.layers[1:]), dataclasses.replace(other, tensors=other.tensors[1:]),
                  dataclasses.replace(other, microbatch_size=8)):
        with pytest.raises(BadInput):
            dataclasses.replace(model, other_sizes=(wrong,))


def test_2bw_goes_no_deeper_than_its_two_versions_allow() -> None:
    """Long transfers ask for more in flight; batches of four in four stages allow five, longer ones more."""
    model = blocks(4, sent_bytes=250_000)
    short = plan_for(model, flat(4, bandwidth=1e9), stages=4, policy="2bw", batch_microbatches=4)
    assert short.stages[0].in_flight <= 5
    long = plan_for(model, flat(4, bandwidth=1e9), stages=4, policy="2bw", batch_microbatches=16)
    assert long.stages[0].in_flight > 5 and (long.predicted.simulated_us or 0) < (short.predicted.simulated_us or 0)
    with pytest.raises(BadInput, match="too short"):
        plan_for(model, flat(4, bandwidth=1e9), stages=4, policy="2bw", batch_microbatches=4, extra_in_flight=1)
    chosen = plan_for(model, flat(4, bandwidth=1e9), stages=4, policy="2bw")
    assert chosen.batch_microbatches == 8 and (chosen.predicted.simulated_us or 0) < (short.predicted.simulated_us or 0)


def test_an_objective_that_runs_out_of_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search after the first finds the time up."""
    calls = []

    def late(problem: Problem, *, deadline: float | None = None) -> Found | None:
        calls.append(problem)
        if len(calls) > 1:
            raise Infeasible("no plan was found within the time limit", hint="", code="time_limit")
        return search(problem, deadline=deadline)

    monkeypatch.setattr("planner.objective.search", late)
    plan = plan_for(blocks(), flat(8), objective="devices")
    assert plan.worker_count == 8 and "whether fewer would do was not settled in time" in plan.solver.restricted


def test_no_other_way_with_the_same_batch_is_faster() -> None:
    """Updates of 100 us a layer. With the least batches data parallelism is faster, 300 + 200 / 2 us with two microbatches,
    than a pipeline, 320 + 100 us with one. But with two microbatches as well that takes 320 + 100 / 2 us.
    """
    model = profile([layer("a", forward_us=280.0, update_us=100.0), layer("b", forward_us=320.0, update_us=100.0)],
                    [Tensor("x", 0, (1,), 1, 1)])
    plan = plan_for(model, flat(2))
    assert (plan.batch_microbatches, plan.replicas, plan.predicted.microbatch_us) == (2, (1, 1), 370)
    assert all(other.microbatch_us is None or other.microbatch_us >= plan.predicted.microbatch_us * (1 - 1e-9)
               for other in plan.predicted.baselines if "rare" not in other.name)
    alone = plan_for(model, flat(2), batch_microbatches=2)
    assert alone.predicted.microbatch_us == plan.predicted.microbatch_us


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(profiles(most_layers=4), clusters(), st.sampled_from(["stash", "vertical", "2bw", "flush"]))
def test_a_plan_is_the_best_with_its_batch(model: Profile, cluster: Cluster, policy: Policy) -> None:
    """And no slower than the best with the least batch of its replicas."""
    options = PlanOptions(policy=policy, recompute="never")
    problem = problem_of(chain_of(model), Topology(cluster), options)
    least = exhaustive(problem)
    if least is None:
        return
    plan = make_plan(model, cluster, options, command="x")
    tried = dataclasses.replace(options, batch_microbatches=plan.batch_microbatches)
    at_batch = exhaustive(problem_of(chain_of(model), Topology(cluster), tried))
    assert at_batch is not None
    longer = policy == "2bw" and plan.batch_microbatches > problem.batch(least.stages)  # twice the batch, to go deeper
    if not longer:
        assert plan.predicted.microbatch_us <= least.microbatch_us * (1 + 2e-6)
    assert plan.predicted.microbatch_us == pytest.approx(at_batch.microbatch_us, rel=2e-6)


def test_what_a_plan_must_reach_is_held_against_its_schedule() -> None:
    """Transfers make the schedule slower than the closed form where depth is fixed: the throughput asked for is the schedule's."""
    model = blocks(4, sent_bytes=150_000)
    cluster = flat(4, bandwidth=1e9)
    shallow = plan_for(model, cluster, stages=4, max_replicas=1, extra_in_flight=0)
    assert shallow.predicted.simulated_us is not None and shallow.predicted.simulated_us > 330
    with pytest.raises(TooSlow, match="--min-samples-per-s") as caught:
        plan_for(model, cluster, stages=4, max_replicas=1, extra_in_flight=0, min_samples_per_s=8e6 / 310)
    assert caught.value.samples_per_s == pytest.approx(8e6 / shallow.predicted.simulated_us)
    for objective in ("devices", "memory"):
        plan = plan_for(model, cluster, max_replicas=1, objective=objective, min_samples_per_s=8e6 / 650)
        assert (plan.predicted.simulated_us or 0) <= 650


def test_the_objective_counts_before_time_over_several_sizes() -> None:
    """Memory: small microbatches have less in flight. Devices: at 120 us a sample those of 16 need two and take 105 us,
    those of 8 need three, with which they are faster.
    """
    model = at_sizes(16, 8, fixed_us=0.0)
    plan = plan_for(model, flat(4), objective="memory", recompute="never", stages=2)
    assert plan.microbatch_size == 8
    assert [other.name for other in plan.predicted.baselines][-1] == "microbatches of 16"
    few = plan_for(at_sizes(8, 16), flat(4), objective="devices", min_samples_per_s=1e6 / 120)
    more = plan_for(at_sizes(8, 16), flat(4), objective="devices", min_samples_per_s=1e6 / 120, microbatch_size=8)
    assert (few.worker_count, few.microbatch_size, more.worker_count) == (2, 16, 3)
    assert more.predicted.expected_us / 8 < few.predicted.expected_us / 16


def test_auto_says_what_the_others_would_take() -> None:
    plan = plan_for(blocks(), flat(2), policy="auto", stages=2)
    names = [other.name for other in plan.predicted.baselines]
    assert names[-2:] == ["policy flush", "policy stash"] and plan.policy == "2bw"


def test_layers_that_no_cut_separates_cannot_be_pinned_apart() -> None:
    with pytest.raises(Infeasible) as caught:
        plan_for(blocks(), flat(4), together=(("block1", "block5"),), pins=(("block1", 0), ("block5", 1)))
    assert "block1 and block5 are always in one stage" in caught.value.hint


def test_auto_goes_without_a_policy_that_refuses() -> None:
    """So deep 2bw would need longer batches than these; the others do not."""
    options = {"stages": 2, "batch_microbatches": 2, "extra_in_flight": 5}
    with pytest.raises(PolicyRefuses, match="2bw"):
        plan_for(blocks(), flat(2), policy="2bw", **options)
    assert plan_for(blocks(), flat(2), policy="auto", **options).policy != "2bw"


@pytest.mark.parametrize("seconds", [0.001, 0.05])
def test_an_easy_plan_is_found_in_no_time(seconds: float) -> None:
    """Data parallelism and one device are too small, and so are as many stages as devices; some hybrid of both fits."""
    model = blocks(32, saved_bytes=10_000, parameter_bytes=10_000)
    plan = plan_for(model, two_level(4, 8, intra=1e10, inter=1e9, memory_bytes=800_000), recompute="never", time_limit_s=seconds)
    assert peak_bytes(plan) <= 800_000


def test_a_longer_batch_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """2bw tries twice the batch where its schedule waits; when no such plan is found in time, the first one stays."""
    def only_the_first(*arguments: Any) -> Planned:
        if arguments[4].batch_microbatches is not None:
            raise Infeasible("no plan was found within the time limit", hint="", code="time_limit")
        return plan_one_way(*arguments)

    monkeypatch.setattr("planner.solve.plan_one_way", only_the_first)
    plan = plan_for(blocks(4, sent_bytes=250_000), flat(4, bandwidth=1e9), stages=4, policy="2bw")
    assert plan.predicted.waits and plan.batch_microbatches == 4
