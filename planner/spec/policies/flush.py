"""PipeDream-Flush (ICML 2021, section 3.2; synchronous 1F1B): the pipeline is empty at every update.

Two stages, batches of three microbatches; ``(v)`` is the version used, in forward and backward::

    stage 0   0F0(0) 0F1(0) 0B0(0) 0F2(0) 0B1(0)        0B2(0) 0U0 0F3(1) 0F4(1) ...
    stage 1          1F0(0) 1B0(0) 1F1(0) 1B1(0) 1F2(0) 1B2(0) 1U0        1F3(1) ...

Every microbatch of batch t uses version t everywhere, as in ordinary training with batches of that size.
"""

from __future__ import annotations

from planner.spec.policies.base import WeightPolicy

__all__ = ["Flush"]


class Flush(WeightPolicy):
    """``W(t+1) = W(t) - lr * g(W(t))``: the schedule lets no forward of the next batch run before the update."""

    flushes = True
