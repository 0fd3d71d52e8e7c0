"""Each kind of error gets its exit code, one line of message and one of hint."""

from __future__ import annotations

import click
import pytest

from pdcli.errors import describe
from pdcli.main import main
from planner.spec import errors


@pytest.mark.parametrize(
    ("error", "exit_code", "code"),
    [
        (errors.BadInput("no"), 2, "bad_input"),
        (errors.InvalidValue("no"), 2, "invalid_value"),
        (errors.InvalidFile("no"), 2, "invalid_file"),
        (errors.Infeasible("no"), 3, "infeasible"),
        (errors.Mismatch("no"), 4, "mismatch"),
        (errors.WorkerFailure("no"), 5, "worker_failed"),
        (errors.Interrupted("no"), 130, "interrupted"),
        (errors.PipedreamError("no"), 1, "unexpected"),
        (errors.Infeasible("no", code="memory"), 3, "memory"),
        (click.UsageError("no"), 2, "usage"),
        (click.FileError("x"), 2, "usage"),
        (click.Abort(), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "unexpected"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "missing_package"),
        (ModuleNotFoundError("No module named 'planner.nope'", name="planner.nope"), 1, "unexpected"),
    ],
)
def test_exit_codes(error: BaseException, exit_code: int, code: str) -> None:
    failure = describe(error)
    assert (failure.exit_code, failure.code) == (exit_code, code)
    assert failure.message and failure.hint


def test_every_class_of_error_has_an_exit_code_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and errors.PipedreamError in kind.__bases__]
    codes = [describe(kind("x")).exit_code for kind in kinds]
    assert len(kinds) == 5 and sorted(codes) == [2, 3, 4, 5, 130]


def test_only_the_unexpected_is_called_a_bug() -> None:
    assert "bug" in describe(RuntimeError("x")).hint and "--debug" in describe(RuntimeError("x")).hint
    assert "bug" not in describe(errors.BadInput("x")).hint
    assert "bug" not in describe(errors.WorkerFailure("x")).hint


def test_a_given_hint_is_kept_and_both_are_single_printable_lines() -> None:
    failure = describe(errors.Mismatch("one\n  two\x1b[31m", hint="do\nthis"))
    assert failure.message == "one two[31m"
    assert failure.hint == "do this"


def test_a_mistyped_option_is_answered_with_the_near_one() -> None:
    command = click.Command("plan", params=[click.Option(["--policy"])])
    with pytest.raises(click.UsageError) as caught:
        command.make_context("plan", ["--polcy", "x"])
    failure = describe(caught.value)
    assert "--polcy" in failure.message and "--policy" in failure.hint and "plan --help" in failure.hint


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("an exception that cannot say what it is")


def test_an_exception_that_cannot_be_told_is_named() -> None:
    assert describe(Mute()).message == "Mute"


def test_a_message_of_any_length_is_a_line_that_can_be_read() -> None:
    assert len(describe(errors.BadInput("x " * 100_000)).message) == 2000
    assert describe(errors.BadInput(f"{'9' * 5000} is too many")).message.endswith("999... is too many")


def test_a_program_ended_by_code_that_is_not_ours_is_reported() -> None:
    failure = describe(SystemExit(0))
    assert failure.exit_code == 1 and "sys.exit(0)" in failure.message


def test_the_end_of_some_file_is_no_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """click turns every EOFError into an Abort."""
    def ends(*arguments: object) -> None:
        raise EOFError("unexpected EOF")

    monkeypatch.setattr("planner.spec.files.read_document", ends)
    assert main(["simulate", "plan.json"]) == 1
    assert "EOFError: unexpected EOF" in capsys.readouterr().err
