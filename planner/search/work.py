"""How much may still be spent on one kind of work in a search, counted and not timed: so that a plan does not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Work"]


@dataclass
class Work:
    """What is left, in units that its user says."""

    left: int
