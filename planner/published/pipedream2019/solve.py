"""The best plan of a model on a cluster of equal levels, under the original's cost model.

From the inside out: the best pipelines of every stage on one server, on one rack of servers, and so on
(:mod:`planner.published.pipedream2019.nested`); at the outermost level one path for the whole model
(:mod:`planner.published.pipedream2019.bottleneck`). The original lets a level use all units of the one below or
none, and misses cut states of graphs with several sources; neither is done here, so the answer is as
good as its own or better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.published.bottleneck import EQUAL, least_time
from planner.published.pipedream2019.nested import pipelines_us
from planner.published.pipedream2019.stages import Model, stages_of
from planner.published.state_paths import fewest_path
from planner.spec.cluster import Cluster, Node
from planner.spec.errors import BadInput, PipedreamError

__all__ = ["Answer", "Level", "Part", "best_plan", "levels_of", "pipeline_us", "replica_devices"]

Floats = npt.NDArray[np.float64]
_QUICK_STATES = 60
_MANY_STATES = 1000


class Level(NamedTuple):
    """``count`` units (devices, servers, ...) joined by links of a bandwidth; a unit has ``devices_each`` devices."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    bandwidth_bytes_per_s: float
    devices_each: int


@dataclass(frozen=True)
class Part:
    """The stage [first, last) on ``units`` units; each is a copy of the pipeline ``inner``, or one device where that is empty."""

    first: int
    last: int
    units: int
    inner: tuple[Part, ...]


@dataclass(frozen=True)
class Answer:
    """The plan, its time per microbatch, and a time that no plan of the model's states is below."""

    parts: tuple[Part, ...]
    time_us: float
    bound_us: float


def levels_of(cluster: Cluster) -> tuple[Level, ...]:
    """The cluster's levels from the inside out; a level's links are as slow as the slowest on the way.

    Raises:
        BadInput: units of a level differ, which this cost model cannot say.
    """
    found: list[Node] = []
    nodes: tuple[Node, ...] = cluster.nodes
    while nodes:
        if len(nodes) > 1:
            raise BadInput(f"the cost model pipedream-2019 knows equal devices and servers only, {cluster.name} has "
                           f"{' and '.join(node.name for node in nodes)} side by side", hint="plan with the default cost model")
        found.insert(0, nodes[0])
        nodes = nodes[0].children
    levels: list[Level] = []
    devices, bandwidth = 1, float("inf")
    for node in found:
        bandwidth = min(bandwidth, node.link.bandwidth_bytes_per_s)
        if node.count > 1 or not levels:
            levels.append(Level(node.count, bandwidth, devices))
        devices *= node.count
    return tuple(levels)


def best_plan(model: Model, levels: Sequence[Level], *, max_replicas: int | None = None, transfers: bool = True,
              first_pays: bool = False) -> Answer:
    """The plan with the least time per microbatch; of equally fast ones, one with the fewest units of the outermost level.

    ``transfers``: whether cuts cost anything. ``first_pays``: whether the first stage pays for the cut
    after it, which the original's program leaves out.
    """
    own = _by_level(model, levels, max_replicas, transfers)
    solver = _Levels(model, levels, own, max_replicas, transfers)
    end, outer = len(model.states) - 1, levels[-1]
    stages = stages_of(model, own[-1], outer.bandwidth_bytes_per_s, outer.devices_each, transfers=transfers)
    found = least_time(stages.within(model, 0, end, first_pays=first_pays), 0, end, outer.count, max_replicas or outer.count,
                       at_most_us=_ceiling_us(model, levels, max_replicas, transfers, first_pays))
    if found is None:
        raise PipedreamError("no pipeline was found, though one stage on one device is one", hint="please report this with the profile")
    parts = tuple(Part(s.first, s.last, s.units, solver.inner(len(levels) - 1, s.first, s.last)) for s in found.steps)
    time_us = pipeline_us(model, levels, parts, transfers=transfers, first_pays=first_pays)
    if abs(time_us - found.time_us) > 1e-6 * time_us:
        raise PipedreamError(f"the program promised {found.time_us:.9g} us, the cost model finds {time_us:.9g} us",
                             hint="please report this with the profile and the cluster")
    return Answer(parts, time_us, min(found.bound_us, time_us))


def _ceiling_us(model: Model, levels: Sequence[Level], max_replicas: int | None, transfers: bool, first_pays: bool) -> float:
    """What a plan over a few of many states takes."""
    if len(model.states) <= _MANY_STATES or len(levels) > 1:
        return np.inf
    few = model.part(model.states.some(model.compute_us, 2 * _QUICK_STATES))
    return best_plan(few, levels, max_replicas=max_replicas, transfers=transfers, first_pays=first_pays).time_us * (1 + EQUAL)


def _by_level(model: Model, levels: Sequence[Level], max_replicas: int | None, transfers: bool) -> list[Floats]:
    """For each level what one of its units makes of every stage, as far as a best plan may use it.

    A quick plan bounds what is worth knowing. Only the whole model can stand on all units of the outermost
    level; it is solved by itself, which leaves the others a tighter bound.
    """
    own = [model.own_us()]
    if len(levels) == 1:
        return own
    cap_us = np.inf
    if len(model.states) > 2 * _QUICK_STATES:
        quick = model.part(model.states.some(model.compute_us, _QUICK_STATES))
        cap_us = best_plan(quick, levels, max_replicas=max_replicas, transfers=transfers).time_us * (1 + EQUAL)
    for index, level in enumerate(levels[:-1]):
        copies = float(np.prod([outer.count for outer in levels[index + 1:-1]])) * max(levels[-1].count - 1, 1)
        times = pipelines_us(model, own[-1], level.count, max_replicas or level.count, level.bandwidth_bytes_per_s, level.devices_each,
                             transfers=transfers, cap_us=cap_us * copies)
        times[0, -1] = min(times[0, -1], best_plan(model, levels[:index + 1], max_replicas=max_replicas, transfers=transfers).time_us)
        own.append(times)
    return own


@dataclass
class _Levels:
    model: Model
    levels: Sequence[Level]
    own: list[Floats]
    max_replicas: int | None
    transfers: bool

    def inner(self, level: int, first: int, last: int) -> tuple[Part, ...]:
        """The pipeline [first, last) that one unit of ``level`` runs, with the fewest units of the level below."""
        if level == 0:
            return ()
        below = self.levels[level - 1]
        time_us = float(self.own[level][first, last]) * (1 + EQUAL)
        stages = stages_of(self.model, self.own[level - 1], below.bandwidth_bytes_per_s, below.devices_each, transfers=self.transfers)
        part = stages.within(self.model, first, last)
        path = fewest_path(part, part.units(time_us, min(below.count, self.max_replicas or below.count)), first, last)
        return tuple(Part(s.first, s.last, s.units, self.inner(level - 1, s.first, s.last)) for s in path)


def pipeline_us(model: Model, levels: Sequence[Level], parts: Sequence[Part], *, transfers: bool = True, first_pays: bool = False) -> float:
    """The time of a pipeline at the outermost of ``levels``, by the definition."""
    level, below = levels[-1], levels[:-1]
    scale = 1e6 / level.bandwidth_bytes_per_s
    times = []
    for index, (first, last, m, inner) in enumerate((p.first, p.last, p.units, p.inner) for p in parts):
        parameters = model.parameter_bytes[last] - model.parameter_bytes[first]
        own = pipeline_us(model, below, inner, transfers=transfers) if inner else model.compute_us[last] - model.compute_us[first]
        times.append((own + 4 * (m - 1) * parameters * scale / m / level.devices_each) / m)
        if transfers and (index > 0 or first_pays):
            times += [model.crossing_bytes[cut] * scale / m for cut in (first, last)]
    return float(max(times))


def replica_devices(levels: Sequence[Level], parts: Sequence[Part]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first, last, devices) of each stage: device numbers in tree order, replica i on the i-th.

    Replicas are numbered so that microbatch m, on replica m mod r of each stage, stays in one copy of an
    inner pipeline: copy first, then the replica within it.
    """
    each = levels[-1].devices_each
    placed = []
    starts = itertools.accumulate((part.units for part in parts), initial=0)
    for part, start in zip(parts, starts, strict=False):
        inner = replica_devices(levels[:-1], part.inner) if part.inner else [(part.first, part.last, (0,))]
        for first, last, devices in inner:
            numbers = tuple((start + j % part.units) * each + devices[j // part.units] for j in range(part.units * len(devices)))
            placed.append((first, last, numbers))
    return placed
