"""Profiles, clusters, plans and units refuse what they cannot mean."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.errors import InvalidFile, InvalidValue
from planner.spec.files import document_text, parse_document
from planner.spec.plan import StagePlan
from planner.spec.profile import Device, Tensor, TiedParameter
from planner.spec.trace import Span, chrome_trace
from planner.spec.units import format_bytes, parse_bandwidth, parse_bytes, parse_duration_us

LINK = Link(1e9, 5.0)


def two_servers(count: int = 2) -> Cluster:
    device = Node("device", count, Link(12e9, 1.0), "gpu", ())
    return Cluster("two", (DeviceType("gpu", 1.0, 16 * 2**30),), (Node("server", 2, LINK, None, (device,)),))


def test_devices_are_named_by_their_path_in_tree_order() -> None:
    assert [path for path, _ in two_servers().devices()] == ["server0/device0", "server0/device1", "server1/device0", "server1/device1"]
    assert two_servers().device_count == 4


def test_a_cluster_survives_its_file() -> None:
    text = document_text(two_servers())
    assert parse_document(Cluster, text, source="c") == two_servers()


def test_a_fault_deep_in_the_tree_is_named() -> None:
    data = json.loads(document_text(two_servers()))
    data["nodes"][0]["children"][0]["link"]["bandwidth_bytes_per_s"] = 0
    with pytest.raises(InvalidFile, match=r"nodes\[0\]\.children\[0\]\.link: bandwidth_bytes_per_s 0"):
        parse_document(Cluster, json.dumps(data), source="c")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Node("a", 1, LINK, None, ()),
        lambda: Node("a", 1, LINK, "gpu", (Node("b", 1, LINK, "gpu", ()),)),
        lambda: Node("a/b", 1, LINK, "gpu", ()),
        lambda: Node("a", 0, LINK, "gpu", ()),
        lambda: Cluster("c", (), (Node("a", 1, LINK, "gpu", ()),)),
        lambda: Cluster("c", (DeviceType("gpu", 1.0, None),), ()),
        lambda: Cluster("c", (DeviceType("gpu", 1.0, None),), (Node("d1", 4, LINK, "gpu", ()), Node("d", 20, LINK, "gpu", ()))),
        lambda: Link(0.0, 0.0),
        lambda: DeviceType("gpu", 0.0, None),
        lambda: Device("", "", 1, 1, 1, 1.0, 0.0),
        lambda: Device("cpu", "", 10**9, 1, 1, 1.0, 0.0),
        lambda: Device("cpu", "", 1, 1, 10**30, 1.0, 0.0),
        lambda: Device("cpu", "", 1, 1, 1, 1e30, 0.0),
        lambda: Device("cpu", "", 1, 1, 1, 1.0, 1e30),
        lambda: TiedParameter("w", -1, (0, 1)),
        lambda: StagePlan(("a",), ("device0",), 10**12, False),
        lambda: parse_bytes("1e30 TB"),
        lambda: parse_bandwidth("1e17 GB/s"),
        lambda: parse_duration_us("1e9 h"),
        lambda: Tensor("t", 3, (3,), 1, 1),
        lambda: Tensor("t", 0, (2, 1), 1, 1),
        lambda: Tensor("t", 0, (), 1, 1),
    ],
)
def test_impossible_values_are_refused(make: object) -> None:
    with pytest.raises(InvalidValue):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("text", ["", "GB", "12 XB", "1..2GB", "-1GB", "nan", "inf", "1e400GB", "12GB/s"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "12GB", "0 GB/s", "1 furlong/s", "-1GB/s"])
def test_what_is_not_a_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_bandwidth(text)


@given(st.integers(1, 10**6), st.sampled_from([("kB", 1000), ("KiB", 1024), ("MB", 10**6), ("GiB", 2**30), ("", 1)]))
def test_sizes_mean_what_their_unit_says(count: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{count} {unit[0]}") == parse_bytes(f"{count}{unit[0].lower()}") == count * unit[1]


def test_bits_and_bytes_are_told_apart() -> None:
    assert parse_bandwidth("8 Gbit/s") == parse_bandwidth("8Gbps") == parse_bandwidth("1GB/s") == 1e9
    assert parse_duration_us("1.5 ms") == 1500.0
    assert format_bytes(2**30) == "1.0 GiB"


def test_a_trace_has_a_row_a_worker() -> None:
    events = chrome_trace([Span(1, 0, "1F0", "forward", 10.0, 5.0)])["traceEvents"]
    assert events[0] == {"ph": "X", "name": "1F0", "cat": "forward", "pid": 1, "tid": 0, "ts": 10.0, "dur": 5.0}
    assert {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "stage 1"}} in events


@pytest.mark.parametrize(("first", "second"), [(("d", 10), ("d1", 4)), (("d", 200), ("d0", 4)), (("d", 9), ("e1", 9))])
def test_siblings_whose_numbers_never_meet_are_allowed(first: tuple[str, int], second: tuple[str, int]) -> None:
    cluster = Cluster("c", (DeviceType("gpu", 1.0, None),), tuple(Node(name, count, LINK, "gpu", ()) for name, count in (first, second)))
    paths = [path for path, _ in cluster.devices()]
    assert len(set(paths)) == len(paths)
