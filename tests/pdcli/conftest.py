"""Running the command in this process: exit code, stdout and stderr of one command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pdcli.main import main


class Result(NamedTuple):
    """What one command line gave."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout; fails when there is anything else."""
        body = json.loads(self.stdout)
        assert isinstance(body, dict) and self.stdout.count("\n") == 1
        assert body["exit_code"] == self.exit_code and (body["status"] == "ok") == (self.exit_code == 0)
        return body

    def failed(self, exit_code: int) -> tuple[str, str]:
        """Checks the form of a failure; its message and hint."""
        assert self.exit_code == exit_code, self.stderr
        assert self.stdout == ""
        lines = [line for line in self.stderr.splitlines() if line.startswith(("error:", "hint:"))]
        assert [line.split(" ")[0] for line in lines] == ["error:", "hint:"], self.stderr
        assert self.stderr.splitlines()[-2:] == lines, "the error comes last"
        assert "Traceback" not in self.stderr
        return lines[0].removeprefix("error: "), lines[1].removeprefix("hint: ")


Run = Callable[..., Result]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("plan", "profile.json")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        capfd.readouterr()
        exit_code = main(list(arguments))
        return Result(exit_code, *capfd.readouterr())

    return call
