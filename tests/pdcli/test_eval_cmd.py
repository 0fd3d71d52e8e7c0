"""``pipedream eval``: what it hands to the launcher, and what it prints. The launcher is a stand-in here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.supervision.progress import Progress
from launcher.supervision.rundir import RunSettings
from planner.spec.errors import Mismatch, WorkerFailure
from planner.spec.files import encode, write_document
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from planner.spec.summary import EvaluationSummary
from tests.launcher.launching import JOB_DATA, ROOT, make_plan, write_job
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile

RESULT = EvaluationSummary("d" * 64, 300, 4, 13, 0.5, 26.0, {"loss": 1.25, "accuracy": None}, {})


class Launcher(types.ModuleType):
    """Stands in for ``launcher.evaluate``: records what it is given, reports progress, then gives ``outcome``."""

    def __init__(self) -> None:
        super().__init__("launcher.evaluate")
        self.plan: Plan
        self.reference: JobReference
        self.settings: dict[str, Any]
        self.outcome: Any = RESULT

    def EvaluateSettings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def evaluate(self, plan: Plan, reference: JobReference, settings: dict[str, Any], on_progress: Any) -> Any:
        self.plan, self.reference, self.settings = plan, reference, settings
        assert Path(settings["run_directory"]).parent.is_dir()
        print("the job prints")
        on_progress(Progress("connecting", 0, 4, None, None))
        on_progress(Progress("evaluating", 1, 4, None, None))
        on_progress(Progress("saving", 4, 4, None, None))
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def launcher(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launcher:
    write_document(profile(), "profile.json")
    assert run("plan", "profile.json").exit_code == 0
    Path("run").mkdir()
    trained = JobReference("trained.py", {"width": 8})
    write_document(RunSettings(trained, "d" * 64, 300, None, 0, 0, 0, 1, False, 300.0), "run/settings.json")
    Path("run/weights.pt").write_bytes(b"")
    fake = Launcher()
    monkeypatch.setitem(sys.modules, "launcher.evaluate", fake)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return fake


def test_the_runs_job_is_evaluated_in_a_folder_that_goes(run: Run, launcher: Launcher) -> None:
    result = run("eval", "plan.json", "--resume", "run", "--set", "depth=2")
    assert result.exit_code == 0
    assert launcher.reference == JobReference("trained.py", {"width": 8, "depth": 2})
    assert launcher.settings | {"run_directory": None} == {
        "resume": Path("run"), "run_directory": None, "outputs": None, "threads": None, "oversubscribe": False, "timeout_s": 300.0}
    assert launcher.settings["run_directory"].parent == Path("temporary").absolute()
    assert not list(Path("temporary").iterdir())


def test_options_reach_the_launcher(run: Run, launcher: Launcher) -> None:
    run("eval", "plan.json", "--resume", "run", "--job", "other.py", "--outputs", "o.pt", "--run-dir", "here", "--threads", "2",
        "--oversubscribe", "--timeout", "9.5")
    assert launcher.reference == JobReference("other.py", {"width": 8})
    assert launcher.settings == {"resume": Path("run"), "run_directory": Path("here"), "outputs": Path("o.pt"), "threads": 2,
                                 "oversubscribe": True, "timeout_s": 9.5}


def test_values_are_on_stdout_and_everything_else_on_stderr(run: Run, launcher: Launcher) -> None:
    result = run("eval", "plan.json", "--resume", "run")
    assert "evaluated 13 samples with the weights of run, after update 300" in result.stdout
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert rows["loss"] == ["1.250000"] and rows["accuracy"] == ["not", "finite"]
    assert "26.0 samples/s" in result.stdout
    assert "the job prints" in result.stderr and "evaluating 4/4\nsaving\n" in result.stderr
    assert "next: model.load_state_dict(torch.load('run/weights.pt'))" in result.stderr


def test_outputs_are_named_with_their_shapes(run: Run, launcher: Launcher) -> None:
    launcher.outcome = EvaluationSummary("d" * 64, 300, 4, 13, 0.5, 26.0, {}, {"logits": (13, 4)})
    result = run("eval", "plan.json", "--resume", "run", "--outputs", "o.pt")
    assert "outputs: o.pt   (logits 13 x 4)" in result.stdout and "no targets" in result.stdout
    assert "next: torch.load('o.pt')" in result.stderr


def test_json_is_the_result(run: Run, launcher: Launcher) -> None:
    body = run("eval", "plan.json", "--resume", "run", "--json").json
    assert encode(RESULT).items() <= body.items()
    assert body["samples_per_s"] == 26.0 and body["values"] == {"loss": 1.25, "accuracy": None}


@pytest.mark.parametrize(("error", "exit_code", "kept"), [
    (WorkerFailure("stage 1 replica 0 was killed at 1E17", hint="read the log"), 5, True), (Mismatch("another model"), 4, False),
    (KeyboardInterrupt(), 130, False)])
def test_failures_keep_the_logs_that_they_name(run: Run, launcher: Launcher, error: BaseException, exit_code: int, kept: bool) -> None:
    launcher.outcome = error
    run("eval", "plan.json", "--resume", "run").failed(exit_code)
    assert bool(list(Path("temporary").iterdir())) == kept


@pytest.mark.parametrize(("arguments", "names"), [
    (["plan.json"], "--resume"), (["plan.json", "--resume", "nowhere"], "nowhere does not exist"),
    (["plan.json", "--resume", "plan.json"], "is not a directory"), (["plan.json", "--resume", "temporary"], "has no weights.pt"),
    (["profile.json", "--resume", "run"], "pipedream-profile"), (["plan.json", "--resume", "run", "--run-dir", "run"], "not empty")])
def test_bad_input_is_named(run: Run, launcher: Launcher, arguments: list[str], names: str) -> None:
    message, _ = run("eval", *arguments).failed(2)
    assert names in message


SLOW_JOB = JOB_DATA + '''
import time

class Slow(Data):
    def __getitem__(self, index):
        time.sleep(0.05)
        return super().__getitem__(index)

def job():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return Job(model=model, loss=nn.functional.cross_entropy, train_data=Data(64), evaluation_data=Slow(4000), microbatch_size=4,
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loader_processes=1)
'''


def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """Real workers with loader processes, as a terminal would stop them."""
    from launcher.load import load_job

    reference = JobReference(write_job(tmp_path, SLOW_JOB), {})
    plan = make_plan(reference, (1, 1))
    (tmp_path / "run").mkdir()
    (tmp_path / "temporary").mkdir()
    write_document(plan, tmp_path / "plan.json")
    write_document(plan, tmp_path / "run" / "plan.json")
    write_document(RunSettings(reference, "d" * 64, 1, None, 0, 0, 0, 1, False, 300.0), tmp_path / "run" / "settings.json")
    import torch

    torch.save(load_job(reference).model.state_dict(), tmp_path / "run" / "weights.pt")
    command = [sys.executable, "-m", "pdcli", "eval", "plan.json", "--resume", "run", "--oversubscribe"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while b"evaluating" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4, "the workers and a loader process each are not there"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        alive = [one for one in psutil.wait_procs(family, timeout=10)[1] if one.status() != psutil.STATUS_ZOMBIE]
        assert not alive
        last = (tmp_path / "log").read_text().splitlines()[-2:]
        assert last[0].startswith("error: stopped by SIGINT after ") and last[0].endswith(" of 1000 microbatches")
        assert last[1].startswith("hint: ")
        assert not list((tmp_path / "temporary").glob("pipedream-eval-*"))
    finally:
        process.kill()
        process.wait()
