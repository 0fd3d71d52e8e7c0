"""Running a PuLP program: HiGHS, or CBC where only that is installed, quietly and with an honest status."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import pulp

from planner.spec.errors import PipedreamError
from planner.statistics import count_program

__all__ = ["Status", "quiet_stdout", "run", "solver_name"]

Status = Literal["optimal", "infeasible", "unproven"]


def solver_name() -> str:
    """Of the solver that :func:`run` uses.

    Raises:
        PipedreamError: PuLP finds none.
    """
    if pulp.HiGHS(msg=False).available():
        return "HiGHS"
    if _cbc() is not None:
        return "CBC"
    raise PipedreamError("PuLP finds neither HiGHS nor CBC, one of which must solve the integer program",
                         hint="install a solver: pip install highspy", code="no_solver")


def run(program: pulp.LpProblem, *, time_limit_s: float | None, any_solution: bool = False) -> Status:
    """Solve ``program``; its variables then hold the solution. ``any_solution``: the first one will do.

    ``unproven``: the time limit came first. PuLP calls such a program "Optimal", so the solution's
    own status decides.
    """
    name = solver_name()
    gap = 1.0 if any_solution else 0.0  # no objective here is negative, so a gap of 1 is met by every solution
    if name == "HiGHS":
        solver = pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap, random_seed=0)
    else:
        solver = _cbc()(msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap)
    start_s = time.monotonic()
    with quiet_stdout():
        program.solve(solver)
    count_program(columns=program.numVariables(), rows=program.numConstraints(), nodes=_nodes(program),
                  seconds=time.monotonic() - start_s)
    if program.sol_status == pulp.LpSolutionOptimal and program.status == pulp.LpStatusOptimal:
        return "optimal"
    if program.status == pulp.LpStatusInfeasible and program.sol_status == pulp.LpSolutionInfeasible:
        return "infeasible"
    return "unproven"


def _nodes(program: pulp.LpProblem) -> int:
    """Of branch and bound, as HiGHS counts them; PuLP does not pass on what CBC says."""
    model: Any = getattr(program, "solverModel", None)
    return int(model.getInfo().mip_node_count) if hasattr(model, "getInfo") else 0


def _cbc() -> Any:
    """PuLP's interface to an installed CBC, or to the one that PuLP 3 brings along; None without either."""
    for name in ("COIN_CMD", "PULP_CBC_CMD"):
        make = getattr(pulp, name, None)
        if make is not None and make(msg=False).available():
            return make
    return None


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Send file descriptor 1 to nowhere: HiGHS prints a banner on it whatever it is told."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # no standard output at all
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(nowhere)
        os.close(saved)
