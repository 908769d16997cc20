"""Whatever a run measured, its pictures are drawn: values that no run should have, but some do."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.tune.charts import Curve, Point, loss_curves, pareto

speeds = st.floats(min_value=1e-3, max_value=1e7)
gaps = st.floats(min_value=-1, max_value=1e3)
losses = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=2, max_size=40)


@settings(deadline=None)
@given(st.lists(st.tuples(speeds, gaps), min_size=1, max_size=20), st.floats(0, 1), st.floats(1e-6, 1))
def test_every_dot_of_the_pareto_picture_lies_inside_it(pairs: list[tuple[float, float]], noise: float, tolerance: float) -> None:
    dots = [Point(samples_per_s=speed, loss_gap=gap, style="feasible") for speed, gap in pairs]
    root = ElementTree.fromstring(str(pareto(dots, noise_floor=noise, tolerance=tolerance, width=328)))
    circles = list(root.iter("circle"))
    assert len(circles) == len(pairs)
    assert all(0 <= float(circle.get("cx", "nan")) <= 328 for circle in circles)
    assert all(0 <= float(circle.get("cy", "nan")) <= 340 for circle in circles)


@settings(deadline=None)
@given(losses, losses)
def test_curves_of_any_losses_never_put_nan_into_the_picture(reference: list[float], other: list[float]) -> None:
    curves = [
        Curve(name="fp32", losses=tuple(reference), style="reference"),
        Curve(name="twin", losses=tuple(reference[::-1]), style="twin"),
        Curve(name="tuned", losses=tuple(other), style="tuned"),
    ]
    svg = loss_curves(curves, width=328)
    ElementTree.fromstring(str(svg))
    assert not re.search(r'[ "ML](nan|-?inf)', svg)


@pytest.mark.parametrize("losses", [(math.inf, math.nan), (-4e15, -4e15), (0.0, 0.0), (1e-30, 1e-30), (-3.0, -2.0)])
def test_odd_losses_are_drawn_or_said_to_be_no_losses(losses: tuple[float, float]) -> None:
    curves = [Curve(name=style, losses=losses, style=style) for style in ("reference", "tuned")]
    svg = loss_curves(curves, width=328)
    ElementTree.fromstring(str(svg))
    assert ("No loss is finite" in svg) == (not math.isfinite(losses[0]))
