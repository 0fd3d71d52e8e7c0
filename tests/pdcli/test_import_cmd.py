"""``pipedream profile import`` and plans by the original's formulas, as commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.spec.files import read_document
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from tests.pdcli.conftest import Run

GRAPH = """node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Conv2d(3, 4) -- forward_compute_time=2.000, backward_compute_time=4.000, activation_size=1000000.0, parameter_size=400.000
node3 -- Linear(4, 4) -- forward_compute_time=1.000, backward_compute_time=1.000, activation_size=8.0, parameter_size=64000000.000
\tnode1 -- node2
\tnode2 -- node3
"""


@pytest.fixture(autouse=True)
def _graph(run: Run) -> None:
    Path("graph.txt").write_text(GRAPH)


def test_imports_and_plans_by_the_originals_formulas(run: Run) -> None:
    done = run("profile", "import", "graph.txt", "--from", "pipedream-graph", "-o", "graph.json")
    assert done.exit_code == 0 and "wrote graph.json: 2 layers of graph.txt" in done.stdout
    found = read_document(Profile, "graph.json")
    assert found.command == "pipedream profile import graph.txt --from pipedream-graph"
    assert [layer.name for layer in found.layers] == ["node2:Conv2d", "node3:Linear"]
    body = run("plan", "graph.json", "--cluster", "3", "--intra-bandwidth", "1GB/s", "--cost-model", "pipedream-2019", "--json").json
    # Two devices on the first layer, one on the second: 6 ms / 2 with next to nothing to synchronise, 2 ms, and 2 MB over 1 GB/s.
    assert body["replicas"] == [2, 1]
    assert body["predicted"]["microbatch_us"] == pytest.approx(3000 + 4 * 400 / 2 / 1e9 * 1e6 / 2)
    assert body["solver"]["status"] == "optimal" and "pipedream-2019" in body["solver"]["name"]
    plan = read_document(Plan, "plan.json")
    assert plan.command == "pipedream plan graph.json --cluster 3 --intra-bandwidth 1GB/s --cost-model pipedream-2019"
    assert body["hint"] == "pipedream simulate plan.json"  # there is no job that could be trained


def test_json_and_local_without_a_known_device(run: Run) -> None:
    body = run("profile", "import", "graph.txt", "--from", "pipedream-graph", "--microbatch-size", "64", "--json").json
    assert (body["layers"], body["microbatch_size"], body["forward_us"]) == (2, 64, 3000.0)
    plan = run("plan", "profile.json", "--json").json
    assert plan["predicted"]["stages"][0]["available_bytes"] is None


def test_what_cannot_be_imported(run: Run) -> None:
    message, hint = run("profile", "import", "graph.txt").failed(2)
    assert "--from" in message
    Path("bad.txt").write_text(GRAPH + "\tnode3 -- node9\n")
    message, _ = run("profile", "import", "bad.txt", "--from", "pipedream-graph").failed(2)
    assert message == "bad.txt:6: the edge node3 -- node9 names node9, which no line describes"
    message, hint = run("profile", "import", "graph.txt", "--from", "dnn-partitioning").failed(2)
    assert "graph.txt is not JSON" in message and "dnn-partitioning" in hint
    assert run("profile", "import", "--help").stdout.startswith("Usage: pipedream profile import")


def test_options_that_the_originals_formulas_do_not_know(run: Run) -> None:
    run("profile", "import", "graph.txt", "--from", "pipedream-graph")
    for option in ("--stages", "--devices", "--batch-microbatches"):
        message, hint = run("plan", "profile.json", option, "1", "--cost-model", "pipedream-2019").failed(2)
        assert message == f"{option} 1 is asked, which the cost model pipedream-2019 does not know" and option in hint
