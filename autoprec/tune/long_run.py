"""A verification over a long run: raw losses of FP32, its twins and a policy, what they say, and its file ``verify.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from autoprec.errors import RunFolderError
from autoprec.policy import Origin, Policy, write_atomically
from autoprec.records import UNDECIDED_FAILURES, Environment, Failure, Outcome, Record, Verdict, VerdictStatus
from autoprec.tune.divergence import loss_gap, noise_floor
from autoprec.tune.rows import failure_words
from autoprec.tune.verdict import judge

Role = Literal["fp32", "fp32_twin", "fp32_tf32", "policy"]
ROLE_NAMES: dict[Role, str] = {
    "fp32": "FP32",
    "fp32_twin": "FP32, initial weights moved by rounding-size noise",
    "fp32_tf32": "FP32 with TF32",
    "policy": "the policy",
}
VERIFY_FILE = "verify.json"
FOLDER_PREFIX = "verify-"


class Run(Record):
    """One training.

    Attributes:
        seed: of initial weights, data order and dropout.
        losses: of every step; of the steps before the failure where it failed.
        failure: why it did not get to its end.
        loss_gap: relative to FP32 on the same seed, over the last part of the run; None for FP32 itself and for failures.
        skipped_steps: optimizer steps that the loss scaler skipped.
        final_scale: loss scale at the end.
        note: what a person should know about its samples.
    """

    seed: int
    losses: tuple[float, ...]
    failure: Failure | None = None
    loss_gap: float | None = None
    skipped_steps: int = 0
    final_scale: float | None = None
    note: str = ""


class Trained(Record):
    """One set-up with a training a seed, in the order of the seeds."""

    role: Role
    runs: tuple[Run, ...] = ()

    @property
    def gaps(self) -> tuple[float, ...]:
        """The loss gaps of the seeds that got to their end."""
        return tuple(run.loss_gap for run in self.runs if run.loss_gap is not None)

    @property
    def failed(self) -> Run | None:
        """The first seed that failed."""
        return next((run for run in self.runs if run.failure is not None), None)


class Timed(Record):
    """The speed of one arm, and how many times faster the policy's steps are (with a 95% interval where measured)."""

    name: str
    step_times_s: tuple[float, ...] = ()
    samples_per_s: float | None = None
    speed_origin: Origin
    policy_ratio: float | None = None
    policy_ratio_low: float | None = None
    policy_ratio_high: float | None = None
    failure: str = ""
    note: str = ""


class Noise(Record):
    """What FP32 differs from itself by.

    Attributes:
        floor: twice the root mean square of the gaps that count; relative.
        pairs: how many count.
        tf32_counts: whether TF32's do; only where TF32 itself trains like FP32.
        text: which pairs count, and why not the others.
    """

    floor: float
    pairs: int
    tf32_counts: bool
    text: str


class LongRun(Record):
    """All that is known of one verification.

    Attributes:
        name: of its folder.
        status: the answer; ``text`` says it with its figures.
        verdict: from the loss gaps; None where the policy failed on a seed.
        policy: what was verified, as it was trained; ``policy_file`` is where it came from.
        changes: what is not as in that file (execution, on a machine that cannot compile it).
        workload: reference of the model's file.
        target: the card it is about.
        numerics: where losses come from and what speed is worth.
        warnings: what is not as it was when the policy was made.
        notes: further things a reader should know.
        steps: of every training; ``steps_chosen`` says by whom.
        seeds: that were asked for; more are trained while the verdict is unclear.
        tolerance: relative loss gap allowed, where FP32's own noise is smaller.
        arms: every training, FP32 first.
        noise: FP32 against itself.
        speeds: the arms that were timed.
        environment: device, driver, versions.
        command: the command line; ``created`` is when, in UTC.
    """

    name: str
    status: VerdictStatus
    text: str
    verdict: Verdict | None
    policy: Policy
    policy_file: str
    changes: tuple[str, ...] = ()
    workload: str
    target: str
    numerics: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    steps: int
    steps_chosen: str
    seeds: int
    tolerance: float
    arms: tuple[Trained, ...]
    noise: Noise
    speeds: tuple[Timed, ...] = ()
    environment: Environment
    command: str = ""
    created: str = ""
    autoprec_version: str = ""

    def arm(self, role: Role) -> Trained:
        """The arm of a role; without runs where it was not trained."""
        return next((arm for arm in self.arms if arm.role == role), Trained(role=role))

    @property
    def limit(self) -> float:
        """The relative gap that really was allowed."""
        return max(self.tolerance, self.noise.floor)


def run_of(seed: int, outcome: Outcome, reference: Sequence[float] | None = None) -> Run:
    """What a window gave; its gap is taken against ``reference``, the FP32 losses of the same seed."""
    if isinstance(outcome, Failure):
        return Run(seed=seed, losses=outcome.losses, failure=outcome)
    return Run(
        seed=seed,
        losses=outcome.losses,
        loss_gap=None if reference is None else loss_gap(reference, outcome.losses),
        skipped_steps=outcome.skipped_steps,
        final_scale=outcome.final_scale,
        note=outcome.note,
    )


def noise_of(arms: Sequence[Trained], tolerance: float) -> Noise:
    """FP32's noise from its twins, and from TF32 where TF32 itself trains like FP32.

    Where TF32 departs beyond rounding noise and tolerance, the model is sensitive to precision, and to count that as noise would
    let any policy pass.
    """
    by_role = {arm.role: arm for arm in arms}
    reference, twin = by_role["fp32"], by_role["fp32_twin"]
    pairs = _pairs(reference, twin)
    rounding = noise_floor(pairs)
    text = f"{_count(len(pairs), 'pair')} of FP32 runs whose initial weights differ by rounding-size noise"
    tf32 = by_role.get("fp32_tf32")
    if tf32 is None or not tf32.runs:
        return Noise(floor=rounding, pairs=len(pairs), tf32_counts=False, text=text)
    if tf32.failed is not None:
        return Noise(floor=rounding, pairs=len(pairs), tf32_counts=False, text=f"{text}; TF32 failed and does not count")
    judged = judge(tf32.gaps, rounding, tolerance=tolerance, noise_pairs=len(pairs))
    if judged.status != "passed":
        text += f"; TF32 departs by {judged.loss_gap:+.2%}, too far to count as noise"
        return Noise(floor=rounding, pairs=len(pairs), tf32_counts=False, text=text)
    more = _pairs(reference, tf32)
    text += f", and {_count(len(more), 'pair')} of FP32 without and with TF32"
    return Noise(floor=noise_floor([*pairs, *more]), pairs=len(pairs) + len(more), tf32_counts=True, text=text)


def verdict_of(policy: Trained, noise: Noise, tolerance: float) -> tuple[VerdictStatus, str, Verdict | None]:
    """The answer: status, text, and the verdict over the gaps; None where the policy failed on a seed."""
    lost = policy.failed
    if lost is None:
        verdict = judge(policy.gaps, noise.floor, tolerance=tolerance, noise_pairs=noise.pairs)
        return verdict.status, verdict.text, verdict
    assert lost.failure is not None
    kind = lost.failure.kind.replace("_", " ")
    text = f"the policy's run on seed {lost.seed} failed ({kind}): {failure_words(lost.failure)}"
    if lost.failure.kind in UNDECIDED_FAILURES:
        return "inconclusive", f"Inconclusive: {text}. The same command tries it again.", None
    return "rejected", f"Rejected: {text}.", None


def _pairs(reference: Trained, other: Trained) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    losses = {run.seed: run.losses for run in reference.runs}
    return [(losses[run.seed], run.losses) for run in other.runs if run.failure is None and run.seed in losses]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def write_long_run(folder: Path, run: LongRun) -> Path:
    """Writes ``verify.json``; returns its path. Raises OSError where it cannot."""
    path = folder / VERIFY_FILE
    write_atomically(path, run.model_dump_json(indent=1) + "\n")
    return path


def read_long_run(folder: Path) -> LongRun:
    """Reads ``verify.json``.

    Raises:
        RunFolderError: there is none, or it cannot be read.
    """
    path = folder / VERIFY_FILE
    try:
        return LongRun.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise RunFolderError(f"Cannot read {path}: {first}", hint="Run 'autoprec verify' again to write it anew.") from None


def long_run_folders(run_folder: Path) -> list[Path]:
    """The folders of finished verifications inside a run's folder, oldest first."""
    found = [
        path for path in run_folder.glob(f"{FOLDER_PREFIX}*") if (path / VERIFY_FILE).is_file() and _number(path) is not None
    ]
    return sorted(found, key=lambda path: _number(path) or 0)


def _number(path: Path) -> int | None:
    number = path.name.removeprefix(FOLDER_PREFIX)
    return int(number) if number.isdecimal() else None
