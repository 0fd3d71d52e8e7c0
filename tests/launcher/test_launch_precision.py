"""Real worker processes in mixed precision with a scaled loss, against the uncut model under ``torch.autocast`` in the simulation."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from launcher.data.microbatches import MicrobatchSource
from launcher.launch import TrainSettings, train
from launcher.load import load_job
from launcher.precision import autocasting
from launcher.supervision.progress import read_metrics
from planner.spec.profile import JobReference
from tests.launcher.launching import JOB_DATA, make_plan, write_job
from tests.launcher.simulation import Scaling, Setup, simulate

UPDATES, SEED = 10, 3

JOB = JOB_DATA + '''
from launcher import LossScaling

def job():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return Job(model=model, loss=nn.functional.cross_entropy, train_data=Data(64), evaluation_data=Data(8), microbatch_size=4,
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), autocast="fp16",
               loss_scaling=LossScaling(2.0**20, 4.0, 0.25, 2))
'''


def test_equals_the_uncut_model_under_autocast(tmp_path: Path) -> None:
    reference = JobReference(write_job(tmp_path, JOB), {})
    plan = make_plan(reference, (1, 2), policy="stash")
    settings = TrainSettings(tmp_path / "run", UPDATES, None, seed=SEED, oversubscribe=True, timeout_s=60)
    train(plan, reference, settings, lambda progress: None)
    job = load_job(reference, seed=SEED)
    source = MicrobatchSource(job.train_data, plan.microbatch_size, job.shuffle, SEED)
    names = list(dict(job.model.named_parameters()))
    stages = tuple(tuple(name for name in names if name.rpartition(".")[0] in stage.layers) for stage in plan.stages)

    def loss(parameters: object, microbatch: int) -> torch.Tensor:
        inputs, targets = source.read(microbatch)
        with autocasting(job, torch.device("cpu")):
            outputs = torch.func.functional_call(job.model, parameters, (inputs,))  # type: ignore[arg-type]
            return nn.functional.cross_entropy(outputs, targets)

    scaling = Scaling(2.0**20, 4.0, 0.25, 2)
    setup = Setup(stages, plan.replicas, tuple(stage.in_flight for stage in plan.stages), plan.batch_microbatches, plan.policy)
    parameters = {name: value.detach() for name, value in job.model.named_parameters()}
    expected, _ = simulate(parameters, loss, setup, job.optimizer, UPDATES, scaling=scaling)
    assert {steps for _, steps in scaling.seen} == {True, False}, "no update was skipped, or all"
    told = [(line["loss_scale"], not line["skipped"]) for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train_loss" in line]
    assert told == scaling.seen
    found = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
