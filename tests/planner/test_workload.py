"""What workers compute and send: from the profile, and recovered from the plan alone."""

from __future__ import annotations

import dataclasses

import pytest

from planner.simulation.routes import Routes
from planner.simulation.workload import workload_of
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.files import digest
from planner.spec.plan import Plan
from planner.spec.profile import Profile, Tensor
from tests.planner.instances import flat, profile, two_level
from tests.planner.plans import plan_of, stage_layer


def replicated() -> tuple[Plan, Profile]:
    layers = [stage_layer(k, 100.0 * (k + 1), 200.0 * (k + 1), update_us=30.0, parameter_bytes=5000) for k in range(3)]
    return plan_of(layers, flat(6), replicas=(2, 1, 3), cuts=[(700, 700), (300, 300)], batch=12)


def test_a_profile_says_all_of_it() -> None:
    plan, model = replicated()
    work = workload_of(plan, model)
    assert work.assumptions == ()
    for k, (stage, r) in enumerate(zip(work.stages, plan.replicas, strict=True)):
        assert stage.forward_us == pytest.approx((100.0 * (k + 1),) * r)
        assert stage.backward_us == pytest.approx((200.0 * (k + 1),) * r)
        assert stage.update_us == pytest.approx((30.0,) * r)
        assert stage.ring_bytes == pytest.approx(2 * (r - 1) / r * 5000)
    assert [(stage.activation_bytes, stage.gradient_bytes) for stage in work.stages] == [(700, 700), (300, 300), (0, 0)]


def test_the_plan_alone_gives_the_same_where_its_two_assumptions_hold() -> None:
    plan, model = replicated()
    alone, known = workload_of(plan), workload_of(plan, model)
    assert len(alone.assumptions) == 2
    for one, other in zip(alone.stages, known.stages, strict=True):
        for name in ("forward_us", "backward_us", "update_us", "ring_bytes", "activation_bytes", "gradient_bytes"):
            assert getattr(one, name) == pytest.approx(getattr(other, name)), name


def test_a_slower_replica_takes_longer() -> None:
    kinds = (DeviceType("fast", 1.0, None), DeviceType("slow", 0.5, None))
    link = Link(1e9, 0.0)
    cluster = Cluster("mixed", kinds, (Node("fast", 1, link, "fast", ()), Node("slow", 1, link, "slow", ())))
    plan, model = plan_of([stage_layer(0, 100, 200, update_us=10)], cluster, replicas=(2,))
    work = workload_of(plan, model).stages[0]
    assert (work.forward_us, work.backward_us, work.update_us) == ((100, 200), (200, 400), (10, 20))


def test_a_tensor_that_skips_a_stage_is_relayed() -> None:
    layers = [stage_layer(k, 1, 1) for k in range(3)]
    tensors = [Tensor("a", 0, (1, 2), 10, 1), Tensor("b", 1, (2,), 100, 20)]
    model = profile(layers, tensors)
    plan = dataclasses.replace(plan_of(layers, flat(3))[0], profile_digest=digest(model))
    assert [(s.activation_bytes, s.gradient_bytes) for s in workload_of(plan, model).stages] == [(10, 1), (110, 21), (0, 0)]


def test_routes_go_up_to_the_common_switch_and_down() -> None:
    cluster = two_level(2, 2, intra=1e10, inter=1e9, latency_us=3.0)
    routes = Routes(cluster, [name for name, _ in cluster.devices()])

    def names(route_directions: tuple[int, ...]) -> list[str]:
        return [f"{routes.directions[d].node} {routes.directions[d].way}" for d in route_directions]

    inside, outside = routes.path("server1/device0", "server1/device1"), routes.path("server0/device1", "server1/device0")
    assert names(inside.directions) == ["server1/device0 up", "server1/device1 down"] and inside.latency_us == 6.0
    assert names(outside.directions) == ["server0/device1 up", "server0 up", "server1 down", "server1/device0 down"]
    assert outside.latency_us == 12.0
    assert routes.directions[outside.directions[1]].bytes_per_us == 1000.0
    ring = routes.ring(["server1/device0", "server0/device0", "server0/device1"])
    nodes = ("server0", "server1", "server0/device0", "server0/device1", "server1/device0")
    assert sorted(names(ring.directions)) == sorted(f"{node} {way}" for node in nodes for way in ("up", "down"))
    assert ring.latency_us == 2 * 2 * 12.0
