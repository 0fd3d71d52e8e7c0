"""PipeDream's weight stashing (SOSP 2019, section 3.3): the newest version when the forward runs, kept for the backward.

Two stages, an update after every microbatch; ``(v)`` is the version used, in forward and backward::

    stage 0   0F0(0) 0F1(0) 0B0(0) 0U0 0F2(1) 0B1(0) 0U1 0F3(2) 0B2(1) 0U2 ...
    stage 1          1F0(0) 1B0(0) 1U0 1F1(1) 1B1(1) 1U1 1F2(2) ...

The stages of one microbatch use different versions: microbatch 2 above sees 1 at stage 0 and 2 at stage 1.
"""

from __future__ import annotations

from planner.spec.policies.base import WeightPolicy

__all__ = ["Stash"]


class Stash(WeightPolicy):
    """``W_k(t+1) = W_k(t) - lr * g(W_0(t-n+1), ..., W_{n-1}(t))`` for n stages without replicas, batches of one."""
