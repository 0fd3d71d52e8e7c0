"""Jobs and plans for tests that start real workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.capture import Captured, capture_training
from launcher.load import load_job
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.plan import Memory, Plan, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import JobReference
from planner.spec.schedule import default_in_flight

MLP_JOB = '''
import torch
from torch import nn
from launcher import Job

class Data:
    def __init__(self, size): self.size = size
    def __len__(self): return self.size
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randint(0, 4, (), generator=generator)

def optimizer(name):
    return {
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    }[name]

def job(optimizer_name: str = "momentum", evaluation: int = 0, width: int = 16) -> Job:
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    accuracy = lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()
    return Job(model=model, loss=nn.functional.cross_entropy, train_data=Data(64), evaluation_data=Data(evaluation) if evaluation else None,
               optimizer=optimizer(optimizer_name), microbatch_size=4, metrics={"accuracy": accuracy})
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
              cut: Sequence[Sequence[str]] | None = None, microbatch_size: int = 4) -> Plan:
    """A plan as the planner would write it, with predictions of no meaning."""
    captured = captured or capture(reference)
    parts = list(cut) if cut is not None else even_cut(list(captured.layers), len(replicas))
    devices = iter(f"device{index}" for index in range(sum(replicas)))
    depths = default_in_flight(tuple(replicas))
    stages = tuple(StagePlan(tuple(part), tuple(next(devices) for _ in range(r)), depth, False)
                   for part, r, depth in zip(parts, replicas, depths, strict=True))
    prediction = StagePrediction(1.0, 0.0, 0.0, Memory(0, 0, 0, 0, 0), None)
    cluster = Cluster("test", (DeviceType("cpu", 1.0, None),), (Node("device", sum(replicas), Link(1e9, 10.0), "cpu", ()),))
    from math import lcm

    return Plan(
        command="test", model="test", job=reference, fingerprint=captured.fingerprint, profile_digest="", estimated=False,
        microbatch_size=microbatch_size, policy="stash", batch_microbatches=batch or lcm(*replicas), stages=stages,
        predicted=Prediction(1.0, "stage 0", tuple(prediction for _ in stages), (), 1.0, 1.0),
        solver=SolverReport("test", "feasible", 0.0, 1.0, ""), cluster=cluster,
    )
