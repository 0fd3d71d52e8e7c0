"""stdout carries the result only; no colour off a terminal or with NO_COLOR; tables fit 100 columns."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdcli.output import WIDTH, Output, plain

ROOT = Path(__file__).resolve().parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def shown(stream: io.StringIO) -> str:
    out = Output(stream)
    out.table("layers", ("layer", "forward", "share"), [("x" * 150, "1.0 us", "50.0%"), ("[bold]b[/bold]", "2.0 us", "50.0%")])
    out.text("wrote " + "p" * 150)
    return stream.getvalue()


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in shown(Terminal())
    assert "\x1b" not in shown(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(Terminal())


def test_forced_colour_does_not_reach_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in shown(io.StringIO())


def test_tables_fit_and_lose_nothing_while_paths_stay_whole() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert max(len(line.rstrip()) for line in lines[:-1]) <= WIDTH
    assert sum(line.count("x") for line in lines) == 150
    assert lines[-1] == "wrote " + "p" * 150


def test_names_with_brackets_are_shown_as_they_are() -> None:
    assert "[bold]b[/bold]" in shown(io.StringIO())


def test_json_prints_one_object_and_nothing_else() -> None:
    stream = io.StringIO()
    out = Output(stream, as_json=True)
    out.text("words")
    out.table("t", ("a",), [("b",)])
    out.json("done", "next", {"value": 1})
    assert json.loads(stream.getvalue()) == {"status": "ok", "code": "ok", "message": "done", "hint": "next", "exit_code": 0, "value": 1}
    assert stream.getvalue().count("\n") == 1


def test_progress_in_a_log_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(io.StringIO()).progress() as update:
        update("starting", 0, 0)
        for step in range(1, 101):
            update("training  loss 2.5", step, 100)
    error = capsys.readouterr().err.splitlines()
    assert error[0] == "starting"
    assert error[1] == "training 1/100  loss 2.5"
    assert error[-1] == "training 100/100  loss 2.5"
    assert len(error) <= 5
    assert not any("\r" in line or "\x1b" in line for line in error)


def test_progress_on_a_terminal_is_animated(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert not plain(terminal)
    with Output(io.StringIO()).progress() as update:
        update("training  loss 2.5", 1, 2)
        update("training  loss 2.4", 2, 2)
    assert "\x1b[" in terminal.getvalue() and "training  loss 2.4" in terminal.getvalue()


def test_what_libraries_print_goes_to_stderr_even_below_python() -> None:
    code = (
        "import os, sys\n"
        "from pdcli.output import Output, claimed_stdout\n"
        "with claimed_stdout() as stdout:\n"
        "    print('python noise'); os.write(1, b'C noise\\n'); os.system('echo child noise')\n"
        "    Output(stdout).text('result')\n"
        "print('after')\n"
    )
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.stdout == "result\nafter\n", done.stderr
    assert sorted(done.stderr.split("\n")[:-1]) == ["C noise", "child noise", "python noise"]


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "missing.json", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_traceback(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", "pdcli", *arguments], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (1, 2)


def test_a_terminal_without_the_characters_of_a_result_gets_escapes() -> None:
    code = (
        "from pdcli.output import Output, claimed_stdout\n"
        "with claimed_stdout() as stdout:\n"
        "    Output(stdout).text('\\u00b1 \\udcff')\n"
        "    Output(stdout, as_json=True).json('\\u00b1', '\\udcff', {})\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
    text, line = done.stdout.splitlines()
    assert text == "\\xb1 \\udcff"
    assert json.loads(line)["message"] == "\u00b1" and json.loads(line)["hint"] == "\udcff"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])  # a buffered stdout fails again at the last flush
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "missing.json", "--json"]], ids=" ".join)
def test_a_result_that_cannot_be_written_is_an_error_of_two_lines(arguments: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "pdcli", *arguments], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
                              env=environment)
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == "error: cannot write: No space left on device" and hint.startswith("hint: ")


@pytest.mark.parametrize("closed", [(0, 1), (2,), (0, 1, 2)])
def test_closed_streams_lead_nowhere(closed: tuple[int, ...]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    command = [sys.executable, "-m", "pdcli", "plan", "missing.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=close)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") or 2 in closed
