"""The linear program of a path: which stages lead from the first cut state to the last with the fewest units?

One variable a stage, flow conservation at every state. The matrix is that of a network, totally
unimodular, so the variables are continuous and the optimum is integral.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pulp

from planner.solver import run
from planner.spec.errors import PipedreamError

__all__ = ["Column", "cheapest_path"]


class Column(NamedTuple):
    """A stage [first, last) that takes ``units`` of what there is."""

    first: int
    last: int
    units: int


def cheapest_path(columns: Sequence[Column], start: int, end: int) -> tuple[int, list[Column]] | None:
    """The fewest units of a path from ``start`` to ``end``, and of those paths one with the fewest stages; None when there is none."""
    program = pulp.LpProblem("path", pulp.LpMinimize)
    variables = [program.add_variable(f"stage_{index}_from_{c.first}_to_{c.last}", 0, 1) for index, c in enumerate(columns)]
    most_stages = len({c.first for c in columns}) + 1
    program += pulp.LpAffineExpression([(v, c.units * most_stages + 1) for c, v in zip(columns, variables, strict=True)])
    flow: dict[int, list[tuple[pulp.LpVariable, int]]] = defaultdict(list)
    for c, variable in zip(columns, variables, strict=True):
        flow[c.first].append((variable, 1))
        flow[c.last].append((variable, -1))
    if start not in flow or end not in flow:
        return None
    for state in sorted(flow):
        if state != end:
            program += pulp.LpAffineExpression(flow[state]) == (1 if state == start else 0), f"flow_at_{state}"
    if run(program, time_limit_s=None) != "optimal":
        return None
    chosen = sorted(c for c, variable in zip(columns, variables, strict=True) if (variable.value() or 0) > 0.5)
    if not chosen or chosen[0].first != start or chosen[-1].last != end or any(
            one.last != other.first for one, other in itertools.pairwise(chosen)):
        raise PipedreamError(f"the solver's answer is not a path: stages {[tuple(c) for c in chosen]}", hint="please report this")
    return sum(c.units for c in chosen), chosen
