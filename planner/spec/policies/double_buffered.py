"""PipeDream-2BW (ICML 2021, section 3.1): a delay of exactly one batch at every stage, two versions.

Two stages, batches of two microbatches; ``(v)`` is the version used, in forward and backward::

    stage 0   0F0(0) 0F1(0) 0B0(0) 0F2(0) 0B1(0) 0U0 0F3(0) 0B2(0) 0F4(1) 0B3(0) 0U1 0F5(1) ...
    stage 1          1F0(0) 1B0(0) 1F1(0) 1B1(0) 1U0 1F2(0) 1B2(0) 1F3(0) 1B3(0) 1U1 1F4(1) ...

Batch t uses version t - 1 (the first batch version 0), so when the last backward of batch t has made version
t + 1, nothing needs version t - 1 any more: the new version takes its storage.
"""

from __future__ import annotations

import math

from planner.spec.errors import PolicyRefuses
from planner.spec.policies.base import VersionRule, WeightPolicy
from planner.spec.schedule import Pipeline

__all__ = ["DoubleBuffered"]


class DoubleBuffered(WeightPolicy):
    """``W(t+1) = W(t) - lr * g(W(t-1))`` at all stages."""

    def version_rule(self, pipeline: Pipeline) -> VersionRule:
        """Microbatch m uses version ``max(m // A - 1, 0)``."""
        batch = pipeline.batch_microbatches
        return lambda microbatch, newest: max(microbatch // batch - 1, 0)

    def check(self, pipeline: Pipeline) -> None:
        """A batch must be as long as the pipeline is deep: A is at least the number of workers.

        Where stages admit more than the least depth, it must be longer: the first forward of batch t + 1
        runs with ``d - 1`` backwards of its replica missing, and needs the update after batch t - 1, so
        ``(d - 1) r <= A`` at every stage of r replicas with d microbatches in flight each.
        """
        batch, workers = pipeline.batch_microbatches, sum(pipeline.replicas)
        ahead = [(depth - 1) * r for depth, r in zip(pipeline.in_flight, pipeline.replicas, strict=True)]
        least = max(workers, *ahead)
        if batch >= least:
            return
        multiple = math.lcm(*pipeline.replicas)
        longer = -(-least // multiple) * multiple
        if least == workers:
            reason = f"its pipeline is {workers} workers deep"
        else:
            stage = ahead.index(least)
            reason = f"stage {stage} begins a microbatch with {least} others in flight"
        raise PolicyRefuses(f"policy 2bw holds two versions only, and {reason}: batches of {batch} microbatches are too short",
                       hint=f"plan with batches of {longer} or more: --batch-microbatches {longer}")
