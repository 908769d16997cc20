"""Verdicts: whether a policy trains like FP32, and how many times faster one arm is than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from autoprec.records import Verdict
from autoprec.tune.divergence import NOISE_SIGMAS

DEFAULT_TOLERANCE = 0.01
CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 2000
# Enough for the far tails that few blocks ask for: scipy's own default.
BLOCK_RESAMPLES = 9999
# With fewer blocks no resampling reaches 95%: all five on one side of the truth happens in 2 / 2^5 = 6.3% of cases.
LEAST_BLOCKS_TO_DRAW = 6
# Two copies of one training in one process may differ for good, because their memory lies elsewhere. Less than this is no
# difference that anybody should act on. Own choice.
TRIFLING_DIFFERENCE = 0.005
# Where FP32 differs from itself by more than this, passing would mean nothing. Own choice.
USELESS_NOISE = 0.25
# Smaller gaps would print as 0.00%.
VISIBLE_GAP = 5e-5


def judge(
    gaps: Sequence[float],
    noise_floor: float,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    noise_pairs: int = 2,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Judges loss gaps against the larger of tolerance and noise floor.

    The interval is Student's t around the mean gap. With two or three seeds their own spread says little, so the variance is
    the larger of the seeds' and the noise floor's, and the pairs behind the noise floor add their degrees of freedom (a
    moderated t: Smyth 2004, doi:10.2202/1544-6115.1027). With one seed the noise floor alone gives the width.

    Args:
        gaps: ``divergence.loss_gap`` of each seed; positive where the policy's loss ends higher than FP32's.
        noise_floor: ``divergence.noise_floor`` of the same windows.
        tolerance: the largest relative gap accepted.
        noise_pairs: pairs of FP32 runs behind the noise floor.
        confidence: of the two-sided interval.

    Returns:
        Passed where the whole interval lies under the limit, rejected where it lies above, inconclusive otherwise.

    Raises:
        ValueError: no gaps.
    """
    if not gaps:
        raise ValueError("a verdict needs the gap of at least one seed")
    limit = max(tolerance, noise_floor)
    num_seeds = len(gaps)
    if not all(math.isfinite(gap) for gap in gaps):
        bad = sum(not math.isfinite(gap) for gap in gaps)
        text = f"Rejected: the loss became NaN or infinite on {bad} of {num_seeds} {_seeds(num_seeds)}."
        return _verdict("rejected", (math.inf,) * 3, tolerance, noise_floor, num_seeds, text)
    mean = float(np.mean(gaps))
    own = float(np.var(gaps, ddof=1)) if num_seeds > 1 else 0.0
    spread = math.sqrt(max(own, (noise_floor / NOISE_SIGMAS) ** 2))
    freedom = max(num_seeds - 1 + noise_pairs, 1)
    half = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * spread / math.sqrt(num_seeds)
    low, high = mean - half, mean + half
    status = "passed" if high <= limit else "rejected" if low > limit else "inconclusive"
    text = _text(status, mean, low, high, limit, num_seeds)
    if noise_floor > USELESS_NOISE:
        status, text = (
            "inconclusive",
            f"Inconclusive: two FP32 runs of this window differ by {noise_floor:.0%}, so it cannot judge.",
        )
    return _verdict(status, (mean, low, high), tolerance, noise_floor, num_seeds, text)


def _verdict(
    status: str, interval: tuple[float, float, float], tolerance: float, noise_floor: float, num_seeds: int, text: str
) -> Verdict:
    gap, low, high = interval
    data = {"status": status, "loss_gap": gap, "low": low, "high": high, "tolerance": tolerance, "noise_floor": noise_floor}
    return Verdict.model_validate({**data, "seeds": num_seeds, "text": text})


def _text(status: str, mean: float, low: float, high: float, limit: float, num_seeds: int) -> str:
    side = "above" if mean >= 0 else "below"
    ends = f"{abs(mean):.2%} {side} FP32's" if abs(mean) >= VISIBLE_GAP else "as FP32's does"
    figures = f"the loss ends {ends} (95% interval {low:+.2%} to {high:+.2%}, {num_seeds} {_seeds(num_seeds)})"
    return {
        "passed": f"Passed: {figures}, within the limit of {limit:.2%}.",
        "rejected": f"Rejected: {figures}, over the limit of {limit:.2%}.",
        "inconclusive": f"Inconclusive: {figures}; the limit of {limit:.2%} lies inside the interval. Longer windows or more "
        "seeds would tell.",
    }[status]


def _seeds(count: int) -> str:
    return "seed" if count == 1 else "seeds"


def speed_ratio(
    baseline_times_s: Sequence[float],
    candidate_times_s: Sequence[float],
    *,
    baseline_block_steps: Sequence[int] = (),
    candidate_block_steps: Sequence[int] = (),
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float, float]:
    """How many times faster the candidate's steps are, with an interval.

    Interleaved arms: steps of one block share its clocks, its temperature and whatever else ran, so a block counts once, with the
    logarithm of its median step time. Neighbouring blocks of both arms share the drift, so their differences are what is drawn:
    the ratio is the median of the pairs' ratios, which one disturbed block does not move, and its interval a bootstrap over pairs
    (``scipy.stats.bootstrap``, percentiles). A plain percentile interval of six pairs misses the truth in 16% of cases, as it knows
    neither Student's t nor that the resampled spread is too small by (n-1)/n; so the level asked of it is widened by both
    (Hesterberg 2015, doi:10.1080/00031305.2015.1089789, section 5.3). BCa and bootstrap-t were tried: both lose more than they mend
    where a few blocks are disturbed, and BCa is undefined for equal samples. With six or seven pairs the interval runs from the
    least to the largest ratio. Fewer pairs than six give Student's t. Arms with unequal numbers of blocks are drawn each on its own.

    Arms without blocks, or with one: blocks of n^(1/3) consecutive steps are drawn (circular block bootstrap, Politis and Romano
    1992; percentile interval), and the ratio is that of the median step times.

    Args:
        baseline_times_s: step times of the arm compared against, seconds, in the order taken.
        candidate_times_s: step times of the arm judged.
        baseline_block_steps: how many of the baseline's steps each of its blocks holds, in order.
        candidate_block_steps: the same for the candidate.
        confidence: of the two-sided interval.
        seed: of the resampling; the same samples give the same interval.

    Returns:
        Ratio, low, high; above 1 the candidate is faster.

    Raises:
        ValueError: an arm has no samples, or its blocks do not make up its samples.
    """
    if not len(baseline_times_s) or not len(candidate_times_s):
        raise ValueError("both arms need at least one step time")
    baseline = _log_block_medians(baseline_times_s, baseline_block_steps)
    candidate = _log_block_medians(candidate_times_s, candidate_block_steps)
    if min(len(baseline), len(candidate)) < 2:
        return _ratio_of_steps(baseline_times_s, candidate_times_s, confidence, seed)
    paired = len(baseline) == len(candidate)
    arms = (baseline - candidate,) if paired else (baseline, candidate)
    return _ratio_of_blocks(arms, confidence, seed)


def is_different(low: float, high: float) -> bool:
    """Whether an interval of ``speed_ratio`` says that two arms differ in speed, and by more than a trifle."""
    return is_faster(low) or high < 1.0 - TRIFLING_DIFFERENCE


def is_faster(low: float) -> bool:
    """Whether the lower end of an interval of ``speed_ratio`` says that the candidate is faster, and by more than a trifle."""
    return low > 1.0 + TRIFLING_DIFFERENCE


def _log_block_medians(times_s: Sequence[float], block_steps: Sequence[int]) -> NDArray[np.float64]:
    """Logarithm of each block's median step time; empty where there are no blocks."""
    if not len(block_steps):
        return np.empty(0)
    if min(block_steps) < 1 or sum(block_steps) != len(times_s):
        raise ValueError(f"blocks of {list(block_steps)} steps do not make up {len(times_s)} steps")
    blocks = np.split(np.asarray(times_s, dtype=np.float64), np.cumsum(block_steps)[:-1])
    return np.log([np.median(block) for block in blocks])


def _ratio_of_blocks(arms: tuple[NDArray[np.float64], ...], confidence: float, seed: int) -> tuple[float, float, float]:
    """The ratio and its interval from one sample of log ratios, or from two of log times."""
    least = min(len(arm) for arm in arms)
    value = _difference_of_medians(*arms)
    if least < LEAST_BLOCKS_TO_DRAW:
        low, high = _students_interval(arms, confidence)
        return math.exp(_difference_of_means(arms)), math.exp(low), math.exp(high)
    # Hesterberg's widened level: Student's t for the normal quantile, times sqrt(n / (n-1)).
    quantile = math.sqrt(least / (least - 1)) * float(stats.t.ppf(0.5 + confidence / 2, least - 1))
    level = 1 - 2 * float(stats.norm.sf(quantile))
    drawn = stats.bootstrap(
        arms,
        _difference_of_medians,
        n_resamples=BLOCK_RESAMPLES,
        vectorized=True,
        confidence_level=level,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return math.exp(value), math.exp(drawn.low), math.exp(drawn.high)


def _difference_of_medians(*arms: NDArray[np.float64], axis: int = -1) -> Any:
    medians = [np.median(arm, axis=axis) for arm in arms]
    return medians[0] if len(medians) == 1 else medians[0] - medians[1]


def _difference_of_means(arms: tuple[NDArray[np.float64], ...]) -> float:
    means = [float(np.mean(arm)) for arm in arms]
    return means[0] if len(means) == 1 else means[0] - means[1]


def _students_interval(arms: tuple[NDArray[np.float64], ...], confidence: float) -> tuple[float, float]:
    """Student's t around the mean of one sample, or around the difference of two with the degrees of freedom of the smaller one."""
    freedom = min(len(arm) for arm in arms) - 1
    spread = math.sqrt(sum(float(np.var(arm, ddof=1)) / len(arm) for arm in arms))
    half = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * spread
    mean = _difference_of_means(arms)
    return mean - half, mean + half


def _ratio_of_steps(
    baseline_times_s: Sequence[float], candidate_times_s: Sequence[float], confidence: float, seed: int
) -> tuple[float, float, float]:
    rng = np.random.default_rng(seed)
    medians = [_resampled_medians(np.asarray(times), rng) for times in (baseline_times_s, candidate_times_s)]
    ratio = float(np.median(baseline_times_s) / np.median(candidate_times_s))
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians[0] / medians[1], [tail, 1 - tail])
    return ratio, float(low), float(high)


def _resampled_medians(times: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    count = len(times)
    block = max(1, round(count ** (1 / 3)))
    starts = rng.integers(0, count, size=(BOOTSTRAP_RESAMPLES, -(-count // block)))
    rows = (starts[:, :, np.newaxis] + np.arange(block)).reshape(BOOTSTRAP_RESAMPLES, -1)[:, :count] % count
    medians: NDArray[np.float64] = np.median(times[rows], axis=1)
    return medians
