"""What a plan is compared with: other ways to train on the same devices, by the same cost model.

``one device``             the whole model on the fastest one
``data parallelism``       the whole model on every device, an update after one microbatch on each; and, where the
                           plan updates more rarely, with updates as rare
``straight pipeline``      the best with one replica a stage (:mod:`planner.straight`)
``equal split``            as many stages as there are devices, of equal numbers of layers, one replica each
``synchronous flush``      the plan's own stages, drained at every update
``PipeDream 2019``         what the original's algorithm plans (:mod:`planner.published.pipedream2019`)

All but data parallelism have the plan's own batch, or the next that their replicas can share equally. Each
says whether the devices' memory holds it. What would take long to find is left out, with the reason.
"""

from __future__ import annotations

import math
from collections import Counter

from planner.cost import Stage, evaluate
from planner.hardware.topology import Allocation
from planner.published.pipedream2019.solve import Level, best_plan, levels_of, replica_devices
from planner.published.pipedream2019.stages import model_of
from planner.search.problem import Problem
from planner.spec.errors import BadInput
from planner.spec.plan import Baseline
from planner.spec.profile import Profile
from planner.straight import straight_pipeline

__all__ = ["DATA_PARALLEL", "ONE_DEVICE", "baselines"]

ONE_DEVICE, DATA_PARALLEL = "one device", "data parallelism"
MOST_STATES_2019 = 600  # all pairs of them are stages
MOST_COUNTS = 8  # replica counts shown
MOST_STEPS_2019 = 5e8  # of the original's program inside servers: about half a second


def baselines(problem: Problem, profile: Profile, stages: tuple[Stage, ...], batch_microbatches: int) -> tuple[Baseline, ...]:
    """Everything that the plan of these stages is compared with; ``profile`` is what ``problem`` was made from."""
    found = [_one_device(problem, batch_microbatches), *_data_parallel(problem, batch_microbatches)]
    if problem.max_devices > 1 and problem.chain.most_stages > 1:
        found.append(_straight(problem, batch_microbatches))
        found.append(_equal_split(problem, batch_microbatches))
        if problem.policy != "flush" and len(stages) > 1:
            found.append(_flush(problem, stages, batch_microbatches))
        found.append(_original(problem, profile, batch_microbatches))
    return tuple(found)


def _evaluated(name: str, note: str, problem: Problem, stages: tuple[Stage, ...], batch: int) -> Baseline:
    """With recomputation in the stages that need it to fit, where the request allows that."""
    result = evaluate(problem.chain, problem.topology, problem.policy, stages, batch)
    if not result.fits and len(problem.recompute_choices) > 1:
        over = [limit is not None and need.total_bytes > limit for need, limit in zip(result.memory, result.available_bytes, strict=True)]
        again = tuple(stage._replace(recompute=stage.recompute or more) for stage, more in zip(stages, over, strict=True))
        other = evaluate(problem.chain, problem.topology, problem.policy, again, batch)
        result = other if other.fits else result
    return Baseline(name, result.microbatch_us, result.fits, note)


def _one_device(problem: Problem, batch: int) -> Baseline:
    topology = problem.topology
    return _evaluated(ONE_DEVICE, _updates(batch), problem, (_whole(problem, topology.alone(topology.fastest_place)),), batch)


def _data_parallel(problem: Problem, batch: int) -> list[Baseline]:
    left, counts = problem.max_devices, []
    for count in problem.topology.capacities:
        counts.append(min(left, count))
        left -= counts[-1]
    n, stages = problem.max_devices, (_whole(problem, tuple(counts)),)
    own = _evaluated(DATA_PARALLEL, f"on {n} devices, {_updates(n)}", problem, stages, n)
    rare = _rounded(batch, n)
    if rare == n:
        return [own]
    return [own, _evaluated(f"{DATA_PARALLEL}, rare updates", f"on {n} devices, {_updates(rare)}", problem, stages, rare)]


def _straight(problem: Problem, batch: int) -> Baseline:
    if problem.policy == "2bw":
        batch = max(batch, min(problem.max_devices, problem.chain.most_stages))
    stages = straight_pipeline(problem, batch)
    if stages == ():
        stages = straight_pipeline(problem, batch, within_memory=False)
    if not stages:
        return Baseline("straight pipeline", None, False, "the model has too many layers to look for it")
    return _evaluated("straight pipeline", f"{len(stages)} stages of one replica", problem, stages, batch)


def _equal_split(problem: Problem, batch: int) -> Baseline:
    """Its cuts are those of the profile's order that come nearest to equal numbers of layers."""
    chain = problem.chain
    cuts = [state for state, mask in enumerate(chain.states.masks) if mask & (mask + 1) == 0]  # the first layers, and no others
    sizes = {state: chain.states.masks[state].bit_count() for state in cuts}
    count = min(problem.max_devices, len(cuts) - 1)
    chosen, rest = [0], cuts[1:]
    for k in range(1, count):
        among = rest[: len(rest) - (count - k)]  # as many stay for the stages to come
        chosen.append(min(among, key=lambda state: abs(sizes[state] - k * chain.layer_count / count)))
        rest = rest[rest.index(chosen[-1]) + 1 :]
    chosen.append(chain.end)
    devices = [place for place, capacity in enumerate(problem.topology.capacities) for _ in range(capacity)]
    again = problem.recompute_choices[0]
    stages = tuple(Stage(first, last, problem.topology.alone(place), again)
                   for first, last, place in zip(chosen[:-1], chosen[1:], devices, strict=False))
    return _evaluated("equal split", f"{len(stages)} stages of equal numbers of layers", problem, stages,
                      _batch_for(problem, stages, batch))


def _flush(problem: Problem, stages: tuple[Stage, ...], batch: int) -> Baseline:
    result = evaluate(problem.chain, problem.topology, "flush", stages, batch)
    return Baseline("synchronous flush", result.microbatch_us, result.fits, f"the plan's stages, drained after every {_count(batch)}")


def _original(problem: Problem, profile: Profile, batch: int) -> Baseline:
    name, states = "PipeDream 2019", problem.chain.states
    try:
        levels = _levels(problem)
    except BadInput:
        return Baseline(name, None, False, "its algorithm knows whole clusters of equal devices and servers only")
    steps = sum(len(states) ** 3 * level.count**2 / 2 for level in levels[:-1])
    if len(states) > MOST_STATES_2019 or steps > MOST_STEPS_2019:
        return Baseline(name, None, False, "its algorithm would take long on this model and cluster: see --cost-model pipedream-2019")
    parts = best_plan(model_of(profile, states), levels).parts
    place_of = [place for place, count in enumerate(problem.topology.capacities) for _ in range(count)]
    stages = []
    for first, last, devices in replica_devices(levels, parts):
        used = Counter(place_of[device] for device in devices)
        stages.append(Stage(first, last, tuple(used[place] for place in range(len(problem.topology.places)))))
    batch = _batch_for(problem, tuple(stages), batch)
    counts = "-".join(str(stage.replicas) for stage in stages) if len(stages) <= MOST_COUNTS else f"of {len(stages)} stages"
    return _evaluated(name, f"replicas {counts}, {_updates(batch)}", problem, tuple(stages), batch)


def _levels(problem: Problem) -> tuple[Level, ...]:
    """The cluster's levels; of a single one with fewer devices only those that may be used.

    Raises:
        BadInput: unequal devices or servers, or a part of several servers.
    """
    levels = levels_of(problem.topology.cluster)
    if problem.max_devices == problem.topology.device_count:
        return levels
    if len(levels) > 1:
        raise BadInput(f"{problem.max_devices} of {problem.topology.device_count} devices on {levels[-1].count} servers")
    return (levels[0]._replace(count=problem.max_devices),)


def _whole(problem: Problem, allocation: Allocation) -> Stage:
    return Stage(0, problem.chain.end, allocation, problem.recompute_choices[0])


def _rounded(batch: int, multiple: int) -> int:
    return -(-batch // multiple) * multiple


def _batch_for(problem: Problem, stages: tuple[Stage, ...], batch: int) -> int:
    """The next batch from ``batch`` that the replicas share equally; ``2bw`` needs one as long as its pipeline is deep."""
    replicas = [stage.replicas for stage in stages]
    return _rounded(max(batch, sum(replicas)) if problem.policy == "2bw" else batch, math.lcm(*replicas))


def _updates(batch: int) -> str:
    return f"an update after every {_count(batch)}"


def _count(batch: int) -> str:
    return "microbatch" if batch == 1 else f"{batch} microbatches"
