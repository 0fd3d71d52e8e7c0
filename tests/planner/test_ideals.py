"""Cut states against every subset of layers."""

from __future__ import annotations

import itertools

from hypothesis import given, settings

from planner.model.ideals import CutStates, closed_under, enumerate_ideals, predecessor_masks
from planner.spec.profile import Profile
from tests.planner.graphs import every_pipeline, graph_profiles


def edges_of(model: Profile) -> list[tuple[int, int]]:
    return [(t.source, consumer) for t in model.tensors for consumer in t.consumers]


def states_of(model: Profile) -> CutStates:
    found = enumerate_ideals(predecessor_masks(len(model.layers), edges_of(model)))
    assert found is not None
    return CutStates(len(model.layers), tuple(found), complete=True)


@settings(max_examples=60)
@given(graph_profiles(most_layers=9))
def test_states_are_the_subsets_that_nothing_outside_feeds(model: Profile) -> None:
    n, edges = len(model.layers), edges_of(model)
    closed = {mask for mask in range(1 << n) if all(mask >> a & 1 or not mask >> b & 1 for a, b in edges)}
    states = states_of(model)
    assert set(states.masks) == closed and len(states) == len(closed)
    sizes = [mask.bit_count() for mask in states.masks]
    assert sizes == sorted(sizes) and (states.masks[0], states.masks[-1]) == (0, (1 << n) - 1)


@settings(max_examples=60)
@given(graph_profiles(most_layers=7))
def test_stages_are_pairs_of_states_one_inside_the_other(model: Profile) -> None:
    states = states_of(model)
    holds, inside = states.holds(), states.inside()
    sets = [frozenset(i for i in range(len(model.layers)) if mask >> i & 1) for mask in states.masks]
    for i, j in itertools.product(range(len(states)), repeat=2):
        assert inside[i, j] == (sets[i] < sets[j])
        if inside[i, j]:
            assert states.layers(i, j) == tuple(sorted(sets[j] - sets[i]))
            assert i < j
    assert [frozenset(i for i, row in enumerate(holds) if row[k]) for k in range(len(states))] == sets
    assert states.nested == all(a < b for a, b in itertools.pairwise(sets))


@settings(max_examples=30)
@given(graph_profiles(most_layers=5))
def test_paths_of_states_are_the_pipelines(model: Profile) -> None:
    states = states_of(model)
    inside, end = states.inside(), len(states) - 1

    def paths(state: int) -> list[tuple[frozenset[int], ...]]:
        if state == end:
            return [()]
        later = [k for k in range(end + 1) if inside[state, k]]
        return [(frozenset(states.layers(state, k)), *rest) for k in later for rest in paths(k)]

    found = paths(0)
    assert len(set(found)) == len(found)
    assert set(found) == set(every_pipeline(model))


def test_a_chain_has_its_cuts() -> None:
    states = enumerate_ideals(predecessor_masks(4, [(0, 1), (1, 2), (2, 3), (0, 3)]))
    assert states == [0b0, 0b1, 0b11, 0b111, 0b1111]


def test_enumeration_stops_at_the_limit() -> None:
    apart = predecessor_masks(60, [])  # 2**60 states
    assert enumerate_ideals(apart, 1000) is None
    assert enumerate_ideals(predecessor_masks(6, []), 64) is not None
    assert enumerate_ideals(predecessor_masks(6, []), 63) is None


def test_no_cut_within_a_group() -> None:
    assert closed_under([0b0, 0b1, 0b11, 0b111, 0b1111], [0b110]) == [0b0, 0b1, 0b111, 0b1111]
