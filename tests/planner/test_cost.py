"""The cost model against numbers worked out by hand and against a walk over microbatches and devices."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.cost import Stage, evaluate
from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.naming import assign_devices
from planner.spec.cluster import Cluster
from planner.spec.profile import Profile, Tensor
from tests.planner.instances import clusters, flat, layer, profile, profiles, two_level, unequal


def test_one_device_by_hand() -> None:
    chain = chain_of(profile([layer("a", forward_us=10.0, backward_us=20.0, update_us=6.0, copy_us=100.0, parameter_bytes=1000)]))
    result = evaluate(chain, Topology(flat(1)), "stash", (Stage(0, 1, (1,)),), 3)
    assert result.microbatch_us == pytest.approx(10 + 20 + 6 / 3)  # nothing else is in flight, so nothing is copied
    assert result.bottleneck == "stage 0"


def test_two_stages_with_replicas_by_hand() -> None:
    """Stage 0 on two devices, stage 1 on one; 1 GB/s is 1000 bytes a microsecond; a batch of 4 microbatches."""
    layers = [
        layer("a", forward_us=100.0, backward_us=200.0, update_us=40.0, copy_us=20.0, parameter_bytes=80_000),
        layer("b", forward_us=50.0, backward_us=90.0, update_us=8.0, copy_us=1000.0, parameter_bytes=5000),
    ]
    chain = chain_of(profile(layers, [Tensor("x", 0, (1,), 30_000, 50_000)]))
    topology = Topology(flat(3, latency_us=3.0))
    result = evaluate(chain, topology, "stash", (Stage(0, 1, (2,)), Stage(1, 2, (1,))), 4)
    first, second = result.costs
    assert first.compute_us == pytest.approx(300 / 2)
    assert first.update_us == pytest.approx((40 + 20) / 4)  # it copies: an older version is in flight
    assert first.allreduce_us == pytest.approx((2 * 1 / 2 * 80 + 2 * 1 * 6) / 4)  # two links on the way between devices
    assert second == pytest.approx((140, 8 / 4, 0, 0, 50))  # its link: 30 kB in, 50 kB out
    # Each replica of stage 0 moves every second microbatch, and 2 (r-1)/r P / A = 20 kB of gradients.
    assert first.link_us == pytest.approx(50 / 2 + 20)
    assert result.microbatch_us == pytest.approx(150 + 15 + 23)
    assert result.in_flight == (2, 1)


def test_recomputing_costs_a_forward_and_saves_for_one_microbatch_only() -> None:
    layers = [layer("a", forward_us=100.0, backward_us=200.0, saved_bytes=7000),
              layer("b", forward_us=50.0, backward_us=90.0, saved_bytes=900)]
    chain, topology = chain_of(profile(layers, [Tensor("x", 0, (1,), 30, 50)])), Topology(flat(2))
    plain = evaluate(chain, topology, "stash", (Stage(0, 1, (1,)), Stage(1, 2, (1,))), 1, in_flight=(4, 3))
    again = evaluate(chain, topology, "stash", (Stage(0, 1, (1,), True), Stage(1, 2, (1,), True)), 1, in_flight=(4, 3))
    assert [cost.compute_us for cost in plain.costs] == [300, 140] and [cost.compute_us for cost in again.costs] == [400, 190]
    assert [memory.activations_bytes for memory in plain.memory] == [4 * 7000, 3 * (900 + 30)]
    assert [memory.activations_bytes for memory in again.memory] == [7000, 900 + 3 * 30]


def test_a_flush_costs_what_the_other_stages_fill_and_drain() -> None:
    """A batch of 6: stage 0 takes 6 x 300 us, and the first microbatch goes through stage 1 and back meanwhile: 140 us."""
    layers = [layer("a", forward_us=100.0, backward_us=200.0), layer("b", forward_us=50.0, backward_us=90.0)]
    chain, topology = chain_of(profile(layers, [Tensor("x", 0, (1,), 0, 0)])), Topology(flat(3))
    result = evaluate(chain, topology, "flush", (Stage(0, 1, (1,)), Stage(1, 2, (1,))), 6)
    assert [cost.stage_us for cost in result.costs] == pytest.approx([300 + 140 / 6, 140 + 300 / 6])
    alone = evaluate(chain, topology, "flush", (Stage(0, 2, (1,)),), 6)
    assert alone.microbatch_us == pytest.approx(440) and alone.in_flight == (1,)
    shallow = evaluate(chain, topology, "flush", (Stage(0, 1, (2,)), Stage(1, 2, (1,))), 2)
    assert shallow.in_flight == (1, 1)  # a batch of two has one microbatch for each replica


def test_policies_copy_weights_or_not() -> None:
    layers = [layer("a", update_us=40.0, copy_us=20.0), layer("b", update_us=40.0, copy_us=20.0)]
    chain, topology = chain_of(profile(layers, [Tensor("x", 0, (1,), 0, 0)])), Topology(flat(2))

    def updates(policy: str) -> list[float]:
        result = evaluate(chain, topology, policy, (Stage(0, 1, (1,)), Stage(1, 2, (1,))), 2)  # type: ignore[arg-type]
        return [cost.update_us for cost in result.costs]

    assert updates("stash") == [30, 20]  # the last stage has nothing else in flight
    assert updates("vertical") == [30, 30]
    assert updates("2bw") == [30, 30]
    assert updates("flush") == updates("latest") == [20, 20]


def test_the_slowest_device_sets_the_pace() -> None:
    chain = chain_of(profile([layer("a", forward_us=100.0)]))
    result = evaluate(chain, Topology(unequal(1, 1, speed=0.5)), "stash", (Stage(0, 1, (1, 1)),), 2)
    assert result.costs[0].compute_us == pytest.approx(100 / 0.5 / 2)


def test_a_link_between_servers_can_be_the_bottleneck() -> None:
    chain = chain_of(profile([layer("a", forward_us=1.0), layer("b", forward_us=1.0)], [Tensor("x", 0, (1,), 4_000, 6_000)]))
    topology = Topology(two_level(2, 1, intra=1e12, inter=1e9))
    result = evaluate(chain, topology, "stash", (Stage(0, 1, (1, 0)), Stage(1, 2, (0, 1))), 1)
    # Full duplex: server0 sends 4 kB and receives 6 kB of gradients at the same time.
    assert (result.microbatch_us, result.bottleneck) == (pytest.approx(6.0), "link server0")


@st.composite
def plans(draw: st.DrawFn) -> tuple[Profile, Cluster, tuple[Stage, ...], int]:
    """Any plan at all: random cuts and random allocations of what is left."""
    model, cluster = draw(profiles(most_layers=5)), draw(clusters())
    chain, topology = chain_of(model), Topology(cluster)
    inner = sorted(draw(st.sets(st.integers(0, chain.end), max_size=4)) - {0, chain.end})
    cuts = [0, *inner, chain.end]
    left, stages = list(topology.capacities), []
    for first, last in itertools.pairwise(cuts):
        allocation = tuple(draw(st.integers(0, count)) for count in left)
        assume(any(allocation))
        left = [count - taken for count, taken in zip(left, allocation, strict=True)]
        stages.append(Stage(first, last, allocation))
    batch = math.lcm(*(stage.replicas for stage in stages)) * draw(st.integers(1, 2))
    return model, cluster, tuple(stages), batch


def walked_loads(model: Profile, cluster: Cluster, devices: list[tuple[str, ...]], cuts: list[int], batch: int) -> dict[str, float]:
    """Bytes per microbatch over each link's busier direction, by sending every microbatch of some batches."""
    moved: dict[tuple[str, str], float] = defaultdict(float)

    def send(source: str, target: str, amount: float) -> None:
        climb, fall = source.split("/"), target.split("/")
        shared = 0
        while shared < min(len(climb), len(fall)) and climb[shared] == fall[shared]:
            shared += 1
        for depth in range(shared + 1, len(climb) + 1):
            moved["/".join(climb[:depth]), "up"] += amount
        for depth in range(shared + 1, len(fall) + 1):
            moved["/".join(fall[:depth]), "down"] += amount

    period = math.lcm(batch, *(len(paths) for paths in devices))
    for k in range(len(devices) - 1):
        crossing = [t for t in model.tensors if t.source < cuts[k + 1] <= t.consumers[-1]]
        for m in range(period):
            here, there = devices[k][m % len(devices[k])], devices[k + 1][m % len(devices[k + 1])]
            send(here, there, sum(t.forward_bytes for t in crossing))
            send(there, here, sum(t.gradient_bytes for t in crossing))
    position = {path: index for index, (path, _) in enumerate(cluster.devices())}
    for k, paths in enumerate(devices):
        ring = sorted(paths, key=lambda path: position[path])
        parameters = sum(x.parameter_bytes for x in model.layers[cuts[k]:cuts[k + 1]])
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            if len(ring) > 1:
                send(here, there, 2 * (len(ring) - 1) / len(ring) * parameters * period / batch)
    links = {link for link, _ in moved}
    return {link: max(moved[link, "up"], moved[link, "down"]) / period for link in links}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_link_loads_equal_a_walk_over_microbatches(plan: tuple[Profile, Cluster, tuple[Stage, ...], int]) -> None:
    model, cluster, stages, batch = plan
    topology = Topology(cluster)
    result = evaluate(chain_of(model), topology, "stash", stages, batch)
    devices = assign_devices(topology, stages)
    chain = chain_of(model)
    layers_before = [0, *(len(chain.layers(0, stage.last)) for stage in stages)]
    loads = walked_loads(model, cluster, devices, layers_before, batch)
    for link, load in zip(topology.shared, result.shared_link_bytes, strict=True):
        assert load == pytest.approx(loads.get(link.name, 0.0), abs=1e-6)
    for paths, load in zip(devices, result.device_link_bytes, strict=True):
        for path in paths:
            assert load == pytest.approx(loads.get(path, 0.0), abs=1e-6)
    everything = [cost.stage_us for cost in result.costs]
    rates = dict(cluster_links("", cluster.nodes))
    everything += [load / rates[link] * 1e6 for link, load in loads.items()]
    # A stage's devices are charged for the slowest of their own links, so the estimate may only be higher.
    assert result.microbatch_us >= max(everything) * (1 - 1e-9)
    if len({rates[path] for paths in devices for path in paths}) == 1:
        assert result.microbatch_us == pytest.approx(max(everything))


def cluster_links(prefix, nodes):  # type: ignore[no-untyped-def]
    for node in nodes:
        for index in range(node.count):
            yield f"{prefix}{node.name}{index}", node.link.bandwidth_bytes_per_s
            yield from cluster_links(f"{prefix}{node.name}{index}/", node.children)
