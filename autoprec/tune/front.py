"""What a study found: the Pareto front, its hypervolume, and the finalists worth verifying."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.records import Candidate, Failure
from autoprec.tune.yardstick import Yardstick


@dataclass(frozen=True)
class Scored:
    """A candidate with its two objectives: throughput in samples/s (up) and divergence (down); feasible or not."""

    candidate: Candidate
    samples_per_s: float
    divergence: float
    feasible: bool


def score(candidates: Iterable[Candidate], yardstick: Yardstick) -> list[Scored]:
    """Scores candidates; a failure has no throughput, infinite divergence and is not feasible."""
    scored = []
    for candidate in candidates:
        outcome = candidate.outcome
        if isinstance(outcome, Failure):
            scored.append(Scored(candidate, 0.0, math.inf, False))
            continue
        feasible = yardstick.feasible(outcome)
        scored.append(Scored(candidate, outcome.samples_per_s, yardstick.divergence(outcome), feasible))
    return scored


def pareto(scored: Iterable[Scored]) -> list[Scored]:
    """The feasible candidates that none beats in both objectives, fastest first; of equals the first stays."""
    front: list[Scored] = []
    for item in sorted((s for s in scored if s.feasible), key=lambda s: (-s.samples_per_s, s.divergence, s.candidate.number)):
        if not front or item.divergence < front[-1].divergence:
            front.append(item)
    return front


def hypervolume(points: Iterable[tuple[float, float]], reference: tuple[float, float]) -> float:
    """Area between points (throughput up, divergence down) and a reference that every counted point beats.

    Args:
        points: (samples/s, divergence) pairs; those not better than the reference in both add nothing.
        reference: the worst corner: a low throughput and a high divergence.

    Returns:
        The area in samples/s times divergence.
    """
    slowest, worst = reference
    area, lowest = 0.0, worst
    for speed, divergence in sorted(points, key=lambda point: (-point[0], point[1])):
        if speed > slowest and divergence < lowest:
            area += (speed - slowest) * (lowest - divergence)
            lowest = divergence
    return area


def kind_of(policy: Policy) -> tuple[str, bool]:
    """What sort of policy it is for choosing finalists: the type most layers compute in, and the memory layout."""
    counts = {"fp32": 0, "fp16": 0, "bf16": 0}
    for precision in (policy.default, *policy.precisions().values()):
        counts[precision.removesuffix("_pure")] += 1
    return max(counts, key=lambda name: counts[name]), policy.backend.channels_last


def finalists(scored: Sequence[Scored], k: int = 4) -> list[Scored]:
    """Up to ``k`` feasible candidates for verification, of different kinds.

    What is fastest in eager mode is often not fastest compiled, so the fastest of each kind (compute type, layout) comes
    first, in order of speed; remaining places go to the next fastest, one a policy.
    """
    ranked, seen = [], set()
    for item in sorted((s for s in scored if s.feasible), key=lambda s: (-s.samples_per_s, s.candidate.number)):
        if (key := item.candidate.policy.setup_hash()) not in seen:
            seen.add(key)
            ranked.append(item)
    heads = list({kind_of(item.candidate.policy): item for item in reversed(ranked)}.values())
    heads.sort(key=lambda s: (-s.samples_per_s, s.candidate.number))
    rest = [item for item in ranked if item not in heads]
    return (heads + rest)[:k]
