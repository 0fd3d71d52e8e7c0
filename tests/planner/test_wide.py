"""Graphs with too many cut states: what is chosen from them, and that bounds hold for all of them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner.model.states
from planner.hardware.topology import Topology
from planner.imports import import_profile
from planner.model.graph import chain_of
from planner.model.ideals import edges_of, enumerate_ideals, predecessor_masks
from planner.model.min_cuts import Crossing, Graph, frontier
from planner.model.neighbours import around
from planner.model.states import states_of
from planner.model.wide import wide_of
from planner.options import PlanOptions, problem_of
from planner.published.pipedream2019 import plan as plan2019
from planner.published.pipedream2019.plan import make_plan_2019
from planner.published.pipedream2019.solve import Level, best_plan
from planner.published.pipedream2019.stages import model_of
from planner.search.exact import exhaustive
from planner.solve import make_plan
from planner.spec.profile import Profile
from tests.planner.graphs import crossing, graph_profiles
from tests.planner.instances import flat, two_level


def ideals(model: Profile) -> list[int]:
    found = enumerate_ideals(predecessor_masks(len(model.layers), edges_of(model)))
    assert found is not None
    return found


def layers_of(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def measured(model: Profile, mask: int) -> tuple[float, float]:
    """Bytes that cross, and compute before."""
    before = [model.layers[i] for i in layers_of(mask)]
    return float(sum(crossing(model, layers_of(mask)))), sum(layer.forward_us + layer.backward_us for layer in before)


def graph_of(model: Profile) -> Graph:
    feeds = tuple(tuple(sorted(t.source for t in model.tensors if i in t.consumers)) for i in range(len(model.layers)))
    return Graph(tuple(x.forward_us + x.backward_us for x in model.layers), feeds,
                 tuple(Crossing(t.source, t.consumers, t.forward_bytes + t.gradient_bytes) for t in model.tensors))


def test_a_byte_may_be_worth_more_than_the_smallest_tensor_costs() -> None:
    """Before the last layer 501 bytes cross, before the one before it 500: a microsecond for one byte."""
    graph = Graph((0.0, 1.0, 0.0), ((), (0,), (1,)), (Crossing(0, (1,), 500), Crossing(1, (2,), 501)))
    found = frontier(graph, 0b001, 0b011, 0.0)
    assert min(value + 500 * price for price, value in found.above) == pytest.approx(0.0, abs=1e-6)
    assert min(value + 501 * price for price, value in found.above) == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=int(os.environ.get("PIPEDREAM_EXAMPLES", "80")))
@given(graph_profiles(most_layers=8), st.data())
def test_a_frontier_bounds_every_state_between_its_sets(model: Profile, data: st.DataObject) -> None:
    every = ideals(model)
    inner = data.draw(st.sampled_from(every))
    outer = data.draw(st.sampled_from([mask for mask in every if inner & ~mask == 0]))
    between = [measured(model, mask) for mask in every if inner & ~mask == 0 and mask & ~outer == 0]
    found = frontier(graph_of(model), inner, outer, measured(model, inner)[1])
    assert found.least_bytes == min(size for size, _ in between)
    assert set(found.states) <= {mask for mask in every if inner & ~mask == 0 and mask & ~outer == 0}
    for price, value in found.above:
        assert value == pytest.approx(max(us - price * size for size, us in between), abs=1e-3)
    for price, value in found.below:
        assert value == pytest.approx(min(us + price * size for size, us in between), abs=1e-3)
    # At every number of bytes that some state has, the lines leave no more room than the straight lines between states do.
    for limit in {size for size, _ in between}:
        most = min(value + price * limit for price, value in found.above)
        assert most >= max(us for size, us in between if size <= limit) - 1e-3
        about = limit * (1 + 1e-5)  # the solver's prices are no finer
        hull = max(w * a[1] + (1 - w) * b[1] for a in between for b in between for w in _weights(a, b, about))
        assert most <= hull + 1e-2 + 1e-6 * hull


def _weights(a: tuple[float, float], b: tuple[float, float], limit: float) -> list[float]:
    """Shares of a and b (the rest) whose bytes are exactly the limit, or 1 where a is within it."""
    shares = [1.0] if a[0] <= limit else []
    if a[0] <= limit < b[0]:
        shares.append((b[0] - limit) / (b[0] - a[0]))
    return shares


def test_a_tensor_crosses_until_the_last_layer_that_uses_it() -> None:
    """The first layer's 100 bytes are used by the second and the third; the third makes a million that cross."""
    graph = Graph((10.0, 5.0, 1.0, 0.0), ((), (0,), (0,), (2,)), (Crossing(0, (1, 2), 100), Crossing(2, (3,), 10**6)))
    found = frontier(graph, 0b0001, 0b0111, 10.0)
    assert found.least_bytes == 100.0 and 0b0011 in found.states
    assert all(value == pytest.approx(max(15 - 100 * price, 16 - 10**6 * price)) for price, value in found.above)


@settings(max_examples=80)
@given(graph_profiles(most_layers=6), st.integers(1, 4), st.sampled_from([1e7, 1e8, 1e9, 1e11]))
def test_no_plan_by_the_originals_formulas_is_below_the_bound(model: Profile, devices: int, bandwidth: float) -> None:
    wide = wide_of(model)
    best = best_plan(model_of(model, states_of(model).states), [Level(devices, bandwidth, 1)])
    scale = 1e6 / bandwidth
    assert wide.reaches(best.time_us * (1 + 1e-9), devices, bandwidth / 1e6, lambda m, parameters: 4 * (m - 1) * parameters * scale / m)
    bound_us = wide.least_time_us(devices, bandwidth / 1e6, best.time_us, lambda m, parameters: 4 * (m - 1) * parameters * scale / m)
    assert bound_us <= best.time_us


@settings(max_examples=40)
@given(graph_profiles(most_layers=4), st.sampled_from([flat(3), flat(2, bandwidth=3e7), two_level(2, 2, intra=1e9, inter=1e8)]))
def test_no_plan_of_the_measured_model_is_below_the_bound(model: Profile, cluster) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(chain_of(model), Topology(cluster), PlanOptions())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.model.states, "MOST_SEARCHED", 3)
        patch.setattr(planner.model.states, "MOST_OF_A_CHAIN", 3)
        plan = make_plan(model, cluster, PlanOptions(), command="x")
    # The best with the least batch of its replicas, and the best with the batch of the plan.
    bests = [exhaustive(dataclasses.replace(problem, batch_microbatches=batch)) for batch in (None, plan.batch_microbatches)]
    best_us = min(best.microbatch_us for best in bests if best is not None)
    assert plan.solver.bound_us <= best_us * (1 + 1e-6) <= plan.predicted.microbatch_us * (1 + 2e-6)
    assert ("left out" in plan.solver.restricted or "chosen ones" in plan.solver.restricted) == (len(ideals(model)) > 3)
    if plan.solver.status == "optimal":
        assert plan.predicted.microbatch_us == pytest.approx(best_us, rel=1e-5)


@settings(max_examples=60)
@given(graph_profiles(most_layers=7), st.integers(3, 9))
def test_chosen_states_are_states(model: Profile, most: int) -> None:
    every = set(ideals(model))
    searched = states_of(model, most)
    assert set(searched.states.masks) <= every
    assert searched.states.masks[0] == 0 and searched.states.masks[-1] == (1 << len(model.layers)) - 1
    assert len(searched.states) <= max(most, 2)
    assert bool(searched.restricted) == (len(every) > most) == (searched.wide is not None)


@settings(max_examples=30)
@given(graph_profiles(most_layers=6, least_layers=3), st.integers(1, 3))
def test_a_selection_is_refined_and_bounded(model: Profile, devices: int) -> None:
    best = best_plan(model_of(model, states_of(model).states), [Level(devices, 1e9, 1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan2019, "MOST_STATES", 3)
        plan = make_plan_2019(model, flat(devices), command="x")
    assert plan.solver.bound_us <= best.time_us * (1 + 1e-9) <= plan.predicted.microbatch_us * (1 + 1e-8)
    assert sum(len(stage.layers) for stage in plan.stages) == len(model.layers)


@settings(max_examples=40)
@given(graph_profiles(most_layers=7), st.integers(1, 40), st.data())
def test_neighbours_are_states(model: Profile, most: int, data: st.DataObject) -> None:
    every = ideals(model)
    centres = data.draw(st.lists(st.sampled_from(every), max_size=2, unique=True))
    near = around(predecessor_masks(len(model.layers), edges_of(model)), centres, most)
    assert set(centres) | {every[0], every[-1]} <= set(near.masks) <= set(every)
    if most >= 2 * len(every) and centres:
        assert set(near.masks) == set(every)


@pytest.mark.parametrize(("devices", "best_us", "gap"), [(4, 164_700.0, 1e-3), (8, 84_296.0, 1e-6)])
def test_nasnet(published_data: Path, devices: int, best_us: float, gap: float) -> None:
    """More than three million states; what is found is as good as the bound, or nearly."""
    model = import_profile(str(published_data / "pipedream" / "nasnetalarge.txt"), "pipedream-graph", command="x")
    plan = make_plan_2019(model, flat(devices), command="x")
    assert plan.predicted.microbatch_us <= best_us
    assert plan.solver.gap <= gap and "chosen ones" in plan.solver.restricted
