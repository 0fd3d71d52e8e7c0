"""Progress of a run, read from what its workers write: the launcher's other eye."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.supervision.status import StatusBoard

__all__ = ["Progress", "last_update", "read_metrics", "reporting"]

_EVERY_S = 0.2


@dataclass(frozen=True)
class Progress:
    """``phase`` is "starting workers", what they prepare, "training", "evaluating" or "saving"."""

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


@contextlib.contextmanager
def reporting(metrics: Path, board: StatusBoard, updates: int, report: Callable[[Progress], None]) -> Iterator[None]:
    """Call ``report`` from a thread of its own whenever the run has got further."""
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(metrics, board, updates, report, stop), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(metrics: Path, board: StatusBoard, updates: int, report: Callable[[Progress], None], stop: threading.Event) -> None:
    position, rest = 0, ""
    update, loss, speed = 0, None, None
    shown = None
    stopping = False
    while not stopping:
        stopping = stop.wait(_EVERY_S)  # look once more after the end
        if metrics.exists():
            with metrics.open(encoding="utf-8") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in map(json.loads, filter(None, lines)):
            if "train_loss" in line:
                update, loss, speed = line["update"], line["train_loss"], line["samples_per_s"]
        progress = Progress(_phase(board, update, updates), update, updates, loss, speed)
        if progress != shown:
            shown = progress
            try:
                report(progress)
            except Exception:  # showing it is the caller's matter: the run goes on
                return


def _phase(board: StatusBoard, update: int, updates: int) -> str:
    slots = board.all()
    if any(slot.state == "new" for slot in slots):
        return "starting workers"
    preparing = [slot.text for slot in slots if slot.state == "preparing" and slot.text != "saving"]
    if preparing:
        return min(preparing, key=_ORDER.index)  # the slowest worker's phase is the run's
    if any(slot.state in ("running", "waiting") and "E" in slot.text for slot in slots):
        return "evaluating"
    return "saving" if update >= updates else "training"


_ORDER = ["loading the job", "capturing the model", "connecting", "making the optimizer"]
