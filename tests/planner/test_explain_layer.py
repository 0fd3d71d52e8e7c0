"""A layer beside its cut: what must move along by enumeration of all cut states, and the cost by evaluating over them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import Stage, evaluate
from planner.explain_layer import explain_layer
from planner.hardware.topology import Topology
from planner.model.graph import chain_of
from planner.options import PlanOptions
from planner.solve import make_plan
from planner.spec.errors import BadInput, Infeasible
from planner.spec.profile import Profile, Tensor, TiedParameter
from tests.planner.graphs import graph_profiles
from tests.planner.instances import flat, layer, profile, profiles
from tests.planner.test_search import EXAMPLES, many


def tied(source: Profile, pair: tuple[int, int]) -> Profile:
    layers = tuple(sorted({number % len(source.layers) for number in pair}))
    return dataclasses.replace(source, tied=(TiedParameter("w", 0, layers),)) if len(layers) == 2 else source


@settings(many, max_examples=max(1, EXAMPLES // 3))
@given(st.one_of(profiles(), graph_profiles()).filter(lambda one: len(one.layers) > 1), st.tuples(st.integers(0, 5), st.integers(0, 5)),
       st.integers(2, 3), st.booleans())
def test_the_fewest_layers_move_and_cost_what_the_moved_plan_costs(source: Profile, pair: tuple[int, int], stages: int, tie: bool) -> None:
    source = tied(source, pair) if tie else source
    cluster = flat(4, bandwidth=1e9)
    try:
        plan = make_plan(source, cluster, PlanOptions(stages=stages, max_replicas=2), command="x")
    except Infeasible:
        return
    chain, topology = chain_of(source), Topology(cluster)
    members = {one.name: index for index, one in enumerate(source.layers)}
    cuts, held = [0], 0
    for stage in plan.stages:
        held |= sum(1 << members[name] for name in stage.layers)
        cuts.append(held)
    for index, one in enumerate(source.layers):
        report = explain_layer(plan, source, one.name)
        k = report.stage
        assert one.name in plan.stages[k].layers
        for move in report.moves:
            between = [mask for mask in chain.states.masks if cuts[k] | mask == mask and mask | cuts[k + 1] == cuts[k + 1]]
            if move.stage < k:  # the smallest state that has it
                cut = min((mask for mask in between if mask >> index & 1), key=int.bit_count)
                moved, new = cut & ~cuts[k], [*cuts[:k], cut, *cuts[k + 1 :]]
            else:  # the largest that has it not
                cut = max((mask for mask in between if not mask >> index & 1), key=int.bit_count)
                moved, new = cuts[k + 1] & ~cut, [*cuts[: k + 1], cut, *cuts[k + 2 :]]
            assert set(move.layers) == {name for name, i in members.items() if moved >> i & 1}
            if cut in (cuts[k], cuts[k + 1]):
                assert move.microbatch_us is None and "stage" in move.impossible
                continue
            states = [chain.states.masks.index(mask) for mask in new]
            moved_stages = tuple(Stage(a, b, (len(stage.devices),), stage.recompute)
                                 for a, b, stage in zip(states[:-1], states[1:], plan.stages, strict=True))
            result = evaluate(chain, topology, plan.policy, moved_stages, plan.batch_microbatches)
            assert move.microbatch_us == pytest.approx(result.microbatch_us) and move.bottleneck == result.bottleneck
            assert move.fits == result.fits


def test_the_sentences_name_numbers_and_what_moves() -> None:
    layers = [layer(name, forward_us=time_us) for name, time_us in (("a", 100.0), ("b", 100.0), ("c", 20.0), ("d", 130.0))]
    source = profile(layers, [Tensor(f"t{i}", i, (i + 1,), 1000, 1000) for i in range(3)])
    plan = make_plan(source, flat(2, bandwidth=1e12), PlanOptions(stages=2, max_replicas=1), command="x")
    assert [stage.layers for stage in plan.stages] == [("a", "b"), ("c", "d")]
    first = " | ".join(explain_layer(plan, source, "a").sentences())
    assert "50.0% of the stage's compute" in first and "no slack" in first and "all 2 layers of stage 0" in first
    last = " | ".join(explain_layer(plan, source, "d").sentences())
    assert "stage 1 has 25.0% slack" in last and "all 2 layers of stage 1" in last
    middle = " | ".join(explain_layer(plan, source, "c").sentences())
    assert "in stage 0: predicted 220.0 us per microbatch, 1.1x slower, bounded by stage 0" in middle


def test_an_unknown_layer_is_told_the_nearest_names() -> None:
    source = profile([layer("encoder.attention", forward_us=1.0), layer("decoder.attention", forward_us=1.0)])
    plan = make_plan(source, flat(2), PlanOptions(), command="x")
    with pytest.raises(BadInput) as caught:
        explain_layer(plan, source, "encoder.atention")
    assert "encoder.atention" in caught.value.message and "encoder.attention" in caught.value.hint
