"""Weight policies, one a file: which version of the weights a microbatch uses, and what that asks of the pipeline.

The runtime carries them out, the simulator counts their versions; both ask here.
"""

from __future__ import annotations

from planner.spec.plan import Policy
from planner.spec.policies.base import VersionRule, WeightPolicy
from planner.spec.policies.double_buffered import DoubleBuffered
from planner.spec.policies.flush import Flush
from planner.spec.policies.latest import Latest
from planner.spec.policies.stash import Stash
from planner.spec.policies.vertical import Vertical

__all__ = ["POLICIES", "VersionRule", "WeightPolicy"]

POLICIES: dict[Policy, WeightPolicy] = {
    "stash": Stash(), "vertical": Vertical(), "2bw": DoubleBuffered(), "flush": Flush(), "latest": Latest(),
}
