"""What went wrong, as the user sees it: one ``error:`` line, one ``hint:`` line, an exit code.

Exit codes: 0 done, 1 unexpected or a ``--check`` difference, 2 usage or unreadable input, 3 no feasible
plan, 4 the plan does not match the machine, the job or the checkpoint, 5 a worker failed, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from dataclasses import dataclass

import click

from pdcli.output import json_line
from planner.spec.errors import BadInput, Infeasible, Interrupted, Mismatch, PipedreamError, WorkerFailure, told

__all__ = ["Failure", "describe", "report"]

EXIT_CODES: dict[type[PipedreamError], int] = {BadInput: 2, Infeasible: 3, Mismatch: 4, WorkerFailure: 5, Interrupted: 130}
NO_HINT = {2: "correct the input and run the command again", 3: "allow more memory or devices", 4: "make a new plan with 'pipedream plan'",
           5: "read the worker's log in the run directory", 130: "run the same command again to start over"}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LONGEST_WORD = 300  # of it: somebody's number of 5000 digits
MOST_CHARACTERS = 2000  # of a message: an exception of a library may carry a whole program
PACKAGES = ("torch", "numpy", "networkx", "pulp", "highspy", "rich")


@dataclass(frozen=True)
class Failure:
    """One failed command. ``code`` is stable; ``message`` and ``hint`` are one line each."""

    code: str
    message: str
    hint: str
    exit_code: int


def describe(error: BaseException) -> Failure:
    """The failure that ``error`` is to the user."""
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):  # click takes any of them for an interruption
        error = error.__cause__
    if isinstance(error, PipedreamError):
        exit_code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
        return Failure(error.code, _line(error.message, LONGEST_WORD), _line(error.hint) or NO_HINT.get(exit_code, _bug_hint()), exit_code)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "pipedream"
        near = getattr(error, "possibilities", None)
        also = f"did you mean {' or '.join(sorted(near)[:3])}? " if near else ""
        message = error.message if near else error.format_message()
        return Failure("usage", _line(message, LONGEST_WORD), f"{also}see '{path} --help'", 2)
    if isinstance(error, click.ClickException):
        return Failure("usage", _line(error.format_message()), "see 'pipedream --help'", 2)
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return Failure("interrupted", _line(told(error.__cause__ or error)) or "interrupted", NO_HINT[130], 130)
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return Failure("missing_package", f"the package {error.name!r} is not installed", f"pip install {error.name}", 1)
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" {error.filename}" if error.filename else ""
        return Failure("unwritable", _line(f"cannot write{where}: {error.strerror}"), "make room on that disk and run the command again", 2)
    if isinstance(error, SystemExit):
        return Failure("unexpected", f"the program was ended by sys.exit({error.code!r})", "let the job return or raise an error", 1)
    text = told(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure("unexpected", _line(what), _bug_hint(), 1)


def report(failure: Failure, error: BaseException, *, as_json: bool, debug: bool) -> None:
    """Print ``failure``: on stderr for people, as one object on stdout with ``--json``."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        body = {"status": "error", "code": failure.code, "message": failure.message, "hint": failure.hint, "exit_code": failure.exit_code}
        click.echo(json_line(body, sys.stdout), nl=False)
        return
    colour = False if os.environ.get("NO_COLOR") else None  # None: only on a terminal
    click.echo(f"{click.style('error:', fg='red', bold=True)} {failure.message}", err=True, color=colour)
    click.echo(f"{click.style('hint:', fg='cyan')} {failure.hint}", err=True, color=colour)


def _bug_hint() -> str:
    return "this is a bug in pipedream: run again with --debug and report what it prints"


def _line(text: str, longest_word: int = MOST_CHARACTERS) -> str:
    """``text`` on one line of bearable length, without control characters that a terminal would obey."""
    words = (word if len(word) <= longest_word else f"{word[: longest_word - 3]}..." for word in text.split())
    line = "".join(c for c in " ".join(words) if c.isprintable())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS - 3]}..."
