"""The bound on what low precision could give, from what an FP32 step spends its time on."""

from __future__ import annotations

import math

import pytest
from decision_fakes import layer, look_of

from autoprec.tune.ceiling import measured_ceiling


def ceiling(heavy_s: float, light_s: float, **options: object):
    look = look_of([layer("head")], heavy_s=heavy_s, light_s=light_s)
    return measured_ceiling(look, 0.1, **{"host_bound": False, **options})


def test_amdahls_law_bounds_the_gain() -> None:
    assert ceiling(0.0, 0.1).gain == pytest.approx(2.0), "half the bytes"
    assert ceiling(0.08, 0.0, heavy_gain=16.0).gain == pytest.approx(0.1 / (0.02 + 0.005))
    assert ceiling(0.0, 0.01).gain == pytest.approx(1 / 0.95), "the optimizer and the host are not shortened"


def test_without_known_rates_matmuls_could_vanish() -> None:
    assert ceiling(0.05, 0.0).gain == pytest.approx(2.0)
    assert math.isfinite(ceiling(0.2, 0.0).gain)


def test_a_host_bound_step_gains_no_more_than_the_device_lags_behind_the_host() -> None:
    assert ceiling(0.09, 0.0, host_bound=True).gain == pytest.approx(1 / 0.9)
    assert ceiling(0.001, 0.0, host_bound=True).gain == pytest.approx(0.1 / 0.099)


def test_nothing_measured_bounds_nothing() -> None:
    assert ceiling(0.0, 0.0) is None
