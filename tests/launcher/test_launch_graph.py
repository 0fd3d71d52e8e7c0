"""A model of two branches, from profile over plan to train, with stages that cut across the branches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.data.microbatches import MicrobatchSource
from launcher.launch import TrainSettings, train
from launcher.load import load_job
from launcher.profiling.profile import profile_job
from planner.options import PlanOptions
from planner.solve import make_plan
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.plan import Plan, Policy
from planner.spec.profile import JobReference
from tests.launcher.launching import JOB_DATA, write_job
from tests.launcher.simulation import Setup, simulate

UPDATES, SEED = 6, 5

JOB = JOB_DATA + '''
class Towers(nn.Module):
    """stem -> left and right, of three layers each -> head, which also gets the stem's output."""
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 12)
        self.left = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 6))
        self.right = nn.Sequential(nn.Linear(12, 12), nn.Sigmoid(), nn.Linear(12, 6))
        self.head = nn.Linear(24, 4)
    def forward(self, x):
        stem = self.stem(x)
        return self.head(torch.cat([self.left(stem), self.right(stem), stem], 1))

def job():
    return Job(model=Towers(), loss=nn.functional.cross_entropy, train_data=Data(64), evaluation_data=Data(10),
               optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), microbatch_size=4)
'''

STAGES = {  # the concatenation belongs to the layer before it, right.2
    "three stages across both branches": (
        ("stem", "left.0", "right.0"), ("left.1", "left.2", "right.1"), ("right.2", "head", "loss")),
    "one branch after the other, the second first": (
        ("stem", "right.0", "right.1"), ("left.0", "left.1", "left.2"), ("right.2", "head", "loss")),
}


@pytest.mark.parametrize(("stages", "policy", "recompute"), [
    ("three stages across both branches", "stash", "never"), ("one branch after the other, the second first", "2bw", "always"),
])
def test_stages_across_branches(tmp_path: Path, stages: str, policy: Policy, recompute: str) -> None:
    reference = JobReference(write_job(tmp_path, JOB), {})
    profile = profile_job(reference, repeats=2, seed=SEED)
    names = [layer.name for layer in profile.layers]
    wanted = STAGES[stages]
    assert sorted(name for stage in wanted for name in stage) == sorted(names)
    cluster = Cluster("three", (DeviceType("cpu", 1.0, None),), (Node("device", 3, Link(1e9, 10.0), "cpu", ()),))
    pins = tuple((name, index) for index, stage in enumerate(wanted) for name in stage)
    options = PlanOptions(policy=policy, stages=3, max_replicas=1, pins=pins, recompute=recompute)  # type: ignore[arg-type]
    plan = make_plan(profile, cluster, options, command="test")
    assert [stage.layers for stage in plan.stages] == [tuple(sorted(stage, key=names.index)) for stage in wanted]
    assert any(list(stage.layers) != names[names.index(stage.layers[0]):][: len(stage.layers)] for stage in plan.stages), "no gap"

    summary = train(plan, reference, TrainSettings(tmp_path / "run", UPDATES, None, seed=SEED, oversubscribe=True, timeout_s=60),
                    lambda progress: None)

    expected, losses = simulated(plan, reference)
    model = load_job(reference, seed=SEED).model
    model.load_state_dict(torch.load(tmp_path / "run" / "weights.pt", weights_only=True))
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert summary.final_train_loss == pytest.approx(losses[-1], abs=1e-6)
    assert summary.evaluations[-1].values["loss"] == pytest.approx(evaluated(model, reference), abs=1e-5)


def simulated(plan: Plan, reference: JobReference) -> tuple[dict[str, torch.Tensor], list[float]]:
    job = load_job(reference, seed=SEED)
    source = MicrobatchSource(job.train_data, 4, job.shuffle, SEED)
    names = list(dict(job.model.named_parameters()))
    stages = tuple(tuple(name for name in names if name.rpartition(".")[0] in stage.layers) for stage in plan.stages)

    def loss(parameters: object, microbatch: int) -> torch.Tensor:
        inputs, targets = source.read(microbatch)
        return nn.functional.cross_entropy(torch.func.functional_call(job.model, parameters, (inputs,)), targets)  # type: ignore[arg-type]

    setup = Setup(stages, plan.replicas, tuple(stage.in_flight for stage in plan.stages), plan.batch_microbatches, plan.policy)
    return simulate({name: value.detach() for name, value in job.model.named_parameters()}, loss, setup, job.optimizer, UPDATES)


def evaluated(model: nn.Module, reference: JobReference) -> float:
    data = load_job(reference, seed=SEED).evaluation_data
    assert data is not None
    samples = [data[index] for index in range(len(data))]
    model.eval()
    with torch.no_grad():
        outputs = model(torch.stack([x for x, _ in samples]))
    return float(nn.functional.cross_entropy(outputs, torch.stack([y for _, y in samples])))
