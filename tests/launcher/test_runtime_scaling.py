"""The loss scale under delayed gradients, with infinities on purpose, against the simulation and torch's own scaler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.job import LossScaling
from planner.spec.errors import BadInput
from planner.spec.plan import Policy
from planner.spec.policies import POLICIES
from tests.launcher import toy
from tests.launcher.simulation import Scaling, simulate
from tests.launcher.test_runtime_policies import pipeline_for
from tests.launcher.toy import OPTIMIZERS, initial, setup_of, train_on_threads, whole_loss

LARGE = LossScaling(2.0**126, 4.0, 0.25, 2)  # near the end of float32: infinities, and again after every growth
PIPELINES = [((1,), 2), ((1, 1), 1), ((1, 1, 1, 1), 1), ((1, 1, 1), 3), ((2, 1), 2), ((1, 2), 2), ((2, 2), 2), ((1, 2, 1), 4)]


@pytest.fixture(autouse=True)
def far_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that gradients are large, and times the scale infinite."""
    near = toy.data

    def data(microbatch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = near(microbatch, dtype)
        return inputs, targets * 30

    monkeypatch.setattr(toy, "data", data)


@pytest.mark.parametrize("tied", [{}, {"4.weight": "0.weight"}], ids=["untied", "tied"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("replicas", "batch"), PIPELINES, ids=lambda value: str(value).replace(" ", ""))
def test_equals_the_simulation(replicas: tuple[int, ...], batch: int, policy: Policy, clip_norm: float | None,
                               tied: dict[str, str]) -> None:
    pipeline = pipeline_for(policy, replicas, batch, updates=14)
    start = {name: value for name, value in initial(torch.float32).items() if name not in tied}
    loss, setup = whole_loss(torch.float32), setup_of(pipeline, policy, tied)
    scaling = Scaling(LARGE.initial, LARGE.growth, LARGE.backoff, LARGE.growth_interval)
    expected, _ = simulate(start, loss, setup, OPTIMIZERS["momentum"], 14, None, clip_norm, scaling)
    finite = [steps for _, steps in scaling.seen]
    assert True in finite and False in finite and True in finite[finite.index(False):], "no infinity, or nothing after it"
    trained = train_on_threads(pipeline, torch.float32, OPTIMIZERS["momentum"], policy, clip_norm=clip_norm, tied=tied, loss_scaling=LARGE)
    tolerance = 0.0 if clip_norm is None else 1e-6  # the norm is summed in another order
    for (name, _), value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_flushed_it_is_torchs_scaler(replicas: tuple[int, ...]) -> None:
    """The plain loop with ``torch.amp.GradScaler`` and a learning-rate schedule that counts every update."""
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    weights = {name: nn.Parameter(value) for name, value in initial(torch.float32).items()}
    optimizer, loss = OPTIMIZERS["adam"](list(weights.values())), whole_loss(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=LARGE.initial, growth_factor=LARGE.growth, backoff_factor=LARGE.backoff,
                                  growth_interval=LARGE.growth_interval)
    scheduler = schedule(optimizer)
    for batch in range(12):
        for microbatch in range(4 * batch, 4 * batch + 4):
            scaler.scale(loss(weights, microbatch) / 4).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
    pipeline = pipeline_for("flush", replicas, 4, updates=12)
    trained = train_on_threads(pipeline, torch.float32, OPTIMIZERS["adam"], "flush", scheduler=schedule, loss_scaling=LARGE)
    for (name, _), value in trained.items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [
    {"initial": 0.0}, {"initial": float("inf")}, {"growth": 1.0}, {"backoff": 1.0}, {"growth_interval": 0},
])
def test_a_scale_that_cannot_work_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))):
        LossScaling(**settings)  # type: ignore[arg-type]
