"""The schedule spelled out, and held against what 1F1B round robin must satisfy for any shape."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.spec.errors import InvalidValue
from planner.spec.schedule import Op, Pipeline, default_in_flight, operations, parse_op, validate


def text(pipeline: Pipeline, stage: int, replica: int = 0) -> str:
    return " ".join(map(str, operations(pipeline, stage, replica)))


def test_two_stages_spelled_out() -> None:
    pipeline = Pipeline((1, 1), (2, 1), batch_microbatches=1, batches=3)
    assert text(pipeline, 0) == "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2"
    assert text(pipeline, 1) == "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2"


def test_a_replicated_stage_spelled_out() -> None:
    pipeline = Pipeline((2, 1), (2, 1), batch_microbatches=2, batches=2)
    assert text(pipeline, 0, 0) == "0F0 0F2 0B0 0U0 0B2 0U1"
    assert text(pipeline, 0, 1) == "0F1 0F3 0B1 0U0 0B3 0U1"
    assert text(pipeline, 1) == "1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1"


def test_a_flush_empties_the_pipeline_at_each_update() -> None:
    pipeline = Pipeline((1, 1), (2, 1), batch_microbatches=3, batches=2, flush=True)
    assert text(pipeline, 0) == "0F0 0F1 0B0 0F2 0B1 0B2 0U0 0F3 0F4 0B3 0F5 0B4 0B5 0U1"
    assert text(pipeline, 1) == "1F0 1B0 1F1 1B1 1F2 1B2 1U0 1F3 1B3 1F4 1B4 1F5 1B5 1U1"
    replicated = Pipeline((2, 1), (2, 1), batch_microbatches=4, batches=2, flush=True)
    assert text(replicated, 0, 1) == "0F1 0F3 0B1 0B3 0U0 0F5 0F7 0B5 0B7 0U1"


def test_evaluation_comes_after_its_update_and_leaves_the_rest_alone() -> None:
    plain = Pipeline((1, 1), (2, 1), 1, 2)
    with_evaluation = Pipeline((1, 1), (2, 1), 1, 2, evaluate_at_end=True, evaluation_microbatches=2)
    assert text(with_evaluation, 0) == "0F0 0F1 0B0 0U0 0B1 0U1 0E0 0E1"
    for stage in range(2):
        assert [op for op in operations(with_evaluation, stage, 0) if op.kind != "E"] == list(operations(plain, stage, 0))


@pytest.mark.parametrize("stages", range(1, 6))
def test_the_version_of_a_forward_follows_the_rule_of_the_paper(stages: int) -> None:
    """With an update per microbatch, stage k's forward of microbatch t sees W_k(t - (n - 1 - k))."""
    replicas = (1,) * stages
    pipeline = Pipeline(replicas, default_in_flight(replicas), 1, 20)
    for stage in range(stages):
        version = 0
        for op in operations(pipeline, stage, 0):
            if op.kind == "U":
                version += 1
            elif op.kind == "F":
                assert version == max(op.index - (stages - 1 - stage), 0)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    extra = draw(st.integers(0, 2))
    batch = math.lcm(*replicas) * draw(st.integers(1, 3))
    return Pipeline(
        replicas, default_in_flight(replicas, extra), batch, draw(st.integers(0, 4)),
        draw(st.integers(0, 2)), draw(st.booleans()), draw(st.integers(0, 5)),
        flush=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=200)
@given(pipelines())
def test_every_schedule_ends_and_runs_everything_once_in_order(pipeline: Pipeline) -> None:
    validate(pipeline)
    for stage, r in enumerate(pipeline.replicas):
        forwards: list[int] = []
        backwards: list[int] = []
        for replica in range(r):
            ops = list(operations(pipeline, stage, replica))
            mine = list(range(replica, pipeline.microbatches, r))
            assert [op.index for op in ops if op.kind == "F"] == mine
            assert [op.index for op in ops if op.kind == "B"] == mine
            assert [op.index for op in ops if op.kind == "U"] == list(range(pipeline.batches))
            pending = 0
            for position, op in enumerate(ops):
                pending += (op.kind == "F") - (op.kind == "B")
                assert 0 <= pending <= pipeline.in_flight[stage]
                if op.kind == "B":
                    assert Op(stage, "F", op.index) in ops[:position]
                if op.kind == "U":  # a batch's update follows its last backward here, with nothing of the next before it
                    done = [o.index for o in ops[:position] if o.kind == "B"]
                    assert done == [m for m in mine if m < (op.index + 1) * pipeline.batch_microbatches]
            forwards += mine
            backwards += mine
        assert sorted(forwards) == sorted(backwards) == list(range(pipeline.microbatches))


def test_a_schedule_that_cannot_end_names_the_operations_it_waits_at() -> None:
    stuck = Pipeline((1, 1), (1, 2), batch_microbatches=2, batches=2)  # stage 1 wants two forwards, stage 0 sends one
    with pytest.raises(InvalidValue, match="stage 0 replica 0 at 0B0, stage 1 replica 0 at 1F1"):
        validate(stuck)


def test_a_batch_that_cannot_be_dealt_is_refused_with_the_nearest_that_can() -> None:
    with pytest.raises(InvalidValue, match="batch of 4 microbatches cannot be dealt to 3 replicas") as caught:
        Pipeline((3, 2), (2, 1), 4, 1)
    assert "multiple of 6" in caught.value.hint


@given(st.builds(Op, st.integers(0, 999), st.sampled_from("FBUE"), st.integers(0, 10**9)))
def test_an_operation_is_what_it_is_written_as(op: Op) -> None:
    assert parse_op(str(op)) == op


@pytest.mark.parametrize("text", ["", "F3", "0X3", "0F", "-1F2", "0F3 ", "0F3\n"])
def test_what_is_not_an_operation_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_op(text)
