"""How much may still be spent: work of one kind, counted so that a plan does not depend on the machine, and time."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Work", "is_late"]


@dataclass
class Work:
    """What is left, in units that its user says."""

    left: int


def is_late(deadline: float | None) -> bool:
    """Whether a :func:`time.monotonic` has passed; never where there is none."""
    return deadline is not None and time.monotonic() > deadline
