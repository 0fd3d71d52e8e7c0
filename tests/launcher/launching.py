"""Jobs and plans for tests that start real workers."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from pathlib import Path

from launcher.graph.capture import Captured, capture_training
from launcher.load import load_job
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.plan import Memory, Plan, Policy, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import JobReference
from planner.spec.schedule import default_in_flight

ROOT = Path(__file__).resolve().parent.parent.parent

JOB_DATA = '''
import torch
from torch import nn
from launcher import Job

class Data:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randint(0, 4, (), generator=generator)
'''

MLP_JOB = JOB_DATA + '''
def optimizer(name):
    return {
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    }[name]

def job(optimizer_name: str = "momentum", evaluation: int = 0, width: int = 16, loaders: int = 0,
        clip_norm: float | None = None, schedule: bool = False) -> Job:
    sizes = [8, width, width, width]
    hidden = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(width, 4))
    accuracy = lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()
    return Job(model=model, loss=nn.functional.cross_entropy, train_data=Data(64), evaluation_data=Data(evaluation) if evaluation else None,
               optimizer=optimizer(optimizer_name), microbatch_size=4, metrics={"accuracy": accuracy}, loader_processes=loaders,
               clip_norm=clip_norm, scheduler=(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)) if schedule else None)
'''

TROUBLE_JOB = '''
import os, time
import torch
from torch import nn
from launcher import Job

class Data:
    def __len__(self): return 400
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(8) * index, torch.tensor(index % 4)

class Trouble(torch.optim.SGD):
    """Gets into trouble at its sixth step, in the stage that has the last layer."""
    def __init__(self, parameters, trouble):
        super().__init__(parameters, lr=0.01)
        self.trouble, self.steps = trouble, 0
        self.last = any(p.shape == (4, 16) for group in self.param_groups for p in group["params"])
    def step(self, closure=None):
        self.steps += 1
        if self.last and self.steps == 6:
            if self.trouble == "raise":
                raise ValueError("the sixth step fails\\nand says more")
            if self.trouble == "exit":
                os._exit(0)
            if self.trouble == "hang":
                time.sleep(1000)
        return super().step(closure)

def job(trouble: str = "none") -> Job:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return Job(model=model, loss=nn.functional.cross_entropy, train_data=Data(), optimizer=lambda p: Trouble(p, trouble), microbatch_size=4,
               shuffle=False)
'''


def write_job(folder: Path, text: str = MLP_JOB) -> str:
    path = folder / "its_job.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def capture(reference: JobReference, seed: int = 0) -> Captured:
    return capture_training(load_job(reference, seed=seed))


def even_cut(layers: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """The layers in ``stages`` runs of about equal length."""
    bounds = [round(index * len(layers) / stages) for index in range(stages + 1)]
    return [tuple(layers[first:last]) for first, last in zip(bounds, bounds[1:])]  # noqa: B905, RUF007


def make_plan(reference: JobReference, replicas: Sequence[int], *, captured: Captured | None = None, batch: int | None = None,
              cut: Sequence[Sequence[str]] | None = None, microbatch_size: int = 4, policy: Policy = "stash", extra_per_link: int = 0,
              recompute: Sequence[bool] = ()) -> Plan:
    """A plan as the planner would write it, with predictions of no meaning; no stage recomputes unless ``recompute`` says so."""
    captured = captured or capture(reference)
    parts = list(cut) if cut is not None else even_cut(list(captured.layers), len(replicas))
    devices = iter(f"device{index}" for index in range(sum(replicas)))
    depths = default_in_flight(tuple(replicas), extra_per_link)
    again = tuple(recompute) or (False,) * len(parts)
    stages = tuple(StagePlan(tuple(part), tuple(next(devices) for _ in range(r)), depth, recomputes)
                   for part, r, depth, recomputes in zip(parts, replicas, depths, again, strict=True))
    prediction = StagePrediction(1.0, 0.0, 0.0, 0.0, Memory(0, 0, 0, 0, 0), None)
    cluster = Cluster("test", (DeviceType("cpu", 1.0, None),), (Node("device", sum(replicas), Link(1e9, 10.0), "cpu", ()),))
    return Plan(
        command="test", model="test", job=reference, fingerprint=captured.fingerprint, profile_digest="", estimated=False,
        microbatch_size=microbatch_size, policy=policy, batch_microbatches=batch or lcm(*replicas), stages=stages,
        predicted=Prediction(1.0, None, "stage 0", tuple(prediction for _ in stages), (), ()),
        solver=SolverReport("test", "feasible", 0.0, 1.0, ""), cluster=cluster,
    )
