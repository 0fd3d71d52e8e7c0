"""The dnn-partitioning objective against every contiguous plan by the definition of loads, and the published optima."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.imports.dnn_partitioning import Operator, Placement, read_dnn_partitioning
from planner.published.dnn_partitioning import place
from planner.spec.errors import Infeasible


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """A forward graph with a mirrored backward part, some of it missing, and edges between the two."""
    n = draw(st.integers(1, 5))
    number = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    operators, edges = [], set()
    for i in range(n):
        latency, slower = draw(number), draw(st.sampled_from([1.0, 10.0]))
        operators.append(Operator(f"f{i}", latency, latency * slower, draw(number), 0.0, draw(number), False, i))
    for a, b in itertools.combinations(range(n), 2):
        if draw(st.integers(0, 2)) == 0:
            edges.add((a, b))
    backward = [i for i in range(n) if draw(st.integers(0, 4))]
    position = {i: n + k for k, i in enumerate(backward)}
    for i in backward:
        latency = draw(number)
        operators.append(Operator(f"b{i}", latency, latency * 10, draw(number), 0.0, draw(number), True, i))
        if draw(st.booleans()):
            edges.add((i, position[i]))
    edges |= {(position[b], position[a]) for a, b in edges if a in position and b in position and b < n}
    if backward and draw(st.integers(0, 3)) == 0:  # an orphan: backward without a forward
        operators.append(Operator("orphan", 0.5, 5.0, 1.0, 0.0, 0.25, True, 99))
        edges.add((position[draw(st.sampled_from(backward))], len(operators) - 1))
    memory = draw(st.sampled_from([math.inf, 6.0, 3.0]))
    return Placement("model", "", draw(st.integers(1, 3)), memory, draw(st.integers(0, 1)), tuple(operators), tuple(sorted(edges)))


def plans(placement: Placement) -> Iterator[tuple[dict[int, int], int]]:
    """Every dealing of colours to numbered stages that obeys the order of both parts, and how many stages."""
    colors = sorted({operator.color for operator in placement.operators})
    kinds = placement.operators
    for dealt in itertools.product(range(len(colors)), repeat=len(colors)):
        if set(dealt) != set(range(max(dealt) + 1)):
            continue
        stage = dict(zip(colors, dealt, strict=True))
        ahead = all(stage[kinds[a].color] <= stage[kinds[b].color] for a, b in placement.edges if not kinds[b].backward)
        back = all(stage[kinds[a].color] >= stage[kinds[b].color] for a, b in placement.edges if kinds[a].backward)
        if ahead and back:
            yield stage, max(dealt) + 1


def best_load(placement: Placement) -> float:
    best = math.inf
    for stage, count in plans(placement):
        for cpus in itertools.chain([()], ((k,) for k in range(count)) if placement.cpus else ()):
            if count - len(cpus) > placement.accelerators:
                continue
            loads = []
            for k in range(count):
                mine = {i for i, operator in enumerate(placement.operators) if stage[operator.color] == k}
                if k in cpus:
                    loads.append(sum(placement.operators[i].cpu_latency for i in mine))
                    continue
                if sum(placement.operators[i].memory_bytes for i in mine) > placement.accelerator_bytes:
                    loads.append(math.inf)
                moved = {a for a, b in placement.edges if (a in mine) != (b in mine)}
                loads.append(sum(placement.operators[i].latency for i in mine) + sum(placement.operators[a].transfer_cost for a in moved))
            best = min(best, max(loads))
    return best


@settings(max_examples=150)
@given(placements())
def test_equals_every_contiguous_plan(placement: Placement) -> None:
    expected = best_load(placement)
    if expected == math.inf:
        with pytest.raises(Infeasible, match="no contiguous plan fits"):
            place(placement)
        return
    found = place(placement)
    assert found.largest_load == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.bound == pytest.approx(expected, rel=1e-8, abs=1e-12)
    members = sorted(i for group in (*found.accelerators, *found.cpus) for i in group)
    assert members == list(range(len(placement.operators)))
    assert len(found.accelerators) <= placement.accelerators and len(found.cpus) <= placement.cpus


@pytest.mark.parametrize(("name", "optimum"), [("layer-bert24_training", 41.7458), ("layer-resnet50_training", 78.6318),
                                              ("operator-bert_l-3_training", 65.3031)])
def test_published_optima(published_data: Path, name: str, optimum: float) -> None:
    found = place(read_dnn_partitioning(published_data / "dnn-partitioning" / f"{name}.json"))
    assert found.largest_load == pytest.approx(optimum, abs=5e-5)
    assert found.bound == pytest.approx(found.largest_load, rel=1e-8)
