"""``pipedream simulate`` on plans made by hand, with the real simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdcli.timeline import cells
from planner.spec.files import write_document
from planner.spec.trace import Span
from tests.pdcli.conftest import Run
from tests.planner.instances import flat
from tests.planner.plans import plan_of, stage_layer


@pytest.fixture(autouse=True)
def _plan(run: Run) -> None:
    """Three stages of 3 ms, 1 MB between them at 1 GB/s: 1 ms, which the least depth does not hide."""
    plan, profile = plan_of([stage_layer(k, 1000, 2000, update_us=100) for k in range(3)], flat(3), cuts=[(10**6, 10**6)] * 2)
    write_document(plan, "plan.json")
    write_document(profile, "profile.json")


SIMULATED_US = (3 * 3000 + 4 * 1000 + 100) / 3  # three microbatches in flight make the way there and back, and an update


def test_draws_every_worker_and_holds_both_times_against_each_other(run: Run) -> None:
    result = run("simulate", "plan.json")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.startswith("stage") and "|" in line]
    assert len(rows) == 6, "a row a worker: at the start, and in steady state"
    assert all(len(row) == 100 and set(row.partition("|")[2]) <= set("FBUR.| ") for row in rows)
    assert result.stdout.isascii() and max(map(len, lines)) <= 100 + 60
    assert "predicted (closed form): 3.1 ms" in result.stdout
    assert "simulated (steady state): 4.4 ms per microbatch, +40.9%" in result.stdout
    assert "5, 3, 1 microbatches in flight it would be 3.1 ms" in result.stdout
    assert result.stderr.endswith("next: pipedream train plan.json\n")


def test_json_has_the_same_in_numbers(run: Run) -> None:
    body = run("simulate", "plan.json", "--json").json
    assert body["predicted_microbatch_us"] == pytest.approx(3100)
    assert body["simulated_microbatch_us"] == pytest.approx(SIMULATED_US)
    assert body["deeper"]["in_flight"] == [5, 3, 1] and body["assumptions"] == []
    assert [worker["versions"] for worker in body["workers"]] == [3, 2, 1]
    assert {link["link"] for link in body["links"]} == {"device0", "device1", "device2"}


def test_the_profile_is_found_where_the_plan_was_made_or_assumed(run: Run) -> None:
    assert run("simulate", "plan.json", "--no-timeline").stderr.count("assumed") == 0
    Path("folder").mkdir()
    Path("profile.json").rename("folder/profile.json")
    Path("plan.json").rename("folder/plan.json")
    assert run("simulate", "folder/plan.json", "--json").json["assumptions"] == []
    Path("folder/profile.json").write_text("{}")
    result = run("simulate", "folder/plan.json")
    assert result.exit_code == 0 and "it is assumed that a backward takes twice its forward" in result.stderr
    assert len(run("simulate", "folder/plan.json", "--json").json["assumptions"]) == 2


def test_another_profile_is_exit_code_4(run: Run) -> None:
    _, profile = plan_of([stage_layer(0, 1, 2)], flat(1))
    write_document(profile, "other.json")
    message, _ = run("simulate", "plan.json", "--profile", "other.json").failed(4)
    assert "digest" in message


def test_writes_a_trace_with_every_operation_and_transfer(run: Run) -> None:
    assert run("simulate", "plan.json", "--batches", "7", "--trace", "out/trace.json").exit_code == 0
    events = json.loads(Path("out/trace.json").read_text())["traceEvents"]
    operations = [event["name"] for event in events if event["ph"] == "X" and not event["name"].startswith("wait")]
    assert sorted(operations) == sorted(f"{k}{kind}{m}" for k in range(3) for kind in "FBU" for m in range(7))
    assert len([event for event in events if event["ph"] == "b"]) == len([event for event in events if event["ph"] == "e"]) == 4 * 7
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1, 2}


def test_a_run_that_is_too_short_says_so(run: Run) -> None:
    result = run("simulate", "plan.json", "--batches", "2", "--no-timeline")
    assert result.exit_code == 0 and "2 batches are too few" in result.stdout and "F forward" not in result.stdout
    assert run("simulate", "plan.json", "--batches", "2", "--json").json["simulated_microbatch_us"] is None


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["missing.json"], "missing.json"),
        (["profile.json"], "pipedream-plan"),
        (["plan.json", "--batches", "0"], "--batches"),
        (["plan.json", "--batches", "1000000000"], "--batches 1000000000"),
        (["plan.json", "--width", "5"], "--width"),
        (["plan.json", "--profile", "missing.json"], "missing.json"),
        (["plan.json", "--trace", "plan.json/trace.json"], "plan.json/trace.json"),
    ],
)
def test_bad_input_is_named(run: Run, arguments: list[str], names: str) -> None:
    message, _ = run("simulate", *arguments).failed(2)
    assert names in message


def test_a_plan_whose_schedule_cannot_finish_is_named(run: Run) -> None:
    plan, _ = plan_of([stage_layer(k, 1, 1) for k in range(2)], flat(3), replicas=(1, 2), in_flight=(1, 2), batch=2)
    write_document(plan, "stuck.json")
    message, hint = run("simulate", "stuck.json").failed(2)
    assert "stage 1 replica 0 at 1F2" in message and "in-flight" in hint


def test_a_column_shows_what_fills_most_of_it() -> None:
    spans = [Span(0, 0, "0F0", "forward", 0.0, 3.0), Span(0, 0, "wait 0B0", "wait", 3.0, 5.0), Span(0, 0, "0B0", "backward", 8.0, 4.5)]
    assert cells(spans, 0.0, 2.0, 8) == "FF..BB  "
    assert cells(spans, 4.0, 2.0, 4) == "..BB"
