"""The original's cost model: against every pipeline by its formulas, and against what its program returned."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.imports import import_profile
from planner.published.pipedream2019.nested import pipelines_us
from planner.published.pipedream2019.solve import Level, best_plan, levels_of, pipeline_us, replica_devices
from planner.published.pipedream2019.stages import Model, model_of, stages_of
from planner.published.state_paths import IMPOSSIBLE
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.errors import BadInput
from planner.spec.profile import Profile
from tests.planner.graphs import crossing, graph_profiles
from tests.planner.instances import flat, two_level, unequal
from tests.planner.test_ideals import states_of

Layers = frozenset[int]


def model(profile: Profile) -> Model:
    return model_of(profile, states_of(profile))


def pipelines(profile: Profile, behind: Layers, ahead: Layers) -> Iterator[tuple[Layers, ...]]:
    """Every way to run the layers that are ahead but not behind."""
    feeds = {i: {t.source for t in profile.tensors if i in t.consumers} for i in range(len(profile.layers))}
    left = sorted(ahead - behind)
    if not left:
        yield ()
    for size in range(1, len(left) + 1):
        for members in itertools.combinations(left, size):
            reached = behind.union(members)
            if all(feeds[i] <= reached for i in members):
                for rest in pipelines(profile, reached, ahead):
                    yield (frozenset(members), *rest)


def by_definition_us(profile: Profile, levels: Sequence[Level], behind: Layers, ahead: Layers, most_replicas: int,
                     first_pays: bool) -> float:
    """The least time of the layers between two cuts on one unit of the outermost level, trying everything."""
    if not levels:
        return sum(profile.layers[i].forward_us + profile.layers[i].backward_us for i in ahead - behind)
    level, best = levels[-1], math.inf
    scale = 1e6 / level.bandwidth_bytes_per_s
    everything = frozenset(range(len(profile.layers)))
    for stages in pipelines(profile, behind, ahead):
        ends = list(itertools.accumulate(stages, frozenset.union, initial=behind))
        own = [by_definition_us(profile, levels[:-1], a, b, most_replicas, False) for a, b in itertools.pairwise(ends)]
        for counts in itertools.product(range(1, min(level.count, most_replicas) + 1), repeat=len(stages)):
            if sum(counts) > level.count:
                continue
            times = []
            for k, (stage, m) in enumerate(zip(stages, counts, strict=True)):
                w = sum(profile.layers[i].parameter_bytes for i in stage)
                times.append((own[k] + 4 * (m - 1) * w / m * scale / level.devices_each) / m)
                if k or first_pays:
                    times += [sum(crossing(profile, cut)) * scale / m for cut in (ends[k], ends[k + 1]) if 0 < len(cut) < len(everything)]
            best = min(best, max(times))
    return best


@settings(max_examples=60)
@given(graph_profiles(most_layers=5), st.integers(1, 4), st.sampled_from([1e8, 1e9, 1e11]), st.sampled_from([None, 1, 2]), st.booleans())
def test_flat_clusters_equal_every_pipeline(profile: Profile, devices: int, bandwidth: float, most: int | None, first_pays: bool) -> None:
    levels = [Level(devices, bandwidth, 1)]
    whole = frozenset(range(len(profile.layers)))
    expected = by_definition_us(profile, levels, frozenset(), whole, most or devices, first_pays)
    found = best_plan(model(profile), levels, max_replicas=most, first_pays=first_pays)
    assert found.time_us == pytest.approx(expected, rel=1e-9)
    assert found.bound_us == pytest.approx(expected, rel=1e-8)
    assert sum(part.units for part in found.parts) <= devices


@settings(max_examples=30)
@given(graph_profiles(most_layers=4), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.sampled_from([1e8, 1e10]), st.sampled_from([1e8, 1e9]))
def test_nested_clusters_equal_every_pipeline_of_pipelines(profile: Profile, shape: tuple[int, int], intra: float, inter: float) -> None:
    levels = [Level(shape[1], intra, 1), Level(shape[0], min(intra, inter), shape[1])]
    expected = by_definition_us(profile, levels, frozenset(), frozenset(range(len(profile.layers))), 99, False)
    assert best_plan(model(profile), levels).time_us == pytest.approx(expected, rel=1e-9)


@settings(max_examples=10)
@given(graph_profiles(most_layers=3))
def test_three_levels_equal_every_pipeline_of_pipelines(profile: Profile) -> None:
    levels = [Level(2, 1e10, 1), Level(2, 1e9, 2), Level(2, 3e8, 4)]
    expected = by_definition_us(profile, levels, frozenset(), frozenset(range(len(profile.layers))), 99, False)
    assert best_plan(model(profile), levels).time_us == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60)
@given(graph_profiles(most_layers=5, least_layers=2), st.integers(1, 40), st.sampled_from([1e7, 1e8, 1e9]))
def test_the_fewest_units_equal_a_count(profile: Profile, most: int, bandwidth: float) -> None:
    built = model(profile)
    stages = stages_of(built, built.own_us(), bandwidth, 1)
    costs = np.stack([stages.cost_us(m) for m in range(1, most + 1)])
    for time_us in [0.0, *np.unique(costs)[:: max(1, costs.size // 50)]]:
        counted = [next((m + 1 for m in range(most) if column[m] <= time_us), IMPOSSIBLE) for column in costs.T]
        assert stages.units(float(time_us), most).tolist() == counted


@settings(max_examples=40)
@given(graph_profiles(most_layers=6, least_layers=2), st.integers(1, 5))
def test_pipelines_within_a_cap_are_the_ones_without(profile: Profile, devices: int) -> None:
    built = model(profile)
    free = pipelines_us(built, built.own_us(), devices, devices, 1e9, 1)
    cap_us = float(np.median(free[np.isfinite(free)]))
    capped = pipelines_us(built, built.own_us(), devices, devices, 1e9, 1, cap_us=cap_us)
    assert np.array_equal(capped, np.where(free <= cap_us, free, np.inf))


@settings(max_examples=40)
@given(graph_profiles(most_layers=5), st.sampled_from([(2, 2), (2, 3)]))
def test_replicas_stand_on_different_devices_and_stay_in_their_copy(profile: Profile, shape: tuple[int, int]) -> None:
    levels = [Level(shape[1], 1e11, 1), Level(shape[0], 1e8, shape[1])]
    built = model(profile)
    found = best_plan(built, levels)
    placed = replica_devices(levels, found.parts)
    devices = [device for _, _, replicas in placed for device in replicas]
    assert len(set(devices)) == len(devices) and set(devices) <= set(range(shape[0] * shape[1]))
    assert [first for first, _, _ in placed] == [0, *(last for _, last, _ in placed[:-1])]
    for part in found.parts:
        inner = [replicas for first, last, replicas in placed if built.inside[part.first, last] and first != part.last
                 and (first == part.first or built.inside[part.first, first]) and (last == part.last or built.inside[last, part.last])]
        for m in range(12):  # microbatch m visits one server from end to end
            assert len({replicas[m % len(replicas)] // shape[1] for replicas in inner}) == 1
    assert pipeline_us(built, levels, found.parts) == found.time_us


def test_levels_of_clusters() -> None:
    assert levels_of(flat(8, bandwidth=5.0)) == (Level(8, 5.0, 1),)
    assert levels_of(two_level(4, 2, intra=9.0, inter=3.0)) == (Level(2, 9.0, 1), Level(4, 3.0, 2))
    assert levels_of(two_level(4, 1, intra=2.0, inter=3.0)) == (Level(1, 2.0, 1), Level(4, 2.0, 1))
    device = Node("device", 2, Link(7.0, 0.0), "t", ())
    one = Cluster("one", (DeviceType("t", 1.0, None),), (Node("server", 1, Link(1.0, 0.0), None, (device,)),))
    assert levels_of(one) == (Level(2, 7.0, 1),)
    with pytest.raises(BadInput, match="equal devices and servers only"):
        levels_of(unequal(2, 2, speed=0.5))


def test_no_compute_at_all() -> None:
    from tests.planner.instances import layer, profile

    assert best_plan(model(profile([layer("a"), layer("b")])), [Level(3, 1e9, 1)]).time_us == 0


def published(published_data: Path, name: str) -> Model:
    return model(import_profile(str(published_data / "pipedream" / f"{name}.txt"), "pipedream-graph", command="x"))


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "resnet50", "gnmt"])
def test_equal_to_the_original_on_flat_clusters_and_never_worse_on_others(published_data: Path, name: str) -> None:
    rows = json.loads((published_data / "pipedream" / "reference.json").read_text())["runs"]
    built, compared = published(published_data, name), 0
    hierarchies = {"hier4x4": [Level(4, 12e9, 1), Level(4, 1.25e9, 4)], "hier8x2": [Level(8, 100e9, 1), Level(2, 3.125e9, 8)]}
    for row in rows:
        kind, _, variant = row["cluster"].partition("_")
        if row["profile"] != name or "mem" in variant or row["time_per_microbatch_s"] is None:
            continue
        levels = hierarchies.get(kind) or [Level(int(kind.removeprefix("flat")), 1e9, 1)]
        found_s = best_plan(built, levels, max_replicas=1 if variant == "straight" else None, transfers=variant != "noact").time_us / 1e6
        assert found_s <= row["time_per_microbatch_s"] * (1 + 1e-9)
        if kind.startswith("flat") and variant != "straight":  # the original's straight pipelines use all devices, needed or not
            assert found_s == pytest.approx(row["time_per_microbatch_s"], rel=1e-9)
        compared += 1
    assert compared >= 9


@pytest.mark.parametrize(("name", "optima"), [
    ("alexnet", (0.0282460, 0.00628926, 0.00448782, 0.000388002)),
    ("vgg16", (0.173387, 0.0455248, 0.0116143, 0.00134218)),
    ("resnet50", (0.116426, 0.0328833, 0.00878886, 0.000559583)),
    ("gnmt", (0.025868, 0.010687, 0.00805306, 0.00104938)),
])
def test_exact_optima_where_the_first_stage_pays_too(published_data: Path, name: str, optima: tuple[float, ...]) -> None:
    built = published(published_data, name)
    for devices, optimum_s in zip((4, 16, 64, 1024), optima, strict=True):
        found = best_plan(built, [Level(devices, 3.125e9, 1)], first_pays=True)
        assert found.time_us / 1e6 == pytest.approx(optimum_s, rel=5e-6)
