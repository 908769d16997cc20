from __future__ import annotations

import math

import numpy as np
import pytest

from autoprec.tune.verdict import judge, speed_ratio


@pytest.mark.parametrize(
    ("gaps", "noise", "status"),
    [
        ([0.0005, -0.0003, 0.0001], 0.0005, "passed"),
        ([0.05, 0.06, 0.055], 0.001, "rejected"),
        ([0.009, 0.011, 0.010], 0.002, "inconclusive"),
        ([-0.05, -0.06, -0.055], 0.001, "passed"),
        ([0.02, 0.021], 0.05, "inconclusive"),
        ([0.0], 0.0, "passed"),
        ([0.02], 0.0, "rejected"),
        ([0.0], 0.004, "passed"),
        ([0.0], 0.009, "inconclusive"),
        ([0.001, math.inf], 0.001, "rejected"),
        ([math.nan], 0.001, "rejected"),
    ],
)
def test_the_verdict_follows_from_the_interval(gaps: list[float], noise: float, status: str) -> None:
    assert judge(gaps, noise).status == status


def test_the_interval_is_students_t_around_the_mean() -> None:
    verdict = judge([0.001, 0.002, 0.003], 0.0, noise_pairs=0)
    half = 4.302652729911275 * 0.001 / math.sqrt(3)
    assert (verdict.loss_gap, verdict.low, verdict.high) == pytest.approx((0.002, 0.002 - half, 0.002 + half))
    assert (verdict.seeds, verdict.tolerance, verdict.noise_floor) == (3, 0.01, 0.0)


def test_the_noise_floor_widens_an_interval_that_chance_made_narrow() -> None:
    lucky = judge([0.004, 0.004], 0.008)
    assert lucky.high - lucky.low > 0.01
    assert judge([0.004, 0.004], 0.0).high == pytest.approx(0.004)


def test_a_larger_tolerance_or_noise_floor_is_the_limit() -> None:
    assert judge([0.03, 0.031, 0.029], 0.001, tolerance=0.05).status == "passed"
    assert "within the limit of 20.00%" in judge([0.01, 0.011, 0.012], 0.20).text


def test_the_text_says_what_was_compared_in_plain_words() -> None:
    assert judge([0.05, 0.05], 0.0).text == (
        "Rejected: the loss ends 5.00% above FP32's (95% interval +5.00% to +5.00%, 2 seeds), over the limit of 1.00%."
    )
    assert judge([-0.001], 0.0).text == (
        "Passed: the loss ends 0.10% below FP32's (95% interval -0.10% to -0.10%, 1 seed), within the limit of 1.00%."
    )
    assert judge([math.inf, 0.0], 0.0).text == "Rejected: the loss became NaN or infinite on 1 of 2 seeds."
    assert judge([0.01], 0.004).text.endswith("lies inside the interval. Longer windows or more seeds would tell.")


def test_no_seeds_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        judge([], 0.001)


def test_the_ratio_of_medians_says_how_many_times_faster_the_candidate_is() -> None:
    ratio, low, high = speed_ratio([0.02] * 5, [0.01] * 7)
    assert (ratio, low, high) == (2.0, 2.0, 2.0)


def test_the_same_samples_give_the_same_interval_around_the_ratio() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.02, 0.0005, 40), rng.normal(0.01, 0.0005, 40)
    ratio, low, high = speed_ratio(list(a), list(b))
    assert low < ratio < high and low > 1.9 and high < 2.1
    assert speed_ratio(list(a), list(b)) == (ratio, low, high)


def test_an_arm_against_itself_is_called_different_in_few_repeats_even_with_drifting_clocks() -> None:
    rng, different, planted = np.random.default_rng(0), 0, 0
    for seed in range(200):
        noise = rng.normal(0, 0.002, (2, 60))
        drift = np.apply_along_axis(lambda x: np.convolve(x, np.ones(2) / 2, mode="same"), 1, noise)
        a, b = 0.02 * (1 + drift)
        _, low, high = speed_ratio(list(a), list(b), seed=seed)
        different += not low <= 1.0 <= high
        _, low, high = speed_ratio(list(a), list(b * 1.03), seed=seed)
        planted += high < 1.0
    assert different <= 16, f"{different} of 200 repeats"
    assert planted >= 190


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], [])])
def test_an_arm_without_samples_is_an_error(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one step time"):
        speed_ratio(a, b)
