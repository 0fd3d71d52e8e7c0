"""What the user may ask of a plan, and the search problem that it makes."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.hardware.topology import Topology
from planner.model.graph import Chain
from planner.search.problem import Pin, Problem, Recompute
from planner.spec.cluster import Cluster, Node
from planner.spec.errors import BadInput, Infeasible
from planner.spec.plan import Policy
from planner.spec.profile import Profile, TiedParameter

__all__ = ["CostModel", "Objective", "PlanOptions", "kept_together", "layer_index", "option_name", "problem_of", "refuse_too_large"]

MOST_DEVICES = 16_384  # with more, going through the batches that they could share takes minutes
MOST_SERVERS = 4_096

_OPTIONS = {"pins": "--pin", "time_limit_s": "--time-limit"}  # whose names differ
_MOST_PINNED = 200  # beyond this stage number pins are not looked at beforehand

CostModel = Literal["measured", "pipedream-2019"]
Objective = Literal["throughput", "devices", "memory"]


@dataclass(frozen=True)
class PlanOptions:
    """What the user fixes; None leaves it to the planner. ``devices`` and ``max_replicas`` are upper limits.

    ``microbatch_size`` is one that was measured.
    ``extra_in_flight`` are microbatches more per link than the least depth has. ``pins`` are (layer, stage); the
    layers of each group of ``together`` share a stage. ``min_samples_per_s`` is what a plan must reach at least.
    """

    policy: Policy | Literal["auto"] = "stash"
    microbatch_size: int | None = None
    batch_microbatches: int | None = None
    stages: int | None = None
    max_replicas: int | None = None
    devices: int | None = None
    recompute: Recompute = "auto"
    extra_in_flight: int | None = None
    equal_replicas: bool = False
    pins: tuple[tuple[str, int], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    objective: Objective = "throughput"
    min_samples_per_s: float | None = None
    time_limit_s: float | None = None
    cost_model: CostModel = "measured"


def refuse_too_large(cluster: Cluster, options: PlanOptions) -> None:
    """Before anything is built of it.

    Raises:
        BadInput: more devices or servers than a plan is made for.
    """
    devices = min(options.devices or cluster.device_count, cluster.device_count)
    if devices > MOST_DEVICES:
        raise BadInput(f"{devices} devices may be used, a plan is made for at most {MOST_DEVICES}",
                       hint=f"give --devices {MOST_DEVICES} or fewer")
    if (servers := _servers(cluster.nodes)) > MOST_SERVERS:
        raise BadInput(f"{cluster.name} has {servers} servers, a plan is made for at most {MOST_SERVERS}",
                       hint="describe only as many of the servers as the model will use")


def _servers(nodes: tuple[Node, ...]) -> int:
    return sum(1 if node.device is not None else node.count * _servers(node.children) for node in nodes)


def kept_together(profile: Profile, options: PlanOptions) -> Profile:
    """The profile as if each group of ``--together`` shared what can be in one stage only: no cut comes between its layers.

    Raises:
        BadInput: no layer has such a name.
    """
    names = [layer.name for layer in profile.layers]
    groups = []
    for group in options.together:
        indices = sorted({layer_index(names, name, "--together") for name in group})
        if len(indices) > 1:
            groups.append(TiedParameter(f"together {','.join(group)}", 0, tuple(indices)))
    return replace(profile, tied=(*profile.tied, *groups)) if groups else profile


def problem_of(chain: Chain, topology: Topology, options: PlanOptions) -> Problem:
    """The options as limits of a search, checked against the model and the cluster; ``policy`` must be one.

    Raises:
        BadInput: an option below 1, or a name that no layer has.
        Infeasible: more stages than layers can be cut into, or than there are devices.
    """
    for name in ("batch_microbatches", "stages", "max_replicas", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise BadInput(f"{option_name(name)} {value} is below 1", hint=f"give {option_name(name)} a whole number from 1")
    for name, limit in (("time_limit_s", options.time_limit_s), ("min_samples_per_s", options.min_samples_per_s)):
        if limit is not None and not limit > 0:
            title = option_name(name)
            raise BadInput(f"{title} {limit:g} is not above zero", hint=f"give {title} a number above zero")
    devices = topology.device_count if options.devices is None else min(options.devices, topology.device_count)
    most_stages = chain.most_stages
    if options.stages is not None and options.stages > most_stages:
        tied = "" if most_stages == chain.layer_count else (
            f", as buffers that several update or --together keep some of its {chain.layer_count} layers together")
        raise Infeasible(f"--stages {options.stages} is asked, but the model can be cut into at most {most_stages}{tied}",
                         hint=f"give --stages a number from 1 to {min(most_stages, devices)}")
    if options.stages is not None and options.stages > devices:
        raise Infeasible(f"--stages {options.stages} needs {options.stages} devices, but {devices} may be used",
                         hint=f"give --stages a number from 1 to {devices}, or a cluster with more devices")
    assert options.policy != "auto"
    return Problem(chain, topology, options.policy, devices, min(devices, options.max_replicas or devices), options.stages,
                   options.batch_microbatches, options.recompute, options.equal_replicas, _pins(chain, options, min(devices, most_stages)))


def _pins(chain: Chain, options: PlanOptions, most_stages: int) -> tuple[Pin, ...]:
    stages = most_stages if options.stages is None else options.stages
    pins: dict[int, int] = {}
    for name, stage in options.pins:
        if not 0 <= stage < stages:
            raise Infeasible(f"--pin {name}={stage}: there is no stage {stage}, a plan here has at most {stages} stages, from 0",
                             hint=f"give --pin a stage from 0 to {stages - 1}")
        layer = layer_index(list(chain.names), name, "--pin")
        if pins.setdefault(layer, stage) != stage:
            raise BadInput(f"--pin wants layer {name} in stage {pins[layer]} and in stage {stage}", hint="give one of them")
    found = tuple(Pin(layer, stage) for layer, stage in sorted(pins.items()))
    if found and max(pins.values()) < _MOST_PINNED and not _possible(chain, found, options.stages):
        asked = " ".join(f"--pin {name}={stage}" for name, stage in options.pins)
        fixed = f" with {options.stages} stages" if options.stages is not None else ""
        why = _inseparable(chain, found) or (
            "layers are pinned in the order in which data flows through them, with at least one layer for each stage between")
        raise Infeasible(f"no plan keeps {asked}{fixed}", hint=f"plan without --pin for some of them: {why}")
    return found


def _inseparable(chain: Chain, pins: tuple[Pin, ...]) -> str:
    """Two pinned layers that no cut separates, in words; empty when there are none."""
    for a, b in itertools.combinations(pins, 2):
        if a.stage != b.stage and all(chain.has(state, a.layer) == chain.has(state, b.layer) for state in range(len(chain.states))):
            return (f"{chain.names[a.layer]} and {chain.names[b.layer]} are always in one stage, since they, or layers around them, "
                    "update the same buffer or are kept --together")
    return ""


def _possible(chain: Chain, pins: tuple[Pin, ...], stages: int | None) -> bool:
    """Whether the cut states have a sequence in which every pinned layer is in its stage, whatever that costs."""
    inside = chain.states.inside()
    reached: npt.NDArray[np.bool_] = np.arange(len(chain.states)) == 0
    last = max(pin.stage for pin in pins) + 1
    for stage in range(last if stages is None else stages):
        reached = np.asarray(inside[reached].any(axis=0))
        for pin in pins:  # behind its stage, and not before
            reached = reached & np.array([chain.has(state, pin.layer) == (pin.stage <= stage) for state in range(len(reached))])
    return bool(reached[chain.end]) if stages is not None else bool(reached.any())


def layer_index(names: list[str], name: str, option: str) -> int:
    """Of the layer that an option names.

    Raises:
        BadInput: no layer has such a name; the hint has those that are written most like it.
    """
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, 3, 0.5)
    raise BadInput(f"{option} names layer {name!r}, which is not among the {len(names)} layers of the profile",
                   hint=f"did you mean {' or '.join(near)}?" if near else f"layers are called {', '.join(names[:3])}, ...")


def option_name(name: str) -> str:
    """The option of a field of :class:`PlanOptions`."""
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))
