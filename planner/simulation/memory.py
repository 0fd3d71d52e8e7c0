"""Memory over time of one worker of a simulated run.

Constant are gradients, optimizer state, buffers and workspace; two parts change. A microbatch holds its
activations from the start of its forward to the end of its backward. A weight version lives while a
microbatch in flight, or one still to come, uses it; the newest always lives::

    stash, 3 in flight    F0 F1 F2 B0 U0 F3 B1 U1 F4 ...
    versions in use       0  0  0  0  0  0,1    0,1,2

Which version a microbatch uses is the policy's rule (:mod:`planner.spec.policies`); ``latest`` keeps one only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from planner.memory import live_versions
from planner.simulation.engine import Done
from planner.spec.plan import Plan
from planner.spec.policies import POLICIES
from planner.spec.schedule import Pipeline

__all__ = ["MemoryStep", "memory_steps"]


class MemoryStep(NamedTuple):
    """From ``time_us`` on, until the next step."""

    time_us: float
    versions: int  # of the weights
    in_flight: int
    total_bytes: float


def memory_steps(plan: Plan, pipeline: Pipeline, stage: int, done: Sequence[Done],
                 input_bytes: float) -> list[MemoryStep]:
    """Every change of one worker's memory; ``input_bytes`` is what it receives for one microbatch.

    A stage that recomputes holds the inputs of each microbatch in flight and all activations of the
    one whose backward runs.
    """
    memory, depth = plan.predicted.stages[stage].memory, plan.stages[stage].in_flight
    one_version = memory.gradients_bytes
    buffers = memory.weights_bytes - one_version * live_versions(
        plan.policy, pipeline.replicas, pipeline.in_flight, pipeline.batch_microbatches, stage)
    fixed = buffers + memory.gradients_bytes + memory.optimizer_bytes + memory.workspace_bytes
    if plan.stages[stage].recompute:
        held = input_bytes
        recomputed = max(0.0, memory.activations_bytes - held * depth)
    else:
        held, recomputed = memory.activations_bytes / depth, 0.0
    policy = POLICIES[plan.policy]
    version = policy.version_rule(pipeline)
    in_use: deque[int] = deque()  # versions of the microbatches in flight
    newest, steps = 0, []

    def note(time_us: float, oldest: int, running: float = 0.0) -> None:
        versions = 1 if policy.overwrites else newest - oldest + 1
        steps.append(MemoryStep(time_us, versions, len(in_use), fixed + versions * one_version + held * len(in_use) + running))

    coming = [entry.op for entry in done if entry.op.kind == "F"]
    forwards = 0
    for entry in done:
        kind, microbatch = entry.op.kind, entry.op.index
        if kind == "F":
            in_use.append(version(microbatch, newest))
            forwards += 1
            note(entry.start_us, in_use[0])
            continue
        if kind == "B":
            if recomputed:
                note(entry.start_us, in_use[0], recomputed)
            in_use.popleft()
        elif kind == "U":
            newest += 1
        # What is still needed: by the oldest in flight, else by the next forward.
        following = version(coming[forwards].index, newest) if forwards < len(coming) else newest
        note(entry.end_us, in_use[0] if in_use else min(following, newest))
    return steps or [MemoryStep(0.0, 1, 0, fixed + one_version)]
