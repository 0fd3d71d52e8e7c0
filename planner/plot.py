"""A line plot as SVG text: axes with round ticks, a marker for every point, a legend.

Written here because it is all the plotting the planner needs. The picture has no background of its own
and takes its text colour from the reader's colour scheme, so it can be read on light and dark pages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Point", "Series", "line_plot", "ticks"]

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 36, 66, 52  # margins
COLOURS = ("#2f7ed8", "#e07b1a", "#2a9d5c", "#b455c4", "#c94b4b", "#7a7f87")  # told apart by most eyes, on light and dark
DASHES = ("", "6 4", "2 3", "8 3 2 3", "1 4", "12 4")  # and without colour
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-size: 15px; font-weight: 600 }
  .grid { stroke: #8888; stroke-width: .5 }
  .axis { stroke: #666; stroke-width: 1 }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .axis { stroke: #aaa } }
"""

Format = Callable[[float], str]


@dataclass(frozen=True)
class Point:
    """``note`` is shown when the reader points at the marker."""

    x: float
    y: float
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line through its points, which ascend in x."""

    name: str
    points: tuple[Point, ...]


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_x: bool = False,
              x_format: Format = lambda value: f"{value:g}", y_format: Format = lambda value: f"{value:g}") -> str:
    """The plot's SVG document. y begins at 0; with ``log_x`` all x are above 0."""
    xs = [point.x for line in series for point in line.points] or [1.0]
    ys = [point.y for line in series for point in line.points] or [1.0]
    x_ticks = ticks(min(xs), max(xs))
    if log_x:
        x_ticks = sorted(set(xs)) if len(set(xs)) <= 9 else _log_ticks(min(xs), max(xs))
    y_ticks = ticks(0.0, max(ys))
    if len(y_ticks) > 1 and y_ticks[-1] < max(ys):
        y_ticks.append(2 * y_ticks[-1] - y_ticks[-2])  # the last one is above every point
    x_low, x_high = (min(xs), max(xs)) if log_x else (min(x_ticks[0], min(xs)), max(x_ticks[-1], max(xs)))
    y_high = max(y_ticks[-1], max(ys)) or 1.0

    def across(x: float) -> float:
        share = _share(math.log(x), math.log(x_low), math.log(x_high)) if log_x else _share(x, x_low, x_high)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_high * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_attribute(title)}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
        *_legend(series),
        *_axes(x_ticks, y_ticks, across, up, x_format, y_format),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
        *(part for number, line in enumerate(series) for part in _line(line, number, across, up, x_format, y_format)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.5


def _legend(series: Sequence[Series]) -> Iterable[str]:
    x = float(LEFT)
    for number, line in enumerate(series):
        yield f'<line x1="{x:.0f}" y1="40" x2="{x + 24:.0f}" y2="40" {_stroke(number)}/>'
        yield f'<text x="{x + 30:.0f}" y="44">{escape(line.name)}</text>'
        x += 52 + 6.6 * len(line.name)  # a character is about so wide


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], across: Callable[[float], float], up: Callable[[float], float],
          x_format: Format, y_format: Format) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for y in y_ticks:
        yield f'<line class="grid" x1="{LEFT}" y1="{up(y):.1f}" x2="{right}" y2="{up(y):.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">{escape(y_format(y))}</text>'
    for x in x_ticks:
        yield f'<line class="axis" x1="{across(x):.1f}" y1="{bottom}" x2="{across(x):.1f}" y2="{bottom + 5}"/>'
        yield f'<text x="{across(x):.1f}" y="{bottom + 19}" text-anchor="middle">{escape(x_format(x))}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
    yield f'<line class="axis" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{bottom}"/>'


def _line(line: Series, number: int, across: Callable[[float], float], up: Callable[[float], float],
          x_format: Format, y_format: Format) -> Iterable[str]:
    places = [f"{across(point.x):.1f},{up(point.y):.1f}" for point in line.points]
    yield f'<polyline points="{" ".join(places)}" {_stroke(number)}/>'
    for point in line.points:
        said = f"{line.name}: {x_format(point.x)}, {y_format(point.y)}" + (f" ({point.note})" if point.note else "")
        yield (f'<circle cx="{across(point.x):.1f}" cy="{up(point.y):.1f}" r="3" fill="{COLOURS[number % len(COLOURS)]}">'
               f"<title>{escape(said)}</title></circle>")


def _stroke(number: int) -> str:
    dash = DASHES[number % len(DASHES)]
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, from at most ``low`` to the last up to ``high``.

    >>> ticks(0, 10), ticks(1, 64), ticks(0, 0.3)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    """
    rough = (high - low) / about
    if not rough >= sys.float_info.min:  # nothing between them that a step could divide, down to the smallest numbers
        return [float(low)]
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((m for m in (1, 2, 5, 10) if m * power >= rough * 0.99), default=10)
    first, last = math.floor(low / step + 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; fewer where it is long, its ends where it holds none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [m * 10.0**p for p in powers for m in (1, 2, 5) if low * (1 - 1e-9) <= m * 10.0**p <= high * (1 + 1e-9)]
    if len(inside) > 9:
        inside = [10.0**p for p in powers if low * (1 - 1e-9) <= 10.0**p <= high * (1 + 1e-9)]
    return inside if len(inside) >= 2 else sorted({low, high})
