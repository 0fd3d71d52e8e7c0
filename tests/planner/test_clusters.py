"""Clusters as people name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.hardware.clusters import load_cluster, shipped_clusters
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, InvalidFile
from planner.spec.profile import Device

CPU = Device("cpu", "some cpu", 3, 1, 2**30, 5e9, 8.0)
GPU = Device("cuda", "some gpu", 4, 1, 16 * 2**30, 2e10, 6.0)

TOML = """
name = "lab"

[[device_types]]
name = "big"
speed = 2
memory = "32 GiB"

[[device_types]]
name = "small"

[[nodes]]
name = "server"
count = 2
bandwidth = "10 Gbit/s"
latency = "0.05 ms"

[[nodes.children]]
name = "device"
count = 4
device = "big"
bandwidth = "12 GB/s"

[[nodes]]
name = "laptop"
device = "small"
bandwidth = "1 Gbit/s"
"""


def paths(cluster: Cluster) -> list[str]:
    return [path for path, _ in cluster.devices()]


def test_local_is_the_profiled_machine() -> None:
    cluster = load_cluster("local", device=CPU)
    assert paths(cluster) == ["device0", "device1", "device2"]
    assert cluster.device_types[0].memory_bytes == 2**30
    node = cluster.nodes[0]
    assert (node.link.bandwidth_bytes_per_s, 2 * node.link.latency_us) == (5e9, 8.0)  # a path between devices has two such links


def test_shorthand_counts_from_the_outside_in() -> None:
    cluster = load_cluster("2x3", device=GPU, intra_bandwidth=1e10, inter_bandwidth=1e9)
    assert paths(cluster) == [f"server{i}/device{j}" for i in range(2) for j in range(3)]
    assert cluster.nodes[0].link.bandwidth_bytes_per_s == 1e9
    assert cluster.nodes[0].children[0].link.bandwidth_bytes_per_s == 1e10
    racks = load_cluster("2x1x2", device=GPU, intra_bandwidth=1e10, inter_bandwidth=1e9)
    assert paths(racks) == ["rack0/server0/device0", "rack0/server0/device1", "rack1/server0/device0", "rack1/server0/device1"]
    assert paths(load_cluster("4", device=GPU, intra_bandwidth=1e10)) == ["device0", "device1", "device2", "device3"]
    assert paths(load_cluster("1x2", device=GPU, intra_bandwidth=1e10)) == ["device0", "device1"]


def test_memory_of_a_shorthand_is_an_accelerators_own_or_unlimited_or_what_is_given() -> None:
    def memory(device: Device, memory_bytes: int | None) -> int | None:
        return load_cluster("2", device=device, intra_bandwidth=1e10, memory_bytes=memory_bytes).device_types[0].memory_bytes

    assert (memory(GPU, None), memory(CPU, None), memory(CPU, 7)) == (16 * 2**30, None, 7)


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(TOML)
    cluster = load_cluster(str(file), device=CPU, memory_bytes=1000)
    assert cluster.name == "lab"
    assert cluster.device_count == 9 and paths(cluster)[-1] == "laptop0"
    assert [kind.memory_bytes for kind in cluster.device_types] == [32 * 2**30, 1000]  # --memory only where the file is silent
    assert (cluster.device_types[0].speed, cluster.device_types[1].speed) == (2.0, 1.0)
    assert (cluster.nodes[0].link.bandwidth_bytes_per_s, cluster.nodes[0].link.latency_us) == (1.25e9, 50.0)


def test_shipped_descriptions_are_read_by_name() -> None:
    assert "v100-4x4" in shipped_clusters()
    for name in shipped_clusters():
        assert load_cluster(name, device=CPU).device_count >= 2
    assert load_cluster("v100-4x4", device=CPU).device_count == 16


@pytest.mark.parametrize(("text", "options", "says"), [
    ("2x4", {"intra_bandwidth": 1e9}, "--inter-bandwidth"),
    ("2x4", {"inter_bandwidth": 1e9}, "--intra-bandwidth"),
    ("8", {}, "--intra-bandwidth"),
    ("8", {"intra_bandwidth": 1e9, "inter_bandwidth": 1e9}, "--inter-bandwidth"),
    ("local", {"inter_bandwidth": 1e9}, "--inter-bandwidth"),
    ("0", {"intra_bandwidth": 1e9}, "2x4"),
    ("2x0", {"intra_bandwidth": 1e9, "inter_bandwidth": 1e9}, "2x4"),
    ("2x2x2x2x2", {"intra_bandwidth": 1e9, "inter_bandwidth": 1e9}, "TOML"),
    ("4", {"intra_bandwidth": -1.0}, "--intra-bandwidth"),
    ("nowhere", {}, "v100-4x4"),
    ("v100-4x4", {"intra_bandwidth": 1e9}, "--intra-bandwidth"),
    ("v100-4x4", {"memory_bytes": 5}, "--memory"),
])
def test_wrong_requests_say_which_option(text: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_cluster(text, device=CPU, **options)  # type: ignore[arg-type]
    assert says in caught.value.hint and (text in caught.value.message or "intra" in caught.value.message)


@pytest.mark.parametrize(("old", "new", "place"), [
    ("count = 2", "cout = 2", "nodes[0].cout"),
    ('bandwidth = "10 Gbit/s"', "", "nodes[0].bandwidth"),
    ('bandwidth = "12 GB/s"', 'bandwidth = "12 GB"', "12 GB"),
    ("count = 4", "count = 0", "nodes[0].children[0]"),
    ('device = "big"', 'device = "huge"', "huge"),
    ("speed = 2", "speed = -1", "device_types[0]"),
    ("speed = 2", "speed = true", "device_types[0].speed"),
    ("[[nodes.children]]", "[[nodes.children", "not TOML"),
])
def test_wrong_files_name_the_place(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in TOML
    file = tmp_path / "lab.toml"
    file.write_text(TOML.replace(old, new, 1))
    with pytest.raises(InvalidFile) as caught:
        load_cluster(str(file), device=CPU)
    assert place in caught.value.message and str(file) in caught.value.message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InvalidFile, match=r"absent\.toml"):
        load_cluster("absent.toml", device=CPU)
