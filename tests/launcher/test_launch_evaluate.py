"""``evaluate()`` on real workers against the single-process model; what it refuses; how it fails."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.evaluate import EvaluateSettings, evaluate
from launcher.launch import TrainSettings, train
from launcher.load import load_job
from launcher.supervision.progress import Progress
from launcher.supervision.rundir import RunDirectory
from planner.spec.errors import BadInput, Mismatch, PipedreamError, WorkerFailure
from planner.spec.profile import JobReference
from planner.spec.summary import EvaluationSummary, Summary
from tests.launcher.launching import JOB_DATA, make_plan, write_job

SAMPLES = 23  # microbatches of 4: the last one has 3

JOB = JOB_DATA + '''
import os

class Net(nn.Module):
    """Two outputs, of which one is made by an early layer; statistics and dropout tell evaluation from training."""
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)
    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return {"logits": self.last(torch.relu(self.second(self.drop(hidden)))), "hidden": hidden}

class Held(Data):
    def __init__(self, size, targets, broken):
        super().__init__(size)
        self.targets, self.broken = targets, broken
    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"sample {index} is gone")
        return super().__getitem__(index) if self.targets else super().__getitem__(index)[0]

def loss(outputs, targets): return nn.functional.cross_entropy(outputs["logits"], targets)
def accuracy(outputs, targets): return (outputs["logits"].argmax(-1) == targets).float().mean()

def job(evaluation: int = 23, targets: bool = True, width: int = 16, broken: int = -1, loaders: int = 0, folder: str = "."):
    os.chdir(folder)
    return Job(model=Net(width), loss=loss, train_data=Data(64), evaluation_data=Held(evaluation, targets, broken) if evaluation else None,
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), microbatch_size=4,
               metrics={"accuracy": accuracy}, loader_processes=loaders)
'''


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run of two stages, the first with two replicas."""

    folder: Path
    reference: JobReference
    summary: Summary

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    def model(self) -> nn.Module:
        model = load_job(self.reference).model
        model.load_state_dict(torch.load(self.directory / "weights.pt", weights_only=True))
        return model.eval()

    def expected(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The single-process model's outputs and means over all samples at once."""
        data = load_job(self.reference).evaluation_data
        assert data is not None
        samples = [data[index] for index in range(len(data))]
        inputs, targets = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        with torch.no_grad():
            outputs = self.model()(inputs)
        logits = outputs["logits"]
        return outputs, {"loss": float(nn.functional.cross_entropy(logits, targets)),
                         "accuracy": float((logits.argmax(-1) == targets).float().mean())}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    reference = JobReference(write_job(folder, JOB), {})
    settings = TrainSettings(folder / "run", 8, None, seed=3, oversubscribe=True, timeout_s=60)
    return Trained(folder, reference, train(make_plan(reference, (2, 1)), reference, settings, lambda progress: None))


Evaluate = Callable[..., EvaluationSummary]


@pytest.fixture
def run(trained: Trained, tmp_path: Path) -> Evaluate:
    """``run(replicas, **the job's settings)`` evaluates the trained run through such a plan."""

    def call(replicas: tuple[int, ...], *, microbatch_size: int = 4, on_progress: Callable[[Progress], None] = lambda progress: None,
             outputs: Path | None = None, **changes: Any) -> EvaluationSummary:
        reference = JobReference(trained.reference.target, changes)
        wanted = EvaluateSettings(trained.directory, tmp_path / "evaluation", outputs, oversubscribe=True, timeout_s=60)
        captured = None
        if microbatch_size != 4:
            from launcher.graph.capture import capture_training
            captured = capture_training(dataclasses.replace(load_job(trained.reference), microbatch_size=microbatch_size))
        plan = make_plan(trained.reference, replicas, microbatch_size=microbatch_size, captured=captured)
        return evaluate(plan, reference, wanted, on_progress)

    return call


@pytest.mark.parametrize(("replicas", "microbatch_size", "loaders"), [((2, 1), 4, 0), ((1, 2, 3), 4, 1), ((1,), 5, 0)], ids=str)
def test_values_and_outputs_are_the_models(trained: Trained, run: Evaluate, tmp_path: Path, replicas: tuple[int, ...],
                                           microbatch_size: int, loaders: int) -> None:
    seen: list[Progress] = []
    summary = run(replicas, microbatch_size=microbatch_size, outputs=tmp_path / "outputs.pt", loaders=loaders, on_progress=seen.append)
    outputs, values = trained.expected()
    assert summary.values == pytest.approx(values, abs=1e-6)
    assert summary.values == pytest.approx(trained.summary.evaluations[-1].values, abs=1e-6)
    written = torch.load(tmp_path / "outputs.pt", weights_only=True)
    assert written.keys() == outputs.keys()
    for name, value in outputs.items():
        torch.testing.assert_close(written[name], value, rtol=0, atol=1e-6)
    assert (summary.samples, summary.update, summary.microbatches) == (SAMPLES, 8, -(-SAMPLES // microbatch_size))
    assert seen[-1].update == seen[-1].updates == summary.microbatches
    directory = RunDirectory(tmp_path / "evaluation")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert directory.evaluation.is_file() and directory.trace.is_file() and not directory.parts.exists()


def test_a_job_that_changes_its_folder_changes_no_path(run: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    run((1, 1), outputs=Path("outputs.pt"), folder=str(tmp_path / "elsewhere"))
    assert (tmp_path / "outputs.pt").is_file() and not list((tmp_path / "elsewhere").iterdir())


def test_a_replica_may_have_nothing_to_do(trained: Trained, run: Evaluate) -> None:
    summary = run((1, 3), evaluation=7)
    assert (summary.microbatches, summary.samples) == (2, 7)
    data = [load_job(trained.reference).evaluation_data[index] for index in range(7)]  # type: ignore[index]
    with torch.no_grad():
        logits = trained.model()(torch.stack([x for x, _ in data]))["logits"]
    expected = nn.functional.cross_entropy(logits, torch.stack([y for _, y in data]))
    assert summary.values["loss"] == pytest.approx(float(expected), abs=1e-6)


def test_data_without_targets_give_outputs_only(trained: Trained, run: Evaluate, tmp_path: Path) -> None:
    summary = run((1, 2), outputs=tmp_path / "outputs.pt", targets=False)
    outputs, _ = trained.expected()
    assert summary.values == {}
    written = torch.load(tmp_path / "outputs.pt", weights_only=True)
    for name, value in outputs.items():
        torch.testing.assert_close(written[name], value, rtol=0, atol=1e-6)


def test_a_sample_that_cannot_be_read_is_told_with_the_users_line(run: Evaluate, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as caught:
        run((1, 1), broken=9)
    assert "stage 0 replica 0" in caught.value.message and " failed at 0E2: OSError: sample 9 is gone" in caught.value.message
    assert "its_job.py:" in caught.value.message
    assert str(RunDirectory(tmp_path / "evaluation").stderr(0, 0)) in caught.value.hint


@pytest.mark.parametrize(("kind", "changes", "words"), [
    (BadInput, {"evaluation": 0}, "no evaluation data"),
    (BadInput, {"targets": False}, "have no targets"),
    (Mismatch, {"width": 20}, "the plan is for model"),
    (BadInput, {"outputs": Path("nowhere/outputs.pt")}, "nowhere/outputs.pt"),
    (BadInput, {"outputs": Path()}, "is a folder"),
])
def test_what_is_refused_before_any_worker_starts(run: Evaluate, tmp_path: Path, kind: type[PipedreamError], changes: dict[str, Any],
                                                  words: str) -> None:
    with pytest.raises(kind) as caught:
        run((1, 1), **changes)
    assert words in caught.value.message and caught.value.hint
    assert not (tmp_path / "evaluation").exists()


def test_outputs_never_take_the_place_of_a_pipe_or_a_link(run: Evaluate, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadInput, match="is a device or a pipe"):
        run((1, 1), outputs=pipe)
    assert pipe.is_fifo()
    link = tmp_path / "link.pt"
    link.symlink_to(tmp_path / "outputs.pt")
    run((1, 1), outputs=link)
    assert link.is_symlink() and (tmp_path / "outputs.pt").is_file()


def copied(trained: Trained, folder: Path, text: str) -> tuple[JobReference, EvaluateSettings]:
    """The trained run beside another job."""
    return JobReference(write_job(folder, text), {}), EvaluateSettings(trained.directory, folder / "evaluation", oversubscribe=True)


def test_the_run_of_another_model_is_refused(trained: Trained, tmp_path: Path) -> None:
    reference, settings = copied(trained, tmp_path, JOB.replace("torch.tanh", "torch.sigmoid"))
    plan = make_plan(reference, (1, 1))
    with pytest.raises(Mismatch, match=r"the run .* trained model") as caught:
        evaluate(plan, reference, settings, lambda progress: None)
    assert plan.fingerprint[:12] in caught.value.message and caught.value.code == "other_model"


def test_weights_that_are_not_the_models_are_refused(trained: Trained, tmp_path: Path) -> None:
    copy = RunDirectory(tmp_path / "copy")
    copy.path.mkdir()
    for name in ("plan.json", "settings.json"):
        (copy.path / name).write_bytes((trained.directory / name).read_bytes())
    settings = EvaluateSettings(copy.path, tmp_path / "evaluation", oversubscribe=True)
    plan = make_plan(trained.reference, (1, 1))

    def refused() -> PipedreamError:
        with pytest.raises(PipedreamError) as caught:
            evaluate(plan, trained.reference, settings, lambda progress: None)
        return caught.value

    assert "has no weights.pt" in refused().message
    copy.weights.write_bytes(b"not weights")
    assert isinstance(refused(), BadInput) and str(copy.weights) in refused().message
    weights = torch.load(trained.directory / "weights.pt", weights_only=True)
    torch.save(weights | {"last.bias": torch.zeros(5)}, copy.weights)
    assert isinstance(refused(), Mismatch) and "of shape (5,)" in refused().message and "of shape (4,)" in refused().message
    del weights["last.bias"]
    torch.save(weights, copy.weights)
    assert isinstance(refused(), Mismatch) and "'last.bias' is nothing" in refused().message


def test_outputs_must_have_a_row_a_sample(trained: Trained, tmp_path: Path) -> None:
    reference, settings = copied(trained, tmp_path, JOB.replace('"hidden": hidden}', '"hidden": hidden.T}'))
    with pytest.raises(PipedreamError) as caught:
        evaluate(make_plan(reference, (1, 1)), reference, dataclasses.replace(settings, outputs=tmp_path / "o.pt"), lambda progress: None)
    assert "'hidden' has shape (16, 4) for 4 samples" in caught.value.message
