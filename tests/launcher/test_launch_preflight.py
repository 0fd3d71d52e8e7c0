"""What is refused before any worker starts: with both numbers, a next action, and nothing left behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher import devices
from launcher.launch import TrainSettings, train
from launcher.supervision.preflight import check_schedule
from planner.spec.errors import BadInput, Mismatch, PipedreamError
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from planner.spec.schedule import Pipeline
from tests.launcher.launching import MLP_JOB, even_cut, make_plan, write_job


@pytest.fixture
def reference(tmp_path: Path) -> JobReference:
    return JobReference(write_job(tmp_path), {})


def refused(plan: Plan, reference: JobReference, folder: Path, **changes: object) -> PipedreamError:
    settings = TrainSettings(folder / "run", 4, None, oversubscribe=True)
    with pytest.raises(PipedreamError) as caught:
        train(plan, reference, dataclasses.replace(settings, **changes), lambda progress: None)
    assert not (folder / "run").exists()
    assert caught.value.hint
    return caught.value


def test_a_plan_for_another_width(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    error = refused(plan, JobReference(reference.target, {"width": 20}), tmp_path)
    assert isinstance(error, Mismatch)
    assert plan.fingerprint[:12] in error.message
    assert "same names" in error.message


def test_a_plan_for_other_layers(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    other = tmp_path / "other"
    other.mkdir()
    text = MLP_JOB.replace("nn.Linear(width, 4))", "nn.Linear(width, 4), nn.Identity(), nn.ReLU())")
    error = refused(plan, JobReference(write_job(other, text), {}), tmp_path)
    assert isinstance(error, Mismatch)
    assert "only in the job: 8" in error.message


def test_more_workers_than_devices(tmp_path: Path, reference: JobReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    error = refused(make_plan(reference, (2, 1)), reference, tmp_path, oversubscribe=False)
    assert isinstance(error, Mismatch)
    assert "3 workers" in error.message and "2 CPU cores" in error.message
    assert "--oversubscribe" in error.hint


def test_threads_take_devices(tmp_path: Path, reference: JobReference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 2)
    error = refused(make_plan(reference, (1, 1)), reference, tmp_path, oversubscribe=False, threads=2)
    assert "2 workers" in error.message and "1 CPU devices of 2 threads" in error.message


def test_layers_in_an_impossible_order(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    first, second = plan.stages
    swapped = (dataclasses.replace(first, layers=second.layers), dataclasses.replace(second, layers=first.layers))
    assert isinstance(refused(dataclasses.replace(plan, stages=swapped), reference, tmp_path), Mismatch)


def test_depths_that_would_deadlock(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    error = refused(dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], in_flight=1),
                                                      dataclasses.replace(plan.stages[1], in_flight=2))), reference, tmp_path)
    assert "stage 0 replica 0 at 0B0" in error.message


def test_a_missing_layer(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    first = dataclasses.replace(plan.stages[0], layers=plan.stages[0].layers[1:])
    error = refused(dataclasses.replace(plan, stages=(first, plan.stages[1])), reference, tmp_path)
    assert isinstance(error, Mismatch)
    assert plan.stages[0].layers[0] in error.message


@pytest.mark.parametrize("changes", [{"updates": None}, {"updates": 3, "epochs": 2}, {"updates": 0}, {"threads": 0}])
def test_settings_that_cannot_be(tmp_path: Path, reference: JobReference, changes: dict[str, object]) -> None:
    assert isinstance(refused(make_plan(reference, (1, 1)), reference, tmp_path, **changes), BadInput)


def test_an_epoch_that_fills_no_batch(tmp_path: Path, reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1), batch=32)  # the job has 64 samples: 16 microbatches
    error = refused(plan, reference, tmp_path, updates=None, epochs=1)
    assert "16 microbatches" in error.message and "32" in error.message


def test_batches_too_short_for_the_policy(tmp_path: Path, reference: JobReference) -> None:
    error = refused(make_plan(reference, (1, 1, 1), batch=2, policy="2bw"), reference, tmp_path)
    assert "3 workers deep" in error.message and "2 microbatches" in error.message
    assert "--batch-microbatches 3" in error.hint


def test_a_used_run_directory_is_left_alone(tmp_path: Path, reference: JobReference) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    with pytest.raises(BadInput, match="not empty"):
        train(make_plan(reference, (1, 1)), reference, TrainSettings(tmp_path / "run", 4, None, oversubscribe=True), lambda progress: None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_even_cut_covers_all_layers() -> None:
    assert even_cut(["a", "b", "c", "d", "e"], 2) == [("a", "b"), ("c", "d", "e")]


def test_the_check_of_a_schedule_takes_no_longer_for_a_longer_batch_or_deeper_stages(reference: JobReference) -> None:
    plan = make_plan(reference, (1, 1))
    pipeline = Pipeline((1, 1), (10**11, 10**11), 10**11, 10**6)
    check_schedule(plan, pipeline)
    check_schedule(plan, dataclasses.replace(pipeline, flush=True))
    with pytest.raises(BadInput, match=r"cannot finish"):
        check_schedule(plan, dataclasses.replace(pipeline, in_flight=(1, 10**11)))
