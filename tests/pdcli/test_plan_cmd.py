"""``pipedream plan`` on a profile made by hand, with the real planner."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pdcli.names import short
from planner.spec.files import read_document, write_document
from planner.spec.plan import Plan
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile

CLUSTER = ("--cluster", "2x4", "--intra-bandwidth", "12GB/s", "--inter-bandwidth", "10Gbit/s")


@pytest.fixture(autouse=True)
def _profile(run: Run) -> None:
    write_document(profile(), "profile.json")


def test_writes_a_plan_and_says_what_it_is(run: Run) -> None:
    result = run("plan", "profile.json", *CLUSTER, "--memory", "16GB")
    plan = read_document(Plan, "plan.json")
    assert result.exit_code == 0
    assert plan.command == "pipedream plan profile.json --cluster 2x4 --intra-bandwidth 12GB/s --inter-bandwidth 10Gbit/s --memory 16GB"
    assert plan.cluster.device_count == 8 and plan.job == profile().job
    assert max(len(line) for line in result.stdout.splitlines() if "  " in line) <= 100
    for line in result.stdout.splitlines():
        if "per microbatch" in line and "stages (" not in line:
            assert "predicted" in line
    assert result.stdout.count("predicted") >= 5
    assert "next: pipedream simulate plan.json" in result.stderr  # these servers are not this machine
    assert "next:" not in result.stdout


def test_json_is_the_plan_in_numbers(run: Run) -> None:
    body = run("plan", "profile.json", "--json").json
    plan = read_document(Plan, "plan.json")
    assert body["predicted"]["microbatch_us"] == plan.predicted.microbatch_us
    assert body["replicas"] == list(plan.replicas)
    assert body["solver"]["status"] == plan.solver.status
    assert body["plan"] == "plan.json" and body["hint"] == "pipedream train plan.json"


def test_what_the_programs_came_to_is_said_at_v_and_in_json_but_not_in_the_file(run: Run) -> None:
    quiet = run("plan", "profile.json", *CLUSTER)
    before = Path("plan.json").read_bytes()
    verbose = run("plan", "profile.json", *CLUSTER, "-v")
    assert "branch-and-bound" not in quiet.stderr + quiet.stdout + verbose.stdout
    line = next(line for line in verbose.stderr.splitlines() if line.startswith("integer programs: "))
    statistics = run("plan", "profile.json", *CLUSTER, "--json").json["statistics"]
    assert line.startswith(f"integer programs: {statistics['programs']}, the largest of {statistics['largest_columns']} columns")
    assert statistics["programs"] >= 1 and statistics["solver_s"] <= statistics["total_s"]
    assert Path("plan.json").read_bytes() == before


def column(stdout: str, title: str, heading: str) -> list[str]:
    """The cells of a column of numbers, which ends where its heading ends."""
    lines = stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    stop = lines[start].index(heading) + len(heading)
    return [line[:stop].rsplit("  ", 1)[-1].strip() for line in lines[start + 1 : end]]


def test_slack_is_the_share_of_the_pipelines_time_in_which_a_stage_or_link_is_idle(run: Run) -> None:
    body = run("plan", "profile.json", *CLUSTER, "--stages", "5", "--max-replicas", "1", "--json").json
    predicted = body["predicted"]
    for entry in predicted["stages"]:
        busy_us = sum(entry[key] for key in ("compute_us", "update_us", "allreduce_us", "fill_us"))
        assert entry["slack"] == pytest.approx(1 - busy_us / predicted["microbatch_us"], abs=1e-9)
    for entry in predicted["links"]:
        assert entry["slack"] == pytest.approx(1 - entry["microbatch_us"] / predicted["microbatch_us"])
    assert min(entry["slack"] for entry in predicted["stages"] + predicted["links"]) == pytest.approx(0, abs=1e-9)
    shown = run("plan", "profile.json", *CLUSTER, "--stages", "5", "--max-replicas", "1", "-v").stdout
    assert column(shown, "time per microbatch", "slack") == [f"{entry['slack']:.1%}" for entry in predicted["stages"]]
    links = sorted(predicted["links"], key=lambda entry: -entry["microbatch_us"])
    assert column(shown, "links", "slack") == [f"{entry['slack']:.1%}" for entry in links]
    few = run("plan", "profile.json", *CLUSTER, "--stages", "5", "--max-replicas", "1").stdout
    assert column(few, f"links, the 4 busiest of {len(links)}", "slack") == [f"{entry['slack']:.1%}" for entry in links[:4]]


def test_other_ways_are_compared_and_those_that_do_not_fit_are_marked(run: Run) -> None:
    plan = run("plan", "profile.json", *CLUSTER, "--memory", "60MB", "--json").json["predicted"]
    shown = run("plan", "profile.json", *CLUSTER, "--memory", "60MB").stdout
    rows = {one["name"]: one for one in plan["baselines"]}
    assert {"one device", "data parallelism", "straight pipeline", "equal split", "synchronous flush", "PipeDream 2019"} <= set(rows)
    assert {one["fits"] for one in rows.values()} == {True, False}
    for name, one in rows.items():
        line = next(line for line in shown.splitlines() if line.startswith(f"{name}  "))
        ratio = one["microbatch_us"] / plan["microbatch_us"]
        said = "as fast" if abs(ratio - 1) < 0.005 else f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
        assert f"  {said}  " in line and ("too little" in line) == (not one["fits"])


def test_long_names_are_shortened_in_tables_and_whole_in_json(run: Run) -> None:
    long = "model.decoder.layers.{}.feed_forward.output_projection_of_everything"
    write_document(profile(name=long), "profile.json")
    result = run("plan", "profile.json", *CLUSTER, "--stages", "3")
    table = result.stdout.partition("time per microbatch")[0]
    assert max(map(len, table.splitlines())) <= 100 and long.format(0) not in table
    for number in (0, 5):
        name = short(long.format(number))
        assert table.count(name) == 1 and len(name) == 30, "names are whole, and told apart"
    assert run("plan", "profile.json", *CLUSTER, "--stages", "3", "--json").json["stages"][0]["layers"][0] == long.format(0)


def test_explained_layers_are_told_and_do_not_change_the_plan(run: Run) -> None:
    run("plan", "profile.json", *CLUSTER, "--stages", "3")
    before = Path("plan.json").read_bytes()
    result = run("plan", "profile.json", *CLUSTER, "--stages", "3", "--explain", "net.block0", "--explain", "net.block5")
    assert result.exit_code == 0 and Path("plan.json").read_bytes() == before
    assert "net.block0 is in stage 0: " in result.stdout and "net.block5 is in stage 2: " in result.stdout
    body = run("plan", "profile.json", *CLUSTER, "--stages", "3", "--explain", "net.block0", "--json").json
    assert [(one["layer"], one["stage"], [move["stage"] for move in one["moves"]]) for one in body["explained"]] == [("net.block0", 0, [1])]
    message, hint = run("plan", "profile.json", "--explain", "net.blok0").failed(2)
    assert "net.blok0" in message and "net.block0" in hint
    run("plan", "profile.json", "--explain", "net.block0", "--sweep", "devices=1,2").failed(2)


def test_optimal_is_said_only_when_proven(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import solve

    assert "optimal: " in run("plan", "profile.json").stdout
    honest = solve.make_plan

    def stopped(*arguments: object, **keywords: object) -> Plan:
        plan = honest(*arguments, **keywords)  # type: ignore[arg-type]
        report = dataclasses.replace(plan.solver, status="feasible", bound_us=plan.predicted.microbatch_us * 0.9, gap=0.1)
        return dataclasses.replace(plan, solver=report)

    monkeypatch.setattr(solve, "make_plan", stopped)
    words = run("plan", "profile.json").stdout
    assert "within 10.0%" in words and "not proven optimal" in words
    assert "optimal:" not in words


def test_the_same_input_gives_the_same_bytes(run: Run) -> None:
    run("plan", "profile.json", *CLUSTER, "-o", "one.json")
    run("plan", "profile.json", *CLUSTER, "-o", "folder/two.json", "--json")
    assert Path("one.json").read_bytes() == Path("folder/two.json").read_bytes()


def test_check_compares_and_writes_nothing(run: Run) -> None:
    assert run("plan", "profile.json", "--check").exit_code == 1
    assert not Path("plan.json").exists()
    run("plan", "profile.json")
    before = Path("plan.json").read_bytes()
    assert run("plan", "profile.json", "--check").exit_code == 0
    differs = run("plan", "profile.json", "--stages", "1", "--check", "--json")
    assert differs.exit_code == 1 and differs.json["code"] == "differs" and differs.json["hint"] == "pipedream plan profile.json --stages 1"
    assert Path("plan.json").read_bytes() == before


def test_the_next_command_after_a_check_is_one_that_works(run: Run) -> None:
    for arguments, word in ((CLUSTER, "simulate"), ((), "train")):
        run("plan", "profile.json", *arguments)
        assert run("plan", "profile.json", *arguments, "--check", "--json").json["hint"] == f"pipedream {word} plan.json"
    write_document(profile(job=None), "profile.json")  # a model that others measured
    assert run("plan", "profile.json", "--json").json["hint"] == "pipedream simulate plan.json"


def test_too_little_memory_is_exit_code_3_with_the_stage_and_both_numbers(run: Run) -> None:
    message, hint = run("plan", "profile.json", "--memory", "20MB").failed(3)
    assert "stage" in message and "20000000" in message and hint
    assert not Path("plan.json").exists()
    assert run("plan", "profile.json", "--memory", "20MB", "--json").json["exit_code"] == 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["missing.json"], "missing.json"),
        (["profile.json", "--cluster", "2x4"], "--cluster 2x4"),
        (["profile.json", "--cluster", "no-such-cluster"], "no-such-cluster"),
        (["profile.json", "--cluster", "missing.toml"], "missing.toml"),
        (["profile.json", "--memory", "16 potatoes"], "--memory: '16 potatoes'"),
        (["profile.json", "--intra-bandwidth", "12GB"], "--intra-bandwidth: '12GB'"),
        (["profile.json", "--policy", "newest"], "newest"),
        (["profile.json", "--stages", "0"], "--stages"),
        (["profile.json", "--time-limit", "0"], "--time-limit"),
        (["profile.json", "-o", "profile.json/plan.json"], "profile.json/plan.json"),
        (["profile.json", "--no-such-option"], "--no-such-option"),
        ([], "PROFILE"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: list[str], names: str) -> None:
    message, _ = run("plan", *arguments).failed(2)
    assert names in message
    assert run("plan", *arguments, "--json").json["message"] == message


def test_an_unknown_key_is_named_with_its_place(run: Run) -> None:
    data = json.loads(Path("profile.json").read_text())
    data["layers"][3]["forward_ms"] = 1.0
    Path("profile.json").write_text(json.dumps(data))
    message, hint = run("plan", "profile.json").failed(2)
    assert "profile.json" in message and "layers[3].forward_ms" in message and "forward_us" in hint
