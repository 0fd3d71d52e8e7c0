"""The ``pipedream`` command: finds the subcommand, runs it, and turns what goes wrong into an exit code.

Only click and the standard library are imported until a command runs, so that ``--help`` is immediate.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from pdcli import __version__
from pdcli.errors import describe, report
from pdcli.interrupts import terminations_raised
from pdcli.options import SETTINGS

__all__ = ["cli", "main"]

COMMANDS = {"profile": "pdcli.profile_cmd", "plan": "pdcli.plan_cmd", "simulate": "pdcli.simulate_cmd",
            "train": "pdcli.train_cmd", "eval": "pdcli.eval_cmd"}  # in the order of use


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings=SETTINGS, invoke_without_command=True, epilog="Start with: pipedream profile JOB.py")
@click.version_option(__version__, prog_name="pipedream")
@click.pass_context
def cli(context: click.Context) -> None:
    """Plan and run asynchronous pipeline-parallel training of PyTorch models.

    \b
    pipedream profile JOB.py       what each layer costs         -> profile.json
    pipedream plan profile.json    stages, replicas, placement   -> plan.json
    pipedream simulate plan.json   what its schedule does when   -> timeline, idle time, memory
    pipedream train plan.json      one worker per device         -> run directory
    pipedream eval plan.json       what its weights give         -> loss, metrics, outputs
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; prints errors, never raises."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    code = 0
    try:
        with terminations_raised():
            code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, as in `pipedream ... | head`
        _discard_stdout()
        return 1  # as click itself does
    except OSError as error:  # stdout takes nothing, not even the error as --json
        _discard_stdout()
        if code:  # what failed is told already; a buffered stdout fails once more when it is flushed
            return code
        failure = describe(error)
        report(failure, error, as_json=False, debug="--debug" in words)
        return failure.exit_code


def _discard_stdout() -> None:
    """So that the interpreter's last flush of what could not be written is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _open_standard_streams() -> None:
    """Streams that are closed lead nowhere, so that no file of ours gets their numbers and what libraries print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _run(words: list[str]) -> int:
    try:
        code = cli.main(args=words, prog_name="pipedream", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and _raised_by_click(error):  # its answer to a reader that has gone
            return error.code if isinstance(error.code, int) else 1
        failure = describe(error)
        report(failure, error, as_json="--json" in words, debug="--debug" in words)
        return failure.exit_code


def _raised_by_click(error: BaseException) -> bool:
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = str(frame.f_globals.get("__name__"))
    return place.partition(".")[0] == "click"
