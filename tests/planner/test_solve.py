"""Complete plans: what they say, that they are reproducible, and what is said when there is none."""

from __future__ import annotations

import random
import re

import pulp
import pytest

from planner.explain import bottleneck_sentence
from planner.hardware.clusters import load_cluster
from planner.hardware.topology import Topology
from planner.least_memory import least_memory
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.simulation.simulate import steady_microbatch_us
from planner.solve import make_plan
from planner.spec.errors import BadInput, Infeasible
from planner.spec.files import digest, document_text, parse_document
from planner.spec.plan import Plan
from planner.spec.profile import Profile, Tensor
from planner.spec.schedule import default_in_flight
from tests.planner.instances import flat, layer, profile, two_level


def model(layers: int = 8, seed: int = 1) -> Profile:
    rng = random.Random(seed)
    return profile(
        [layer(f"block{i}", forward_us=rng.uniform(50, 500), backward_us=rng.uniform(100, 1000), update_us=rng.uniform(1, 40),
               copy_us=rng.uniform(1, 20), parameter_bytes=rng.randrange(10**5, 10**6), optimizer_bytes=rng.randrange(10**5, 10**6),
               saved_bytes=rng.randrange(10**5, 10**6), workspace_bytes=1000) for i in range(layers)],
        [Tensor(f"x{i}", i, (i + 1,), rng.randrange(10**3, 10**5), rng.randrange(10**3, 10**5)) for i in range(layers - 1)])


def test_a_plan_is_complete_and_consistent() -> None:
    source = model()
    plan = make_plan(source, two_level(2, 2, intra=1e10, inter=1e9), PlanOptions(), command="pipedream plan profile.json")
    assert [name for stage in plan.stages for name in stage.layers] == [x.name for x in source.layers]
    assert all(stage.in_flight >= least for stage, least in zip(plan.stages, default_in_flight(plan.replicas), strict=True))
    assert plan.predicted.simulated_us == pytest.approx(steady_microbatch_us(plan, source))
    assert (plan.command, plan.profile_digest, plan.policy) == ("pipedream plan profile.json", digest(source), "stash")
    assert (plan.solver.status, plan.solver.bound_us, plan.solver.gap) == ("optimal", plan.predicted.microbatch_us, 0.0)
    predicted = plan.predicted
    slowest = max([s.microbatch_us for s in predicted.stages] + [link.microbatch_us for link in predicted.links])
    assert predicted.microbatch_us == pytest.approx(slowest)
    assert predicted.microbatch_us <= min(predicted.baseline_us("one device"), predicted.baseline_us("data parallelism")) * (1 + 1e-9)
    total_us = sum(x.forward_us + x.backward_us + x.update_us / plan.batch_microbatches for x in source.layers)
    assert predicted.baseline_us("one device") == pytest.approx(total_us)
    assert parse_document(Plan, document_text(plan), source="plan") == plan


def test_the_same_request_gives_the_same_bytes() -> None:
    for cluster in (flat(6), two_level(2, 3, intra=1e10, inter=1e8)):
        texts = {document_text(make_plan(model(), cluster, PlanOptions(), command="x")) for _ in range(2)}
        assert len(texts) == 1


def test_equally_fast_plans_take_the_fewest_devices() -> None:
    """One layer is half of everything and cannot be split without an all-reduce that costs more: two devices do."""
    layers = [layer("small", forward_us=100.0), layer("large", forward_us=100.0, parameter_bytes=10**9)]
    plan = make_plan(profile(layers), flat(8), PlanOptions(), command="x")
    assert (plan.replicas, plan.predicted.microbatch_us) == ((1, 1), 100.0)


def test_packed_and_spread_placements_are_both_found() -> None:
    heavy_cut = [Tensor("x", 0, (1,), 10**6, 10**6)]
    small_weights = [layer("a", forward_us=100.0), layer("b", forward_us=100.0)]
    spread = make_plan(profile(small_weights, heavy_cut), two_level(2, 2, intra=1e12, inter=1e8), PlanOptions(stages=2), command="x")
    for stage in spread.stages:  # two inner pipelines, one on each server: nothing crosses between servers
        assert {path.split("/")[0] for path in stage.devices} == {"server0", "server1"}
    assert spread.stages[0].devices[0].split("/")[0] == spread.stages[1].devices[0].split("/")[0]
    assert not [link for link in spread.predicted.links if "/" not in link.link]
    large_weights = [layer("a", forward_us=100.0, parameter_bytes=10**6), layer("b", forward_us=100.0, parameter_bytes=10**6)]
    light_cut = [Tensor("x", 0, (1,), 10, 10)]
    packed = make_plan(profile(large_weights, light_cut), two_level(2, 2, intra=1e12, inter=1e8), PlanOptions(stages=2), command="x")
    for stage in packed.stages:  # each stage inside one server: its all-reduce is fast
        assert len(stage.devices) == 2 and len({path.split("/")[0] for path in stage.devices}) == 1


def test_bottleneck_sentences() -> None:
    stage = make_plan(model(), flat(2), PlanOptions(), command="x")
    assert re.match(r"Stage \d \(block\d", bottleneck_sentence(stage)) and "compute" in bottleneck_sentence(stage)
    layers = [layer("a", forward_us=1.0), layer("b", forward_us=1.0)]
    link = make_plan(profile(layers, [Tensor("x", 0, (1,), 10**6, 0)]), flat(2), PlanOptions(stages=2, max_replicas=1), command="x")
    assert link.predicted.bottleneck == "link device0"
    assert "link of device0" in bottleneck_sentence(link) and "1.00 ms" not in bottleneck_sentence(link)[:10]


def memory_needs(message: str) -> tuple[int, int]:
    need, available = re.findall(r"(\d+) bytes", message)
    return int(need), int(available)


@pytest.mark.parametrize("options", [PlanOptions(), PlanOptions(stages=2), PlanOptions(policy="vertical"), PlanOptions(policy="2bw"),
                                     PlanOptions(recompute="never"), PlanOptions(policy="flush", recompute="always"),
                                     PlanOptions(batch_microbatches=2, devices=3), PlanOptions(max_replicas=1)])
def test_infeasible_memory_names_what_binds_and_its_hint_helps(options: PlanOptions) -> None:
    source = model(6)
    least = least_memory(problem_of(chain_of(source), Topology(two_level(2, 2, memory_bytes=10**15)), options))
    assert least is not None
    need = least.memory_bytes
    for available in (need - 1, need // 2):
        with pytest.raises(Infeasible) as caught:
            make_plan(source, two_level(2, 2, memory_bytes=available), options, command="x")
        error = caught.value
        assert error.code == "infeasible_memory"
        assert memory_needs(error.message) == (need, available)
        assert "block" in error.message and f'memory = "{need} B"' in error.hint
    plan = make_plan(source, two_level(2, 2, memory_bytes=need), options, command="x")
    assert max(stage.memory.total_bytes for stage in plan.predicted.stages) == need


@pytest.mark.parametrize(("options", "error", "says"), [
    (PlanOptions(devices=0), BadInput, "--devices 0"),
    (PlanOptions(batch_microbatches=0), BadInput, "--batch-microbatches 0"),
    (PlanOptions(max_replicas=-1), BadInput, "--max-replicas -1"),
    (PlanOptions(time_limit_s=0.0), BadInput, "--time-limit"),
    (PlanOptions(pins=(("block9", 0),)), BadInput, "block9"),
    (PlanOptions(pins=(("block1", 4),)), Infeasible, "block1=4"),
    (PlanOptions(pins=(("block1", 0), ("block1", 1))), BadInput, "stage 0 and in stage 1"),
    (PlanOptions(pins=(("block1", 2), ("block2", 0))), Infeasible, "--pin"),
    (PlanOptions(together=(("block0", "what"),)), BadInput, "what"),
    (PlanOptions(together=(("block0", "block7"),), stages=2), Infeasible, "at most 1"),
    (PlanOptions(min_samples_per_s=1e9), Infeasible, "--min-samples-per-s"),
    (PlanOptions(stages=9), Infeasible, "at most 8"),
    (PlanOptions(stages=5), Infeasible, "4 may be used"),
    (PlanOptions(stages=3, policy="2bw", batch_microbatches=2), Infeasible, "3 stages"),
])
def test_impossible_requests(options: PlanOptions, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        make_plan(model(8), flat(4), options, command="x")
    assert says in caught.value.message and caught.value.hint  # type: ignore[attr-defined]


def test_a_model_of_one_layer_that_costs_nothing() -> None:
    plan = make_plan(profile([layer("only")]), flat(3), PlanOptions(), command="x")
    assert (plan.replicas, plan.predicted.microbatch_us, plan.solver.status) == ((1,), 0.0, "optimal")


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    make_plan(model(), load_cluster("2x2", device=model().device, intra_bandwidth=1e10, inter_bandwidth=1e9), PlanOptions(), command="x")
    assert capfd.readouterr() == ("", "")


def test_at_the_time_limit_the_best_plan_so_far_is_returned_unproven() -> None:
    plan = make_plan(model(14, seed=3), two_level(2, 4, intra=1e10, inter=1e7), PlanOptions(time_limit_s=1e-9), command="x")
    assert plan.solver.status == "feasible" and "time limit" in plan.solver.restricted
    assert 0 < plan.solver.bound_us < plan.predicted.microbatch_us and 0 < plan.solver.gap < 1


def test_cbc_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    if not {"COIN_CMD", "PULP_CBC_CMD"} & set(pulp.listSolvers(onlyAvailable=True)):
        pytest.skip("CBC is not installed")
    cluster = two_level(2, 3, intra=1e10, inter=1e8)
    with_highs = make_plan(model(), cluster, PlanOptions(), command="x")
    monkeypatch.setattr("planner.solver.solver_name", lambda: "CBC")
    with_cbc = make_plan(model(), cluster, PlanOptions(), command="x")
    assert with_cbc.predicted.microbatch_us == pytest.approx(with_highs.predicted.microbatch_us, rel=2e-6)
    assert with_cbc.worker_count == with_highs.worker_count


def test_equal_servers_are_numbered_in_the_order_of_the_stages() -> None:
    layers = [layer(f"layer{i}", forward_us=100.0, parameter_bytes=10**6) for i in range(3)]
    tensors = [Tensor(f"x{i}", i, (i + 1,), 1000, 1000) for i in range(2)]
    plan = make_plan(profile(layers, tensors), two_level(3, 1, intra=1e10, inter=1e9), PlanOptions(stages=3), command="x")
    assert [stage.devices for stage in plan.stages] == [("server0/device0",), ("server1/device0",), ("server2/device0",)]
