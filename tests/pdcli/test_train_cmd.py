"""``pipedream train``: what it hands to the launcher, and what it prints of a run. The launcher is a stand-in here."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.supervision.rundir import RunSettings
from planner.spec.errors import Interrupted, Mismatch, WorkerFailure
from planner.spec.files import encode, read_document, write_document
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile, summary


@dataclass
class Progress:
    phase: str
    update: int
    updates: int
    train_loss: float | None = None
    samples_per_s: float | None = None


class Launcher(types.ModuleType):
    """Stands in for ``launcher.launch``: records what it is given, reports progress, then gives ``outcome``."""

    Progress = Progress

    def __init__(self) -> None:
        super().__init__("launcher.launch")
        self.plan: Plan
        self.reference: JobReference
        self.settings: dict[str, Any]
        self.outcome: Any = summary()
        self.left_out = 0

    def TrainSettings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def train(self, plan: Plan, reference: JobReference, settings: dict[str, Any], on_progress: Any) -> Any:
        self.plan, self.reference, self.settings = plan, reference, settings
        print("the job prints")
        on_progress(Progress("starting workers", 0, 0))
        on_progress(Progress("training", 1, 2, 3.0, 100.0))
        on_progress(Progress("saving", 2, 2, 2.5, 120.0))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        run = RunSettings(reference, "d" * 64, 300, settings["epochs"], self.left_out, 0, 0, 1, False, 300.0)
        write_document(run, settings["run_directory"] / "settings.json")
        return self.outcome


@pytest.fixture
def launcher(run: Run, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    write_document(profile(), "profile.json")
    assert run("plan", "profile.json").exit_code == 0
    fake = Launcher()
    monkeypatch.setitem(sys.modules, "launcher.launch", fake)
    return fake


def test_the_plan_and_its_job_are_trained(run: Run, launcher: Launcher) -> None:
    assert run("train", "plan.json", "--steps", "300").exit_code == 0
    assert launcher.plan == read_document(Plan, "plan.json")
    assert launcher.reference == JobReference("job.py", {"width": 64})
    expected = {"run_directory": Path("runs/job-1"), "updates": 300, "epochs": None, "seed": 0, "evaluate_every": 0, "threads": None,
                "oversubscribe": False, "timeout_s": 300.0}
    assert launcher.settings == expected


def test_options_reach_the_launcher(run: Run, launcher: Launcher) -> None:
    run("train", "plan.json", "--job", "other.py:small", "--set", "width=8", "--set", "depth=2", "--epochs", "3", "--run-dir", "here/run",
        "--seed", "7", "--evaluate-every", "50", "--threads", "2", "--oversubscribe", "--timeout", "9.5")
    assert launcher.reference == JobReference("other.py:small", {"width": 8, "depth": 2})
    expected = {"run_directory": Path("here/run"), "updates": None, "epochs": 3, "seed": 7, "evaluate_every": 50, "threads": 2,
                "oversubscribe": True, "timeout_s": 9.5}
    assert launcher.settings == expected


def test_one_epoch_unless_told_otherwise(run: Run, launcher: Launcher) -> None:
    run("train", "plan.json")
    assert (launcher.settings["updates"], launcher.settings["epochs"]) == (None, 1)


def test_every_run_gets_a_directory_of_its_own(run: Run, launcher: Launcher) -> None:
    used = []
    for _ in range(3):
        run("train", "plan.json")
        used.append(launcher.settings["run_directory"])
    assert used == [Path("runs/job-1"), Path("runs/job-2"), Path("runs/job-3")]
    assert all(path.is_dir() for path in used)


def test_a_run_that_never_started_leaves_no_directory(run: Run, launcher: Launcher) -> None:
    launcher.outcome = Mismatch("the plan is for another model")
    run("train", "plan.json").failed(4)
    assert list(Path("runs").iterdir()) == []


def test_a_used_directory_is_refused(run: Run, launcher: Launcher) -> None:
    Path("full").mkdir()
    Path("full/plan.json").write_text("kept")
    message, _ = run("train", "plan.json", "--run-dir", "full").failed(2)
    assert "full" in message and Path("full/plan.json").read_text() == "kept"


def test_results_are_on_stdout_and_everything_else_on_stderr(run: Run, launcher: Launcher) -> None:
    result = run("train", "plan.json")
    assert "final training loss: 2.5000" in result.stdout
    assert "evaluation after update 300: loss 2.7500, accuracy 0.5000" in result.stdout
    assert "throughput: 800.0 samples/s" in result.stdout
    assert "runs/job-1/weights.pt" in result.stdout and "runs/job-1/trace.json" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    assert "the job prints" in result.stderr
    assert "training 1/2  loss 3.0000  100.0 samples/s" in result.stderr
    assert "training 2/2  loss 2.5000  120.0 samples/s\nsaving\n" in result.stderr
    assert "next: pipedream eval plan.json --resume runs/job-1\n" in result.stderr


def test_the_next_step_is_to_evaluate_on_the_same_devices_where_there_are_data_for_it(run: Run, launcher: Launcher) -> None:
    result = run("train", "plan.json", "--threads", "2", "--oversubscribe", "--json")
    assert result.json["hint"] == "pipedream eval plan.json --resume runs/job-1 --threads 2 --oversubscribe"
    launcher.outcome = dataclasses.replace(summary(), evaluations=())
    assert run("train", "plan.json", "--json").json["hint"] == "model.load_state_dict(torch.load('runs/job-2/weights.pt'))"


def test_predicted_stands_against_measured_for_each_stage_and_the_pipeline(run: Run, launcher: Launcher) -> None:
    rows = [line.split("  ") for line in run("train", "plan.json").stdout.splitlines()]
    table = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    stages = read_document(Plan, "plan.json").predicted.stages
    assert table["stage 0"][1:4] == ["10.2 ms", "9.9 ms", "0.97"] and stages[0].microbatch_us == 10_200
    assert table["stage 1"][1:4] == ["9.9 ms", "9.9 ms", "1.00"] and stages[1].microbatch_us == 9_900
    assert table["pipeline"] == ["2", "10.2 ms", "10.0 ms", "0.98"]


def test_microbatches_that_fill_no_batch_are_told(run: Run, launcher: Launcher) -> None:
    assert "left out" not in run("train", "plan.json").stdout
    launcher.left_out = 3
    assert "left out: the last 3 microbatches" in run("train", "plan.json").stdout


def test_json_is_the_summary(run: Run, launcher: Launcher) -> None:
    result = run("train", "plan.json", "--json")
    body = result.json
    assert encode(summary()).items() <= body.items()
    assert body["run_directory"] == "runs/job-1" and body["predicted_microbatch_us"] == 10_200
    assert "the job prints" in result.stderr


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (WorkerFailure("stage 1 replica 0 was killed at 1B17", hint="read runs/job-1/logs"), 5),
        (Interrupted("stopped after update 17"), 130),
        (KeyboardInterrupt(), 130),
        (RuntimeError("unforeseen"), 1),
    ],
)
def test_failures(run: Run, launcher: Launcher, error: BaseException, exit_code: int) -> None:
    launcher.outcome = error
    run("train", "plan.json").failed(exit_code)
    assert run("train", "plan.json", "--json").json["exit_code"] == exit_code


def test_debug_shows_where(run: Run, launcher: Launcher) -> None:
    launcher.outcome = RuntimeError("unforeseen")
    result = run("train", "plan.json", "--debug")
    assert "Traceback" in result.stderr and result.exit_code == 1
    assert "bug" in result.stderr.splitlines()[-1]


def test_a_plan_without_a_job_needs_one(run: Run, launcher: Launcher) -> None:
    write_document(profile(job=None), "profile.json")
    run("plan", "profile.json")
    _, hint = run("train", "plan.json").failed(2)
    assert "--job" in hint
    assert run("train", "plan.json", "--job", "mine.py").exit_code == 0
    assert launcher.reference == JobReference("mine.py", {})


@pytest.mark.parametrize(
    ("arguments", "names"),
    [(["missing.json"], "missing.json"), (["profile.json"], "pipedream-profile"),
     (["plan.json", "--steps", "1", "--epochs", "1"], "--epochs"),
     (["plan.json", "--steps", "0"], "--steps"), (["plan.json", "--set", "width"], "width")],
)
def test_bad_input_is_named(run: Run, launcher: Launcher, arguments: list[str], names: str) -> None:
    message, _ = run("train", *arguments).failed(2)
    assert names in message
