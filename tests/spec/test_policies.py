"""The policies' rules against their timelines and against walking the schedule operation by operation."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.spec.errors import BadInput
from planner.spec.plan import Policy
from planner.spec.policies import POLICIES
from planner.spec.schedule import Pipeline, default_in_flight, operations


def timeline(policy: Policy, pipeline: Pipeline, stage: int) -> list[str]:
    """What one replica-less stage does, with the version of each forward and backward."""
    rule, newest, used, text = POLICIES[policy].version_rule(pipeline), 0, {}, []
    for op in operations(pipeline, stage, 0):
        if op.kind == "U":
            newest += 1
            text.append(str(op))
        else:
            if op.kind == "F":
                used[op.index] = rule(op.index, newest)
            overwritten = op.kind == "B" and POLICIES[policy].overwrites
            text.append(f"{op}({newest if overwritten else used[op.index]})")
    return text


@pytest.mark.parametrize(("policy", "file", "batch"), [
    ("stash", "stash", 1), ("vertical", "vertical", 1), ("2bw", "double_buffered", 2), ("flush", "flush", 3), ("latest", "latest", 1),
])
def test_the_documented_timeline_is_the_schedule(policy: Policy, file: str, batch: int) -> None:
    drawn = importlib.import_module(f"planner.spec.policies.{file}").__doc__
    pipeline = Pipeline((1, 1), (2, 1), batch, 12, flush=POLICIES[policy].flushes)
    for stage in range(2):
        line = re.search(rf"stage {stage} +(.*) \.\.\.", drawn)
        assert line is not None
        steps = line[1].split()
        assert len(steps) >= 7
        assert steps == timeline(policy, pipeline, stage)[: len(steps)]


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    batch = math.lcm(*replicas) * draw(st.integers(1, 4))
    return Pipeline(replicas, default_in_flight(replicas, draw(st.integers(0, 2))), batch, draw(st.integers(1, 5)))


def forwards(pipeline: Pipeline, visit: Callable[[int, int, int], None]) -> None:
    """``visit(stage, microbatch, newest)`` at every forward, ``newest`` being the updates that its replica has done."""
    for stage, r in enumerate(pipeline.replicas):
        for replica in range(r):
            newest = 0
            for op in operations(pipeline, stage, replica):
                newest += op.kind == "U"
                if op.kind == "F":
                    visit(stage, op.index, newest)


@settings(deadline=None, max_examples=200)
@given(pipelines(), st.sampled_from(sorted(POLICIES)))
def test_a_forward_asks_for_a_version_that_there_is_and_never_for_an_older_one_than_before(pipeline: Pipeline, policy: Policy) -> None:
    try:
        POLICIES[policy].check(pipeline)
    except BadInput:
        assert policy == "2bw"
        return
    rule, before = POLICIES[policy].version_rule(pipeline), dict[int, int]()

    def visit(stage: int, microbatch: int, newest: int) -> None:
        version = rule(microbatch, newest)
        assert version <= newest
        assert version >= before.get(stage * 100 + microbatch % pipeline.replicas[stage], 0)
        before[stage * 100 + microbatch % pipeline.replicas[stage]] = version
        if policy == "2bw":
            assert newest - version <= 1, "a third version"

    forwards(pipeline, visit)


@settings(deadline=None, max_examples=100)
@given(pipelines())
def test_vertical_is_the_version_met_at_stage_0(pipeline: Pipeline) -> None:
    rule, met = POLICIES["vertical"].version_rule(pipeline), dict[int, int]()

    def visit(stage: int, microbatch: int, newest: int) -> None:
        if stage == 0:
            met[microbatch] = newest
        assert rule(microbatch, newest) == met[microbatch]

    forwards(pipeline, visit)


@settings(deadline=None, max_examples=200)
@given(pipelines())
def test_double_buffering_refuses_what_would_need_a_version_too_early(pipeline: Pipeline) -> None:
    """And, with the least depths, exactly what the planner does not plan: batches below the number of workers."""
    rule, early = POLICIES["2bw"].version_rule(pipeline), list[int]()
    forwards(pipeline, lambda stage, microbatch, newest: early.append(microbatch) if rule(microbatch, newest) > newest else None)
    try:
        POLICIES["2bw"].check(pipeline)
    except BadInput as error:
        least = int(error.hint.rpartition(" ")[2])
        assert least > pipeline.batch_microbatches
        assert early or pipeline.batches < 3 or pipeline.batch_microbatches < sum(pipeline.replicas)
    else:
        assert not early
        assert pipeline.batch_microbatches >= sum(pipeline.replicas)
