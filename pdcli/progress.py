"""How a command shows that it goes on: bars on a terminal, a few lines in a log.

Both are functions of (what, done, total). ``total`` 0 is work of unknown length. What follows two spaces in
``what`` is detail that changes, such as the loss.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Progress", "bars", "lines"]

LINE_EVERY_S = 10.0  # between two lines in a log

Progress = Callable[[str, int, int], None]  # (what, done, total)


@contextlib.contextmanager
def bars(console: Any) -> Iterator[Progress]:
    """A bar for each piece of work with a known length, a spinner for the others while they last."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Bar(BarColumn):
        def render(self, task: Task) -> Any:
            return Text("") if task.total is None else super().render(task)

    class Count(TextColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")

    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), Bar(bar_width=30), Count(""), TimeRemainingColumn())
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as display:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            key = what.partition("  ")[0]
            for other, task in tasks.items():
                if other != key and display.tasks[task].total is None:
                    display.update(task, visible=False)  # it has ended, at an unknown length
            if key not in tasks:
                tasks[key] = display.add_task(what, total=total or None)
            display.update(tasks[key], description=what, completed=done, total=total or None, visible=True)

        yield update
        for task in tasks.values():
            if display.tasks[task].total is None:
                display.update(task, visible=False)


def lines() -> Progress:
    """A line for a new phase and for its end, and in between one every few seconds."""
    phase, printed_at_s, complete = "", 0.0, False

    def update(what: str, done: int, total: int) -> None:
        nonlocal phase, printed_at_s, complete
        key = what.partition("  ")[0]
        now_s = time.monotonic()
        if key != phase:
            phase, complete = key, False
        elif complete or (now_s - printed_at_s < LINE_EVERY_S and not 0 < total <= done):
            return
        printed_at_s, complete = now_s, 0 < total <= done
        count = f" {done}/{total}" if total else ""
        sys.stderr.write(f"{key}{count}{what[len(key):]}\n")
        sys.stderr.flush()

    return update
