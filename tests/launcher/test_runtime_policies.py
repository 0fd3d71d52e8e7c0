"""The worker's loop over in-process channels, against the simulation of every weight policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from launcher.runtime.worker import StageWorker
from planner.memory import live_versions
from planner.spec.errors import BadInput
from planner.spec.plan import Policy
from planner.spec.policies import POLICIES
from planner.spec.schedule import Pipeline, default_in_flight
from tests.launcher.simulation import OptimizerFactory, simulate
from tests.launcher.toy import OPTIMIZERS, initial, setup_of, train_on_threads, whole_loss

UPDATES = 8
PIPELINES = [
    ((1,), 1), ((1,), 4), ((1, 1), 1), ((1, 1), 3), ((1, 1, 1), 1), ((1, 1, 1, 1), 1), ((1, 1, 1, 1), 2),
    ((2, 1), 2), ((1, 2), 2), ((2, 2), 2), ((2, 2), 4), ((3, 1), 3), ((1, 2, 1), 2), ((2, 3, 1), 6), ((1, 1, 2, 1), 4),
]


def pipeline_for(policy: Policy, replicas: tuple[int, ...], batch: int, extra: int = 0, updates: int = UPDATES) -> Pipeline:
    """With a batch of that size, or the next that the policy allows."""
    depths = default_in_flight(replicas, extra)
    if policy == "2bw":
        least = max(sum(replicas), *((depth - 1) * r for depth, r in zip(depths, replicas, strict=True)))
        batch = -(-max(batch, least) // lcm(*replicas)) * lcm(*replicas)
    return Pipeline(replicas, depths, batch, updates, flush=policy == "flush")


def assert_equals_the_simulation(policy: Policy, pipeline: Pipeline, dtype: torch.dtype, optimizer: str,
                                 recompute: tuple[bool, ...] = ()) -> None:
    expected, _ = simulate(initial(dtype), whole_loss(dtype), setup_of(pipeline, policy), OPTIMIZERS[optimizer], pipeline.batches)
    trained = train_on_threads(pipeline, dtype, OPTIMIZERS[optimizer], policy, recompute)
    assert {name for name, _ in trained} == set(expected)
    for (name, rank), value in trained.items():
        assert torch.equal(value, expected[name]), f"{name} at rank {rank} differs by {(value - expected[name]).abs().max()}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("replicas", "batch"), PIPELINES, ids=lambda value: str(value).replace(" ", ""))
def test_equals_the_simulation_to_the_last_bit(replicas: tuple[int, ...], batch: int, policy: Policy, optimizer: str) -> None:
    dtype = torch.float32 if optimizer in ("adam", "adamw-fused") else torch.float64
    assert_equals_the_simulation(policy, pipeline_for(policy, replicas, batch), dtype, optimizer)


def by_shape(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Groups with their own weight decay and learning rate, as is usual for biases."""
    return torch.optim.AdamW([{"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
                              {"params": [one for one in parameters if one.ndim == 1], "lr": 0.02, "weight_decay": 0.0}], lr=0.01)


EVERY_OPTIMIZER: list[OptimizerFactory] = [
    *(getattr(torch.optim, name) for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")),
    partial(torch.optim.Adam, amsgrad=True, foreach=True), partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    by_shape,
]


@pytest.mark.parametrize("policy", ["stash", "2bw"])
@pytest.mark.parametrize("optimizer", EVERY_OPTIMIZER, ids=lambda factory: getattr(factory, "__name__", str(factory))[:40])
def test_every_optimizer_of_torch(monkeypatch: pytest.MonkeyPatch, optimizer: OptimizerFactory, policy: Policy) -> None:
    monkeypatch.setitem(OPTIMIZERS, "this", optimizer)
    assert_equals_the_simulation(policy, pipeline_for(policy, (1, 2, 1), 2), torch.float64, "this")


@given(policy=st.sampled_from(sorted(POLICIES)), replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4), extra=st.integers(0, 2),
       multiple=st.integers(1, 3), optimizer=st.sampled_from(sorted(OPTIMIZERS)), data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_depth_batch_and_recomputation_equal_the_simulation(
    policy: Policy, replicas: list[int], extra: int, multiple: int, optimizer: str, data: st.DataObject
) -> None:
    """Up to two microbatches more per link; ``latest`` cannot recompute what it has overwritten, and is tested by itself."""
    stages = tuple(replicas)
    recompute = tuple(data.draw(st.booleans()) and policy != "latest" for _ in stages)
    pipeline = pipeline_for(policy, stages, multiple * lcm(*stages), extra, updates=4)
    assert_equals_the_simulation(policy, pipeline, torch.float64, optimizer, recompute)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)], ids=str)
def test_a_flushed_pipeline_is_ordinary_training(replicas: tuple[int, ...]) -> None:
    """The plain loop: no versions, no replicas, gradients of a batch accumulated, one step."""
    pipeline = pipeline_for("flush", replicas, 4)
    weights = {name: nn.Parameter(value.clone()) for name, value in initial(torch.float64).items()}
    optimizer, loss = OPTIMIZERS["momentum"](list(weights.values())), whole_loss(torch.float64)
    for batch in range(UPDATES):
        for microbatch in range(4 * batch, 4 * batch + 4):
            (loss(weights, microbatch) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, _), value in train_on_threads(pipeline, torch.float64, OPTIMIZERS["momentum"], "flush").items():
        torch.testing.assert_close(value, weights[name].detach(), rtol=1e-12, atol=1e-14)


def test_the_policies_differ() -> None:
    """So that no policy passes for another."""
    results = {}
    for policy in POLICIES:
        pipeline = Pipeline((1, 1, 1), (3, 2, 1), 3, UPDATES, flush=policy == "flush")
        trained = train_on_threads(pipeline, torch.float64, OPTIMIZERS["momentum"], policy)
        results[policy] = trained["0.weight", 0]
    names = sorted(results)
    for index, one in enumerate(names):
        for other in names[index + 1:]:
            assert (results[one] - results[other]).abs().max() > 1e-6, (one, other)


EXPECTED_STORAGES = [
    # without replicas and batches of one: n - k versions at stage k, all n with vertical sync
    ("stash", (1, 1, 1), 1, 0, (3, 2, 1)), ("vertical", (1, 1, 1), 1, 0, (3, 3, 3)),
    # a longer batch needs fewer
    ("stash", (1, 1, 1), 2, 0, (2, 2, 1)), ("vertical", (1, 1, 1), 2, 0, (2, 2, 2)),
    ("stash", (2, 1), 2, 0, (2, 1)), ("vertical", (2, 1), 2, 0, (2, 2)),
    ("stash", (1, 2), 2, 1, (3, 1)), ("vertical", (1, 2), 2, 1, (3, 3)),
    # two of 2bw, whatever the depth
    ("2bw", (1, 1, 1), 3, 0, (2, 2, 2)), ("2bw", (1, 1, 1), 4, 1, (2, 2, 2)), ("2bw", (2, 1), 4, 0, (2, 2)),
    ("2bw", (1, 2, 1), 8, 1, (2, 2, 2)),
    ("flush", (1, 1, 1), 4, 0, (1, 1, 1)), ("flush", (2, 1), 4, 2, (1, 1)),
    ("latest", (1, 1, 1), 1, 2, (1, 1, 1)), ("latest", (2, 1), 2, 0, (1, 1)),
]


@pytest.mark.parametrize(("policy", "replicas", "batch", "extra", "versions"), EXPECTED_STORAGES, ids=str)
def test_a_stage_holds_no_more_versions_than_its_policy_needs(
    policy: Policy, replicas: tuple[int, ...], batch: int, extra: int, versions: tuple[int, ...]
) -> None:
    """Counted as storages: every address that a parameter's weights ever had, and those alive at one moment."""
    seen: dict[tuple[int, int], set[int]] = defaultdict(set)
    most: dict[int, int] = defaultdict(int)

    def look(worker: StageWorker) -> None:
        stage = worker.weights
        alive = {stage.peek(number).leaves[0].data_ptr() for number in stage.held} | {stage.masters[0].data_ptr()}
        seen[worker.worker.stage, worker.worker.replica] |= alive
        most[worker.worker.stage] = max(most[worker.worker.stage], len(alive))

    pipeline = pipeline_for(policy, replicas, batch, extra, updates=12)
    assert pipeline.batch_microbatches == batch
    train_on_threads(pipeline, torch.float64, OPTIMIZERS["momentum"], policy, on_event=look)
    assert tuple(most[stage] for stage in range(len(replicas))) == versions
    assert versions == tuple(live_versions(policy, replicas, pipeline.in_flight, batch, stage) for stage in range(len(replicas)))
    for (stage, _), addresses in seen.items():
        assert len(addresses) == versions[stage], "storage of a version that is gone is used again"


@pytest.mark.parametrize(("replicas", "depths", "batch", "least"), [
    ((1, 1), (2, 1), 1, 2), ((1, 1, 1), (3, 2, 1), 2, 3), ((2, 2), (2, 1), 2, 4), ((2, 1), (2, 1), 2, 4), ((1, 1, 1), (5, 3, 1), 3, 4),
], ids=str)
def test_double_buffering_refuses_batches_that_are_too_short(
    replicas: tuple[int, ...], depths: tuple[int, ...], batch: int, least: int
) -> None:
    with pytest.raises(BadInput, match=f"batches of {batch} microbatches") as caught:
        POLICIES["2bw"].check(Pipeline(replicas, depths, batch, 4))
    assert f"--batch-microbatches {least}" in caught.value.hint
    POLICIES["2bw"].check(Pipeline(replicas, depths, least, 4))
