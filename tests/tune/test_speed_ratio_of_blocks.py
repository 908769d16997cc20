"""The ratio of interleaved arms: what is drawn are pairs of blocks, and what is promised holds in simulations of real noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from autoprec.tune.verdict import is_different, is_faster, speed_ratio

STEPS, REPEATS = 6, 400


@dataclass(frozen=True)
class Noise:
    """What disturbs a row of steps, as natural logarithms of the time factor: 0.01 is about 1%.

    ``white`` scatters single steps with a correlation ``rho`` of neighbours, ``drift`` is a random walk (its standard deviation over
    the whole comparison), ``block`` scatters whole blocks, a share ``spikes`` of the steps takes up to twice as long, and a share
    ``bursts`` of the blocks is slowed by another process.
    """

    white: float
    rho: float
    drift: float
    block: float
    spikes: float
    bursts: float

    def times_s(self, rng: np.random.Generator, blocks: int) -> tuple[list[float], list[float]]:
        """Step times of two equal arms in blocks of STEPS, the order of each pair drawn."""
        steps = 2 * blocks * STEPS
        log = np.empty(steps)
        value = 0.0
        for step, drawn in enumerate(rng.normal(0, self.white, steps)):
            value = self.rho * value + math.sqrt(1 - self.rho**2) * drawn
            log[step] = value
        log += np.cumsum(rng.normal(0, self.drift / math.sqrt(steps), steps))
        log += (rng.random(steps) < self.spikes) * rng.exponential(0.4, steps)
        rows = log.reshape(2 * blocks, STEPS) + rng.normal(0, self.block, (2 * blocks, 1))
        rows += (rng.random((2 * blocks, 1)) < self.bursts) * rng.exponential(0.1, (2 * blocks, 1))
        first = rng.integers(0, 2, blocks)
        pairs = 0.01 * np.exp(rows.reshape(blocks, 2, STEPS))
        return pairs[np.arange(blocks), first].ravel().tolist(), pairs[np.arange(blocks), 1 - first].ravel().tolist()


DEVICE = Noise(white=0.002, rho=0.3, drift=0.01, block=0.001, spikes=0.01, bursts=0.0)
PLAIN = Noise(white=0.01, rho=0.0, drift=0.0, block=0.01, spikes=0.0, bursts=0.0)
SHARED_HOST = Noise(white=0.04, rho=0.6, drift=0.1, block=0.01, spikes=0.1, bursts=0.25)


def ratio(base: list[float], other: list[float], blocks: int, seed: int = 0) -> tuple[float, float, float]:
    given = (len(base) // blocks,) * blocks
    return speed_ratio(base, other, baseline_block_steps=given, candidate_block_steps=given, seed=seed)


@pytest.mark.parametrize("blocks", [3, 6, 7, 10, 20])
@pytest.mark.parametrize("noise", [DEVICE, PLAIN, SHARED_HOST], ids=["device", "plain", "shared host"])
def test_an_interval_of_equal_arms_misses_1_in_at_most_5_percent_whatever_the_noise(noise: Noise, blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    missed = 0
    for repeat in range(REPEATS):
        _, low, high = ratio(*noise.times_s(rng, blocks), blocks, seed=repeat)
        missed += not low <= 1.0 <= high
    # 5% of 400, and two standard deviations of a count with that mean.
    assert missed <= 0.05 * REPEATS + 2 * math.sqrt(0.05 * 0.95 * REPEATS), f"{missed} of {REPEATS}"


@pytest.mark.parametrize("noise", [DEVICE, PLAIN, SHARED_HOST], ids=["device", "plain", "shared host"])
def test_equal_arms_in_the_seven_blocks_of_a_tune_are_called_different_in_under_5_of_100_repeats(noise: Noise) -> None:
    rng = np.random.default_rng(1)
    for _ in range(4):
        called = sum(is_different(*ratio(*noise.times_s(rng, 7), 7, seed=repeat)[1:]) for repeat in range(100))
        assert called < 5


def test_a_slowdown_of_3_percent_is_found_where_the_device_is_the_limit() -> None:
    rng = np.random.default_rng(2)
    found = 0
    for repeat in range(REPEATS):
        base, other = DEVICE.times_s(rng, 7)
        _, low, high = ratio(base, [1.03 * time_s for time_s in other], 7, seed=repeat)
        found += is_different(low, high) and high < 1.0
    assert found >= 0.99 * REPEATS


def test_the_truth_lies_in_the_interval_around_a_ratio_that_is_not_1() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for repeat in range(REPEATS):
        base, other = PLAIN.times_s(rng, 7)
        _, low, high = ratio(base, [time_s / 1.5 for time_s in other], 7, seed=repeat)
        held += low <= 1.5 <= high
    assert held >= 0.95 * REPEATS


def test_drift_that_hits_both_arms_alike_cancels_in_pairs_of_blocks() -> None:
    clocks = np.repeat(np.linspace(1.0, 2.0, 8), STEPS)
    base, other = (0.02 * clocks).tolist(), (0.01 * clocks).tolist()
    assert ratio(base, other, 8) == pytest.approx((2.0, 2.0, 2.0))
    _, low, high = speed_ratio(base, other)
    assert high - low > 0.1


def test_one_disturbed_block_moves_neither_the_ratio_nor_far_its_interval() -> None:
    base, other = [0.02] * 60, [0.01] * 60
    other[12:18] = [0.05] * 6
    assert ratio(base, other, 10) == pytest.approx((2.0, 2.0, 2.0))


def test_seven_pairs_give_the_least_and_the_largest_ratio_as_interval() -> None:
    ratios = [0.97, 1.04, 1.01, 0.99, 1.0, 1.02, 0.98]
    base = [0.01 * value for value in ratios for _ in range(STEPS)]
    assert ratio(base, [0.01] * len(base), 7) == pytest.approx((1.0, 0.97, 1.04))


def test_two_pairs_of_blocks_give_the_wide_interval_of_students_t() -> None:
    base = [0.01 * math.exp(0.02)] * 3 + [0.01] * 3
    middle, half = 0.01, 12.706204736174694 * 0.01
    assert ratio(base, [0.01] * 6, 2) == pytest.approx([math.exp(at) for at in (middle, middle - half, middle + half)])


def test_arms_that_lost_different_numbers_of_blocks_are_drawn_each_on_its_own() -> None:
    rng = np.random.default_rng(4)
    base, other = rng.normal(0.02, 0.0002, 60).tolist(), rng.normal(0.01, 0.0001, 48).tolist()
    value, low, high = speed_ratio(base, other, baseline_block_steps=(6,) * 10, candidate_block_steps=(6,) * 8)
    medians = [np.exp(np.median(np.log(np.median(np.reshape(arm, (-1, 6)), axis=1)))) for arm in (base, other)]
    assert value == pytest.approx(medians[0] / medians[1])
    assert 1.97 < low < value < high < 2.03
    few = speed_ratio(base, other[:24], baseline_block_steps=(6,) * 10, candidate_block_steps=(6,) * 4)
    logs = [np.log(np.median(np.reshape(arm, (-1, 6)), axis=1)) for arm in (base, other[:24])]
    middle, half = (
        logs[0].mean() - logs[1].mean(),
        3.182446305284263 * math.sqrt(logs[0].var(ddof=1) / 10 + logs[1].var(ddof=1) / 4),
    )
    assert few == pytest.approx([math.exp(at) for at in (middle, middle - half, middle + half)]), (
        "Student's t, 3 degrees of freedom"
    )


def test_blocks_of_one_arm_only_or_a_single_block_are_judged_by_their_steps() -> None:
    rng = np.random.default_rng(5)
    base, other = rng.normal(0.02, 0.0005, 40).tolist(), rng.normal(0.01, 0.0005, 40).tolist()
    by_steps = speed_ratio(base, other)
    assert speed_ratio(base, other, baseline_block_steps=(8,) * 5) == by_steps
    assert speed_ratio(base, other, baseline_block_steps=(40,), candidate_block_steps=(40,)) == by_steps


def test_the_same_blocks_give_the_same_interval() -> None:
    base, other = SHARED_HOST.times_s(np.random.default_rng(6), 10)
    assert ratio(base, other, 10) == ratio(base, other, 10)


@pytest.mark.parametrize("blocks", [(2, 2), (5, 0), (3, 3)])
def test_blocks_that_do_not_make_up_the_steps_are_an_error(blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not make up 5 steps"):
        speed_ratio([0.01] * 5, [0.01] * 4, baseline_block_steps=blocks, candidate_block_steps=(2, 2))


def test_a_difference_of_half_a_percent_is_a_trifle() -> None:
    assert not is_faster(1.004) and is_faster(1.006)
    assert not is_different(1.004, 1.2) and is_different(1.006, 1.2)
    assert not is_different(0.8, 0.996) and is_different(0.8, 0.994)
