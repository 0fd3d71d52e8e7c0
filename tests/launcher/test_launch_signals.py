"""A run that is interrupted, or whose launcher is killed: nothing is left behind, and the terminal is clean."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner.spec.files import write_document
from planner.spec.profile import JobReference
from tests.launcher.launching import ROOT, TROUBLE_JOB, make_plan, write_job

# No `if __name__ == "__main__"`: workers must not run the caller's script.
SCRIPT = '''
import json, sys
from pathlib import Path
from launcher.launch import TrainSettings, train
from planner.spec.errors import PipedreamError
from planner.spec.files import read_document
from planner.spec.plan import Plan

folder, updates = Path(sys.argv[1]), int(sys.argv[2])
plan = read_document(Plan, folder / "plan.json")
settings = TrainSettings(folder / "run", updates, None, oversubscribe=True, timeout_s=60)
try:
    summary = train(plan, plan.job, settings, lambda progress: print(progress.phase, progress.update, flush=True))
    result = {"updates": summary.updates}
except PipedreamError as error:
    result = {"class": type(error).__name__, "message": error.message, "hint": error.hint}
(folder / "result.json").write_text(json.dumps(result))
'''


@dataclass
class Run:
    """One training run in a process of its own, and every process that descended from it."""

    folder: Path
    process: subprocess.Popen[bytes]
    family: set[psutil.Process] = field(default_factory=set)

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family.update(psutil.Process(self.process.pid).children(recursive=True))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 150) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            self.look()
            assert time.monotonic() < end, f"not within {timeout_s} s: {self.output()}"
            assert self.process.poll() is None or condition(), f"the run ended early: {self.output()}"
            time.sleep(0.05)

    def wait_until_training(self) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        self.look()

    def end(self, timeout_s: float = 120) -> dict[str, Any]:
        """Wait for the run's end, check that nothing is left of it, and return its result."""
        end = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < end, f"still running after {timeout_s} s: {self.output()}"
            time.sleep(0.05)
        self.assert_nobody_left()
        return json.loads((self.folder / "result.json").read_text())

    def assert_nobody_left(self, within_s: float = 20) -> None:
        assert len(self.family) >= 2, "the test did not see the workers"
        _, alive = psutil.wait_procs(self.family, timeout=within_s)
        assert not alive, f"left behind: {[(process.pid, process.cmdline()) for process in alive]}"

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def run(updates: int = 90, prepare: Callable[[], None] | None = None) -> Run:
        reference = JobReference(write_job(tmp_path, TROUBLE_JOB), {})
        write_document(make_plan(reference, (1, 1)), tmp_path / "plan.json")
        (tmp_path / "script.py").write_text(SCRIPT)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "output").open("wb") as output:
            process = subprocess.Popen([sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(updates)],
                                       stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path, preexec_fn=prepare)
        runs.append(Run(tmp_path, process))
        return runs[-1]

    yield run
    for made in runs:
        made.look()
        for process in made.family:
            if process.is_running():
                process.kill()
        made.process.kill()
        made.process.wait()


def assert_only_progress(output: str) -> None:
    """What the run printed: our progress lines, nothing of torch's."""
    phases = ("checking", "starting", "loading", "capturing", "connecting", "making", "training", "evaluating", "saving")
    strange = [line for line in output.splitlines() if not line.startswith(phases)]
    assert not strange


def test_interrupted_by_the_terminal(start: Callable[..., Run]) -> None:
    run = start(prepare=os.setpgrp)
    run.wait_until_training()
    os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to every process of the group
    result = run.end()
    assert result["class"] == "Interrupted"
    assert result["message"].startswith("stopped by SIGINT after ")
    assert result["message"].endswith(" of 90 updates")
    assert_only_progress(run.output())


def test_interrupted_while_starting(start: Callable[..., Run]) -> None:
    run = start(prepare=os.setpgrp)
    run.wait_for(lambda: "starting" in run.output())
    os.killpg(run.process.pid, signal.SIGINT)
    run.look()
    assert run.end()["class"] == "Interrupted"
    assert_only_progress(run.output())


def test_workers_end_when_the_launcher_is_killed(start: Callable[..., Run]) -> None:
    """Also: stdin is closed, as under some schedulers."""
    run = start(prepare=lambda: os.close(0))
    run.wait_until_training()
    assert_only_progress(run.output())
    run.process.kill()
    run.process.wait()
    run.assert_nobody_left()


def test_a_run_started_with_nohup_survives_its_terminal(start: Callable[..., Run]) -> None:
    def nohup() -> None:
        os.setpgrp()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run = start(updates=30, prepare=nohup)
    run.wait_until_training()
    os.kill(run.process.pid, signal.SIGHUP)
    assert run.end() == {"updates": 30}
