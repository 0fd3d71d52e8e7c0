"""What is said of a request without a plan: the exact least memory, and changes each of which, applied as it is written, makes a plan."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.hardware.clusters import load_cluster
from planner.hardware.topology import Topology
from planner.least_memory import least_memory, may_exist
from planner.model.graph import chain_of
from planner.options import PlanOptions, problem_of
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible
from planner.spec.profile import Profile
from planner.variants import with_memory, with_microbatch_size
from tests.planner import naive_memory
from tests.planner.graphs import graph_profiles
from tests.planner.instances import profiles
from tests.planner.test_search import EXAMPLES, many
from tests.planner.test_solve import model

requests = st.builds(
    PlanOptions,
    policy=st.sampled_from(["stash", "stash", "vertical", "2bw", "flush", "latest"]),
    batch_microbatches=st.sampled_from([None, None, None, 1, 2, 4]),
    stages=st.sampled_from([None, None, None, 1, 2]),
    max_replicas=st.sampled_from([None, None, 1, 2]),
    devices=st.sampled_from([None, None, 1, 2]),
    recompute=st.sampled_from(["auto", "auto", "never", "always"]),
    equal_replicas=st.sampled_from([False, False, True]),
)
shorthands = st.sampled_from(["1", "2", "3", "4", "1x2", "2x1", "2x2", "3x1", "2x3"])


def cluster_of(text: str, source: Profile, memory_bytes: int) -> Cluster:
    return load_cluster(text, device=source.device, intra_bandwidth=1e9, inter_bandwidth=1e9 if "x" in text else None,
                        memory_bytes=memory_bytes)


def changed(change: str, source: Profile, shorthand: str, memory_bytes: int, options: PlanOptions) -> tuple[Profile, Cluster, PlanOptions]:
    """The request with one change of a hint, read from its words as a user would."""
    if found := re.fullmatch(r"without --([a-z-]+)", change):
        name = found[1].replace("-", "_")
        return source, cluster_of(shorthand, source, memory_bytes), dataclasses.replace(options, **{name: getattr(PlanOptions(), name)})
    if found := re.fullmatch(r"with --(policy|recompute) ([a-z0-9]+)", change):
        return source, cluster_of(shorthand, source, memory_bytes), dataclasses.replace(options, **{found[1]: found[2]})
    if found := re.fullmatch(r"with --(batch-microbatches|devices) ([0-9]+)", change):
        name = found[1].replace("-", "_")
        return source, cluster_of(shorthand, source, memory_bytes), dataclasses.replace(options, **{name: int(found[2])})
    if found := re.fullmatch(r"with .* per device \(--memory ([0-9]+)\)", change):
        return source, cluster_of(shorthand, source, int(found[1])), options
    if found := re.fullmatch(r"on [0-9]+ devices \(--cluster ([0-9x]+)\)", change):
        return source, cluster_of(found[1], source, memory_bytes), options
    found = re.fullmatch(r"with microbatches of ([0-9]+) \(estimated: pipedream profile JOB --microbatch-size \1\)", change)
    assert found, change
    return with_microbatch_size(source, int(found[1])), cluster_of(shorthand, source, memory_bytes), options


def explained(source: Profile, cluster: Cluster, options: PlanOptions) -> Infeasible | None:
    try:
        make_plan(source, cluster, options, command="x")
    except Infeasible as error:
        return error
    return None


def random_request(seed: int) -> tuple[Profile, str, int, PlanOptions]:
    """A model, a cluster and options, and a little less memory than some plan with these options needs at least."""
    rng = random.Random(seed)
    plain = model(rng.randint(2, 6), seed)
    factor = rng.choice([0, 1, 5, 20])
    source = dataclasses.replace(plain, layers=tuple(dataclasses.replace(x, saved_bytes=factor * x.saved_bytes) for x in plain.layers))
    shorthand = rng.choice(["1", "2", "3", "4", "1x2", "2x1", "2x2", "3x1", "2x3"])
    options = PlanOptions(
        policy=rng.choice(["stash", "stash", "vertical", "2bw", "flush", "latest"]), batch_microbatches=rng.choice([None, None, 1, 2, 4]),
        stages=rng.choice([None, None, 1, 2]), max_replicas=rng.choice([None, None, 1, 2]), devices=rng.choice([None, None, 1, 2]),
        recompute=rng.choice(["auto", "never", "never", "always"]), equal_replicas=rng.random() < 0.3)
    loose = rng.choice([options, dataclasses.replace(options, recompute="auto"), dataclasses.replace(options, stages=None), PlanOptions()])
    try:
        least = least_memory(problem_of(chain_of(source), Topology(cluster_of(shorthand, source, 10**12)), loose))
    except Infeasible:  # more stages than there can be
        least = None
    return source, shorthand, 10**6 if least is None else max(1, least.memory_bytes + rng.choice([0, 0, -1, -1000, -(10**5)])), options


def test_every_change_of_a_hint_makes_a_plan() -> None:
    """On random infeasible requests, each change by itself, read from the hint's text."""
    refused, applied = 0, set()
    for seed in range(EXAMPLES // 2):
        source, shorthand, memory_bytes, options = random_request(seed)
        error = explained(source, cluster_of(shorthand, source, memory_bytes), options)
        if error is None or not error.hint.startswith("there is a plan "):
            continue
        refused += 1
        for change in error.hint.removeprefix("there is a plan ").split(", or "):
            other = explained(*changed(change, source, shorthand, memory_bytes, options))
            assert other is None, f"seed {seed}: {change}: {other}"
            applied.add(re.sub(r"[0-9]+(\.[0-9]+)?( [KMG]?i?B)?", "N", change))
    assert refused >= EXAMPLES / 6 and len(applied) >= 9, f"{refused} refused, {applied}"


@many
@given(st.one_of(profiles(), graph_profiles()), shorthands, requests)
def test_the_least_memory_is_that_of_the_plain_dynamic_program(source: Profile, shorthand: str, options: PlanOptions) -> None:
    cluster = cluster_of(shorthand, source, 10**12)
    chain = chain_of(source)
    if (options.stages or 1) > min(chain.most_stages, cluster.device_count, options.devices or 99):
        return
    problem = problem_of(chain, Topology(cluster), options)
    found, expected = least_memory(problem), naive_memory.least_memory(problem)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.memory_bytes == expected.memory_bytes
        for memory_bytes, there in ((found.memory_bytes, True), (found.memory_bytes - 1, False)):
            if memory_bytes > 0:
                limited = dataclasses.replace(problem, topology=Topology(with_memory(cluster, memory_bytes)))
                assert may_exist(limited) is there


def test_each_number_is_the_smallest() -> None:
    plain = model(8)
    source = dataclasses.replace(plain, layers=tuple(dataclasses.replace(x, saved_bytes=20 * x.saved_bytes) for x in plain.layers))
    options = PlanOptions(max_replicas=1)
    least = {n: least_memory(problem_of(chain_of(source), Topology(cluster_of(str(n), source, 10**12)), options)) for n in range(1, 9)}
    needs = {n: one.memory_bytes for n, one in least.items() if one is not None}
    fits = next(n for n in range(3, 9) if needs[n] < needs[2])
    memory_bytes = needs[fits]
    error = explained(source, cluster_of("2", source, memory_bytes), options)
    assert error is not None and f"on {fits} devices (--cluster {fits})" in error.hint
    fewer = explained(source, cluster_of("8", source, memory_bytes), dataclasses.replace(options, devices=2))
    assert fewer is not None and f"with --devices {fits}" in fewer.hint
    size = int(re.search(r"microbatches of (\d+) ", error.hint)[1])  # type: ignore[index]
    assert explained(with_microbatch_size(source, size), cluster_of("2", source, memory_bytes), options) is None
    assert explained(with_microbatch_size(source, size + 1), cluster_of("2", source, memory_bytes), options) is not None


@pytest.mark.parametrize("options", [PlanOptions(pins=(("block5", 0), ("block1", 1))), PlanOptions(pins=(("block0", 1),), stages=2)])
def test_pins_that_cannot_be_kept_are_what_is_named(options: PlanOptions) -> None:
    error = explained(model(6), cluster_of("4", model(6), 10**12), options)
    assert error is not None and "--pin block" in error.message and "without --pin" in error.hint
    assert explained(model(6), cluster_of("4", model(6), 10**12), dataclasses.replace(options, pins=())) is None
