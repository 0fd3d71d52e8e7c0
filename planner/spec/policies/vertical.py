"""PipeDream's vertical sync (SOSP 2019, section 3.3): at every stage the version the microbatch met at stage 0.

Two stages, an update after every microbatch; ``(v)`` is the version used, in forward and backward::

    stage 0   0F0(0) 0F1(0) 0B0(0) 0U0 0F2(1) 0B1(0) 0U1 0F3(2) 0B2(1) 0U2 ...
    stage 1          1F0(0) 1B0(0) 1U0 1F1(0) 1B1(0) 1U1 1F2(1) ...

Stage 0 saw the fewest updates when the microbatch began, so every later stage still has that version,
or keeps it: no more of them than stage 0 itself.
"""

from __future__ import annotations

from planner.spec.policies.base import VersionRule, WeightPolicy
from planner.spec.schedule import Pipeline

__all__ = ["Vertical"]


class Vertical(WeightPolicy):
    """``W(t+1) = W(t) - lr * g(W(t-n+1))`` at all n stages, without replicas and with batches of one."""

    def version_rule(self, pipeline: Pipeline) -> VersionRule:
        """The version does not travel with the microbatch: stage 0's schedule gives it as a closed form.

        A replica of stage 0 runs its q-th forward after the backward of its (q - d)-th, and an update
        follows each A / r of its backwards: ``max(q - d + 1, 0) // (A / r)`` updates are done by then.
        """
        r, depth = pipeline.replicas[0], pipeline.in_flight[0]
        share = pipeline.batch_microbatches // r
        return lambda microbatch, newest: max(microbatch // r - depth + 1, 0) // share
