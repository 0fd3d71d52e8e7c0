"""Whole models through capture, split and the worker's loop on threads: dropout, BatchNorm, skips, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from launcher import Job
from launcher.data.microbatches import MicrobatchSource, evaluation_samples
from launcher.graph.capture import capture_training
from launcher.graph.randomness import keyed
from launcher.graph.split import split
from launcher.runtime.channel import Worker, workers
from launcher.runtime.local import LocalTransport
from launcher.runtime.observer import Observer, Scaled
from launcher.runtime.worker import StageWorker
from launcher.supervision.rundir import RunDirectory, RunSettings
from launcher.supervision.task import Task, assign, capture_programs, pipeline_of, stage_state
from planner.spec.plan import Policy
from planner.spec.profile import JobReference
from tests.launcher.launching import even_cut, make_plan
from tests.launcher.simulation import Setup, simulate
from tests.launcher.toy import run_made

SEED, UPDATES = 7, 6


class Images:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64), index % 3


class Text:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


class Scale(nn.Module):
    """Divides by a moving average that its own forward updates; autograd keeps what it divided by."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(4), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.size.mul_(0.8).add_(0.2 * x.detach().abs().mean((0, 2, 3)))
        return x / self.size.view(1, -1, 1, 1)


def scaling(persistent: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), Scale(persistent), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), Scale(persistent), nn.Flatten(),
        nn.Linear(64, 3),
    ).double()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3),
    ).double()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.drop, self.attend = nn.Dropout(0.2), nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype), 1)
        return x + self.drop(self.mix(self.attend(y, y, y, attn_mask=mask, need_weights=False)[0]))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)


def make_job(kind: str) -> Job:
    torch.manual_seed(SEED)
    if kind != "transformer":
        model = convolutional() if kind == "convolutional" else scaling(persistent=kind == "scaling")
        data, evaluation, loss = Images(40), Images(11), nn.functional.cross_entropy
    else:
        model, data, evaluation = Transformer().double(), Text(40), Text(11)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outputs, targets.flatten())

    return Job(model=model, loss=loss, train_data=data, evaluation_data=evaluation, microbatch_size=4,
               optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


class Losses(Observer):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: dict[int, dict[str, float]] = {}

    def updated(self, batch: int, loss: float | None, scaled: Scaled | None = None) -> None:
        if loss is not None:
            self.losses.append(loss)

    def evaluated(self, batch: int, values: Mapping[str, float]) -> None:
        self.evaluations[batch] = dict(values)


def run(kind: str, replicas: tuple[int, ...], batch: int, evaluate_every: int, policy: Policy = "stash", recompute: tuple[bool, ...] = (),
        extra_per_link: int = 0) -> tuple[dict[Worker, StageWorker], Losses, Any]:
    """Train on threads as ``launcher/supervision/process.py`` does in processes."""
    job = make_job(kind)
    captured = capture_training(job)
    plan = make_plan(JobReference("in memory", {}), replicas, captured=captured, batch=batch, policy=policy,
                     extra_per_link=extra_per_link, recompute=recompute)
    settings = RunSettings(JobReference("in memory", {}), "", UPDATES, None, 0, SEED, evaluate_every, 1, True, 30.0)
    samples = evaluation_samples(job.evaluation_data)
    task = Task(plan, settings, pipeline_of(plan, UPDATES, evaluate_every, samples), RunDirectory(None), samples)  # type: ignore[arg-type]
    transport, losses = LocalTransport(replicas, timeout_s=30), Losses()
    made: dict[Worker, StageWorker] = {}
    programs = capture_programs(task, job)
    for worker in workers(replicas):
        assignment = assign(task, job, programs, worker, torch.device("cpu"))
        parameters, buffers = stage_state(assignment, copy.deepcopy(job.model))
        made[worker] = StageWorker(assignment, parameters, buffers, job.optimizer, transport.of(worker),
                                   losses if worker == (len(replicas) - 1, 0) else None, keyed=lambda m: keyed(SEED, m))
    finals: dict[Worker, dict[str, torch.Tensor]] = {}

    def finish(worker: Worker) -> None:
        finals[worker] = made[worker].final_buffers()

    run_made(made, transport, finish)
    return made, losses, (plan, finals, captured)


CASES: list[tuple[str, Policy, tuple[int, ...], int, int]] = [
    *((kind, "stash", replicas, batch, 0) for kind in ("convolutional", "transformer")
      for replicas, batch in [((1,), 2), ((1, 1), 1), ((2, 1), 2), ((1, 2, 1), 2), ((1, 1, 1, 1), 1)]),
    ("convolutional", "vertical", (1, 2, 1), 2, 1), ("convolutional", "2bw", (2, 1), 4, 0), ("convolutional", "flush", (1, 1, 1), 4, 0),
    ("transformer", "vertical", (1, 1, 1), 1, 0), ("transformer", "2bw", (1, 1, 1), 4, 1), ("transformer", "flush", (1, 2), 4, 1),
    ("scaling", "stash", (1, 1), 1, 2), ("scaling", "2bw", (2, 1), 4, 0), ("hidden scaling", "stash", (1, 1), 1, 0),
]


@pytest.mark.parametrize(("kind", "policy", "replicas", "batch", "extra"), CASES,
                         ids=lambda value: str(value).strip("(,)").replace(", ", "-"))
def test_parameters_buffers_and_losses_equal_the_simulation(
    kind: str, policy: Policy, replicas: tuple[int, ...], batch: int, extra: int
) -> None:
    made, losses, (plan, finals, _) = run(kind, replicas, batch, 2, policy, extra_per_link=extra)

    job = make_job(kind)
    captured = capture_training(job)
    whole = split(captured, [list(captured.layers)])[0]
    source = MicrobatchSource(job.train_data, 4, job.shuffle, SEED)
    model_buffers = dict(job.model.named_buffers())
    cut = split(captured, [stage.layers for stage in plan.stages])
    stage_of = {name: k for k, program in enumerate(cut) for name in (*program.parameters, *program.buffers)}
    # each replica of a stage updates buffers of its own
    copies = {(name, i): model_buffers[name].clone() for name in whole.buffers for i in range(replicas[stage_of[name]])}

    def loss(parameters: Mapping[str, torch.Tensor], microbatch: int) -> torch.Tensor:
        buffers = [copies[name, microbatch % replicas[stage_of[name]]] for name in whole.buffers]
        with keyed(SEED, microbatch):
            return whole.module(*(parameters[name] for name in whole.parameters), *buffers, *source.read(microbatch, whole.inputs))[0]

    setup = Setup(tuple(program.parameters for program in cut), replicas, tuple(s.in_flight for s in plan.stages), batch, policy)
    parameters = dict(job.model.named_parameters())
    expected, expected_losses = simulate({name: parameters[name] for name in whole.parameters}, loss, setup, job.optimizer, UPDATES)
    for worker, stage in made.items():
        for name, value in zip(cut[worker.stage].parameters, stage.weights.masters, strict=True):
            torch.testing.assert_close(value.detach(), expected[name], rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
        for name, value in finals[worker].items():
            own = [copies[name, i] for i in range(replicas[worker.stage])]
            wanted = torch.stack(own).mean(0) if value.is_floating_point() else own[worker.replica]
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-11)
    assert losses.losses == pytest.approx(expected_losses, rel=1e-9)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_evaluation_disturbs_nothing_and_is_right(replicas: tuple[int, ...]) -> None:
    with_evaluation, losses, (_, finals, _) = run("convolutional", replicas, max(replicas), evaluate_every=1)
    without, _, _ = run("convolutional", replicas, max(replicas), evaluate_every=0)
    for worker, stage in with_evaluation.items():
        for one, other in zip(stage.weights.masters, without[worker].weights.masters, strict=True):
            assert torch.equal(one, other)
    assert sorted(losses.evaluations) == list(range(UPDATES))

    # the last evaluation is of the final weights, in evaluation mode, over all samples
    job = make_job("convolutional")
    captured = capture_training(job)
    cut = split(captured, even_cut(list(captured.layers), len(replicas)))
    state = job.model.state_dict()
    for worker, stage in with_evaluation.items():
        state |= dict(zip(cut[worker.stage].parameters, stage.weights.masters, strict=True)) | finals[worker]
    job.model.load_state_dict(state)
    job.model.eval()
    samples = [job.evaluation_data[index] for index in range(11)]
    with torch.no_grad():
        outputs = job.model(torch.stack([image for image, _ in samples]))
    wanted = nn.functional.cross_entropy(outputs, torch.tensor([label for _, label in samples]))
    assert losses.evaluations[UPDATES - 1]["loss"] == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize(("kind", "policy"), [
    ("convolutional", "stash"), ("convolutional", "vertical"), ("transformer", "2bw"), ("scaling", "flush"), ("hidden scaling", "stash"),
])
def test_recomputation_changes_no_bit(kind: str, policy: Policy) -> None:
    """Dropout masks, running statistics (counted once a microbatch) and the version are those of the first forward."""
    kept, losses, (_, finals, _) = run(kind, (1, 1, 1), 4, 3, policy)
    again, same_losses, (_, same_finals, _) = run(kind, (1, 1, 1), 4, 3, policy, recompute=(True, True, True))
    for worker, stage in kept.items():
        for one, other in zip(stage.weights.masters, again[worker].weights.masters, strict=True):
            assert torch.equal(one, other)
        for name, value in finals[worker].items():
            assert torch.equal(value, same_finals[worker][name]), name
    assert losses.losses == same_losses.losses
    assert losses.evaluations == same_losses.evaluations
