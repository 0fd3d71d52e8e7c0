"""SVG plots are well-formed, have every point where it belongs, and round ticks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plot import Point, Series, line_plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in root.iter(f"{SVG}circle")]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


POINTS = st.lists(st.tuples(st.floats(1e-3, 1e12), st.floats(0, 1e12)), min_size=1, max_size=20, unique_by=lambda point: point[0])


@given(POINTS, st.booleans())
def test_a_marker_for_every_point_inside_the_picture(values: list[tuple[float, float]], log_x: bool) -> None:
    points = tuple(Point(x, y) for x, y in sorted(values))
    svg = line_plot("title", "x", "y", [Series("one", points), Series("other", points[:1])], log_x=log_x)
    found = circles(svg)
    assert len(found) == len(points) + 1
    assert all(0 <= x <= 720 and 0 <= y <= 420 for x, y in found)
    xs, ys = [x for x, _ in found[:-1]], [y for _, y in found[:-1]]
    assert xs == sorted(xs), "x ascends to the right"
    for (_, one), (_, other), a, b in zip(sorted(values), sorted(values)[1:], ys, ys[1:], strict=False):
        assert (one <= other) == (a >= b) or a == b, "more is higher"


def test_points_lie_where_the_axes_say() -> None:
    svg = line_plot("t", "x", "y", [Series("line", (Point(0, 0), Point(5, 50), Point(10, 100)))])
    (x0, y0), (x1, y1), (x2, y2) = circles(svg)
    assert x1 == pytest.approx((x0 + x2) / 2) and y1 == pytest.approx((y0 + y2) / 2)
    labels = {text.text: text.attrib for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert float(labels["10"]["x"]) == pytest.approx(x2) and float(labels["100"]["y"]) == pytest.approx(y2 + 4)


def test_logarithmic_axes_space_ratios_equally() -> None:
    found = circles(line_plot("t", "x", "y", [Series("line", (Point(1, 1), Point(10, 1), Point(100, 1)))], log_x=True))
    assert found[1][0] - found[0][0] == pytest.approx(found[2][0] - found[1][0], abs=0.11)


def test_text_is_escaped_and_nothing_depends_on_a_light_page() -> None:
    svg = line_plot("<&\"'>", "a & b", "<y>", [Series("<s>", (Point(1, 1, "<note>"),))])
    assert {"<&\"'>", "a & b", "<y>", "<s>"} <= set(texts(svg))
    assert "prefers-color-scheme: dark" in svg and "<rect" not in svg


def test_a_plot_without_points_is_still_a_picture() -> None:
    assert circles(line_plot("t", "x", "y", [])) == []


@pytest.mark.parametrize("high", [0.0, 5e-324, 1e-320, 2.3e-308])
def test_a_range_too_small_to_divide_has_one_tick(high: float) -> None:
    assert ticks(0.0, high) == [0.0]


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e9))
def test_ticks_are_few_even_and_round(low: float, length: float) -> None:
    found = ticks(low, low + length)
    if len(found) >= 3:
        step = found[1] - found[0]
        assert found == pytest.approx([found[0] + n * step for n in range(len(found))], abs=step / 100)
    assert 1 <= len(found) <= 9 and found[0] <= low + length / 1e3
