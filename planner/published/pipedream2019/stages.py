"""Every stage of a model on one level of a cluster, as arrays: what m units (devices or servers) make of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.model.ideals import CutStates
from planner.published.bottleneck import NO_TIME_US
from planner.published.state_paths import IMPOSSIBLE
from planner.spec.profile import Profile

__all__ = ["Model", "Stages", "model_of", "stages_of"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

@dataclass(frozen=True, eq=False)
class Model:
    """Sums over the layers before each cut state, and the bytes that cross there (forward and back)."""

    states: CutStates
    inside: npt.NDArray[np.bool_]  # states by states
    compute_us: Floats
    parameter_bytes: Floats
    crossing_bytes: Floats  # 0 at both ends

    def part(self, states: Ints) -> Model:
        """The model with these of its states only, ascending, both ends among them."""
        kept = CutStates(self.states.layer_count, tuple(self.states.masks[i] for i in states), complete=False)
        return Model(kept, self.inside[np.ix_(states, states)], self.compute_us[states], self.parameter_bytes[states],
                     self.crossing_bytes[states])

    def own_us(self) -> Floats:
        """What every stage takes on one device, states by states; infinite where there is none."""
        return np.where(self.inside, self.compute_us[None, :] - self.compute_us[:, None], np.inf)


def model_of(profile: Profile, states: CutStates) -> Model:
    """The profile's layers as the cost model sees them: ``2 a(c)`` is the tensors and their gradients."""
    holds = states.holds()
    compute, parameters, crossing = (np.zeros(len(states)) for _ in range(3))
    for row, layer in zip(holds, profile.layers, strict=True):  # one by one, in layer order: the sums of a chain are its prefix sums
        compute += row * (layer.forward_us + layer.backward_us)
        parameters += row * float(layer.parameter_bytes)
    for tensor in profile.tensors:
        open_at = holds[tensor.source] & ~holds[list(tensor.consumers)].all(axis=0)
        crossing += open_at * float(tensor.forward_bytes + tensor.gradient_bytes)
    return Model(states, states.inside(), compute, parameters, crossing)


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages [first, last), sorted by ``last``; ``own_us`` is what one unit takes.

    ``sync_us`` is ``4 w / B`` over the devices of a unit, ``in_us`` and ``out_us`` are ``2 a / B`` of the
    cuts before and after; with m units a stage costs the largest of
    ``(own + sync (m-1) / m) / m``, ``in / m`` and ``out / m``.
    """

    state_count: int
    first: Ints
    last: Ints
    own_us: Floats
    sync_us: Floats
    in_us: Floats
    out_us: Floats

    def some(self, chosen: Ints) -> Stages:
        """These of the stages only."""
        return replace(self, first=self.first[chosen], last=self.last[chosen], own_us=self.own_us[chosen], sync_us=self.sync_us[chosen],
                       in_us=self.in_us[chosen], out_us=self.out_us[chosen])

    def cost_us(self, units: Ints | int) -> Floats:
        """Cost of every stage with so many units."""
        m = np.asarray(units, dtype=np.float64)
        return np.maximum((self.own_us + self.sync_us * (m - 1) / m) / m, np.maximum(self.in_us, self.out_us) / m)

    def units(self, time_us: float, most: int) -> Ints:
        """The fewest units with which each stage costs at most ``time_us``; IMPOSSIBLE above ``most``.

        The cost is not monotone in m: ``T m^2 - (own + sync) m + sync >= 0`` holds outside of two roots.
        So it is the fewest that the cuts allow, unless that lies between the roots; then the larger root.
        """
        time_us = max(time_us, NO_TIME_US)  # a model that costs nothing
        with np.errstate(over="ignore", invalid="ignore"):
            fewest = np.maximum(np.ceil(np.maximum(self.in_us, self.out_us) / time_us), 1.0)
            both = self.own_us + self.sync_us
            root = (both + np.sqrt(np.maximum(both * both - 4 * time_us * self.sync_us, 0.0))) / (2 * time_us)
            guess = np.where(self.cost_us(fewest) <= time_us, fewest, np.maximum(np.ceil(root), fewest))
        found = np.minimum(np.nan_to_num(guess, nan=IMPOSSIBLE, posinf=IMPOSSIBLE), most + 2).astype(np.int64)
        for shift in (-1, 1):  # rounding may leave the guess one too high or too low
            near = np.maximum(found + shift, 1)
            better = self.cost_us(near) <= time_us if shift < 0 else self.cost_us(found) > time_us
            found = np.where(better, near, found)
        return np.where((found <= most) & (self.cost_us(found) <= time_us), found, IMPOSSIBLE)

    def within(self, model: Model, first: int, last: int, *, first_pays: bool = False) -> Stages:
        """The stages of the pipeline [first, last) alone. Its first stage pays for no cut, as in the original, unless ``first_pays``."""
        known = model.inside
        start_ok, end_ok = known[first].copy(), known[:, last].copy()
        start_ok[first] = end_ok[last] = True
        part = self.some(np.flatnonzero(start_ok[self.first] & end_ok[self.last]))
        opens = (part.first == first) & (not first_pays)
        return replace(part, in_us=np.where(opens, 0.0, part.in_us), out_us=np.where(opens, 0.0, part.out_us))


def stages_of(model: Model, own_us: Floats, bandwidth_bytes_per_s: float, devices_per_unit: int, *, transfers: bool = True) -> Stages:
    """All stages of ``model`` of which one unit takes ``own_us`` (states by states, infinite where it cannot).

    ``transfers``: whether the cuts count.
    """
    last, first = np.nonzero((model.inside & np.isfinite(own_us)).T)
    parameters = model.parameter_bytes[last] - model.parameter_bytes[first]
    scale = 1e6 / bandwidth_bytes_per_s
    crossing = model.crossing_bytes * scale if transfers else np.zeros(len(model.states))
    return Stages(len(model.states), first, last, own_us[first, last], 4 * parameters * scale / devices_per_unit, crossing[first],
                  crossing[last])
