"""Every program is counted once, by who collects, with the solver's own sizes."""

from __future__ import annotations

import pulp
import pytest

from planner.options import PlanOptions
from planner.published.path_program import Column, cheapest_path
from planner.solve import make_plan
from planner.solver import run, solver_name
from planner.statistics import Statistics, collected
from tests.planner.instances import two_level
from tests.planner.test_solve import model


def test_a_path_program_has_a_column_a_stage_and_a_row_a_state() -> None:
    with collected() as statistics:
        assert cheapest_path([Column(0, 1, 2), Column(1, 2, 1), Column(0, 2, 4)], 0, 2) is not None
    assert (statistics.programs, statistics.columns, statistics.rows) == (1, 3, 2)
    assert 0 < statistics.solver_s <= statistics.total_s


def test_inner_collectors_keep_their_own_and_an_error_ends_one() -> None:
    path = [Column(0, 1, 1)]
    with collected() as outer:
        with pytest.raises(RuntimeError), collected() as inner:
            cheapest_path(path, 0, 1)
            raise RuntimeError
        cheapest_path(path, 0, 1)
        cheapest_path(path, 0, 1)
    assert (inner.programs, outer.programs) == (1, 2)
    cheapest_path(path, 0, 1)  # nobody collects
    assert outer.programs == 2


def test_branch_and_bound_nodes_are_the_solvers() -> None:
    """An odd sum of even numbers: the relaxation is fractional, so it takes branching or cuts to see that there is none."""
    if solver_name() != "HiGHS":
        pytest.skip("only HiGHS tells")
    program = pulp.LpProblem("knapsack", pulp.LpMaximize)
    values, weights = [41, 50, 49, 59, 55, 57, 60, 33, 71, 62], [19, 23, 24, 29, 27, 28, 31, 17, 35, 30]
    chosen = [program.add_variable(f"x{i}", 0, 3, "Integer") for i in range(10)]
    program += pulp.lpSum(v * x for v, x in zip(values, chosen, strict=True))
    for shift in range(4):
        program += pulp.lpSum(weights[(i + shift) % 10] * x for i, x in enumerate(chosen)) <= 151 + shift, f"weight_{shift}"
    with collected() as statistics:
        assert run(program, time_limit_s=None) == "optimal"
    assert (statistics.columns, statistics.rows) == (10, 4) and statistics.nodes >= 1


def test_a_plan_is_made_of_programs() -> None:
    with collected() as statistics:
        make_plan(model(), two_level(2, 2, intra=1e10, inter=1e8), PlanOptions(), command="x")
    assert statistics.programs >= 1 and statistics.largest_columns <= statistics.columns and statistics.largest_rows <= statistics.rows


def test_the_largest_is_the_one_with_most_columns() -> None:
    statistics = Statistics()
    for columns, rows in ((3, 9), (7, 2), (5, 5)):
        statistics.add(columns, rows, -1, 0.25)
    assert (statistics.largest_columns, statistics.largest_rows, statistics.nodes, statistics.solver_s) == (7, 2, 0, 0.75)
