"""Verdicts: whether a policy trains like FP32, and how many times faster one arm is than another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from autoprec.records import Verdict
from autoprec.tune.divergence import NOISE_SIGMAS

DEFAULT_TOLERANCE = 0.01
CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 2000
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
    return _verdict(
        status, (mean, low, high), tolerance, noise_floor, num_seeds, _text(status, mean, low, high, limit, num_seeds)
    )


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
    baseline_times_s: Sequence[float], candidate_times_s: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float, float]:
    """How many times faster the candidate's steps are: ratio of median step times with a bootstrap interval.

    Neighbouring steps are alike (clocks, caches), so blocks of n^(1/3) consecutive steps are drawn, not single ones (circular
    block bootstrap, Politis and Romano 1992; percentile interval).

    Args:
        baseline_times_s: step times of the arm compared against, seconds, in the order taken.
        candidate_times_s: step times of the arm judged.
        confidence: of the two-sided interval.
        seed: of the resampling; the same samples give the same interval.

    Returns:
        Ratio, low, high; above 1 the candidate is faster.

    Raises:
        ValueError: an arm has no samples.
    """
    if not len(baseline_times_s) or not len(candidate_times_s):
        raise ValueError("both arms need at least one step time")
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
