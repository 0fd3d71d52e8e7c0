"""Sums over intervals and what crosses each cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.graph import chain_of
from planner.spec.profile import Profile, Tensor, TiedParameter
from tests.planner.instances import layer, profile, profiles


def test_a_skip_tensor_crosses_every_cut_up_to_its_last_consumer_once() -> None:
    tensors = [Tensor("skip", 0, (1, 3), 10, 1), Tensor("next", 1, (2,), 100, 0)]
    chain = chain_of(profile([layer(f"layer{i}") for i in range(5)], tensors))
    assert chain.forward_bytes == (0, 10, 110, 10, 0, 0)
    assert chain.gradient_bytes == (0, 1, 1, 1, 0, 0)


def test_tied_layers_are_not_separated() -> None:
    chain = chain_of(profile([layer(f"layer{i}") for i in range(5)], tied=(TiedParameter("embedding", 4, (1, 3)),)))
    assert chain.allowed_cuts == (0, 1, 4, 5)
    assert chain.intervals() == [(0, 1), (0, 4), (0, 5), (1, 4), (1, 5), (4, 5)]


@settings(max_examples=40)
@given(profiles(most_layers=6))
def test_intervals_equal_sums_over_their_layers(model: Profile) -> None:
    chain = chain_of(model)
    for first, last in chain.intervals():
        inside = model.layers[first:last]
        compute_us = sum(x.forward_us + x.backward_us for x in inside)
        assert chain.compute_us[last] - chain.compute_us[first] == pytest.approx(compute_us, abs=1e-6)
        assert chain.parameter_bytes[last] - chain.parameter_bytes[first] == sum(x.parameter_bytes for x in inside)
        assert chain.saved_bytes[last] - chain.saved_bytes[first] == sum(x.saved_bytes for x in inside)
    for cut in range(chain.layer_count + 1):
        crossing = [t for t in model.tensors if t.source < cut and any(consumer >= cut for consumer in t.consumers)]
        assert chain.forward_bytes[cut] == sum(t.forward_bytes for t in crossing)
        assert chain.gradient_bytes[cut] == sum(t.gradient_bytes for t in crossing)
