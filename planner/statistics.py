"""What the programs of one search came to: how many, how large, how many nodes.

Every program is counted where it is solved, for whoever asked: a search need not know that it is watched.
None of it is in a plan file, which is the same for the same input.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["Statistics", "collected", "count_program"]


@dataclass
class Statistics:
    """Sums over all programs, and the size of the largest; ``total_s`` is of all that was done while collecting."""

    programs: int = 0
    columns: int = 0
    rows: int = 0
    nodes: int = 0  # of branch and bound; 0 where each linear relaxation was integral or presolve sufficed
    largest_columns: int = 0
    largest_rows: int = 0
    solver_s: float = 0.0
    total_s: float = 0.0

    def add(self, columns: int, rows: int, nodes: int, seconds: float) -> None:
        """Count one program."""
        self.programs += 1
        self.columns += columns
        self.rows += rows
        self.nodes += max(nodes, 0)
        if columns > self.largest_columns:
            self.largest_columns, self.largest_rows = columns, rows
        self.solver_s += seconds


_watching: ContextVar[Statistics | None] = ContextVar("statistics", default=None)


@contextlib.contextmanager
def collected() -> Iterator[Statistics]:
    """Count the programs that are solved inside; they are not counted outside as well.

    >>> with collected() as statistics:
    ...     count_program(columns=3, rows=2, nodes=0, seconds=0.5)
    >>> statistics.programs, statistics.largest_columns, statistics.solver_s
    (1, 3, 0.5)
    """
    statistics, start_s = Statistics(), time.monotonic()
    token = _watching.set(statistics)
    try:
        yield statistics
    finally:
        statistics.total_s = time.monotonic() - start_s
        _watching.reset(token)


def count_program(*, columns: int, rows: int, nodes: int, seconds: float) -> None:
    """Tell whoever collects, if anyone does, of a program that was solved."""
    statistics = _watching.get()
    if statistics is not None:
        statistics.add(columns, rows, nodes, seconds)
