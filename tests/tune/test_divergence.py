from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tune.divergence import loss_gap, noise_floor, tail_steps

FALLING = [2.0 - 0.05 * step for step in range(20)]


def test_a_loss_one_percent_higher_has_a_gap_of_one_percent_and_a_lower_one_is_negative() -> None:
    assert loss_gap(FALLING, [1.01 * x for x in FALLING]) == pytest.approx(0.01)
    assert loss_gap(FALLING, [0.99 * x for x in FALLING]) == pytest.approx(-0.01)
    assert loss_gap(FALLING, FALLING) == 0.0


def test_only_the_end_of_the_window_counts() -> None:
    assert tail_steps(20) == 5 and tail_steps(100) == 25 and tail_steps(3) == 3
    assert loss_gap(FALLING, [9.0] * 15 + FALLING[15:]) == 0.0


def test_a_reference_near_zero_is_measured_by_its_own_fall() -> None:
    reference = [1.0] * 10 + [1e-6] * 10
    candidate = [1.0] * 10 + [2e-6] * 10
    assert loss_gap(reference, candidate) == pytest.approx(1e-6 / 0.05, rel=1e-3)
    assert loss_gap(reference, [1.0] * 10 + [0.01] * 10) == pytest.approx(0.2, rel=1e-3)


def test_a_negative_loss_is_compared_by_its_size() -> None:
    assert loss_gap([-2.0] * 8, [-1.9] * 8) == pytest.approx(0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_anywhere_is_an_infinite_gap(bad: float) -> None:
    assert loss_gap(FALLING, [bad, *FALLING[1:]]) == math.inf


def test_a_run_that_stopped_early_is_infinite_and_a_longer_one_is_an_error() -> None:
    assert loss_gap(FALLING, FALLING[:5]) == math.inf
    with pytest.raises(ValueError, match="the candidate has 21 steps, the reference 20"):
        loss_gap(FALLING, [*FALLING, 1.0])


@pytest.mark.parametrize("reference", [[], [1.0, math.nan]])
def test_a_reference_without_finite_losses_is_an_error(reference: list[float]) -> None:
    with pytest.raises(ValueError, match="the reference has no losses"):
        loss_gap(reference, [1.0, 1.0])


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40).flatmap(
        lambda r: st.tuples(st.just(r), st.lists(st.floats(-1e3, 1e3), min_size=len(r), max_size=len(r)))
    )
)
def test_finite_curves_have_a_gap_with_the_sign_of_the_difference(curves: tuple[list[float], list[float]]) -> None:
    reference, candidate = curves
    gap = loss_gap(reference, candidate)
    steps = tail_steps(len(reference))
    assert not math.isnan(gap)
    difference = math.fsum(candidate[-steps:]) - math.fsum(reference[-steps:])
    if abs(difference) > 1e-6:
        assert math.copysign(1, gap) == math.copysign(1, difference)


def test_the_noise_floor_is_twice_the_root_mean_square_gap_of_the_twins() -> None:
    pairs = [(FALLING, [1.003 * x for x in FALLING]), (FALLING, [0.996 * x for x in FALLING])]
    assert noise_floor(pairs) == pytest.approx(2 * math.sqrt((0.003**2 + 0.004**2) / 2))
    assert noise_floor([]) == 0.0
    assert noise_floor([(FALLING, [math.nan] * 20)]) == math.inf
