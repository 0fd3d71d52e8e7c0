"""How results look. stdout carries the result only; progress, notes and errors go to stderr.

Colour and animation appear on a terminal only, and never with NO_COLOR. Tables fit 100 columns.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

__all__ = ["Output", "Progress", "claimed_stdout", "plain"]

WIDTH = 100
LINE_EVERY_S = 10.0  # between two lines of progress in a log

Progress = Callable[[str, int, int], None]  # (what, done, total)


@contextlib.contextmanager
def claimed_stdout() -> Iterator[TextIO]:
    """Yield the real stdout, and send to stderr whatever else is printed meanwhile.

    Solvers and users' jobs print, some through the C library: so file descriptor 1 itself is redirected.
    """
    sys.stdout.flush()
    if not _is_descriptor_1(sys.stdout):  # replaced by a test or an embedding program: redirect the object only
        saved = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield saved
        return
    own = os.dup(1)
    os.dup2(2, 1)
    stream = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield stream
            stream.flush()
    finally:
        os.dup2(own, 1)
        with contextlib.suppress(BrokenPipeError):  # the exception that matters is already on its way
            stream.close()


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, io.UnsupportedOperation):
        return False


def plain(stream: TextIO) -> bool:
    """Whether to leave colour and animation out on ``stream``."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not stream.isatty()


class Output:
    """Where one command writes its result and its progress."""

    def __init__(self, stdout: TextIO, *, as_json: bool = False, verbose: bool = False) -> None:
        self.stdout = stdout
        self.as_json = as_json
        self.verbose = verbose

    def json(self, message: str, next_command: str, fields: dict[str, Any], exit_code: int = 0) -> None:
        """The one object of ``--json``; nothing without it. ``hint`` is the next command, ``exit_code`` 1 a difference."""
        if self.as_json:
            status, code = ("ok", "ok") if exit_code == 0 else ("error", "differs")
            body = {"status": status, "code": code, "message": message, "hint": next_command, "exit_code": exit_code} | fields
            self.stdout.write(json.dumps(body, ensure_ascii=False) + "\n")
            self.stdout.flush()

    def text(self, line: str = "") -> None:
        """A line of the result; long paths are not broken."""
        if not self.as_json:
            self._console(self.stdout).print(line, soft_wrap=True)

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> None:
        """A table of the result; the columns ``text`` hold text, the others numbers."""
        if self.as_json:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1))
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="left" if index in text else "right", overflow="fold", header_style="dim")
        for row in rows:
            table.add_row(*row)
        console = self._console(self.stdout)
        with console.capture() as captured:
            console.print(table)
        lines = "\n".join(line.rstrip() for line in captured.get().splitlines())  # rich pads each to the table's width
        self.stdout.write(f"\n{lines}\n")

    def next(self, command: str) -> None:
        """What to do after this command, on stderr."""
        if not self.as_json:
            self._console(sys.stderr).print(f"next: {command}", soft_wrap=True)

    def note(self, line: str) -> None:
        """Something worth knowing that is not the result, on stderr."""
        self._console(sys.stderr).print(line, soft_wrap=True)

    def detail(self, line: str) -> None:
        """Like :meth:`note`, with ``--verbose`` only."""
        if self.verbose:
            self.note(line)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something of unknown length is going on: a spinner on a terminal, one line in a log."""
        if plain(sys.stderr):
            self.detail(what)
            yield
            return
        with self._console(sys.stderr).status(what):
            yield

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A function to call with (what, done, total): a bar on a terminal, lines every few seconds in a log.

        ``total`` 0 is work of unknown length. What follows two spaces in ``what`` is detail that changes.
        """
        if plain(sys.stderr):
            yield _lines()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console(sys.stderr), redirect_stdout=False, redirect_stderr=False) as bars:
            tasks: dict[str, Any] = {}

            def update(what: str, done: int, total: int) -> None:
                key = what.partition("  ")[0]
                for other, task in tasks.items():
                    if other != key and bars.tasks[task].total is None:
                        bars.update(task, visible=False)  # it has ended, at an unknown length
                if key not in tasks:
                    tasks[key] = bars.add_task(what, total=total or None)
                bars.update(tasks[key], description=what, completed=done, total=total or None, visible=True)

            yield update

    @staticmethod
    def _console(stream: TextIO) -> Any:
        from rich.console import Console

        console = Console(file=stream, markup=False, highlight=False, emoji=False, force_terminal=not plain(stream))
        console.width = WIDTH if plain(stream) else min(console.width, WIDTH)
        return console


def _lines() -> Progress:
    """Progress as lines in a log: a new phase, its end, and in between at most one every few seconds."""
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
