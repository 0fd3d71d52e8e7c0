"""Live versions and bytes, against a walk through the schedule itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.memory import copies_weights, live_versions, replica_memory
from planner.model.graph import chain_of
from planner.spec.profile import Tensor
from planner.spec.schedule import Pipeline, default_in_flight, operations
from tests.planner.instances import layer, profile


def most_stashed(pipeline: Pipeline, stage: int, replica: int) -> int:
    """The most distinct versions among a worker's microbatches in flight and the newest, one operation after the other."""
    newest, used, most = 0, {}, 1
    for op in operations(pipeline, stage, replica):
        if op.kind == "F":
            used[op.index] = newest
        elif op.kind == "B":
            del used[op.index]
        elif op.kind == "U":
            newest = op.index + 1
        most = max(most, len({newest, *used.values()}))
    return most


def version_at_first_stage(pipeline: Pipeline) -> dict[int, int]:
    """The version that each microbatch meets at stage 0."""
    versions = {}
    for replica in range(pipeline.replicas[0]):
        newest = 0
        for op in operations(pipeline, 0, replica):
            if op.kind == "F":
                versions[op.index] = newest
            elif op.kind == "U":
                newest = op.index + 1
    return versions


replica_counts = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@given(replica_counts, st.integers(1, 4))
def test_stash_equals_a_walk_through_the_schedule(replicas: tuple[int, ...], times: int) -> None:
    batch = math.lcm(*replicas) * times
    depth = default_in_flight(replicas)
    pipeline = Pipeline(replicas, depth, batch, 4 + 3 * sum(replicas) // batch)
    for stage, r in enumerate(replicas):
        expected = max(most_stashed(pipeline, stage, replica) for replica in range(r))
        assert live_versions("stash", replicas, depth, batch, stage) == expected


@given(replica_counts, st.integers(1, 4))
def test_vertical_keeps_from_the_oldest_version_still_to_be_used_to_the_newest(replicas: tuple[int, ...], times: int) -> None:
    batch = math.lcm(*replicas) * times
    depth = default_in_flight(replicas)
    pipeline = Pipeline(replicas, depth, batch, 6 + 4 * sum(replicas) // batch)
    versions = version_at_first_stage(pipeline)
    for stage in range(len(replicas)):
        # After the update that follows a batch, every later microbatch is still to be run backward here.
        needed = [batch_index + 2 - versions[(batch_index + 1) * batch] for batch_index in range(pipeline.batches - 1)]
        assert live_versions("vertical", replicas, depth, batch, stage) == max(needed)


def test_known_cases() -> None:
    depth = default_in_flight((1, 1, 1))
    assert [live_versions("stash", (1, 1, 1), depth, 1, k) for k in range(3)] == [3, 2, 1]
    assert [live_versions("vertical", (1, 1, 1), depth, 1, k) for k in range(3)] == [3, 3, 3]
    assert [live_versions("2bw", (1, 1, 1), depth, 4, k) for k in range(3)] == [2, 2, 2]
    assert [live_versions("flush", (1, 1, 1), depth, 4, k) for k in range(3)] == [1, 1, 1]
    assert [live_versions("stash", (1, 1, 1), depth, 4, k) for k in range(3)] == [2, 2, 1]
    assert (copies_weights("stash", 2), copies_weights("stash", 1), copies_weights("2bw", 2)) == (True, False, True)


def test_bytes_by_hand() -> None:
    first = layer("first", parameter_bytes=1)
    second = layer("second", parameter_bytes=100, buffer_bytes=7, optimizer_bytes=200, saved_bytes=1000, workspace_bytes=30)
    third = layer("third", parameter_bytes=10, buffer_bytes=1, optimizer_bytes=20, saved_bytes=5000, workspace_bytes=40)
    chain = chain_of(profile([first, second, third], [Tensor("x", 0, (1, 2), 60, 60), Tensor("y", 1, (2,), 5, 5)]))
    memory = replica_memory(chain, 1, 3, in_flight=4, versions=3)
    assert memory.weights_bytes == 110 * 3 + 8
    assert memory.gradients_bytes == 110
    assert memory.optimizer_bytes == 220
    assert memory.activations_bytes == (6000 + 60) * 4  # what its layers save, and the tensor it received
    assert memory.workspace_bytes == 40
    assert memory.total_bytes == pytest.approx(338 + 110 + 220 + 24240 + 40)
