"""The plan as one thing varies: devices used, microbatch size, or the bandwidth between servers.

Each value is planned on its own, with all other options as given. Values that no plan can satisfy are kept
with their reason, so that a table shows where a model begins to fit.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from planner.options import PlanOptions
from planner.plot import Point, Series, line_plot
from planner.solve import make_plan
from planner.spec.cluster import Cluster
from planner.spec.errors import BadInput, Infeasible
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.units import format_bandwidth, parse_bandwidth
from planner.variants import with_bandwidth, with_microbatch_size

__all__ = ["Row", "Sweep", "parse_sweep", "sweep", "sweep_plot"]

What = Literal["devices", "microbatch-size", "bandwidth"]
_HINT = "write --sweep devices=1..64, --sweep devices=2,4,8, --sweep microbatch-size=1..32 or --sweep bandwidth=1GB/s..100GB/s"
MOST_VALUES = 1024


@dataclass(frozen=True)
class Sweep:
    """What varies, and its values, ascending."""

    what: What
    values: tuple[float, ...]

    def text(self, value: float) -> str:
        """One value for people, and as an option takes it."""
        return format_bandwidth(value) if self.what == "bandwidth" else f"{value:g}"

    @property
    def label(self) -> str:
        return {"devices": "devices that may be used", "microbatch-size": "samples in a microbatch",
                "bandwidth": "bandwidth between servers"}[self.what]


@dataclass(frozen=True)
class Row:
    """The plan for one value, or why there is none."""

    value: float
    plan: Plan | None
    reason: str = ""
    hint: str = ""

    @property
    def samples_per_s(self) -> float | None:
        if self.plan is None or not self.plan.predicted.expected_us > 0:
            return None
        return self.plan.microbatch_size * 1e6 / self.plan.predicted.expected_us


def parse_sweep(text: str) -> Sweep:
    """The sweep that ``WHAT=VALUES`` names. VALUES are single values and ranges ``A..B``, separated by commas.

    A range of devices has every whole number; of microbatch sizes, doublings of A; of bandwidths, ten values a
    decade, evenly on a logarithmic scale.

    >>> parse_sweep("devices=1..3,8").values, parse_sweep("microbatch-size=2..20").values
    ((1.0, 2.0, 3.0, 8.0), (2.0, 4.0, 8.0, 16.0))

    Raises:
        BadInput: not of this form, a value below its least, or too many values.
    """
    what, equals, listed = text.replace("_", "-").partition("=")
    if what not in ("devices", "microbatch-size", "bandwidth") or not equals:
        raise BadInput(f"--sweep {text!r} does not say what to vary", hint=_HINT)
    values: set[float] = set()
    for part in listed.split(","):
        low_text, dots, high_text = part.partition("..")
        low = _value(what, low_text, text)
        high = _value(what, high_text, text) if dots else low
        if high < low:
            raise BadInput(f"--sweep {text!r}: the range {part} ends before it begins", hint=_HINT)
        values.update(_range(what, low, high))
        if len(values) > MOST_VALUES:
            raise BadInput(f"--sweep {text!r} has more than {MOST_VALUES} values", hint="give fewer values")
    return Sweep(what, tuple(sorted(values)))  # type: ignore[arg-type]


def _value(what: str, text: str, whole: str) -> float:
    if what == "bandwidth":
        try:
            return parse_bandwidth(text)
        except BadInput as error:
            raise BadInput(f"--sweep {whole!r}: {error.message}", hint=error.hint) from error
    if not re.fullmatch(r"[0-9]{1,7}", text.strip()) or int(text) < 1:
        raise BadInput(f"--sweep {whole!r}: {text!r} is not a whole number from 1 to 9999999", hint=_HINT)
    return float(int(text))


def _range(what: str, low: float, high: float) -> Iterator[float]:
    if what == "devices":
        yield from (low + n for n in range(min(int(high - low), MOST_VALUES) + 1))
    elif what == "microbatch-size":
        while low <= high:
            yield low
            low *= 2
    else:
        steps = min(MOST_VALUES, max(1, round(10 * math.log10(high / low)))) if high > low else 0
        yield from (low * (high / low) ** (n / steps) if n else low for n in range(steps))
        yield high


def sweep(profile: Profile, cluster: Cluster, options: PlanOptions, wanted: Sweep, *, command: str,
          progress: Callable[[int], None] = lambda done: None) -> list[Row]:
    """Plan for each value; ``progress`` is told how many are done.

    Raises:
        BadInput: an option that no plan can have.
    """
    if wanted.what == "microbatch-size" and options.microbatch_size is not None:
        raise BadInput(f"--sweep microbatch-size varies what --microbatch-size {options.microbatch_size} fixes", hint="give one of them")
    rows: list[Row] = []
    for done, value in enumerate(wanted.values):
        progress(done)
        row = _row(profile, cluster, options, wanted, value, command)
        fewer = rows[-1] if wanted.what == "devices" and rows and row.plan is not None else None
        if fewer is not None and (row.samples_per_s or 0.0) < (fewer.samples_per_s or 0.0):
            row = dataclasses.replace(fewer, value=value)  # more may be used, and need not be
        rows.append(row)
    progress(len(wanted.values))
    return rows


def _row(profile: Profile, cluster: Cluster, options: PlanOptions, wanted: Sweep, value: float, command: str) -> Row:
    if wanted.what == "devices":
        if value > cluster.device_count:
            return Row(value, None, f"the cluster has {cluster.device_count} devices")
        options = dataclasses.replace(options, devices=int(value))
    elif wanted.what == "microbatch-size":
        profile = with_microbatch_size(profile, int(value))
    else:
        cluster = with_bandwidth(cluster, value)
    try:
        return Row(value, make_plan(profile, cluster, options, command=command))
    except Infeasible as error:
        return Row(value, None, error.message, error.hint)


def sweep_plot(model: str, wanted: Sweep, rows: list[Row]) -> str:
    """Predicted throughput of the plans, of data parallelism and of one device, as SVG; a point of the first line is a row."""
    ours: list[Point] = []
    data_parallel: list[Point] = []
    one_device: list[Point] = []
    for row in rows:
        if row.plan is None or row.samples_per_s is None:
            continue
        predicted, samples = row.plan.predicted, row.plan.microbatch_size * 1e6
        others_us = predicted.baseline_us("data parallelism"), predicted.baseline_us("one device")
        ours.append(Point(row.value, row.samples_per_s, f"{len(row.plan.stages)} stages, replicas {'-'.join(map(str, row.plan.replicas))}"))
        for baseline, time_us in zip((data_parallel, one_device), others_us, strict=True):
            if 0 < time_us < math.inf:
                baseline.append(Point(row.value, samples / time_us))
    series = [Series("pipeline", tuple(ours)), Series("data parallelism", tuple(data_parallel)), Series("one device", tuple(one_device))]
    return line_plot(f"{model}: predicted throughput", wanted.label, "samples/s", [line for line in series if line.points],
                     log_x=wanted.what != "devices", x_format=wanted.text)
