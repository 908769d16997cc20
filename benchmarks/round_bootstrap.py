"""Intervals for arms that were timed in rounds, A B A B: whole rounds are drawn anew, the same ones for both arms.

Steps of one block share its clocks and temperature, so that many steps of few blocks say less than as many independent ones;
and what a round did to both arms cancels in their ratio only where both keep the round.
Source: two-stage bootstrap, Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8: blocks first, then
the steps inside each; percentile intervals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95


def step_interval(times_s: Sequence[float], block_steps: Sequence[int], *, seed: int = 0) -> tuple[float, float, float]:
    """Median step time with its 95% interval.

    Args:
        times_s: seconds of every step, in the order taken.
        block_steps: how many of them each round had.
        seed: of the resampling; the same samples give the same interval.

    Returns:
        Median, low, high in seconds.

    Raises:
        ValueError: the blocks do not add up to the steps, or one is empty.
    """
    return _interval(float(np.median(times_s)), _resampled_medians([_blocks(times_s, block_steps)], seed)[0])


def ratio_interval(
    base_times_s: Sequence[float], times_s: Sequence[float], block_steps: Sequence[int], *, seed: int = 0
) -> tuple[float, float, float]:
    """How many times faster an arm is than the base: ratio of median step times with its 95% interval.

    Args:
        base_times_s: seconds of the base's steps, in the order taken.
        times_s: seconds of the arm's steps, taken in the same rounds.
        block_steps: how many of them each round had, the same for both.
        seed: of the resampling.

    Returns:
        Ratio, low, high; above 1 the arm is faster.

    Raises:
        ValueError: the blocks do not add up to the steps of both arms, or one is empty.
    """
    base, arm = _resampled_medians([_blocks(base_times_s, block_steps), _blocks(times_s, block_steps)], seed)
    return _interval(float(np.median(base_times_s) / np.median(times_s)), base / arm)


def _blocks(times_s: Sequence[float], block_steps: Sequence[int]) -> list[NDArray[np.float64]]:
    if not block_steps or min(block_steps) < 1 or sum(block_steps) != len(times_s):
        raise ValueError(f"blocks of {list(block_steps)} steps do not make up {len(times_s)} steps")
    return np.split(np.asarray(times_s, dtype=np.float64), np.cumsum(block_steps)[:-1])


def _resampled_medians(arms: Sequence[list[NDArray[np.float64]]], seed: int) -> NDArray[np.float64]:
    """Medians of each arm (rows) in each resample (columns); a column has the same rounds for every arm."""
    rng = np.random.default_rng(seed)
    count = len(arms[0])
    medians = np.empty((len(arms), RESAMPLES))
    for column, rounds in enumerate(rng.integers(0, count, size=(RESAMPLES, count))):
        for row, blocks in enumerate(arms):
            drawn = [blocks[number][rng.integers(0, len(blocks[number]), len(blocks[number]))] for number in rounds]
            medians[row, column] = np.median(np.concatenate(drawn))
    return medians


def _interval(value: float, resampled: NDArray[np.float64]) -> tuple[float, float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return value, float(low), float(high)
