"""A language model whose embedding is its head, from profile over plan to train, with the two on different stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from launcher.data.microbatches import MicrobatchSource
from launcher.launch import TrainSettings, train
from launcher.load import load_job
from launcher.profiling.profile import profile_job
from planner import options, solve
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.plan import Plan
from planner.spec.profile import JobReference
from tests.launcher.launching import make_plan, write_job
from tests.launcher.simulation import Setup, simulate

UPDATES, SEED = 6, 5

JOB = '''
import torch
from torch import nn
from launcher import Job

class Data:
    def __len__(self): return 64
    def __getitem__(self, index):
        text = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(index))
        return text[:-1], text[1:]

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(x + self.attention(y, y, y, need_weights=False)[0])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)

def optimizer(named_parameters):
    flat, other = ([one for _, one in named_parameters if (one.ndim < 2) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": other}], lr=0.01)

def job():
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets.flatten())
    return Job(model=Model().double(), loss=loss, train_data=Data(), evaluation_data=Data(), optimizer=optimizer, microbatch_size=4,
               clip_norm=0.5)
'''


def test_the_planner_may_cut_between_the_uses(tmp_path: Path) -> None:
    reference = JobReference(write_job(tmp_path, JOB), {})
    profile = profile_job(reference, repeats=1, seed=SEED)
    tied, = profile.tied
    assert (tied.name, [profile.layers[layer].name for layer in tied.layers]) == ("tokens.weight", ["tokens", "head"])
    cluster = Cluster("three", (DeviceType("cpu", 1.0, None),), (Node("device", 3, Link(1e9, 10.0), "cpu", ()),))
    pins = (("tokens", 0), ("head", 2))
    plan = solve.make_plan(profile, cluster, options.PlanOptions(policy="stash", stages=3, pins=pins), command="test")
    assert "tokens" in plan.stages[0].layers and "head" in plan.stages[2].layers
    assert_trains_as_simulated(tmp_path, plan, reference)


def test_with_replicas(tmp_path: Path) -> None:
    reference = JobReference(write_job(tmp_path, JOB), {})
    assert_trains_as_simulated(tmp_path, make_plan(reference, (1, 2), policy="2bw", batch=4), reference)


def assert_trains_as_simulated(folder: Path, plan: Plan, reference: JobReference) -> None:
    train(plan, reference, TrainSettings(folder / "run", UPDATES, None, seed=SEED, oversubscribe=True, timeout_s=60), lambda progress: None)
    job = load_job(reference, seed=SEED)
    source = MicrobatchSource(job.train_data, plan.microbatch_size, job.shuffle, SEED)
    names = list(dict(job.model.named_parameters(remove_duplicate=False)))

    def stage_of(name: str) -> int:  # the stage that has the layer of the parameter's module, or of the attention around it
        module = name.rpartition(".")[0]
        return next(k for k, stage in enumerate(plan.stages) if {module, module.rpartition(".")[0]} & set(stage.layers))

    def loss(parameters: object, microbatch: int) -> torch.Tensor:
        inputs, targets = source.read(microbatch)
        outputs = torch.func.functional_call(job.model, parameters, (inputs,), tie_weights=False)  # type: ignore[arg-type]
        assert job.loss is not None
        return job.loss(outputs, targets)

    def optimizer(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return job.optimizer([("", parameter) for parameter in parameters])

    stages = tuple(tuple(name for name in names if stage_of(name) == k) for k in range(len(plan.stages)))
    setup = Setup(stages, plan.replicas, tuple(stage.in_flight for stage in plan.stages), plan.batch_microbatches, plan.policy,
                  {"head.weight": "tokens.weight"})
    parameters = {name: value.detach() for name, value in job.model.named_parameters()}
    expected, _ = simulate(parameters, loss, setup, optimizer, UPDATES, clip_norm=job.clip_norm)
    found = torch.load(folder / "run" / "weights.pt", weights_only=True)
    assert torch.equal(found["head.weight"], found["tokens.weight"])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
