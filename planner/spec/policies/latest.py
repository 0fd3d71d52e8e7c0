"""No stashing, only to show why it matters: forward and backward use whatever the weights are at that moment.

Two stages, an update after every microbatch; ``(v)`` is the version seen, another one in forward and backward::

    stage 0   0F0(0) 0F1(0) 0B0(0) 0U0 0F2(1) 0B1(1) 0U1 0F3(2) 0B2(2) 0U2 ...
    stage 1          1F0(0) 1B0(0) 1U0 1F1(1) 1B1(1) 1U1 1F2(2) ...

A backward of batch t sees version t, since all earlier updates are done and no later one. Exactly: the
forward's results stay as its version made them, and where the backward formula has the weight itself, it
reads the one storage that the updates step in place. For ``y = f(W x)`` that is::

    gradient of W = f'(W_forward x) * dy, outer x        gradient of x = W_backward^T (f'(W_forward x) * dy)

which is the gradient of no function wherever the two versions differ. A stage that recomputes its
activations does so with the weights of that moment: its gradient is a true one, but of another output than
the one it sent on.
"""

from __future__ import annotations

from planner.spec.policies.base import WeightPolicy

__all__ = ["Latest"]


class Latest(WeightPolicy):
    """One version, overwritten under the microbatches in flight."""

    overwrites = True
