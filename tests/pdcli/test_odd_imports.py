"""Model descriptions of others with odd content: refused by name, or imported and planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.spec.files import read_document
from planner.spec.plan import Plan
from tests.pdcli.conftest import Run

LONG = "9" * 5000
LINE = "node{} -- Layer -- forward_compute_time={}, backward_compute_time=4.000, activation_size={}, parameter_size={}\n"
NODES = "".join(LINE.format(i, 2.0, 1000.0, 400.0) for i in (1, 2, 3))
EDGES = "\tnode1 -- node2\n\tnode2 -- node3\n"


def imported(run: Run, text: str, form: str = "pipedream-graph") -> None:
    Path("odd").write_text(text, encoding="utf-8", errors="surrogatepass")
    result = run("profile", "import", "odd", "--from", form)
    assert result.exit_code == 0, result.stderr
    result = run("plan", "profile.json", "--cluster", "3", "--intra-bandwidth", "1GB/s")
    assert result.exit_code == 0, result.stderr
    read_document(Plan, "plan.json")


def refused(run: Run, text: str, form: str = "pipedream-graph") -> str:
    Path("odd").write_text(text, encoding="utf-8", errors="surrogatepass")
    message, hint = run("profile", "import", "odd", "--from", form).failed(2)
    assert "odd" in message and len(message) <= 800 and "bug" not in hint
    assert not Path("profile.json").exists()
    return message


@pytest.mark.parametrize("text", [
    "", "\0", "\ud800", NODES + EDGES + "\tnode3 -- node1\n", NODES + "\tnode1 -- node1\n", NODES + NODES, NODES + "\tnode1 -- \n",
    NODES.replace("node2", "x" * 10_000) + EDGES, "node1 -- Layer\n", "{}",
    NODES + "\tnode1 -- node2\n" + EDGES,
], ids=["empty", "NUL", "surrogate", "cycle", "self loop", "nodes twice", "half an edge", "edge to nothing", "no numbers", "JSON",
        "an edge twice"])
def test_graphs_that_are_none(run: Run, text: str) -> None:
    refused(run, text)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e308", "1e400", LONG, "", "x", "0x10"], ids=lambda text: text[:8])
def test_numbers_in_a_graph_that_are_none(run: Run, place: int, value: str) -> None:
    values: list[Any] = [2.0, 1000.0, 400.0]
    values[place] = value
    refused(run, LINE.format(1, *values) + "".join(LINE.format(i, 2.0, 1000.0, 400.0) for i in (2, 3)) + EDGES)


@pytest.mark.parametrize("text", [
    NODES, NODES.replace("Layer", "層 (🙂)") + EDGES, LINE.format(1, 0.0, 0.0, 0.0), NODES.replace("2.0", "0.0") + EDGES,
    NODES.replace("Layer", "L" * 10_000) + EDGES,
], ids=["no edges", "unicode", "one layer of nothing", "zero forward", "a name of 10 kB"])
def test_odd_graphs_are_planned(run: Run, text: str) -> None:
    imported(run, text)


def node(number: int, **fields: Any) -> dict[str, Any]:
    return {"name": f"n{number}", "id": number, "supportedOnFpga": 1, "cpuLatency": 1.0, "fpgaLatency": 1.0, "isBackwardNode": 0,
            "colorClass": number, "size": 100.0} | fields


def edge(source: int, destination: int, **fields: Any) -> dict[str, Any]:
    return {"sourceId": source, "destId": destination, "cost": 0.1} | fields


def description(nodes: list[dict[str, Any]], edges: list[dict[str, Any]]) -> str:
    return json.dumps({"maxSizePerFPGA": 1e10, "maxFPGAs": 3, "maxCPUs": 1, "nodes": nodes, "edges": edges})


def test_a_plain_description_is_planned(run: Run) -> None:
    imported(run, description([node(1), node(2)], [edge(1, 2)]), "dnn-partitioning")


@pytest.mark.parametrize("text", [
    "", "[]", "null", "[" * 100_000, "{}", description([], []), description([node(1), node(2)], [edge(1, 2), edge(2, 1)]),
    description([node(1)], [edge(1, 1)]), description([node(1)], [edge(1, 9)]), description([node(1), node(1)], []),
    description([node(1, fpgaLatency=1)], []).replace('"fpgaLatency": 1', f'"fpgaLatency": {LONG}'),
    *(description([node(1, fpgaLatency=value)], []) for value in (float("nan"), float("inf"), -1, 1e308, "1", None)),
    *(description([node(1, size=value)], []) for value in (float("nan"), -1, 1e308, [])),
    *(description([node(1), node(2)], [edge(1, 2, cost=value)]) for value in (float("nan"), -1, 1e308, "x")),
], ids=lambda text: text[-40:][:20])
def test_descriptions_that_are_none(run: Run, text: str) -> None:
    refused(run, text, "dnn-partitioning")
