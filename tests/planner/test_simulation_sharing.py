"""Fair sharing, against water-filling over all flows at once and against what max-min fair means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulation.sharing import Flow, Network
from tests.planner.naive_simulation import Message, fair_rates

# (capacities, changes): a change is a set of directions for a flow that starts, or which flow ends
SCENARIOS = st.integers(2, 8).flatmap(lambda count: st.tuples(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0]) | st.floats(0.01, 100), min_size=count, max_size=count),
    st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=3) | st.integers(0, 100), max_size=25),
))


def play(capacities: list[float], changes: list[Any]) -> Any:
    """The network after each change, with its flows and the rates it reported before and after."""
    network, alive = Network(capacities), []
    reported: dict[Flow, float] = {}
    for change in changes:
        if isinstance(change, set):
            flow = Flow(tuple(sorted(change)), None)
            changed = network.start(flow)
            alive.append(flow)
        elif alive:
            flow = alive.pop(change % len(alive))
            changed = network.end(flow)
        else:
            continue
        reported |= {each: each.rate for each in changed}
        yield network, alive, reported


@settings(max_examples=300)
@given(SCENARIOS)
def test_rates_are_those_of_water_filling(scenario: tuple[list[float], list[Any]]) -> None:
    capacities, changes = scenario
    for _, alive, reported in play(capacities, changes):
        messages = [Message((n,), tuple((str(d), "up") for d in flow.directions), 0.0, 1.0, None) for n, flow in enumerate(alive)]
        fair_rates(messages, {(str(d), "up"): capacity for d, capacity in enumerate(capacities)})
        for flow, message in zip(alive, messages, strict=True):
            assert flow.rate == pytest.approx(message.rate, rel=1e-7)
            assert reported[flow] == pytest.approx(flow.rate, rel=1e-7), "a change that was not reported"


@settings(max_examples=200)
@given(SCENARIOS)
def test_no_link_is_over_its_capacity_and_every_flow_has_a_bottleneck(scenario: tuple[list[float], list[Any]]) -> None:
    capacities, changes = scenario
    for _, alive, _ in play(capacities, changes):
        load = [sum(flow.rate for flow in alive if d in flow.directions) for d in range(len(capacities))]
        assert all(load[d] <= capacity * (1 + 1e-6) for d, capacity in enumerate(capacities))
        for flow in alive:
            assert any(load[d] >= capacities[d] * (1 - 1e-6)
                       and flow.rate >= max(other.rate for other in alive if d in other.directions) * (1 - 1e-6) for d in flow.directions)


def test_a_flow_that_starts_anew_is_reported_even_at_its_old_rate() -> None:
    network, flow, other = Network([2.0]), Flow((0,), None), Flow((0,), None)
    network.start(other)
    network.start(flow)
    network.end(flow)
    assert set(network.start(flow)) == {flow, other}
