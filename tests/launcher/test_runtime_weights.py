"""Versions are real and held no longer than needed: checked on random schedules, without any pipeline."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from launcher.runtime.weights import WeightVersions
from planner.spec.schedule import Pipeline, default_in_flight, operations

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "momentum-fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


@given(
    replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4), extra=st.integers(0, 2), multiple=st.integers(1, 2),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)), data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_pending_backward_never_sees_a_later_step(
    replicas: list[int], extra: int, multiple: int, optimizer: str, data: st.DataObject
) -> None:
    """Along a random stage's schedule: each backward's gradient is the one of the weights its forward saw."""
    batch = multiple * torch.tensor(replicas).prod().item()
    pipeline = Pipeline(tuple(replicas), default_in_flight(tuple(replicas), extra), int(batch), 4)
    stage = data.draw(st.integers(0, len(replicas) - 1))
    master, frozen = nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float64)), nn.Parameter(torch.ones(2), requires_grad=False)
    weights = WeightVersions([master, frozen])
    step = OPTIMIZERS[optimizer]([master])
    pending = {}
    used = {}
    most = 0
    for op in operations(pipeline, stage, 0):
        if op.kind == "F":
            version = weights.begin(weights.newest)
            used[op.index] = version.number
            pending[op.index] = (version, (version.leaves[0] ** 3).sum(), master.detach().clone())
        elif op.kind == "B":
            version, loss, seen = pending.pop(op.index)
            before = None if master.grad is None else master.grad.clone()
            weights.lend_gradients(version)
            loss.backward()
            weights.take_gradients(version)
            weights.end(version)
            added = master.grad if before is None else master.grad - before
            torch.testing.assert_close(added, 3 * seen**2, rtol=1e-12, atol=1e-12)
            weights.discard(weights.newest)
        else:
            def advance() -> None:
                step.step()
                master.grad = None

            weights.advance(advance, weights.newest + 1)
        # exactly the versions of the microbatches in flight, and the newest
        assert set(weights.held) == {used[m] for m in pending} | {weights.newest}
        most = max(most, len(weights.held))
        for version, _, seen in pending.values():
            assert torch.equal(version.leaves[0], seen)
            assert version.leaves[1].data_ptr() == frozen.data_ptr()
    assert most <= pipeline.in_flight[stage] + 1


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_step_copies_only_for_a_microbatch_in_flight(in_flight: bool) -> None:
    master = nn.Parameter(torch.ones(3))
    weights = WeightVersions([master])
    address = master.data_ptr()
    version = weights.begin(0)
    if not in_flight:
        weights.end(version)
    weights.advance(lambda: None, 1)
    assert (master.data_ptr() != address) == in_flight


def test_storage_is_recycled() -> None:
    """Two versions alternate between two storages, however long the run."""
    master = nn.Parameter(torch.zeros(3))
    weights = WeightVersions([master])
    addresses = set()
    previous = weights.begin(0)
    for _ in range(20):
        weights.advance(lambda: master.data.add_(1), weights.newest + 1)
        current = weights.begin(weights.newest)
        weights.end(previous)
        weights.discard(weights.newest)
        addresses.add(master.data_ptr())
        previous = current
    assert len(addresses) == 2
    assert torch.equal(master.detach(), torch.full((3,), 20.0))


def test_a_version_that_a_later_forward_needs_is_kept() -> None:
    """As 2BW does: after update t, forwards still use version t - 1; exactly two versions are held."""
    master = nn.Parameter(torch.zeros(2))
    weights = WeightVersions([master])
    for update in range(6):
        oldest = max(update - 1, 0)  # what the batch now running uses
        version = weights.begin(oldest)
        assert torch.equal(version.leaves[0], torch.full((2,), float(oldest)))
        weights.end(version)
        weights.advance(lambda: master.data.add_(1), keep_from=update)
        assert weights.held == (update, update + 1)


def test_gradients_of_a_batch_add_up_in_place() -> None:
    master = nn.Parameter(torch.tensor([2.0]))
    weights = WeightVersions([master])
    for _ in range(3):
        version = weights.begin(0)
        weights.lend_gradients(version)
        (version.leaves[0] * 5).sum().backward()
        weights.take_gradients(version)
        weights.end(version)
    assert master.grad is not None
    assert master.grad.item() == 15
    assert weights.peek(0).leaves[0].grad is None
