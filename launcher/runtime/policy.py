"""Weight policies: which version of its stage's weights a microbatch uses.

A policy is one question, answered from the static schedule and never from timing: *with* ``newest``
*updates done, which version does the forward of this microbatch use?* The backward uses the same
version, always; that is what stashing means. The answers never decrease along a stage's
microbatches, so a version older than the next forward's is needed by microbatches in flight only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from planner.spec.errors import BadInput
from planner.spec.plan import Policy
from planner.spec.schedule import Pipeline

__all__ = ["POLICIES", "VersionRule", "stash", "version_rule"]


class VersionRule(Protocol):
    """``rule(microbatch, newest)`` is the version the forward of ``microbatch`` uses."""

    def __call__(self, microbatch: int, newest: int, /) -> int: ...


def stash(pipeline: Pipeline, stage: int) -> VersionRule:
    """PipeDream's weight stashing: the newest version at this stage when the forward runs.

    Two stages, an update after every microbatch; ``(v)`` is the version used, in forward and backward::

        stage 0   0F0(0) 0F1(0) 0B0(0) 0U0 0F2(1) 0B1(0) 0U1 0F3(2) 0B2(1) 0U2 ...
        stage 1          1F0(0) 1B0(0) 1U0 1F1(1) 1B1(1) 1U1 1F2(2) ...
    """
    return lambda microbatch, newest: newest


POLICIES: dict[Policy, Callable[[Pipeline, int], VersionRule]] = {"stash": stash}


def version_rule(policy: Policy, pipeline: Pipeline, stage: int) -> VersionRule:
    """The rule of ``policy`` at one stage.

    Raises:
        BadInput: the policy is not one the runtime can run.
    """
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise BadInput(f"the plan's weight policy {policy!r} cannot be run yet, these can: {known}",
                       hint="plan again with --policy stash", code="policy")
    return POLICIES[policy](pipeline, stage)
