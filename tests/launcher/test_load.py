"""From a reference to a job: what is found, how settings are converted, how faults are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.load import load_job
from planner.spec.errors import BadInput
from planner.spec.profile import JobReference

HEAD = """
import torch
from torch import nn
from pathlib import Path
from typing import Literal
from launcher import Job

DATA = [(torch.zeros(4), torch.zeros(2)) for _ in range(6)]

def make(**changes):
    fields = dict(model=nn.Linear(4, 2), train_data=DATA, optimizer=lambda p: torch.optim.SGD(p, 0.1), microbatch_size=2,
                  loss=nn.functional.mse_loss)
    return Job(**{**fields, **changes})
"""


def write(folder: Path, body: str, name: str = "my_job.py", head: str = HEAD) -> str:
    path = folder / name
    path.write_text(head + body)
    return str(path)


def fault(target: str, **settings: str | int | float | bool) -> BadInput:
    with pytest.raises(BadInput) as caught:
        load_job(JobReference(target, settings))
    assert caught.value.hint and "Traceback" not in caught.value.message
    return caught.value


def test_factory_is_found_by_default_by_name_and_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "def job(): return make()\ndef other(): return make(microbatch_size=3)\n", name="some_job_module.py")
    assert load_job(JobReference(path, {})).microbatch_size == 2
    assert load_job(JobReference(f"{path}:other", {})).microbatch_size == 3
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_job(JobReference("some_job_module:other", {})).microbatch_size == 3


def test_settings_become_the_annotated_types(tmp_path: Path) -> None:
    path = write(tmp_path, """
def job(a: int, b: float = 1.0, c: bool = False, d: str = "x", e=3, f: "int | None" = None, g: Literal["p", "q"] = "p",
        h: Path = Path(".")):
    job.got = (a, b, c, d, e, f, g, h)
    assert [type(v).__name__ for v in job.got[:7]] == ["int", "float", "bool", "str", "int", "int", "str"], job.got
    return make(microbatch_size=a)
""")
    settings: dict[str, str | int | float | bool] = {
        "a": "2", "b": "1e-3", "c": "true", "d": "5", "e": "7", "f": "4", "g": "q", "h": "some/where"}
    assert load_job(JobReference(path, settings)).microbatch_size == 2


def test_every_load_with_a_seed_builds_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "def job(): return make()\n")

    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)  # what ran before must not matter
        return load_job(JobReference(path, {}), seed=seed).model.state_dict()["weight"]

    assert torch.equal(weights(4), weights(4))
    assert not torch.equal(weights(4), weights(5))
    path = write(tmp_path, "torch.rand(3)\ndef job(): return make()\n", name="draws_when_imported.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = "draws_when_imported:job"  # imported once, so it draws before the first factory call only
    assert torch.equal(weights(4), weights(4))


def test_what_the_job_prints_is_not_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_job(JobReference(write(tmp_path, "print('at import')\ndef job():\n    print('in the factory')\n    return make()\n"), {}))
    out, err = capsys.readouterr()
    assert out == "" and "at import" in err and "in the factory" in err


def test_a_raising_factory_is_blamed_by_its_own_line(tmp_path: Path) -> None:
    path = write(tmp_path, "def helper():\n    return torch.zeros(2).view(3)\ndef job():\n    helper()\n")
    error = fault(path)
    line = HEAD.count("\n") + 2
    assert f"my_job.py:{line} in helper" in error.message and "RuntimeError" in error.message
    assert error.code == "job_raised"


@pytest.mark.parametrize(("body", "words"), [
    ("def job(: pass\n", "not valid Python"),
    ("import does_not_exist_anywhere\n", "ModuleNotFoundError"),
    ("import sys; sys.exit(3)\n", "SystemExit"),
    ("def train(): return make()\n", "no function 'job'; functions there: make, train"),
    ("def job(): return 7\n", "returned int, not a Job"),
    ("def job(): return make(train_data=[])\n", "train_data is empty: 0 samples"),
    ("def job(): return make(evaluation_data=[])\n", "evaluation_data is empty"),
    ("def job(): return make(microbatch_size=7)\n", "a microbatch of 7 samples is larger than train_data, which has 6"),
    ("def job(): return make(microbatch_size=0)\n", "microbatch_size 0"),
    ("def job(): return make(train_data=iter(DATA))\n", "an iterator, which can be gone through only once"),
    ("def job(): return make(model='net')\n", "model is a str"),
    ("def job(): return make(loss=None, metrics={'a': max})\n", "1 metrics but no loss"),
    ("def job(): return make(model=nn.Identity())\n", "no trainable parameter"),
    ("def job(n): return make()\n", "needs the setting 'n'"),
])
def test_faulty_jobs_are_explained(tmp_path: Path, body: str, words: str) -> None:
    assert words in fault(write(tmp_path, body)).message


def test_wrong_references_and_settings_are_explained(tmp_path: Path) -> None:
    assert "does not exist" in fault(str(tmp_path / "nothing.py")).message
    assert "cannot be found" in fault("no_such_module_here:job").message
    assert "does not name a job" in fault("something").message
    path = write(tmp_path, "def job(width: int = 3, deep: bool = False): return make()\n")
    unknown = fault(path, depth=3)
    assert "no setting 'depth'" in unknown.message and "width, deep" in unknown.hint
    assert "width='wide' is not int" in fault(path, width="wide").message
    assert "width=2.5 is not int" in fault(path, width=2.5).message
    assert "deep='perhaps' is not bool" in fault(path, deep="perhaps").message
    assert "no function 'other'" in fault(f"{path}:other").message
