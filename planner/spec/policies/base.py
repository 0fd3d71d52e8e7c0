"""What a weight policy is: one question, answered from the static schedule and never from timing.

*With* ``newest`` *updates done at this stage, which version does the forward of this microbatch use?* The
backward uses the same version, and an update never changes it: that is what stashing means. The answers
never decrease along a stage's microbatches, so a version older than the next forward's is needed by
microbatches in flight only.
"""

from __future__ import annotations

from typing import Protocol

from planner.spec.schedule import Pipeline

__all__ = ["VersionRule", "WeightPolicy"]


class VersionRule(Protocol):
    """``rule(microbatch, newest)`` is the version the forward of ``microbatch`` uses."""

    def __call__(self, microbatch: int, newest: int, /) -> int: ...


class WeightPolicy:
    """The newest version at each forward, kept for the backward; the policies say where they differ.

    ``flushes``: the pipeline is empty at every update. ``overwrites``: there is one version only, and an
    update changes it under the microbatches in flight.
    """

    flushes = False
    overwrites = False

    def version_rule(self, pipeline: Pipeline) -> VersionRule:
        """The rule for every stage of ``pipeline``."""
        return lambda microbatch, newest: newest

    def check(self, pipeline: Pipeline) -> None:
        """Whether the policy can run on ``pipeline``.

        Raises:
            BadInput: it cannot; the message has the reason, the hint the nearest pipeline that can.
        """
