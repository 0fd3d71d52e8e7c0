"""The best pipeline of every stage on one unit of a level: what the level above takes as its compute.

For all pairs of states at once, by a dynamic program over the units that are used. ``P_d(I, J)``, the
least time of a pipeline [I, J) on at most d units, is that of one stage, or with a last stage [K, J)::

    P_d(I, J) = least over K, m of   max(P_{d-m}(I, K), stage [K, J) on m units with its two cuts)

The least over K of a maximum of two is a matrix product with (min, max) for (+, *), done state by state
with numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.published.pipedream2019.stages import Model

__all__ = ["pipelines_us"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def pipelines_us(model: Model, own_us: Floats, units: int, most_replicas: int, bandwidth_bytes_per_s: float, devices_per_unit: int, *,
                 transfers: bool = True, cap_us: float = np.inf) -> Floats:
    """States by states: the least time of a pipeline on at most ``units``, of which one alone takes ``own_us``.

    Infinite where it is above ``cap_us``, which saves most of the work.
    """
    scale = 1e6 / bandwidth_bytes_per_s
    cut_us = model.crossing_bytes * scale if transfers else np.zeros(len(model.states))
    parameters = np.where(model.inside, model.parameter_bytes[None, :] - model.parameter_bytes[:, None], 0.0)
    sync_us = 4 * parameters * scale / devices_per_unit
    cuts_us = np.maximum(cut_us[:, None], cut_us[None, :])
    counts = range(1, min(units, most_replicas) + 1)
    alone = {m: _capped(np.where(model.inside, (own_us + sync_us * ((m - 1) / m)) / m, np.inf), cap_us) for m in counts}
    later = {m: _capped(np.maximum(alone[m], cuts_us / m), cap_us) for m in counts}
    ends = {m: _finite_columns(later[m]) for m in counts}
    best: dict[int, Floats] = {}
    begins: dict[int, list[Ints]] = {}
    for d in range(1, units + 1):
        best[d] = np.minimum(alone[d], best[d - 1]) if d > 1 and d in alone else alone[d] if d in alone else best[d - 1].copy()
        for m in range(1, min(d - 1, most_replicas) + 1):
            _lower(best[d], best[d - m], later[m], begins[d - m], ends[m])
        begins[d] = _finite_columns(best[d].T)
    return best[units]


def _capped(times_us: Floats, cap_us: float) -> Floats:
    return np.where(times_us <= cap_us, times_us, np.inf)


def _finite_columns(matrix: Floats) -> list[Ints]:
    """Of each row, the columns that are finite."""
    rows, columns = np.nonzero(np.isfinite(matrix))
    return np.split(columns, np.searchsorted(rows, np.arange(1, len(matrix))))


def _lower(result: Floats, left: Floats, right: Floats, begins: list[Ints], ends: list[Ints]) -> None:
    """Lower ``result[i, j]`` to the least over k of ``max(left[i, k], right[k, j])``; all are upper triangular.

    ``begins[k]`` are the rows that are finite in column k of ``left``, ``ends[k]`` the columns that are in row k
    of ``right``. Where they are nearly all between their first and last, whole blocks are faster.
    """
    buffer = np.empty_like(left)
    for k, (rows, columns) in enumerate(zip(begins, ends, strict=True)):
        if not len(rows) or not len(columns):
            continue
        top, bottom, start, stop = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        if 4 * len(rows) * len(columns) > (bottom - top) * (stop - start):
            block, room = result[top:bottom, start:stop], buffer[top:bottom, start:stop]
            np.maximum(left[top:bottom, k, None], right[None, k, start:stop], out=room)
            np.minimum(block, room, out=block)
        else:
            part = np.ix_(rows, columns)
            result[part] = np.minimum(result[part], np.maximum(left[rows, k][:, None], right[k, columns][None, :]))
