"""Model descriptions of others, read: what they say, and what is said when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.imports import import_profile
from planner.imports.dnn_partitioning import parse_dnn_partitioning, profile_of
from planner.imports.pipedream_graph import parse_pipedream_graph
from planner.spec.errors import BadInput, InvalidFile
from planner.spec.profile import Profile


def node(name: str, description: str = "Linear(1, 1)", forward: object = 1.0, backward: object = 2.0, activation: object = 4.0,
         parameters: object = 8.0) -> str:
    return (f"{name} -- {description} -- forward_compute_time={forward}, backward_compute_time={backward}, "
            f"activation_size={activation}, parameter_size={parameters}")


def read(*lines: str) -> Profile:
    return parse_pipedream_graph("\n".join(lines) + "\n", source="model.txt", model="model", command="x")


def test_a_graph_is_read_in_execution_order() -> None:
    found = read(node("node10", "Add()", parameters=0), node("node2", "Conv2d(3, 4)", 1.5, 2.5, "[10; 20.0]", 7.0), node("node3"),
                 "\tnode2 -- node3", "\tnode2 -- node10", "\tnode3 -- node10")
    assert [layer.name for layer in found.layers] == ["node2:Conv2d", "node3:Linear", "node10:Add"]
    first = found.layers[0]
    assert (first.forward_us, first.backward_us, first.parameter_bytes, first.saved_bytes) == (1500.0, 2500.0, 7, 30)
    assert [(t.source, t.consumers, t.forward_bytes, t.gradient_bytes) for t in found.tensors] == [(0, (1, 2), 30, 30), (1, (2,), 4, 4)]
    assert found.job is None and found.estimated


def test_the_order_of_lines_does_not_matter() -> None:
    lines = [node("node1"), node("node2"), node("node3"), node("node4"), "\tnode1 -- node4", "\tnode2 -- node3", "\tnode1 -- node2"]
    assert read(*lines).layers == read(*lines[3::-1], *lines[:3:-1]).layers
    assert read(*lines).tensors == read(*lines[3::-1], *lines[:3:-1]).tensors


def test_data_and_unused_values_are_removed() -> None:
    found = read(node("node1", "Input0"), node("node2"), node("node3", "__getitem__(0)"), node("node4", "__getitem__(1)"), node("node5"),
                 "\tnode1 -- node2", "\tnode2 -- node3", "\tnode2 -- node4", "\tnode3 -- node5")
    assert [layer.name for layer in found.layers] == ["node2:Linear", "node3:__getitem__", "node5:Linear"]
    assert [t.consumers for t in found.tensors] == [(1,), (2,)]


@pytest.mark.parametrize(("lines", "message"), [
    ([], "has no layer: 0 nodes"),
    ([node("node1", "Input")], "has no layer: 1 nodes"),
    ([node("node1"), "\tnode1 -- node9"], "model.txt:2: .*node9, which no line describes"),
    ([node("node1"), node("node1")], "model.txt:2: the node node1 was described before"),
    ([node("a"), node("b"), "\ta -- b", "\ta -- b"], "model.txt:4: the edge a -- b is on line 3 too"),
    ([node("a"), node("b"), node("c"), "\ta -- b", "\tb -- c", "\tc -- b"], "form a cycle: (b -> c -> b|c -> b -> c)"),
    ([node("a"), "\ta -- a"], "model.txt:2: .*to itself"),
    ([node("a"), "\ta"], "model.txt:2: 'a' is not an edge"),
    ([node("a", forward="nan")], "model.txt:1: forward_compute_time is 'nan'"),
    ([node("a", forward=-1)], "model.txt:1: forward_compute_time is '-1'"),
    ([node("a", parameters="inf")], "model.txt:1: parameter_size is 'inf'"),
    ([node("a", activation="[1; x]")], r"model.txt:1: activation_size is '\[1; x\]'"),
    ([node("a", backward="[1; 2]")], r"model.txt:1: backward_compute_time is '\[1; 2\]'"),
    (["a -- Linear -- forward_compute_time=1, backward_compute_time=1, activation_size=1"], "model.txt:1: a has no parameter_size"),
    ([node("a") + ", colour=3"], "model.txt:1: 'colour=3' of a is unknown"),
    ([node("a") + ", parameter_size=3"], "model.txt:1: 'parameter_size=3' of a is twice"),
    (["this is a text"], "model.txt:1: 'this is a text' is not a node"),
])
def test_a_wrong_graph_names_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(InvalidFile, match=message) as caught:
        read(*lines)
    assert caught.value.hint


def test_zero_times_and_one_layer_are_fine() -> None:
    found = read(node("a", forward=0, backward=0, activation=0, parameters=0))
    assert len(found.layers) == 1 and not found.tensors


def test_unknown_formats_and_files() -> None:
    with pytest.raises(BadInput, match="onnx"):
        import_profile("x", "onnx", command="x")
    for form in ("pipedream-graph", "dnn-partitioning"):
        with pytest.raises(InvalidFile, match="cannot read absent"):
            import_profile("absent", form, command="x")


def placement_text(nodes: list[dict[str, Any]], edges: list[tuple[int, int, float]], **others: Any) -> str:
    plain = {"supportedOnFpga": 1, "cpuLatency": 10.0, "fpgaLatency": 1.0, "isBackwardNode": 0, "size": 100.0}
    return json.dumps({
        "maxSizePerFPGA": 1000.0, "maxFPGAs": 2, "maxCPUs": 1,
        "nodes": [{"name": f"node{index}", "id": index, "colorClass": index, **plain, **values} for index, values in enumerate(nodes)],
        "edges": [{"sourceId": a, "destId": b, "cost": cost, "size": 50.0} for a, b, cost in edges],
    } | others)


def test_a_placement_input_is_read_and_made_a_profile() -> None:
    back = {"isBackwardNode": 1, "fpgaLatency": 2.0}
    text = placement_text([{}, {"fpgaLatency": 3.0}, {"colorClass": 1} | back, {"colorClass": 0} | back],
                          [(0, 1, 0.5), (1, 2, 0.25), (2, 3, 0.5)])
    found = parse_dnn_partitioning(text, source="model.json", model="model")
    assert (found.accelerators, found.cpus, found.accelerator_bytes) == (2, 1, 1000.0)
    assert [operator.transfer_cost for operator in found.operators] == [0.5, 0.25, 0.5, 0.0]
    assert found.groups() == [[0, 3], [1, 2]]
    profile = profile_of(found, command="x")
    assert [(layer.name, layer.forward_us, layer.backward_us) for layer in profile.layers] == [("node0", 1000, 2000), ("node1", 3000, 2000)]
    assert [(t.source, t.consumers, t.forward_bytes, t.gradient_bytes) for t in profile.tensors] == [(0, (1,), 50, 50)]


def test_colours_on_a_circle_share_a_device() -> None:
    text = placement_text([{"colorClass": 7}, {"colorClass": 8}, {"colorClass": 7}], [(0, 1, 1.0), (1, 2, 1.0)])
    assert parse_dnn_partitioning(text, source="s", model="m").groups() == [[0, 1, 2]]


def test_backward_edges_written_forward_are_read_so() -> None:
    back = {"isBackwardNode": 1}
    nodes = [{}, {}, {}, {"colorClass": 0} | back, {"colorClass": 1} | back, {"colorClass": 2} | back]
    ahead = parse_dnn_partitioning(placement_text(nodes, [(0, 1, 1.0), (1, 2, 1.0), (3, 4, 1.0), (4, 5, 1.0)]), source="s", model="m")
    mirrored = parse_dnn_partitioning(placement_text(nodes, [(0, 1, 1.0), (1, 2, 1.0), (5, 4, 1.0), (4, 3, 1.0)]), source="s", model="m")
    assert ahead.groups() == mirrored.groups() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(("text", "message"), [
    ("{", "not JSON"),
    ("[]", "no list 'nodes'"),
    ('{"nodes": [], "edges": []}', "nodes is empty"),
    (placement_text([{}, {"id": 0}], []), r"nodes\[1\].id 0 is that of nodes\[0\]"),
    (placement_text([{}], [(0, 5, 1.0)]), r"edges\[0\] names node 5"),
    (placement_text([{}], [(0, 0, 1.0)]), r"edges\[0\] joins node 0 to itself"),
    (placement_text([{}, {}], [(0, 1, 1.0), (1, 0, 1.0)]), "cycle: node0 -> node1"),
    (placement_text([{}, {}, {}], [(0, 1, 1.0), (0, 2, 2.0)]), r"edges\[1\].cost is 2, another edge of node 0 has 1"),
    (placement_text([{"fpgaLatency": -1}], []), r"nodes\[0\].fpgaLatency is -1, not a number from 0"),
    (placement_text([{"size": float("nan")}], []), r"nodes\[0\].size is nan"),
    (placement_text([{"colorClass": None}], []), r"nodes\[0\].colorClass is missing"),
    (placement_text([{}], [], maxFPGAs=0), "maxFPGAs is 0, below 1"),
])
def test_a_wrong_placement_input_names_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidFile, match=message):
        parse_dnn_partitioning(text, source="model.json", model="model")


@pytest.mark.parametrize(("name", "layers"), [("alexnet", 22), ("vgg16", 40), ("resnet50", 176), ("gnmt", 37), ("densenet121", 428),
                                              ("nasnetalarge", 1250)])
def test_published_graphs(published_data: Path, name: str, layers: int) -> None:
    found = import_profile(str(published_data / "pipedream" / f"{name}.txt"), "pipedream-graph", command="x")
    assert len(found.layers) == layers
    assert not any("Input" in layer.name for layer in found.layers)
    assert sum(not any(t.source == i for t in found.tensors) for i in range(layers)) <= 3  # sinks
