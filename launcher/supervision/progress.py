"""Progress of a run, read from what its workers write: the launcher's other eye."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.supervision.status import StatusBoard
from planner.spec.schedule import parse_op

__all__ = ["Evaluating", "Progress", "Training", "counting", "following", "last_update", "read_metrics"]

_EVERY_S = 0.2


@dataclass(frozen=True)
class Progress:
    """``phase`` is "starting workers", what they prepare, "training", "evaluating" or "saving"; what follows two spaces is detail."""

    phase: str
    update: int
    updates: int
    train_loss: float | None
    samples_per_s: float | None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def last_update(path: Path) -> int:
    """How many updates a metrics file tells of."""
    return max((line["update"] for line in read_metrics(path)), default=0)


class Training:
    """How far a run of ``updates`` has got, by its metrics file and its workers' status: call it to look."""

    def __init__(self, metrics: Path, board: StatusBoard, updates: int) -> None:
        self._metrics, self._board, self._updates = metrics, board, updates
        self._position, self._rest = 0, ""
        self._update: int = 0
        self._loss: float | None = None
        self._speed: float | None = None

    def __call__(self) -> Progress:
        if self._metrics.exists():
            with self._metrics.open(encoding="utf-8") as file:
                file.seek(self._position)
                self._rest += file.read()
                self._position = file.tell()
        *lines, self._rest = self._rest.split("\n")
        for line in map(json.loads, filter(None, lines)):
            if "train_loss" in line:
                self._update, self._loss, self._speed = line["update"], line["train_loss"], line["samples_per_s"]
        slots = self._board.all()
        phase = _preparing(self._board)
        if phase is None and any(slot.state in ("running", "waiting") and "E" in slot.text for slot in slots):
            phase = "evaluating"
        phase = phase or ("saving" if self._update >= self._updates else "training")
        return Progress(phase, self._update, self._updates, self._loss, self._speed)


class Evaluating:
    """How many of ``microbatches`` the last stage has come to, by its replicas' status: call it to look."""

    def __init__(self, board: StatusBoard, replicas: Sequence[int], microbatches: int) -> None:
        self._board, self._last, self._microbatches = board, replicas[-1], microbatches
        self._done = 0

    def __call__(self) -> Progress:
        slots = self._board.all()
        phase = _preparing(self._board)
        last = slots[-self._last:]
        if phase is None and all(slot.state == "done" or slot.text == "saving" for slot in last):
            phase, self._done = "saving", self._microbatches
        self._done = max(self._done, *(parse_op(slot.text).index for slot in last if slot.state in ("running", "waiting")), 0)
        return Progress(phase or "evaluating", self._done, self._microbatches, None, None)


def counting(report: Callable[[Progress], None]) -> Callable[[int], None]:
    """Reports how many samples of the evaluation data have been counted."""
    return lambda samples: report(Progress(f"counting the evaluation data  {samples} samples", 0, 0, None, None))


@contextlib.contextmanager
def following(look: Callable[[], Progress], report: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``report`` from a thread of its own whenever ``look`` finds that the run has got further."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(look, report, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(look: Callable[[], Progress], report: Callable[[Progress], None], stop: threading.Event) -> None:
    shown = None
    stopping = False
    while not stopping:
        stopping = stop.wait(_EVERY_S)  # look once more after the end
        progress = look()
        if progress != shown:
            shown = progress
            try:
                report(progress)
            except Exception:  # showing it is the caller's matter: the run goes on
                return


def _preparing(board: StatusBoard) -> str | None:
    """What the slowest worker prepares, which is the run's phase; None when all are at work."""
    slots = board.all()
    if any(slot.state == "new" for slot in slots):
        return "starting workers"
    preparing = [slot.text for slot in slots if slot.state == "preparing" and slot.text != "saving"]
    return min(preparing, key=_ORDER.index, default=None)


_ORDER = ["loading the job", "capturing the model", "connecting", "making the optimizer"]
