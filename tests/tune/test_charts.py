from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_run import curves, report_data

from autoprec.tune import drawing
from autoprec.tune.charts import Axis, Bar, Curve, LayerCell, Point, bars, layer_strip, loss_curves, pareto
from autoprec.tune.report import arm_bars, layer_cells, pareto_points

NASTY = "<script>alert('x')</script>&\"quote\""


def parsed(svg: object) -> ElementTree.Element:
    """The chart as XML; raises where it is not well-formed."""
    return ElementTree.fromstring(str(svg))


def of_class(root: ElementTree.Element, word: str) -> list[ElementTree.Element]:
    return [item for item in root.iter() if word in item.get("class", "").split()]


@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-3, 1e6),
    share=st.floats(0, 1),
    start=st.floats(0, 500),
    length=st.floats(-500, 500),
)
def test_a_value_inside_the_range_lands_inside_the_picture(low, span, share, start, length):
    axis = Axis(low, low + span, start, start + length)
    at = axis(low + share * span)
    assert min(start, start + length) - 1e-6 <= at <= max(start, start + length) + 1e-6
    assert axis(low) == pytest.approx(start)


@given(low=st.floats(1e-9, 1e3), factor=st.floats(1.01, 1e9), count=st.integers(1, 10))
def test_ticks_lie_inside_the_range_and_are_not_too_many(low, factor, count):
    for log in (False, True):
        ticks = Axis(low, low * factor, 0, 100, log=log).ticks(count)
        slack = 1e-6 * low * factor
        assert all(low - slack <= tick <= low * factor + slack for tick in ticks)
        assert len(ticks) <= 2 * count + 2


def test_a_logarithmic_axis_has_ticks_at_powers_of_ten():
    assert Axis(1e-4, 1e-1, 0, 90, log=True).ticks(5) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1])
    assert Axis(1e-4, 1e-1, 0, 90, log=True)(1e-3) == pytest.approx(30)


@pytest.mark.parametrize("log", [False, True])
def test_a_range_without_extent_is_widened(log):
    assert 0 < Axis(5.0, 5.0, 0, 100, log=log)(5.0) < 100


@pytest.mark.parametrize("width", [900, 328])
def test_every_chart_of_a_run_is_well_formed_and_as_wide_as_asked(width):
    data = report_data()
    drawn = (
        pareto(pareto_points(data), noise_floor=data.noise_floor, tolerance=data.tolerance, width=width),
        loss_curves(data.curves, width=width),
        bars(arm_bars(data), width=width),
        layer_strip(layer_cells(data), width=width),
    )
    for svg in drawn:
        root = parsed(svg)
        assert float(root.get("width")) == width
        assert root.get("aria-label")
        for item in root.iter():
            if item.tag == "rect":
                assert 0 <= float(item.get("x")) <= float(item.get("x")) + float(item.get("width")) <= width


@pytest.mark.parametrize("width", [900, 328])
def test_no_text_of_a_bar_leaves_the_picture(width):
    root = parsed(bars(arm_bars(report_data()), width=width))
    for item in root.iter("text"):
        size = drawing.CHAR_PX * len(item.text or "")
        start = float(item.get("x")) - (size if item.get("text-anchor") == "end" else 0)
        assert start >= 0, item.text
        assert start + size <= width, item.text


def test_the_pareto_picture_shows_each_point_once_and_the_chosen_one_on_top():
    data = report_data()
    points = pareto_points(data)
    root = parsed(pareto(points, noise_floor=data.noise_floor, tolerance=data.tolerance, width=900))
    dots = of_class(root, "dot")
    assert len(dots) == len(points)
    assert "chosen" in dots[-1].get("class")
    assert len(of_class(root, "tolerance")) == len(of_class(root, "noise")) == 1


def test_labels_of_the_pareto_picture_do_not_cover_each_other():
    crowd = [Point(samples_per_s=1000 + i, loss_gap=1e-3, style="baseline", label=f"set-up number {i}") for i in range(9)]
    root = parsed(pareto(crowd, noise_floor=5e-4, tolerance=1e-2, width=900))
    boxes = []
    for item in [*of_class(root, "name"), *of_class(root, "note")]:
        x, y, size = float(item.get("x")), float(item.get("y")), drawing.CHAR_PX * len(item.text)
        x -= {"end": size, "middle": size / 2, "start": 0}[item.get("text-anchor")]
        boxes.append((x, y - 11, x + size, y + 3))
    assert len(boxes) > 4
    assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for a, b in combinations(boxes, 2))


def test_a_gap_under_the_noise_or_below_fp32_lies_on_the_bottom_edge():
    points = [Point(samples_per_s=float(i + 1), loss_gap=gap, style="feasible") for i, gap in enumerate((-0.5, 0.0, 1e-9, 0.005))]
    root = parsed(pareto(points, noise_floor=1e-3, tolerance=1e-2, width=900))
    heights = [float(item.get("cy")) for item in of_class(root, "dot")]
    assert heights[0] == heights[1] == heights[2] > heights[3]


def test_charts_without_data_say_so():
    assert "No candidate finished" in pareto([], noise_floor=0, tolerance=0.01, width=900)
    assert "No FP32 run" in loss_curves([], width=900)
    assert "No FP32 run" in loss_curves([curves()[-1]], width=900)
    parsed(bars([], width=900))
    parsed(layer_strip([], width=900))


def test_a_curve_that_becomes_nan_ends_in_a_cross():
    losses = (1.0, 0.9, math.nan, math.nan)
    found = (Curve(name="FP32", losses=(1.0, 0.9, 0.8, 0.7), style="reference"), Curve(name="amp", losses=losses, style="stock"))
    root = parsed(loss_curves(found, width=900))
    crosses = of_class(root, "lost")
    assert len(crosses) == 2
    assert crosses[0].find("title").text == "not finite from here"
    assert "nan" not in str(loss_curves(found, width=900)).lower()


def test_a_long_run_stays_a_small_drawing():
    losses = tuple(1.0 / (1 + step) for step in range(50_000))
    svg = loss_curves([Curve(name="FP32", losses=losses, style="reference")], width=900)
    assert len(svg) < 20_000


def test_bars_are_as_long_as_their_values_and_predicted_ones_are_marked():
    items = [
        Bar(name="a", value=50.0, text="50", predicted=False),
        Bar(name="b", value=100.0, text="100", predicted=True, chosen=True),
    ]
    one, two = of_class(parsed(bars(items, width=900)), "bar")
    assert float(two.get("width")) == pytest.approx(2 * float(one.get("width")), rel=0.02)
    assert "predicted" in two.get("class").split()
    assert "predicted" not in one.get("class").split()


def test_every_layer_is_a_column_of_three_cells_with_its_reason():
    data = report_data()
    cells = of_class(parsed(layer_strip(layer_cells(data), width=900)), "cell")
    assert len(cells) == 3 * 35
    assert cells[-1].find("title").text == (
        "head (Linear): fp32\ntakes 44.8 µs (predicted)\nsensitivity 0.00025 (measured)\n"
        "values out of range: outputs reach 81,920, over 65,504"
    )


def test_hundreds_of_layers_wrap_into_rows_inside_the_picture():
    many = [LayerCell(name=f"h.{i}", precision="bf16", gained_s=1e-4, sensitivity=math.inf, title=f"h.{i}") for i in range(400)]
    root = parsed(layer_strip(many, width=328))
    cells = of_class(root, "cell")
    assert len(cells) == 1200
    assert all(float(item.get("x")) + float(item.get("width")) <= 328 for item in cells)
    assert max(float(item.get("y")) + float(item.get("height")) for item in cells) <= float(root.get("height"))


def test_text_of_users_is_escaped_in_every_chart():
    drawn = (
        pareto(
            [Point(samples_per_s=1.0, loss_gap=0.1, style="chosen", label=NASTY, title=NASTY)],
            noise_floor=0.01,
            tolerance=0.1,
            width=900,
        ),
        bars([Bar(name=NASTY, value=1.0, text=NASTY, predicted=True)], width=900),
        layer_strip([LayerCell(name=NASTY, precision="fp32", gained_s=None, sensitivity=None, title=NASTY)], width=900),
    )
    for svg in drawn:
        assert "<script" not in svg
        assert any(item.text == NASTY for item in parsed(svg).iter())


def test_colours_come_from_the_page_so_that_they_follow_light_and_dark():
    data = report_data()
    svg = str(layer_strip(layer_cells(data), width=900)) + str(bars(arm_bars(data), width=900))
    assert not re.search(r'#[0-9a-f]{3,8}"|fill="', svg)
