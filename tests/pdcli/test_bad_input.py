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


@pytest.mark.parametrize("job", ["raise SystemExit(0)", "raise GeneratorExit"])
def test_a_factory_that_ends_the_program(run: Run, job: str) -> None:
    message, _ = run("profile", write_job(Path("job.py"), job=job)).failed(2)
    assert "job()" in message and "Exit" in message


def test_a_model_that_ends_the_program(run: Run) -> None:
    job = write_job(Path("job.py"), forward="raise SystemExit(0)")
    message, _ = run("profile", job).failed(2)
    assert "SystemExit" in message and f"job.py:{line_of(job, 'raise SystemExit')}" in message


def test_a_factory_that_is_no_plain_function(run: Run, recwarn: pytest.WarningsRecorder) -> None:
    job = Path(write_job(Path("job.py")))
    text = job.read_text()
    job.write_text(text.replace("def job(", "async def job("))
    message, _ = run("profile", str(job)).failed(2)
    assert "coroutine" in message and not recwarn.list
    job.write_text(text.replace("def job(", "def made(") + "\nimport functools\njob = functools.partial(made, no_such=1)\n")
    message, _ = run("profile", str(job)).failed(2)
    assert "no_such" in message


@pytest.mark.parametrize("target", ["a\\0b.py", "a\\0b.py:job"])
def test_a_job_that_no_file_can_be(run: Run, profiled: Path, target: str) -> None:
    assert run("plan", str(profiled / "profile.json")).exit_code == 0
    plan = json.loads(Path("plan.json").read_text())
    plan["job"]["target"] = target.replace("\\0", "\0")
    Path("plan.json").write_text(json.dumps(plan))
    run("train", "plan.json", "--steps", "1").failed(2)


@pytest.mark.parametrize(("data", "where"), [("torch.randn(32, width, device='meta')", "data"), ("torch.randn(32, width)", "model")])
def test_tensors_without_values(run: Run, data: str, where: str) -> None:
    job = Path(write_job(Path("job.py")))
    text = job.read_text().replace("torch.randn(32, width), torch.randn", f"{data}, torch.randn")
    job.write_text(text.replace("Job(Net(width)", "Job(Net(width).to('meta')" if where == "model" else "Job(Net(width)"))
    message, _ = run("profile", str(job)).failed(2)
    assert "meta" in message


def test_an_optimizer_of_other_parameters(run: Run) -> None:
    job = Path(write_job(Path("job.py"), job="other = torch.nn.Linear(3, 3)"))
    job.write_text(job.read_text().replace("SGD(parameters", "SGD(other.parameters()"))
    message, hint = run("profile", str(job)).failed(2)
    assert "2 parameters" in message and "8 it was given" in message and "parameters" in hint
    job.write_text(job.read_text().replace("torch.optim.SGD(other.parameters(), lr=0.1)", "None"))
    message, _ = run("profile", str(job)).failed(2)
    assert "NoneType" in message


@pytest.mark.parametrize("argument", ["metrics=[3]", "metrics={'a': 3}", "metrics={3: len}", "loader_processes=-1", "loader_processes='x'",
                                      "clip_norm=0", "clip_norm='1'", "scheduler=3"])
def test_a_job_with_a_field_of_another_kind(run: Run, argument: str) -> None:
    job = Path(write_job(Path("job.py")))
    job.write_text(job.read_text().replace("4, loss", f"4, {argument}, loss"))
    message, _ = run("profile", str(job)).failed(2)
    assert argument.partition("=")[0] in message


def test_a_job_that_goes_to_another_folder(run: Run) -> None:
    job = write_job(Path("job.py"), job="import os; os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')")
    assert run("profile", job, "--repeats", "1").exit_code == 0
    assert Path("profile.json").is_file()
    assert run("plan", "profile.json").exit_code == 0
    assert run("train", "plan.json", "--steps", "2", "--oversubscribe").exit_code == 0
    assert Path("runs/job-1/weights.pt").is_file()


def test_a_loss_that_is_not_finite_is_shown_as_such(run: Run) -> None:
    job = write_job(Path("job.py"), forward="return self.layers(x) * float('nan')")
    assert run("profile", job, "--repeats", "1").exit_code == 0
    assert run("plan", "profile.json").exit_code == 0
    result = run("train", "plan.json", "--steps", "2", "--oversubscribe")
    assert result.exit_code == 0 and "final training loss: not finite" in result.stdout


@pytest.mark.parametrize("option", ["--timeout=nan", "--timeout=inf", "--steps=1e9", f"--steps={10**30}", f"--seed={2**64}"])
def test_a_number_beyond_use(run: Run, option: str) -> None:
    message, _ = run("train", "plan.json", option).failed(2)
    assert option.partition("=")[0] in message
