"""Sums over stages and what crosses each cut, against the layers and tensors themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.model.graph import chain_of
from planner.spec.profile import Profile, Tensor, TiedParameter
from tests.planner.graphs import crossing, every_pipeline, graph_profiles
from tests.planner.instances import layer, profile, profiles


def in_a_row(count: int) -> list[Tensor]:
    return [Tensor(f"x{i}", i, (i + 1,), 0, 0) for i in range(count - 1)]


def test_a_skip_tensor_crosses_every_cut_up_to_its_last_consumer_once() -> None:
    tensors = [Tensor("skip", 0, (1, 3), 10, 1), Tensor("next", 1, (2,), 100, 0), *in_a_row(5)[2:]]
    chain = chain_of(profile([layer(f"layer{i}") for i in range(5)], tensors))
    assert chain.forward_bytes == (0, 10, 110, 10, 0, 0)
    assert chain.gradient_bytes == (0, 1, 1, 1, 0, 0)


def test_branches_can_be_cut_on_either_side() -> None:
    tensors = [Tensor("x", 0, (1, 2), 10, 10), Tensor("y", 1, (3,), 200, 0), Tensor("z", 2, (3,), 3000, 0)]
    chain = chain_of(profile([layer(f"layer{i}") for i in range(4)], tensors))
    assert [chain.layers(0, state) for state in range(1, 6)] == [(0,), (0, 1), (0, 2), (0, 1, 2), (0, 1, 2, 3)]
    assert chain.forward_bytes == (0, 10, 210, 3010, 3200, 0)
    assert (2, 3) not in chain.intervals() and chain.layers(2, 4) == (2,)
    assert chain.stage_names(2, 5) == ("layer2", "layer3")
    assert chain.most_stages == 4


def test_layers_that_must_be_in_one_stage_are_not_separated() -> None:
    tied = (TiedParameter("running mean", 0, (1, 3)),)
    chain = chain_of(profile([layer(f"layer{i}") for i in range(5)], in_a_row(5), tied))
    assert [len(chain.layers(0, state)) for state in range(chain.end + 1)] == [0, 1, 4, 5]
    assert chain.intervals() == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert chain.most_stages == 3


def test_the_layers_of_a_tied_parameter_may_be_separated() -> None:
    tied = (TiedParameter("embedding", 4, (1, 3)),)
    chain = chain_of(profile([layer(f"layer{i}") for i in range(5)], in_a_row(5), tied))
    assert chain.most_stages == 5


@settings(max_examples=60)
@given(graph_profiles(most_layers=7) | profiles(most_layers=6))
def test_stages_equal_sums_over_their_layers(model: Profile) -> None:
    chain = chain_of(model)
    assert not chain.restricted
    for first, last in chain.intervals():
        inside = [model.layers[i] for i in chain.layers(first, last)]
        compute_us = sum(x.forward_us + x.backward_us for x in inside)
        assert chain.compute_us[last] - chain.compute_us[first] == pytest.approx(compute_us, abs=1e-6)
        assert chain.update_us[last] - chain.update_us[first] == pytest.approx(sum(x.update_us for x in inside), abs=1e-6)
        assert chain.copy_us[last] - chain.copy_us[first] == pytest.approx(sum(x.copy_us for x in inside), abs=1e-6)
        for field in ("parameter_bytes", "buffer_bytes", "optimizer_bytes", "saved_bytes"):
            sums = getattr(chain, field)
            assert sums[last] - sums[first] == sum(getattr(x, field) for x in inside)
        assert chain.workspace(first, last) == max(x.workspace_bytes for x in inside)
    for state in range(chain.end + 1):
        behind = frozenset(chain.layers(0, state))
        assert (chain.forward_bytes[state], chain.gradient_bytes[state]) == crossing(model, behind)


@settings(max_examples=30)
@given(graph_profiles(most_layers=5))
def test_the_longest_pipeline_has_most_stages(model: Profile) -> None:
    assert chain_of(model).most_stages == max(len(stages) for stages in every_pipeline(model)) == len(model.layers)


def test_huge_numbers_stay_whole() -> None:
    large = 10**18 - 1
    chain = chain_of(profile([layer(f"layer{i}", parameter_bytes=large) for i in range(20)], in_a_row(20)))
    assert chain.parameter_bytes[20] == 20 * large
