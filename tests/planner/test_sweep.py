"""A sweep is what planning for each value by itself gives; values are read as they are documented."""

from __future__ import annotations

import pytest

from planner.options import PlanOptions
from planner.solve import make_plan
from planner.spec.errors import BadInput
from planner.spec.profile import Profile, Tensor
from planner.sweep import parse_sweep, sweep, sweep_plot
from planner.variants import with_bandwidth, with_microbatch_size
from tests.planner.instances import flat, layer, profile, two_level
from tests.planner.test_plot import circles


def model() -> Profile:
    layers = [layer(f"l{i}", forward_us=100.0, backward_us=200.0, update_us=30.0, parameter_bytes=10**6, saved_bytes=10**5)
              for i in range(6)]
    return profile(layers, [Tensor(f"t{i}", i, (i + 1,), 10**4, 10**4) for i in range(5)])


def test_what_is_swept_is_not_fixed_too() -> None:
    with pytest.raises(BadInput, match="varies what --microbatch-size 4 fixes"):
        sweep(profile([layer("a", forward_us=1.0)]), flat(2), PlanOptions(microbatch_size=4), parse_sweep("microbatch-size=1..4"),
              command="c")


def test_every_row_is_the_plan_of_its_value() -> None:
    cluster, done = two_level(2, 3, intra=1e9, inter=1e8), []
    rows = sweep(model(), cluster, PlanOptions(), parse_sweep("devices=1..7"), command="c", progress=done.append)
    assert done == list(range(8))
    for n, row in enumerate(rows[:6], start=1):
        alone = make_plan(model(), cluster, PlanOptions(devices=n), command="c")
        assert row.plan is not None and row.plan == alone
        assert row.samples_per_s == pytest.approx(8e6 / max(alone.predicted.microbatch_us, alone.predicted.simulated_us or 0.0))
    assert rows[6].plan is None and rows[6].reason == "the cluster has 6 devices"
    times = [row.plan.predicted.microbatch_us for row in rows if row.plan]
    assert times == sorted(times, reverse=True), "one more device is never worse"


def test_infeasible_values_keep_their_reason_and_the_plot_has_a_point_for_each_plan() -> None:
    cluster = flat(6, memory_bytes=6_500_000)
    rows = sweep(model(), cluster, PlanOptions(), parse_sweep("devices=1..6"), command="c")
    feasible = [row for row in rows if row.plan]
    assert 0 < len(feasible) < 6 and all(row.reason and row.hint for row in rows if not row.plan)
    svg = sweep_plot("model", parse_sweep("devices=1..6"), rows)
    assert svg.count("<title>pipeline: ") == len(feasible)
    assert len(circles(svg)) == 3 * len(feasible), "and as many of data parallelism and one device"


def test_bandwidth_is_that_between_servers_or_of_a_single_servers_devices() -> None:
    outer, inner = with_bandwidth(two_level(2, 3, intra=1e9, inter=1e8), 5e7), with_bandwidth(flat(4, latency_us=3.0), 5e7)
    assert outer.nodes[0].link.bandwidth_bytes_per_s == 5e7 and outer.nodes[0].children[0].link.bandwidth_bytes_per_s == 1e9
    assert inner.nodes[0].link.bandwidth_bytes_per_s == 5e7 and inner.nodes[0].link.latency_us == 3.0
    one_server = with_bandwidth(two_level(1, 3, intra=1e9, inter=1e8), 5e7)
    assert one_server.nodes[0].children[0].link.bandwidth_bytes_per_s == 5e7
    times = [row.plan.predicted.microbatch_us for row in
             sweep(model(), two_level(2, 3), PlanOptions(), parse_sweep("bandwidth=10MB/s..10GB/s"), command="c") if row.plan]
    assert len(times) == 31 and times == sorted(times, reverse=True)


def test_another_microbatch_size_scales_what_depends_on_samples_and_says_that_it_is_estimated() -> None:
    double = with_microbatch_size(model(), 16)
    assert double.estimated and double.microbatch_size == 16
    assert (double.layers[0].forward_us, double.layers[0].saved_bytes, double.tensors[0].forward_bytes) == (200.0, 2 * 10**5, 2 * 10**4)
    assert (double.layers[0].parameter_bytes, double.layers[0].update_us) == (10**6, 30.0)
    assert with_microbatch_size(model(), 8) == model()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("devices=4", (4,)),
        ("devices=1..3,8,2", (1, 2, 3, 8)),
        ("microbatch-size=1..64", (1, 2, 4, 8, 16, 32, 64)),
        ("microbatch_size=3..20", (3, 6, 12)),
        ("bandwidth=1GB/s", (1e9,)),
        ("bandwidth=1GB/s,8Gbit/s,2GB/s", (1e9, 2e9)),
        ("bandwidth=1GB/s..10GB/s", tuple(1e9 * 10 ** (n / 10) for n in range(11))),
    ],
)
def test_values(text: str, values: tuple[float, ...]) -> None:
    assert parse_sweep(text).values == pytest.approx(values)


@pytest.mark.parametrize("text", [
    "", "devices", "devices=", "devices=0", "devices=1..", "devices=5..1", "devices=1..9999", "devices=x", "devices=9999999999", "layers=3",
    "bandwidth=1", "bandwidth=0GB/s", "bandwidth=2GB/s..1GB/s", "microbatch-size=1.5",
])
def test_what_is_no_sweep_is_named(text: str) -> None:
    with pytest.raises(BadInput, match="--sweep") as caught:
        parse_sweep(text)
    assert caught.value.hint
