"""What the final comparison is between: arms, how far each is from plain FP32, and their names."""

from __future__ import annotations

from autoprec.policy import Execution, Policy
from autoprec.records import Failure, Measurement, Outcome, Verdict
from autoprec.session.context import Context
from autoprec.tune.choice import Arm

RANK_FP32, RANK_TF32, RANK_STOCK, RANK_BASELINE, RANK_TUNED, RANK_COMPILED = range(6)
STOCK_RANKS = {"fp32": RANK_FP32, "fp32_tf32": RANK_TF32, "amp_fp16": RANK_STOCK, "amp_bf16": RANK_STOCK}
BASELINE_NAMES = {
    "fp32": "FP32",
    "fp32_tf32": "FP32 + TF32",
    "amp_fp16": "stock AMP fp16",
    "amp_bf16": "stock AMP bf16",
}
EXECUTION_NAMES: dict[Execution, str] = {"eager": "", "compile": ", compiled", "compile_cudagraphs": ", CUDA graphs"}
# Seeds are added while a verdict is inconclusive, up to this many. Own choice: the interval shrinks with the root of the number.
MAX_SEEDS = 6
# Extra seeds and timings run only while more than this share of the budget is left.
EXTRA_SEEDS_SHARE = 0.25
# A compiled window may take this much longer than an eager one.
COMPILE_TIMEOUT_S = 300.0


def arm_of(context: Context, name: str, policy: Policy, rank: int, outcome: Outcome, verdict: Verdict | None) -> Arm:
    """An arm from what one of its windows gave: its step times, or why it has none."""
    if isinstance(outcome, Failure):
        return Arm(name=name, policy=policy, rank=rank, speed_origin=context.target.timing, failure=why(outcome))
    return Arm(
        name=name,
        policy=policy,
        rank=rank,
        step_times_s=outcome.step_times_s,
        block_steps=outcome.block_steps,
        useful_share=useful_share(outcome),
        speed_origin=outcome.speed_origin,
        peak_bytes=outcome.peak_bytes,
        verdict=verdict,
        host_bound=outcome.host_bound,
    )


def useful_share(measurement: Measurement) -> float:
    """Share of steps that did work, counted over the second half: a scale that settles at the start costs a long run nothing."""
    if not measurement.losses:
        return 1.0
    return max(0.0, 1.0 - measurement.late_skipped_steps / max(len(measurement.losses) - len(measurement.losses) // 2, 1))


def why(outcome: Outcome) -> str:
    """Why a window failed; empty where it did not."""
    if not isinstance(outcome, Failure):
        return ""
    where = f" in {outcome.layer}" if outcome.layer else ""
    return f"{outcome.kind}{where}: {outcome.message}"


def is_unclear(verdict: Verdict | None) -> bool:
    """Whether more seeds could decide."""
    return verdict is not None and verdict.status == "inconclusive"
