"""Real worker processes over gloo, against the single-process simulation of their weight policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.data.microbatches import MicrobatchSource
from launcher.launch import Progress, TrainSettings, train
from launcher.load import load_job
from planner.spec.plan import Plan, Policy
from planner.spec.profile import JobReference
from planner.spec.summary import Summary
from tests.launcher.launching import capture, make_plan, write_job
from tests.launcher.simulation import Setup, simulate

UPDATES = 10
RUNS: list[tuple[Policy, tuple[int, ...], int, int, tuple[bool, ...], str]] = [  # batch, extra depth per link, recomputing stages
    ("stash", (1, 1), 1, 0, (), "momentum"), ("stash", (2, 1), 2, 0, (), "adam"), ("stash", (1, 2, 1), 4, 0, (), "momentum"),
    ("stash", (1, 1, 1, 1), 1, 0, (), "adam"), ("stash", (1, 1, 1, 2), 2, 1, (), "momentum"),
    ("stash", (1, 1, 1), 1, 0, (True, False, True), "adam"),
    ("vertical", (1, 1, 1), 1, 0, (), "momentum"), ("vertical", (1, 2), 2, 1, (True, True), "adam"),
    ("2bw", (1, 1, 1), 3, 0, (), "adam"), ("2bw", (2, 1), 4, 1, (True, False), "momentum"),
    ("flush", (1, 1, 1), 4, 0, (), "momentum"), ("flush", (2, 1), 4, 0, (True, True), "adam"),
    ("latest", (1, 1, 1), 1, 0, (), "momentum"), ("latest", (1, 2), 2, 2, (), "adam"),
]


@pytest.mark.parametrize(("policy", "replicas", "batch", "extra", "recompute", "optimizer"), RUNS,
                         ids=lambda value: str(value).strip("(,)").replace(", ", "-"))
def test_parameters_after_ten_updates(tmp_path: Path, policy: Policy, replicas: tuple[int, ...], batch: int, extra: int,
                                      recompute: tuple[bool, ...], optimizer: str) -> None:
    reference = JobReference(write_job(tmp_path), {"optimizer_name": optimizer, "evaluation": 10, "loaders": int(replicas == (2, 1))})
    captured = capture(reference)
    plan = make_plan(reference, replicas, captured=captured, batch=batch, policy=policy, extra_per_link=extra, recompute=recompute)
    seen: list[Progress] = []
    settings = TrainSettings(tmp_path / "run", UPDATES, None, seed=3, evaluate_every=4, oversubscribe=True, timeout_s=60)
    summary = train(plan, reference, settings, seen.append)

    expected, losses = simulated(plan, reference, 3)
    model = load_job(reference, seed=3).model
    model.load_state_dict(torch.load(tmp_path / "run" / "weights.pt", weights_only=True))
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")

    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in metrics if "train_loss" in line]
    assert [line["update"] for line in trained] == list(range(1, UPDATES + 1))
    assert [line["train_loss"] for line in trained] == pytest.approx(losses, abs=1e-6)
    assert [line["update"] for line in metrics if "evaluation" in line] == [4, 8, UPDATES]
    assert summary.final_train_loss == pytest.approx(losses[-1], abs=1e-6)
    assert_evaluation_is_the_final_models(summary, model, reference)
    assert seen[-1].update == UPDATES


@pytest.mark.parametrize(("policy", "replicas", "batch"), [("stash", (1, 2), 2), ("2bw", (1, 1, 1), 3)], ids=str)
def test_a_schedule_and_clipping_over_all_stages(tmp_path: Path, policy: Policy, replicas: tuple[int, ...], batch: int) -> None:
    reference = JobReference(write_job(tmp_path), {"clip_norm": 0.3, "schedule": True})
    plan = make_plan(reference, replicas, batch=batch, policy=policy)
    settings = TrainSettings(tmp_path / "run", UPDATES, None, seed=3, oversubscribe=True, timeout_s=60)
    train(plan, reference, settings, lambda progress: None)
    expected, _ = simulated(plan, reference, 3)
    found = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def simulated(plan: Plan, reference: JobReference, seed: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    job = load_job(reference, seed=seed)
    source = MicrobatchSource(job.train_data, plan.microbatch_size, job.shuffle, seed)
    names = list(dict(job.model.named_parameters()))
    # a layer of this model is a module, so a parameter belongs to the stage that has its module's layer
    stages = tuple(tuple(name for name in names if name.rpartition(".")[0] in stage.layers) for stage in plan.stages)
    assert sorted(name for stage in stages for name in stage) == sorted(names)

    def loss(parameters: object, microbatch: int) -> torch.Tensor:
        inputs, targets = source.read(microbatch)
        outputs = torch.func.functional_call(job.model, parameters, (inputs,))  # type: ignore[arg-type]
        return nn.functional.cross_entropy(outputs, targets)

    setup = Setup(stages, plan.replicas, tuple(stage.in_flight for stage in plan.stages), plan.batch_microbatches,
                  plan.policy)
    parameters = {name: value.detach() for name, value in job.model.named_parameters()}
    return simulate(parameters, loss, setup, job.optimizer, UPDATES, job.scheduler, job.clip_norm)


def assert_evaluation_is_the_final_models(summary: Summary, model: nn.Module, reference: JobReference) -> None:
    data = load_job(reference, seed=3).evaluation_data
    assert data is not None
    samples = [data[index] for index in range(len(data))]
    inputs, targets = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    model.eval()
    with torch.no_grad():
        outputs = model(inputs)
    final = summary.evaluations[-1]
    assert final.update == UPDATES
    assert final.values["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), abs=1e-5)
    assert final.values["accuracy"] == pytest.approx(float((outputs.argmax(-1) == targets).float().mean()), abs=1e-6)
