"""Places, rings, the order of replicas, and what crosses shared links."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.hardware.topology import Topology
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from tests.planner.instances import flat, two_level, unequal


def racks() -> Topology:
    """Two racks of two servers of two devices; bandwidths 100 (device), 10 (server), 1 (rack), latencies 1, 10, 100 us."""
    leaf = Node("device", 2, Link(100.0, 1.0), "test", ())
    server = Node("server", 2, Link(10.0, 10.0), None, (leaf,))
    return Topology(Cluster("racks", (DeviceType("test", 1.0, 5),), (Node("rack", 2, Link(1.0, 100.0), None, (server,)),)))


def test_places_are_counted_and_named_when_asked() -> None:
    topology = Topology(two_level(2, 3))
    assert topology.capacities == (3, 3)
    assert [link.name for link in topology.shared] == ["server0", "server1"]
    names = [place.device(index) for place in topology.places for index in range(place.count)]
    assert names == [path for path, _ in topology.cluster.devices()]
    assert Topology(flat(5)).shared == ()


def test_a_ring_is_as_fast_as_its_slowest_link_and_as_late_as_its_longest_hop() -> None:
    topology = racks()
    inside = topology.ring((2, 0, 0, 0))
    assert (inside.bandwidth_bytes_per_s, inside.latency_us, inside.shared) == (100.0, 2.0, ())
    servers = topology.ring((1, 1, 0, 0))
    assert (servers.bandwidth_bytes_per_s, servers.latency_us) == (10.0, 22.0)
    assert {topology.shared[i].name for i in servers.shared} == {"rack0/server0", "rack0/server1"}
    everything = topology.ring((2, 2, 2, 2))
    assert (everything.bandwidth_bytes_per_s, everything.latency_us) == (1.0, 222.0)
    assert len(everything.shared) == 6


def test_a_site_is_as_good_as_its_worst_device() -> None:
    topology = Topology(unequal(2, 2, speed=0.5, intra=8.0, inter=6.0, memory_bytes=7))
    both = topology.site((1, 2))
    assert (both.replicas, both.speed, both.memory_bytes, both.device_bandwidth_bytes_per_s) == (3, 0.5, 7, 4.0)
    assert both.ring_bandwidth_bytes_per_s == 3.0  # the slow server's own link
    assert topology.site((2, 0)).memory_bytes is None


@pytest.mark.parametrize(("allocation", "order"), [
    ((2, 2), (0, 1, 0, 1)), ((1, 3), (0, 1, 1, 1)), ((4, 2), (0, 1, 0, 0, 1, 0)), ((3, 0), (0, 0, 0)), ((0, 1), (1,)),
])
def test_order(allocation: tuple[int, int], order: tuple[int, ...]) -> None:
    assert Topology(two_level(2, 4)).order(allocation) == order


allocations = st.tuples(*[st.integers(0, 3)] * 3).filter(any)


@given(allocations, allocations)
def test_crossings_equal_a_walk_over_microbatches(sender: tuple[int, ...], receiver: tuple[int, ...]) -> None:
    topology = Topology(two_level(3, 3))
    before, after = topology.order(sender), topology.order(receiver)
    assert sorted(before) == sorted(p for p, count in enumerate(sender) for _ in range(count))
    period = math.lcm(len(before), len(after))
    pairs = [(before[m % len(before)], after[m % len(after)]) for m in range(period)]
    for index, link in enumerate(topology.shared):
        up = sum(p in link.below and q not in link.below for p, q in pairs) / period
        down = sum(p not in link.below and q in link.below for p, q in pairs) / period
        assert topology.crossings(sender, receiver)[index] == pytest.approx((up, down))
        least_up, least_down = topology.least_crossings(sender, receiver)[index]
        assert least_up <= up + 1e-9 and least_down <= down + 1e-9


@given(st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(1, 4))
def test_equal_proportions_pair_up_inside_their_servers(shares: list[int], times: int) -> None:
    topology = Topology(two_level(3, 16))
    once, often = tuple(shares), tuple(share * times for share in shares)
    assert all(pair == (0.0, 0.0) for pair in topology.crossings(once, often))
    assert any(pair != (0.0, 0.0) for pair in topology.crossings((1, 0, 0), once))


def test_only_equal_neighbours_are_interchangeable() -> None:
    assert Topology(two_level(3, 2)).interchangeable == [(0, 1), (1, 2)]
    assert Topology(unequal(2, 2, speed=1.0)).interchangeable == []
    assert racks().interchangeable == [(0, 1), (2, 3)]  # servers of one rack; exchanging racks is not claimed
