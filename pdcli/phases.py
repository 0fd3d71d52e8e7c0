"""A run of the launcher as it is shown: the phase that has a length, and those before and after it that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pdcli.progress import Progress

if TYPE_CHECKING:
    from launcher.supervision.progress import Progress as Report

__all__ = ["phases"]


def phases(update: Progress, counted: str) -> Callable[[Report], None]:
    """Hands the launcher's reports to :meth:`pdcli.output.Output.progress`; ``counted`` is the phase with a length."""
    shown = 0

    def report(progress: Report) -> None:
        nonlocal shown
        here = progress.phase == counted
        if here or progress.update > shown:  # the last updates may be reported with the next phase
            shown = progress.update
            loss = "" if progress.train_loss is None else f"  loss {progress.train_loss:.4f}"
            speed = f"  {progress.samples_per_s:.1f} samples/s" if progress.samples_per_s else ""
            update(counted + loss + speed, progress.update, progress.updates)
        if not here:
            update(progress.phase, 0, 0)

    return report
