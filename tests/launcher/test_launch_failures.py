"""A worker that is killed, raises, exits or hangs: the error names the one that caused it, and all are gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.launch import Progress, TrainSettings, train
from launcher.supervision.failure import explain
from launcher.supervision.rundir import RunDirectory
from launcher.supervision.status import StatusBoard
from planner.spec.errors import WorkerFailure
from planner.spec.profile import JobReference
from tests.launcher.launching import TROUBLE_JOB, make_plan, write_job


class Run(threading.Thread):
    """``train()`` of a two-stage plan on a thread of its own, so that a test can interfere."""

    def __init__(self, folder: Path, trouble: str, timeout_s: float = 60) -> None:
        super().__init__(daemon=True)
        self.directory = RunDirectory(folder / "run")
        self._plan = make_plan(JobReference(write_job(folder, TROUBLE_JOB), {"trouble": trouble}), (1, 1))
        self._settings = TrainSettings(self.directory.path, 400, None, oversubscribe=True, timeout_s=timeout_s)
        self.error: BaseException | None = None
        self.update = 0
        self.start()

    def run(self) -> None:
        assert self._plan.job is not None
        try:
            train(self._plan, self._plan.job, self._settings, self._progress)
        except BaseException as error:
            self.error = error

    def _progress(self, progress: Progress) -> None:
        self.update = progress.update

    def failure(self) -> WorkerFailure:
        """The error the run ended with, after checking that its workers are gone."""
        self.join(150)
        assert not self.is_alive()
        assert isinstance(self.error, WorkerFailure), self.error
        pids = [slot.pid for slot in StatusBoard(self.directory.status, 2).all()]
        assert all(pids)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
        return self.error


@pytest.fixture(autouse=True)
def _quiet_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing but the job's own words may reach the terminal."""
    yield
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_a_killed_worker_is_named_with_its_operation(tmp_path: Path) -> None:
    run = Run(tmp_path, "none")
    while run.update < 3 and run.is_alive():
        time.sleep(0.05)
    pid = StatusBoard(run.directory.status, 2).get(1).pid
    os.kill(pid, signal.SIGKILL)
    error = run.failure()
    assert error.message.startswith(f"stage 1 replica 0 (rank 1, {socket.gethostname()}, pid {pid}) was killed by SIGKILL at 1")
    assert str(run.directory.stderr(1, 0)) in error.hint


def test_a_raising_worker_is_named_with_the_users_error(tmp_path: Path) -> None:
    run = Run(tmp_path, "raise")
    error = run.failure()
    assert "stage 1 replica 0 (rank 1, " in error.message
    assert ") failed at 1U5: ValueError: the sixth step fails" in error.message
    assert "its_job.py:" in error.message, "the user's own line"
    assert "\n" not in error.message
    log = run.directory.stderr(1, 0)
    assert str(log) in error.hint
    assert "and says more" in log.read_text()


def test_a_worker_that_just_exits_is_found(tmp_path: Path) -> None:
    message = Run(tmp_path, "exit").failure().message
    assert message.startswith("stage 1 replica 0 ")
    assert "ended without a word while 1U5" in message


def test_the_hanging_worker_is_named_and_not_its_victim(tmp_path: Path) -> None:
    message = Run(tmp_path, "hang", timeout_s=4).failure().message
    assert message.startswith("stage 1 replica 0 ")
    assert "has been in 1U5 for" in message


def test_a_worker_that_could_not_even_write_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    directory.parts.mkdir()
    board = StatusBoard.create(directory.status, 2)
    monkeypatch.setattr("launcher.supervision.failure.shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    error = explain(directory, (1, 1), board, {1: 1}, 60.0)
    assert error.message.startswith("stage 1 replica 0") and error.message.endswith(f"the disk of {tmp_path} is full")
    assert "room" in error.hint


def test_the_process_that_starts_workers_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*arguments: object) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr("launcher.supervision.engine.launch_agent", lost)
    run = Run(tmp_path, "none")
    run.join(60)
    assert isinstance(run.error, WorkerFailure) and "starts the workers has ended: EOFError" in run.error.message
