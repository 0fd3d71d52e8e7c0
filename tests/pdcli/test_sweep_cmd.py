"""``pipedream plan --sweep`` with the real planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.spec.files import write_document
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile
from tests.planner.test_plot import circles

CLUSTER = ("--cluster", "2x2", "--intra-bandwidth", "12GB/s", "--inter-bandwidth", "10Gbit/s")


@pytest.fixture(autouse=True)
def _profile(run: Run) -> None:
    write_document(profile(), "profile.json")


def test_a_table_and_a_plot_but_no_plan(run: Run) -> None:
    result = run("plan", "profile.json", *CLUSTER, "--sweep", "devices=1..5")
    assert result.exit_code == 0 and not Path("plan.json").exists()
    rows = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"] and rows[4][1:] == ["no", "plan"]
    assert "no plan for 5: the cluster has 4 devices" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert len(circles(Path("sweep.svg").read_text())) == 3 * 4
    best = next(row[0] for row in rows if float(row[1]) == max(float(row[1]) for row in rows[:4]))
    assert result.stderr.endswith(f"next: pipedream plan profile.json {' '.join(CLUSTER)} --devices {best}\n")


def test_json_has_a_row_a_value_and_the_recommended_plan_is_that_row(run: Run) -> None:
    body = run("plan", "profile.json", *CLUSTER, "--sweep", "devices=1..5", "--plot", "out/plot.svg", "--json").json
    assert body["plot"] == "out/plot.svg" and Path("out/plot.svg").exists()
    assert [row["feasible"] for row in body["rows"]] == [True] * 4 + [False]
    words = body["hint"].split()
    plan = run(*words[1:], "--json").json
    chosen = next(row for row in body["rows"] if str(row["value"]) == f"{words[-1]}.0")
    assert max(plan["predicted"]["microbatch_us"], plan["predicted"]["simulated_us"]) == chosen["microbatch_us"]


def test_scaled_microbatch_sizes_are_called_estimated(run: Run) -> None:
    result = run("plan", "profile.json", *CLUSTER, "--sweep", "microbatch-size=8,16")
    assert result.exit_code == 0 and "estimated: the profile was measured with 8 samples" in result.stderr


def test_when_nothing_is_feasible_the_reason_is_given(run: Run) -> None:
    message, hint = run("plan", "profile.json", *CLUSTER, "--memory", "1MB", "--sweep", "devices=1,2").failed(3)
    assert "at 1:" in message and "1000000" in message and hint
    assert not Path("sweep.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["--sweep", "layers=1..3"], "layers=1..3"), (["--sweep", "devices=1", "--check"], "--check"),
     (["--sweep", "devices=1", "--plot", "profile.json/x.svg"], "profile.json/x.svg")],
)
def test_bad_input_is_named(run: Run, arguments: list[str], names: str) -> None:
    message, _ = run("plan", "profile.json", *CLUSTER, *arguments).failed(2)
    assert names in message
