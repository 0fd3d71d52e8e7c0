"""``pipedream profile``: what it hands to the profiler, and what it prints. The profiler is a stand-in here."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest

from planner.spec.files import read_document
from planner.spec.profile import JobReference, Profile
from tests.pdcli.conftest import Run
from tests.pdcli.samples import profile


class Profiler(types.ModuleType):
    """Stands in for ``launcher.profiling.profile``."""

    def __init__(self) -> None:
        super().__init__("launcher.profiling.profile")
        self.given: dict[str, Any] = {}
        self.result = profile(20)

    def profile_job(self, reference: JobReference, *, on_progress: Any, **keywords: Any) -> Profile:
        self.given = {"reference": reference, **keywords}
        on_progress("capturing", 0, 0)
        on_progress("measuring layers", 20, 20)
        return dataclasses.replace(self.result, command=keywords["command"])


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Profiler:
    fake = Profiler()
    monkeypatch.setitem(sys.modules, "launcher.profiling.profile", fake)
    return fake


def test_options_reach_the_profiler_and_the_file_holds_its_command(run: Run, profiler: Profiler) -> None:
    result = run("profile", "job.py:small", "--set", "width=8", "--microbatch_size", "4", "--repeats", "3", "--threads", "1", "--seed", "5",
                 "-o", "p.json")
    assert result.exit_code == 0
    command = "pipedream profile job.py:small --set width=8 --microbatch-size 4 --repeats 3 --threads 1 --seed 5"
    assert profiler.given == {"reference": JobReference("job.py:small", {"width": 8}), "microbatch_sizes": (4,), "repeats": 3, "threads": 1,
                              "seed": 5, "command": command}
    assert read_document(Profile, "p.json").command == command


def test_defaults(run: Run, profiler: Profiler) -> None:
    run("profile", "job.py")
    assert profiler.given["microbatch_sizes"] == () and profiler.given["threads"] is None and profiler.given["seed"] == 0
    assert profiler.given["command"] == "pipedream profile job.py"
    assert len(read_document(Profile, "profile.json").layers) == 20


def test_the_heaviest_layers_come_first(run: Run, profiler: Profiler) -> None:
    layers = list(profiler.result.layers)
    layers[7] = dataclasses.replace(layers[7], forward_us=9000.0)
    profiler.result = dataclasses.replace(profiler.result, layers=tuple(layers))
    result = run("profile", "job.py")
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("net.block")]
    assert rows[0][0] == "net.block7" and len(rows) == 12
    assert rows[0][-5] == f"{11_000 / (11_000 + 19 * 3_000):.1%}"
    assert "heaviest 12 of 20 layers" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_sum_of_layers_stands_against_the_whole_step(run: Run, profiler: Profiler) -> None:
    words = run("profile", "job.py").stdout
    assert "sum of layers   forward 20.0 ms, backward 40.0 ms, update 6.0 ms" in words
    assert "whole step      forward 21.0 ms, backward 42.0 ms, update 6.0 ms" in words
    assert f"{1 / 1.05:.1%} of the whole step" in words


def test_the_next_command_names_the_file(run: Run, profiler: Profiler) -> None:
    result = run("profile", "job.py", "-o", "my folder/p.json")
    assert "next: pipedream plan 'my folder/p.json'" in result.stderr
    body = run("profile", "job.py", "--json").json
    assert body["hint"] == "pipedream plan profile.json" and body["profile"] == "profile.json"
    assert body["parameter_bytes"] == 20 * 4_000_000 and body["layers"] == 20


@pytest.mark.parametrize("name", ["block{}.[bold]x[/bold]", "very.long." * 12 + "{}", "ünïcödé{}"])
def test_any_layer_name_is_shown_whole(run: Run, profiler: Profiler, name: str) -> None:
    profiler.result = profile(3, name=name)
    words = run("profile", "job.py").stdout
    assert max(map(len, words.splitlines())) <= 100
    if "very" not in name:
        assert name.format(1) in words
    else:
        assert words.count("v") >= 3 * 12  # folded over lines
