"""What users get wrong, through the real profiler, planner and launcher: two lines, the exit code, no traceback."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from pdcli.main import main
from tests.pdcli.conftest import Run

JOB = '''
import torch
from launcher import Job

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        {forward}

def job(width: int = 8):
    {job}
    data = torch.utils.data.TensorDataset(torch.randn(32, width), torch.randn(32, width))
    return Job(Net(width), data, lambda parameters: torch.optim.SGD(parameters, lr=0.1), 4, loss=torch.nn.functional.mse_loss)
'''


def write_job(path: Path, *, forward: str = "return self.layers(x)", job: str = "pass") -> str:
    path.write_text(JOB.format(forward=textwrap.indent(forward, " " * 8).strip(), job=job))
    return str(path)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job that was really profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    job = write_job(folder / "job.py")
    assert main(["profile", job, "--repeats", "1", "-o", str(folder / "profile.json")]) == 0
    return folder


def line_of(path: str, text: str) -> int:
    return next(number for number, line in enumerate(Path(path).read_text().splitlines(), 1) if text in line)


def test_a_job_file_that_is_missing(run: Run) -> None:
    message, _ = run("profile", "missing.py").failed(2)
    assert "missing.py" in message
    assert run("profile", "missing.py", "--json").json["code"] == "job_not_found"


def test_a_factory_that_raises_is_shown_with_its_line(run: Run) -> None:
    job = write_job(Path("job.py"), job='raise RuntimeError("no such data")')
    message, hint = run("profile", job).failed(2)
    assert "RuntimeError" in message and "no such data" in message
    assert f"job.py:{line_of(job, 'no such data')}" in message and hint


def test_control_flow_that_depends_on_data_is_shown_with_its_line(run: Run) -> None:
    job = write_job(Path("job.py"), forward="if x.sum() > 0:\n    return self.layers(x)\nreturn x")
    message, hint = run("profile", job).failed(2)
    assert f"job.py:{line_of(job, 'x.sum()')}" in message and "torch.where" in hint


def test_a_setting_that_the_factory_does_not_know(run: Run) -> None:
    message, hint = run("profile", write_job(Path("job.py")), "--set", "depth=3").failed(2)
    assert "'depth'" in message and "width" in hint


def test_a_setting_of_another_type(run: Run) -> None:
    message, _ = run("profile", write_job(Path("job.py")), "--set", "width=wide").failed(2)
    assert "width" in message and "wide" in message


NEWER = '{"format": "pipedream-profile", "version": 99}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "pipedream-plan"}', NEWER, "\x00\xff"])
def test_a_file_that_is_no_profile(run: Run, text: str) -> None:
    Path("profile.json").write_text(text, encoding="latin-1")
    message, hint = run("plan", "profile.json").failed(2)
    assert "profile.json" in message
    assert ("upgrade" in hint) == ("99" in text)


def test_an_unknown_key(run: Run, profiled: Path) -> None:
    data = json.loads((profiled / "profile.json").read_text())
    data["layers"][0]["colour"] = "blue"
    Path("profile.json").write_text(json.dumps(data))
    message, _ = run("plan", "profile.json").failed(2)
    assert "unknown key layers[0].colour" in message


def test_a_plan_for_another_model(run: Run, profiled: Path) -> None:
    cluster = ("--cluster", "1x2", "--intra-bandwidth", "1GB/s")
    assert run("plan", str(profiled / "profile.json"), *cluster, "--stages", "2").exit_code == 0
    message, hint = run("train", "plan.json", "--steps", "1", "--set", "width=16", "--oversubscribe").failed(4)
    assert "model" in message and hint
    assert run("train", "plan.json", "--steps", "1", "--set", "width=16", "--oversubscribe", "--json").json["code"] == "other_model"
    assert not any(Path("runs").iterdir()), "no run was started"


def test_more_workers_than_devices(run: Run, profiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher import devices

    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    assert run("plan", str(profiled / "profile.json"), "--cluster", "1x3", "--intra-bandwidth", "1GB/s", "--stages", "3").exit_code == 0
    message, hint = run("train", "plan.json", "--steps", "1").failed(4)
    assert "3 workers" in message and "2 CPU cores" in message and "--oversubscribe" in hint
