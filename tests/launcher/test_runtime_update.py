"""Parameter groups, learning-rate schedules and clipping by the global norm, against the simulation and torch's own clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from launcher.optimizer import make_optimizer, make_scheduler
from launcher.runtime.update import Update
from planner.spec.errors import BadInput
from planner.spec.plan import Policy
from planner.spec.schedule import Pipeline, default_in_flight
from tests.launcher.simulation import SchedulerFactory, simulate
from tests.launcher.toy import OPTIMIZERS, initial, setup_of, train_on_threads, whole_loss

UPDATES, CLIP = 8, 0.05

SCHEDULERS: dict[str, SchedulerFactory | None] = {
    "none": None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)], [3]),
}
RUNS: list[tuple[Policy, tuple[int, ...], int, int]] = [
    ("stash", (1,), 2, 0), ("stash", (1, 1, 1), 1, 0), ("stash", (1, 2, 1), 2, 1), ("vertical", (2, 1), 2, 0), ("2bw", (1, 1, 1), 4, 1),
    ("flush", (1, 2), 4, 0), ("latest", (1, 1), 1, 0),
]


@pytest.mark.parametrize(("policy", "replicas", "batch", "extra"), RUNS, ids=str)
@pytest.mark.parametrize(("schedule", "clip_norm"), [("none", CLIP), ("step", None), ("warm-up", CLIP)], ids=str)
def test_equals_the_simulation(
    policy: Policy, replicas: tuple[int, ...], batch: int, extra: int, schedule: str, clip_norm: float | None
) -> None:
    pipeline = Pipeline(replicas, default_in_flight(replicas, extra), batch, UPDATES, flush=policy == "flush")
    start, loss, setup = initial(torch.float64), whole_loss(torch.float64), setup_of(pipeline, policy)
    expected, _ = simulate(start, loss, setup, OPTIMIZERS["momentum"], UPDATES, SCHEDULERS[schedule], clip_norm)
    plain, _ = simulate(start, loss, setup, OPTIMIZERS["momentum"], UPDATES)
    trained = train_on_threads(pipeline, torch.float64, OPTIMIZERS["momentum"], policy, scheduler=SCHEDULERS[schedule], clip_norm=clip_norm)
    assert {name for name, _ in trained} == set(expected)
    for (name, _), value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")
    assert any((expected[name] - plain[name]).abs().max() > 1e-3 for name in expected), "neither changed anything"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.001, 1.0, 1000.0])
def test_clipping_is_torchs(scale: float, dtype: torch.dtype) -> None:
    parameters, own = ([nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 5)] for _ in range(2))
    for one, other in zip(parameters, own, strict=True):
        one.grad = (torch.arange(1.0, one.numel() + 1) * scale).to(dtype)
        other.grad = one.grad.clone()
    own.append(nn.Parameter(torch.ones(2, dtype=dtype)))  # which no microbatch reached
    nn.utils.clip_grad_norm_(parameters, 2.0)
    Update(dict(zip("abc", own, strict=True)), OPTIMIZERS["momentum"], clip_norm=2.0).agree(torch.device("cpu"))
    for one, other in zip(parameters, own, strict=False):
        torch.testing.assert_close(other.grad, one.grad)


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(("make", "words"), [
    (lambda optimizer: None, "NoneType"),
    (torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau"),
    (lambda optimizer: torch.optim.lr_scheduler.StepLR(other_optimizer(), 1), "another optimizer"),
])
def test_what_is_no_schedule_is_refused(make: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        make_scheduler(make, other_optimizer())
    assert "optimizer" in caught.value.hint


def test_an_optimizer_that_runs_the_model_itself_is_refused() -> None:
    with pytest.raises(BadInput, match="LBFGS") as caught:
        make_optimizer(torch.optim.LBFGS, {"w": nn.Parameter(torch.ones(1))})
    assert "closure" in caught.value.hint


def test_groups_by_the_models_own_names() -> None:
    """Only biases decay, told apart by name; the simulation makes the same groups of the names it knows."""
    pipeline = Pipeline((1, 2, 1), default_in_flight((1, 2, 1)), 2, UPDATES)

    def groups(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        biases = [parameter for name, parameter in named_parameters if name.endswith("bias")]
        others = [parameter for name, parameter in named_parameters if not name.endswith("bias")]
        return torch.optim.SGD([{"params": biases, "weight_decay": 0.5}, {"params": others}], lr=0.1)

    def same(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return groups([("weight" if parameter.ndim > 1 else "bias", parameter) for parameter in parameters])

    expected, _ = simulate(initial(torch.float64), whole_loss(torch.float64), setup_of(pipeline, "stash"), same, UPDATES)
    for (name, _), value in train_on_threads(pipeline, torch.float64, groups).items():
        assert torch.equal(value, expected[name]), name
