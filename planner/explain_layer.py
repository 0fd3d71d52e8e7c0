"""Why a layer is in its stage: what it costs there, and what the plan would cost with it in the stage before or after.

A cut may only be moved to another cut state, so a layer takes others along: to the stage before, those of its
stage that feed it, to the stage after, those that it feeds, and all that must be in one stage with it. The plan with
the cut moved is evaluated by the same cost model.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost import Evaluation, Stage, evaluate
from planner.hardware.topology import Topology
from planner.model.graph import Chain, chain_over
from planner.model.ideals import CutStates, edges_of, predecessor_masks
from planner.model.states import Searched
from planner.options import layer_index
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.units import format_bytes, format_duration_us

__all__ = ["LayerReport", "Move", "explain_layer"]

MOST_NAMED = 4  # layers that move along


@dataclass(frozen=True)
class Move:
    """The layer in a neighbouring stage. ``impossible`` says why it cannot be there, and is empty when it can."""

    stage: int
    layers: tuple[str, ...]  # that move, the layer among them
    microbatch_us: float | None
    bottleneck: str
    fits: bool
    impossible: str


@dataclass(frozen=True)
class LayerReport:
    """Times and bytes of the layer alone, per microbatch; ``stage_share`` of its stage's compute, ``slack`` of its stage."""

    layer: str
    stage: int
    compute_us: float
    update_us: float
    parameter_bytes: int
    saved_bytes: int
    stage_share: float
    slack: float
    microbatch_us: float  # of the plan
    moves: tuple[Move, ...]

    def sentences(self) -> list[str]:
        """The report for people."""
        said = [
            f"{self.layer} is in stage {self.stage}: predicted {format_duration_us(self.compute_us)} forward and backward, "
            f"{self.stage_share:.1%} of the stage's compute, {format_bytes(self.parameter_bytes)} of weights, "
            f"{format_bytes(self.saved_bytes)} saved for backward",
            f"stage {self.stage} has {self.slack:.1%} slack" if self.slack >= 0.0005 else f"stage {self.stage} has no slack",
        ]
        return said + [f"in stage {move.stage}: {self._move(move)}" for move in self.moves]

    def _move(self, move: Move) -> str:
        if move.microbatch_us is None:
            return f"not possible, {move.impossible}"
        others = [name for name in move.layers if name != self.layer]
        named = ", ".join(others[:MOST_NAMED]) + (f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else "")
        ratio = move.microbatch_us / self.microbatch_us if self.microbatch_us > 0 else 1.0
        compared = "as fast" if abs(ratio - 1) < 0.0005 else f"{ratio:.3g}x slower" if ratio > 1 else f"{1 / ratio:.3g}x faster"
        memory = "" if move.fits else ", and would not fit in memory"
        along = f", with {named}, which must come along" if others else ""
        return (f"predicted {format_duration_us(move.microbatch_us)} per microbatch, {compared}, bounded by {move.bottleneck}{memory}"
                f"{along}")


def explain_layer(plan: Plan, profile: Profile, name: str) -> LayerReport:
    """Why the layer called ``name`` is where it is; ``profile`` is the plan's, at its microbatch size.

    Raises:
        BadInput: no layer has this name.
    """
    index = layer_index([layer.name for layer in profile.layers], name, "--explain")
    layer, member = profile.layers[index], {layer.name: i for i, layer in enumerate(profile.layers)}
    masks = [sum(1 << member[one] for one in stage.layers) for stage in plan.stages]
    k = next(number for number, mask in enumerate(masks) if mask >> index & 1)
    own, stage_us = plan.predicted.stages[k], sum(
        profile.layers[member[one]].forward_us + profile.layers[member[one]].backward_us for one in plan.stages[k].layers)
    total_us = plan.predicted.microbatch_us
    return LayerReport(
        layer=name, stage=k, compute_us=layer.forward_us + layer.backward_us, update_us=layer.update_us,
        parameter_bytes=layer.parameter_bytes, saved_bytes=layer.saved_bytes,
        stage_share=(layer.forward_us + layer.backward_us) / stage_us if stage_us > 0 else 0.0,
        slack=max(0.0, 1 - own.microbatch_us / total_us) if total_us > 0 else 0.0, microbatch_us=total_us,
        moves=tuple(_moved(plan, profile, masks, index, k, to) for to in (k - 1, k + 1) if 0 <= to < len(masks)),
    )


def _moved(plan: Plan, profile: Profile, masks: list[int], index: int, k: int, to: int) -> Move:
    along = _along(profile, masks[k], index, backwards=to < k)
    names = tuple(layer.name for i, layer in enumerate(profile.layers) if along >> i & 1)
    if along == masks[k]:
        return Move(to, names, None, "", True, f"all {len(names)} layers of stage {k} would have to come along" if len(names) > 1 else (
            f"it is the only layer of stage {k}"))
    masks = list(masks)
    masks[k] &= ~along
    masks[to] |= along
    result = _evaluated(plan, profile, masks)
    return Move(to, names, result.microbatch_us, result.bottleneck, result.fits, "")


def _along(profile: Profile, stage: int, index: int, *, backwards: bool) -> int:
    """The layers of the stage that must move with one of them."""
    feeds = predecessor_masks(len(profile.layers), edges_of(profile))
    groups = [sum(1 << layer for layer in tied.layers) for tied in profile.tied if tied.one_stage]
    moved, grown = 0, 1 << index
    while grown != moved:
        moved = grown
        for i, sources in enumerate(feeds):
            if backwards and moved >> i & 1:
                grown |= sources & stage
            elif not backwards and sources & moved and stage >> i & 1:
                grown |= 1 << i
        for group in groups:
            grown |= group & stage if group & grown else 0
    return moved


def _evaluated(plan: Plan, profile: Profile, masks: list[int]) -> Evaluation:
    """The plan's stages with other layers, on their devices, in the least depth."""
    states, held = [0], 0
    for mask in masks:
        held |= mask
        states.append(held)
    topology = Topology(plan.cluster)
    chain: Chain = chain_over(profile, Searched(CutStates(len(profile.layers), tuple(states), complete=False), "", None))
    place_of = {place.device(i): p for p, place in enumerate(topology.places) for i in range(place.count)}
    stages = []
    for number, stage in enumerate(plan.stages):
        counts = [0] * len(topology.places)
        for device in stage.devices:
            counts[place_of[device]] += 1
        stages.append(Stage(number, number + 1, tuple(counts), stage.recompute))
    return evaluate(chain, topology, plan.policy, tuple(stages), plan.batch_microbatches)
