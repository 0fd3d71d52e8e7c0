"""The run directory: everything a run leaves behind, under names that are said in this file only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from planner.spec.errors import BadInput
from planner.spec.files import write_document
from planner.spec.plan import Plan
from planner.spec.profile import JobReference

__all__ = ["RunDirectory", "RunSettings"]


@dataclass(frozen=True)
class RunSettings:
    """How a run was started: ``settings.json``. ``left_out_microbatches`` of the epochs asked for do not fill a batch."""

    FORMAT: ClassVar[str] = "pipedream-settings"
    VERSION: ClassVar[int] = 1

    job: JobReference
    plan_digest: str
    updates: int
    epochs: int | None
    left_out_microbatches: int
    seed: int
    evaluate_every: int
    threads: int  # each worker computes with
    oversubscribe: bool
    timeout_s: float


@dataclass(frozen=True)
class RunDirectory:
    """Paths in one run's directory.

    ``plan.json settings.json metrics.jsonl trace.json summary.json weights.pt`` and ``logs/``; while the
    run goes on also ``parts/``, what each worker hands to the launcher.
    """

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def settings(self) -> Path:
        return self.path / "settings.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: an update's or an evaluation's."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def weights(self) -> Path:
        return self.path / "weights.pt"

    @property
    def evaluation(self) -> Path:
        """What ``pipedream eval`` found, in the directory of that run."""
        return self.path / "evaluation.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """What torch's own engine says of starting and stopping the workers."""
        return self.logs / "launcher.log"

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def status(self) -> Path:
        """Each worker's current operation, memory-mapped: see ``launcher/supervision/status.py``."""
        return self.parts / "status"

    def stdout(self, stage: int, replica: int) -> Path:
        return self.logs / f"stage{stage}-replica{replica}.stdout.log"

    def stderr(self, stage: int, replica: int) -> Path:
        return self.logs / f"stage{stage}-replica{replica}.stderr.log"

    def failure(self, stage: int, replica: int) -> Path:
        """Why a worker failed, written by itself."""
        return self.parts / f"stage{stage}-replica{replica}.failure.json"

    def measurements(self, stage: int, replica: int) -> Path:
        return self.parts / f"stage{stage}-replica{replica}.measurements.json"

    def stage_weights(self, stage: int) -> Path:
        return self.parts / f"stage{stage}.pt"

    def check_unused(self) -> None:
        """Raise :class:`BadInput` when the directory exists and holds anything."""
        try:
            used = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        except OSError as error:
            raise BadInput(f"cannot read the run directory {self.path}: {error.strerror}", hint="choose another run directory") from error
        if used:
            raise BadInput(f"the run directory {self.path} exists and is not empty", hint="give another one, or remove it")

    def check_finished(self) -> None:
        """Raise :class:`BadInput` unless a run has left its weights here."""
        if not self.path.is_dir():
            what = "is not a directory" if self.path.exists() else "does not exist"
            raise BadInput(f"the run directory {self.path} {what}", hint="give the directory of a run that 'pipedream train' finished")
        if not self.weights.is_file():
            raise BadInput(f"the run directory {self.path} has no {self.weights.name}: the run has not finished, or was no training",
                           hint="give the directory of a run that 'pipedream train' finished")

    def create(self, plan: Plan, settings: RunSettings) -> None:
        """Make the directory with its plan and settings; :class:`BadInput` when it cannot be written."""
        self.check_unused()
        try:
            self.logs.mkdir(parents=True)
            self.parts.mkdir()
        except OSError as error:
            raise BadInput(f"cannot make the run directory {self.path}: {error.strerror}", hint="choose another run directory") from error
        write_document(plan, self.plan)
        write_document(settings, self.settings)
