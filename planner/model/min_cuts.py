"""The cuts of a wide graph that few bytes cross, found by parametric minimum cuts.

Between two sets of layers, one inside the other, there can be millions of cut states. For a price of p
microseconds a byte, the state with the most compute before it, less the price of what crosses, is a
minimum cut: a linear program over one variable a layer (is it before the cut?) and one a tensor (does it
cross?), whose solutions are whole. Each answer says something of *all* states between the two sets::

    compute <= V(p) + p * bytes        V(p) the largest compute - p * bytes
    compute >= U(p) - p * bytes        U(p) the least    compute + p * bytes

and is itself a state on the frontier of the two. Prices are tried where two known answers leave room for a
third. HiGHS is asked directly, not through PuLP: the program stays, the prices change, and thousands of
answers take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import highspy
import numpy as np
import numpy.typing as npt

from planner.solver import quiet_stdout

__all__ = ["Crossing", "Frontier", "Graph", "frontier"]


class Crossing(NamedTuple):
    """What a layer makes for later layers: its bytes, forward and back."""

    source: int
    consumers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Graph:
    """Layers with their compute and what feeds them; tensors."""

    compute_us: tuple[float, ...]
    feeds: tuple[tuple[int, ...], ...]
    tensors: tuple[Crossing, ...]

    @cached_property
    def users(self) -> tuple[int, ...]:
        """The consumers of each tensor, as masks."""
        return tuple(sum(1 << v for v in tensor.consumers) for tensor in self.tensors)


@dataclass(frozen=True)
class Frontier:
    """Of the states between two sets: lines that bound them all, and states on the frontier (masks).

    ``above`` are (p, V(p)) and ``below`` (p, U(p)); no state is crossed by less than ``least_bytes``.
    """

    above: tuple[tuple[float, float], ...]
    below: tuple[tuple[float, float], ...]
    least_bytes: float
    states: tuple[int, ...]


_Point = tuple[float, float, int]  # bytes, compute, and the free layers it has, as a mask of their own


def frontier(graph: Graph, inner: int, outer: int, inner_us: float) -> Frontier:
    """The frontier of the states that hold ``inner``, of so much compute, and stay within ``outer`` (both states themselves)."""
    with quiet_stdout():
        program = _Program(graph, inner, outer, inner_us)
        least = program.solve(0.0, 1.0)
        above, states = _explore(program, 1.0, least)
        below, more = _explore(program, -1.0, least)
    found = {least[2], *states, *more}
    return Frontier(tuple(above), tuple(below), least[0], tuple(sorted(program.mask(local) for local in found)))


def _explore(program: _Program, sign: float, least: _Point) -> tuple[list[tuple[float, float]], list[int]]:
    """Lines and states for the most (``sign`` 1) or the least (-1) compute at every number of bytes, from the ``least`` on."""
    lines: list[tuple[float, float]] = []
    states: list[int] = []

    def ask(price: float) -> _Point:
        point = program.solve(sign, price)
        lines.append((price, point[1] - sign * price * point[0]))
        states.append(point[2])
        return point

    dear, cheap = ask(program.dear), program.end(sign)
    lines.append((0.0, cheap[1]))
    pending = [(cheap, dear), (dear, least)]  # sizes may differ by less than the smallest, and be dearer than dear
    while pending:
        many, few = pending.pop()  # many bytes cross, few bytes cross
        gain_us, saved = sign * (many[1] - few[1]), many[0] - few[0]
        if saved <= 0.5 or gain_us <= 1e-6:
            continue
        price = gain_us / saved
        middle = ask(price)
        if sign * middle[1] - price * middle[0] > sign * many[1] - price * many[0] + 1e-6 * max(1.0, abs(gain_us)):
            pending += [(many, middle), (middle, few)]
    return lines, states


class _Program:
    """Layers that may stand on either side, and the tensors they open or close."""

    def __init__(self, graph: Graph, inner: int, outer: int, inner_us: float) -> None:
        self.inner, between = inner, outer & ~inner
        self.free = [v for v in range(between.bit_length()) if between >> v & 1]
        self.place = {v: index for index, v in enumerate(self.free)}
        self.compute_us = np.array([graph.compute_us[v] for v in self.free])
        self.base_us = inner_us
        self.base_bytes = 0.0
        self.tensors: list[tuple[int, list[int], int]] = []  # source, consumers (-1: always, before or beyond), bytes
        for (source, consumers, size), users in zip(graph.tensors, graph.users, strict=True):
            made, beyond = inner >> source & 1, users & ~outer
            if made and beyond:
                self.base_bytes += size
            elif made and users & between:
                self.tensors.append((-1, [self.place[v] for v in consumers if v in self.place], size))
            elif between >> source & 1:
                self.tensors.append((self.place[source], [-1] if beyond else [self.place[v] for v in consumers], size))
        self.sizes = np.array([size for _, _, size in self.tensors], dtype=np.float64)
        self.sources = np.array([source for source, _, _ in self.tensors], dtype=np.int64)
        self.users = np.array([user for _, users, _ in self.tensors for user in users], dtype=np.int64)
        self.starts = np.cumsum([0, *(len(users) for _, users, _ in self.tensors)])[:-1]
        self.dear = 10 * float(self.compute_us.sum()) / max(1.0, float(self.sizes.min(initial=np.inf)))
        self.highs = self._build([[u for u in graph.feeds[v] if u in self.place] for v in self.free])

    def _build(self, feeds: list[list[int]]) -> highspy.Highs:
        """Rows: a layer is before the cut only with what feeds it; a tensor crosses when made and not used up."""
        n = len(self.free)
        rows: list[tuple[list[tuple[int, float]], float]] = []  # terms <= limit
        rows += [([(index, 1.0), (self.place[u], -1.0)], 0.0) for index, sources in enumerate(feeds) for u in sources]
        for index, (source, users, _) in enumerate(self.tensors):
            made, limit = ([(source, 1.0)], 0.0) if source >= 0 else ([], -1.0)
            rows += [([*made, *([(user, -1.0)] if user >= 0 else []), (n + index, -1.0)], limit) for user in users]
        count = n + len(self.tensors)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = count, len(rows)
        model.col_cost_, model.col_lower_, model.col_upper_ = np.zeros(count), np.zeros(count), np.ones(count)
        model.row_lower_, model.row_upper_ = np.full(len(rows), -highspy.kHighsInf), np.array([limit for _, limit in rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(terms) for terms, _ in rows)])
        model.a_matrix_.index_ = np.array([column for terms, _ in rows for column, _ in terms], dtype=np.int32)
        model.a_matrix_.value_ = np.array([value for terms, _ in rows for _, value in terms])
        highs = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            highs.setOptionValue(option, value)
        highs.passModel(model)
        return highs

    def solve(self, compute_weight: float, price: float) -> _Point:
        """The state with the largest ``compute_weight * compute - price * bytes``."""
        costs = np.concatenate([-compute_weight * self.compute_us, price * self.sizes])
        if not len(costs):
            return self.measured(np.zeros(0, dtype=np.bool_))
        scale = float(np.abs(costs).max()) or 1.0
        self.highs.changeColsCost(len(costs), np.arange(len(costs), dtype=np.int32), costs / scale * 1e4)
        self.highs.run()
        return self.measured(np.array(self.highs.getSolution().col_value[: len(self.free)]) > 0.5)

    def end(self, sign: float) -> _Point:
        """The state with the most or the least compute: one of the two sets."""
        return self.measured(np.full(len(self.free), sign > 0))

    def measured(self, chosen: npt.NDArray[np.bool_]) -> _Point:
        """Bytes, compute and layers of the state that has these of the free layers."""
        size = self.base_bytes
        if len(self.tensors):
            made = np.where(self.sources >= 0, chosen[self.sources], True) if len(chosen) else np.ones(len(self.sources), dtype=np.bool_)
            used = np.where(self.users >= 0, chosen[self.users], False) if len(chosen) else np.zeros(len(self.users), dtype=np.bool_)
            size += float(self.sizes[made & ~np.logical_and.reduceat(used, self.starts)].sum())
        local = int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little")
        return size, self.base_us + float(self.compute_us[chosen].sum()), local

    def mask(self, local: int) -> int:
        """All layers of a state, from those of its free ones."""
        mask = self.inner
        for index, v in enumerate(self.free):
            mask |= (local >> index & 1) << v
        return mask
