"""One row for every evaluated policy: what ``trials.csv``, the report and the notes show of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from autoprec.policy import Execution, Origin, Precision
from autoprec.records import Candidate, Failure, FailureKind, Record, VerdictStatus

Value = str | int | float | bool | None


_ROLE_WORDS = {
    "fp32": "FP32",
    "fp32_tf32": "FP32 + TF32",
    "amp_fp16": "stock AMP fp16",
    "amp_bf16": "stock AMP bf16",
    "pure_fp16": "pure fp16",
    "pure_bf16": "pure bf16",
    "tuned": "tuned policy",
    "start": "starting point",
    "refine": "refinement",
    "fastest_fp16": "fastest fp16 plan",
    "fastest_bf16": "fastest bf16 plan",
    "repaired_fp16": "repaired fp16 plan",
    "repaired_bf16": "repaired bf16 plan",
}
_BASELINES = ("fp32", "fp32_tf32", "amp_fp16", "amp_bf16")
_SUFFIX_WORDS = {
    "_compile_cudagraphs": "compiled with CUDA graphs",
    "_compile": "compiled",
    "_channels_last": "channels_last",
}


def role_words(role: str) -> str:
    """A role as people read it: ``amp_fp16_channels_last`` is "stock AMP fp16, channels_last"; unknown ones stay as they are."""
    endings = []
    for suffix, words in _SUFFIX_WORDS.items():
        if role.endswith(suffix):
            role = role.removesuffix(suffix)
            endings.append(words)
    return ", ".join((_ROLE_WORDS.get(role, role), *reversed(endings)))


def is_baseline(role: str) -> bool:
    """Whether a role is that of a set-up that needs no search: FP32 or stock AMP, in any execution and memory format."""
    for suffix in _SUFFIX_WORDS:
        role = role.removesuffix(suffix)
    return role in _BASELINES


class TrialRow(Record):
    """A candidate as people read it.

    Attributes:
        number: the candidate's number in the run.
        trial: Optuna's trial number; None where it was evaluated outside the study.
        role: what it was for (``amp_fp16``, ``trial``, ...).
        steps: steps of its window; ``seed`` is the window's.
        outcome: ``ok``, or the kind of failure.
        failure: why there are no samples, or an empty string.
        verdict: of the verification, where it was a finalist.
        samples_per_s: throughput, with ``origin`` saying whether it was measured or predicted.
        ratio_to_stock_amp: throughput over that of the better stock AMP of the same run.
        loss_gap: relative departure of its losses from FP32; None for a failure.
        peak_bytes: peak memory.
        num_exceptions: layers that depart from the default precision by a setting of their own.
        params: the study's parameters.
    """

    number: int
    trial: int | None
    role: str
    purpose: str
    steps: int
    seed: int
    outcome: Literal["ok"] | FailureKind
    failure: str = ""
    verdict: VerdictStatus | None = None
    samples_per_s: float | None = None
    ratio_to_stock_amp: float | None = None
    loss_gap: float | None = None
    peak_bytes: int | None = None
    skipped_steps: int | None = None
    final_scale: float | None = None
    origin: Origin | None = None
    default_precision: Precision
    execution: Execution
    num_exceptions: int
    params: dict[str, Value] = Field(default_factory=dict)


def failure_words(failure: Failure) -> str:
    """Its message with the layer and the step, where the message does not name them itself."""
    places = (f"in {failure.layer}" if failure.layer else "", "" if failure.step is None else f"at step {failure.step}")
    return " ".join((failure.message, *(place for place in places if place and place not in failure.message)))


def row_of(
    candidate: Candidate,
    *,
    loss_gap: float | None = None,
    stock_samples_per_s: float | None = None,
    verdict: VerdictStatus | None = None,
    params: Mapping[str, Value] | None = None,
) -> TrialRow:
    """The row of one candidate. A failure keeps its reason and has no figures."""
    policy, outcome = candidate.policy, candidate.outcome
    shared = {
        "number": candidate.number,
        "trial": candidate.trial,
        "role": candidate.role,
        "purpose": candidate.window.purpose,
        "steps": candidate.window.steps,
        "seed": candidate.window.seed,
        "verdict": verdict,
        "default_precision": policy.default,
        "execution": policy.execution,
        "num_exceptions": len(policy.layers),
        "params": dict(params or {}),
    }
    if isinstance(outcome, Failure):
        return TrialRow.model_validate({**shared, "outcome": outcome.kind, "failure": failure_words(outcome)})
    speed = outcome.samples_per_s
    return TrialRow.model_validate(
        {
            **shared,
            "outcome": "ok",
            "failure": "",
            "samples_per_s": speed,
            "ratio_to_stock_amp": speed / stock_samples_per_s if stock_samples_per_s else None,
            "loss_gap": loss_gap,
            "peak_bytes": outcome.peak_bytes,
            "skipped_steps": outcome.skipped_steps,
            "final_scale": outcome.final_scale,
            "origin": outcome.speed_origin,
        }
    )


def rows_of(
    candidates: Iterable[Candidate],
    *,
    loss_gaps: Mapping[int, float],
    stock_samples_per_s: float | None,
    verdicts: Mapping[int, VerdictStatus] | None = None,
    params: Mapping[int, Mapping[str, Value]] | None = None,
) -> tuple[TrialRow, ...]:
    """The rows of a run, in order.

    Args:
        candidates: every candidate of the run.
        loss_gaps: relative departure from FP32 by candidate number.
        stock_samples_per_s: throughput of the better stock AMP; None where none ran.
        verdicts: of the finalists, by candidate number.
        params: the study's parameters, by Optuna's trial number.
    """
    return tuple(
        row_of(
            candidate,
            loss_gap=loss_gaps.get(candidate.number),
            stock_samples_per_s=stock_samples_per_s,
            verdict=(verdicts or {}).get(candidate.number),
            params=(params or {}).get(candidate.trial) if candidate.trial is not None else None,
        )
        for candidate in candidates
    )
