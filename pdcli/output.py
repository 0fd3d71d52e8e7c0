"""How results look. stdout carries the result only; progress, notes and errors go to stderr.

Colour and animation appear on a terminal only, and never with NO_COLOR. Tables fit 100 columns.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pdcli.progress import Progress, bars, lines

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Output", "claimed_stdout", "json_line", "plain"]

WIDTH = 100


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
    stream = os.fdopen(own, "w", encoding=sys.stdout.encoding, errors="backslashreplace")  # as stderr: a name is shown, not fatal
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield stream
            stream.flush()
    finally:
        os.dup2(own, 1)
        with contextlib.suppress(OSError):  # the exception that matters is already on its way
            stream.close()


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, io.UnsupportedOperation):
        return False


def json_line(body: dict[str, Any], stream: TextIO) -> str:
    """``body`` as one line, with escapes if ``stream`` cannot hold its characters otherwise."""
    line = json.dumps(body, ensure_ascii=False)
    try:
        line.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(body)
    return f"{line}\n"


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
            self.stdout.write(json_line(body, self.stdout))
            self.stdout.flush()

    def text(self, line: str | Text = "") -> None:
        """A line of the result; long paths are not broken."""
        if not self.as_json:
            self._console(self.stdout).print(line, soft_wrap=True)

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> None:
        """A table of the result; the columns ``text`` hold text, the others numbers."""
        if self.as_json:
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="left" if index in text else "right", overflow="fold", header_style="dim")
        for row in rows:
            table.add_row(*row)
        console = self._console(self.stdout)
        with console.capture() as captured:
            console.print(title, style="bold")
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
        """A function to call with (what, done, total): see :mod:`pdcli.progress`."""
        if plain(sys.stderr):
            yield lines()
        else:
            with bars(self._console(sys.stderr)) as update:
                yield update

    @staticmethod
    def _console(stream: TextIO) -> Any:
        from rich.console import Console

        console = Console(file=stream, markup=False, highlight=False, emoji=False, force_terminal=not plain(stream))
        console.width = WIDTH if plain(stream) else min(console.width, WIDTH)
        return console
