"""Tied parameters whose uses lie on different stages, over in-process channels, against the simulation and an uncut model."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from launcher.runtime.channel import rank_of, workers
from planner.spec.errors import InvalidValue
from planner.spec.plan import Policy
from planner.spec.policies import POLICIES
from planner.spec.schedule import Op, Pipeline, operations, validate
from tests.launcher.simulation import OptimizerFactory, simulate
from tests.launcher.test_runtime_policies import pipeline_for
from tests.launcher.toy import LAYERS, OPTIMIZERS, initial, layers_of, programs, setup_of, train_on_threads, whole_loss

ENDS = {"4.weight": "0.weight"}
THREE_USES = {"2.weight": "0.weight", "4.weight": "0.weight", "4.bias": "1.bias"}  # with two cuts and more, on overlapping stages
PIPELINES = [((1,), 2), ((1, 1), 1), ((1, 1, 1), 1), ((1, 1, 1, 1), 3), ((2, 1), 2), ((1, 2), 2), ((2, 2), 2), ((2, 1, 2), 4)]


def start(tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in initial(torch.float64).items() if name not in tied}


def assert_equals_the_simulation(policy: Policy, pipeline: Pipeline, tied: Mapping[str, str], optimizer: OptimizerFactory,
                                 clip_norm: float | None = None, tolerance: float = 0.0) -> None:
    expected, _ = simulate(start(tied), whole_loss(torch.float64), setup_of(pipeline, policy, tied), optimizer, pipeline.batches,
                           clip_norm=clip_norm)
    trained = train_on_threads(pipeline, torch.float64, optimizer, policy, clip_norm=clip_norm, tied=tied)
    cut = programs(layers_of(len(pipeline.replicas)), torch.float64, tied)
    assert set(trained) == {(name, rank_of(pipeline.replicas, worker)) for worker in workers(pipeline.replicas)
                            for name in cut[worker.stage].parameters}, "every worker of every use has a copy"
    copies: dict[str, torch.Tensor] = {}
    for (name, rank), value in trained.items():
        assert torch.equal(value, copies.setdefault(name, value)), f"the copies of {name} are not the same bits at rank {rank}"
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("tied", [ENDS, THREE_USES], ids=["ends", "three uses"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "adamw-fused"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("replicas", "batch"), PIPELINES, ids=lambda value: str(value).replace(" ", ""))
def test_equals_the_simulation_to_the_last_bit(replicas: tuple[int, ...], batch: int, policy: Policy, optimizer: str,
                                               tied: Mapping[str, str]) -> None:
    assert_equals_the_simulation(policy, pipeline_for(policy, replicas, batch), tied, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("policy", ["stash", "2bw", "flush"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_the_norm_counts_a_tied_parameter_once(replicas: tuple[int, ...], policy: Policy) -> None:
    pipeline = pipeline_for(policy, replicas, 2)
    assert_equals_the_simulation(policy, pipeline, THREE_USES, OPTIMIZERS["momentum"], clip_norm=0.05, tolerance=1e-12)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_flushed_it_is_ordinary_training(replicas: tuple[int, ...]) -> None:
    """The plain loop over a module that really has one tensor under two names."""
    weights = {name: nn.Parameter(value) for name, value in start(ENDS).items()}
    optimizer, loss = OPTIMIZERS["adamw"](list(weights.values())), whole_loss(torch.float64)
    for batch in range(6):
        for microbatch in range(4 * batch, 4 * batch + 4):
            (loss(weights | {name: weights[first] for name, first in ENDS.items()}, microbatch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = train_on_threads(pipeline_for("flush", replicas, 4, updates=6), torch.float64, OPTIMIZERS["adamw"], "flush", tied=ENDS)
    for (name, _), value in trained.items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-9, atol=1e-12)


def test_groups_by_name_treat_it_alike_at_every_stage() -> None:
    def groups(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [one for name, one in named_parameters if name.startswith("0.")], "lr": 0.05},
                                  {"params": [one for name, one in named_parameters if not name.startswith("0.")]}], lr=0.01)

    def same(parameters: Any) -> torch.optim.Optimizer:  # the simulation's first stage has the parameters of layers 0 to 2, in order
        first = parameters[:2] if len(parameters) > 5 else []
        return groups([("0.", one) for one in first] + [("other", one) for one in parameters if all(one is not two for two in first)])

    pipeline = pipeline_for("stash", (1, 1), 1)
    expected, _ = simulate(start(ENDS), whole_loss(torch.float64), setup_of(pipeline, "stash", ENDS), same, pipeline.batches)
    for (name, _), value in train_on_threads(pipeline, torch.float64, groups, tied=ENDS).items():
        assert torch.equal(value, expected[name]), name


NAMES = [f"{layer}.weight" for layer in range(LAYERS)]


@given(policy=st.sampled_from(sorted(POLICIES)), replicas=st.lists(st.integers(1, 3), min_size=2, max_size=4), extra=st.integers(0, 2),
       multiple=st.integers(1, 2), groups=st.lists(st.integers(0, 2), min_size=LAYERS, max_size=LAYERS), clips=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_ties_of_any_pipeline(policy: Policy, replicas: list[int], extra: int, multiple: int, groups: list[int], clips: bool) -> None:
    """Random ties: groups of layers whose weights are one parameter, on any stages, several at once."""
    first = {group: NAMES[groups.index(group)] for group in groups}
    tied = {name: first[group] for name, group in zip(NAMES, groups, strict=True) if first[group] != name}
    pipeline = pipeline_for(policy, tuple(replicas), multiple * lcm(*replicas), extra, updates=3)
    assert_equals_the_simulation(policy, pipeline, tied, OPTIMIZERS["momentum"], 0.1 if clips else None, 1e-11 if clips else 0.0)


@given(replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4), multiple=st.integers(1, 3), flush=st.booleans(),
       evaluate=st.integers(0, 2), data=st.data())
@settings(max_examples=300, deadline=None)
def test_waiting_for_all_at_every_update_never_deadlocks_a_schedule_that_ends(
    replicas: list[int], multiple: int, flush: bool, evaluate: int, data: st.DataObject
) -> None:
    """The strictest of these waits (clipping's) with any depths for which the schedule by itself comes to its end."""
    depths = tuple(data.draw(st.integers(1, 6)) for _ in replicas)
    pipeline = Pipeline(tuple(replicas), depths, multiple * lcm(*replicas), 4, evaluate_every=evaluate,
                        evaluation_microbatches=3 if evaluate else 0, flush=flush)
    try:
        validate(pipeline)
    except InvalidValue:
        return
    assert finishes_together(pipeline)


def finishes_together(pipeline: Pipeline) -> bool:
    """Whether all workers end when each waits at every update until all of them have come to it."""
    lists = {worker: _numbered(pipeline, *worker) for worker in workers(pipeline.replicas)}
    done: set[tuple[int, Op]] = set()
    while any(lists.values()):
        heads = {worker: ops[0] for worker, ops in lists.items() if ops}
        moved = [worker for worker, head in heads.items() if _ready(head, pipeline, done)]
        if all(op.kind == "U" for _, op in heads.values()) and len(heads) == len(lists):
            moved = list(lists)
        if not moved:
            return False
        done |= {lists[worker].popleft() for worker in moved}
    return True


def _numbered(pipeline: Pipeline, stage: int, replica: int) -> deque[tuple[int, Op]]:
    """Each operation with what tells it from its like: the updates before it for E, as the same microbatches recur, and 0."""
    result, updates = deque[tuple[int, Op]](), 0
    for op in operations(pipeline, stage, replica):
        updates += op.kind == "U"
        result.append((updates if op.kind == "E" else 0, op))
    return result


def _ready(head: tuple[int, Op], pipeline: Pipeline, done: set[tuple[int, Op]]) -> bool:
    number, (stage, kind, index) = head
    if kind == "B":
        return stage == len(pipeline.replicas) - 1 or (0, Op(stage + 1, "B", index)) in done
    return kind != "U" and (stage == 0 or (number, Op(stage - 1, kind, index)) in done)
