"""The trainings of a verification: FP32, its twins and the policy, seed by seed, and their speed in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.policy import Policy
from autoprec.records import UNDECIDED_FAILURES, Failure, Measurement, Outcome, Window
from autoprec.session.arms import BASELINE_NAMES, COMPILE_TIMEOUT_S, useful_share
from autoprec.session.context import Context
from autoprec.session.reference import ROUNDING, fp32_error
from autoprec.tune.baselines import STOCK_AMP, baseline_policies
from autoprec.tune.long_run import Role, Run, Timed, Trained, noise_of, run_of, verdict_of
from autoprec.tune.rows import failure_words
from autoprec.tune.verdict import USELESS_NOISE, speed_ratio

# While the verdict is unclear, seeds are added up to this many times as many as were asked for. Own choice: as a tune does.
MOST_TIMES_THE_SEEDS = 2
THE_POLICY = "the policy"


@dataclass(frozen=True)
class Job:
    """What is verified, with what runs it; ``tf32`` says whether a TF32 twin means something here."""

    context: Context
    policy: Policy
    tf32: bool

    @property
    def fp32_with_tf32(self) -> Policy:
        """FP32 with TF32 matmuls and convolutions."""
        plain = self.context.plain_fp32()
        return plain.model_copy(update={"backend": plain.backend.model_copy(update={"tf32": True})})


def trained_arms(job: Job, seeds: int, tolerance: float) -> tuple[Trained, ...]:
    """Trains every set-up on every seed; more seeds while the verdict is unclear. A policy that fails ends it.

    Raises:
        WorkloadError: FP32 itself does not train.
    """
    context = job.context
    runs: dict[Role, list[Run]] = {"fp32": [], "policy": [], "fp32_twin": [], "fp32_tf32": []}
    context.progress.stage("long run", seeds * (4 if job.tf32 else 3))
    for seed in range(seeds):
        _train_seed(job, seed, runs)
        if runs["policy"][-1].failure is not None:
            return _arms(runs)
    while len(runs["policy"]) < MOST_TIMES_THE_SEEDS * seeds and _another_seed_may_tell(_arms(runs), tolerance):
        count = len(runs["policy"])
        context.progress.found(f"long run: not clear after {count} {'seed' if count == 1 else 'seeds'}, one more")
        _train_seed(job, count, runs)
    return _arms(runs)


def _another_seed_may_tell(arms: Sequence[Trained], tolerance: float) -> bool:
    policy = next(arm for arm in arms if arm.role == "policy")
    noise = noise_of(arms, tolerance)
    return policy.failed is None and verdict_of(policy, noise, tolerance)[0] == "inconclusive" and noise.floor <= USELESS_NOISE


def _train_seed(job: Job, seed: int, runs: dict[Role, list[Run]]) -> None:
    """All trainings of one seed, the policy's right after FP32's: where it fails, no twin is needed."""
    context = job.context
    window = context.verify_window(seed, "long run of FP32")
    reference = _evaluated(job, context.plain_fp32(), window, "reference")
    if isinstance(reference, Failure):
        raise fp32_error(reference)
    runs["fp32"].append(run_of(seed, reference))
    outcome = _evaluated(job, job.policy, context.verify_window(seed, "long run of the policy"), "verification")
    runs["policy"].append(run_of(seed, outcome, reference.losses))
    _say_seed(job, runs["policy"][-1])
    if isinstance(outcome, Failure):
        return
    twin = _evaluated(
        job, context.plain_fp32(), context.verify_window(seed, "long run of FP32's twin", perturbation=ROUNDING), "reference"
    )
    if isinstance(twin, Failure):
        raise fp32_error(twin)
    runs["fp32_twin"].append(run_of(seed, twin, reference.losses))
    if job.tf32:
        tf32 = _evaluated(job, job.fp32_with_tf32, context.verify_window(seed, "long run of FP32 with TF32"), "reference")
        runs["fp32_tf32"].append(run_of(seed, tf32, reference.losses))


def _say_seed(job: Job, run: Run) -> None:
    if run.failure is not None:
        said = f"{run.failure.kind.replace('_', ' ')}: {failure_words(run.failure)}"
    else:
        said = f"the policy's loss ends {run.loss_gap:+.2%} from FP32's"
    job.context.progress.found(f"long run: seed {run.seed}, {said}")


def _evaluated(job: Job, policy: Policy, window: Window, role: str) -> Outcome:
    """What the folder remembers, or a new window; one that died or hung is tried again."""
    folder = job.context.folder
    known = folder.lookup(policy, window)
    if known is None or (isinstance(known, Failure) and known.kind in UNDECIDED_FAILURES):
        known = job.context.bench.window(policy, window)
        folder.record(role, policy, window, known)
    job.context.progress.advance()
    return known


def _arms(runs: dict[Role, list[Run]]) -> tuple[Trained, ...]:
    return tuple(Trained(role=role, runs=tuple(done)) for role, done in runs.items() if done or role != "fp32_tf32")


def timed_arms(job: Job) -> tuple[Timed, ...]:
    """FP32, stock AMP and the policy: measured in turns in one process, or FP32 and the policy as predicted."""
    context = job.context
    if context.target.timing == "predicted":
        pair = {"FP32": context.plain_fp32(), THE_POLICY: job.policy}
        known = {name: context.folder.lookup(policy, context.verify_window(0, "")) for name, policy in pair.items()}
        return _timed(job, {name: outcome for name, outcome in known.items() if outcome is not None})
    target = context.target
    stock = baseline_policies(context.look, target.precisions, cuda=target.stands_for_cuda, capability=target.capability)
    policies = {
        "FP32": context.plain_fp32(),
        **{BASELINE_NAMES[role]: stock[role] for role in STOCK_AMP if role in stock},
        THE_POLICY: job.policy,
    }
    window = context.timing_window(extra_timeout_s=COMPILE_TIMEOUT_S if job.policy.execution != "eager" else 0.0)
    context.progress.stage("timing", 1)
    outcomes = _interleaved(job, tuple(policies.values()), window)
    context.progress.advance()
    return _timed(job, dict(zip(policies, outcomes, strict=True)))


def _interleaved(job: Job, policies: tuple[Policy, ...], window: Window) -> list[Outcome]:
    folder = job.context.folder
    known = [folder.lookup(policy, window) for policy in policies]
    sound = [item for item in known if item is not None and not (isinstance(item, Failure) and item.kind in UNDECIDED_FAILURES)]
    if len(sound) == len(policies):
        return sound
    outcomes = job.context.bench.interleave(policies, window)
    for policy, outcome in zip(policies, outcomes, strict=True):
        folder.record("timing", policy, window, outcome)
    return outcomes


def _timed(job: Job, outcomes: dict[str, Outcome]) -> tuple[Timed, ...]:
    policy = outcomes.get(THE_POLICY)
    mine = policy if isinstance(policy, Measurement) else None
    made = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            made.append(Timed(name=name, speed_origin=job.context.target.timing, failure=failure_words(outcome)))
            continue
        times_s = _useful_times_s(outcome)
        timed = Timed(
            name=name,
            step_times_s=outcome.step_times_s if outcome.speed_origin == "measured" else outcome.step_times_s[:1],
            samples_per_s=job.context.look.effective_batch / statistics.median(times_s),
            speed_origin=outcome.speed_origin,
            note=outcome.note,
        )
        if mine is not None and name != THE_POLICY:
            ratio, low, high = speed_ratio(
                times_s,
                _useful_times_s(mine),
                baseline_block_steps=outcome.block_steps,
                candidate_block_steps=mine.block_steps,
            )
            measured = outcome.speed_origin == "measured"  # predicted step times are all equal: no interval
            interval = {"policy_ratio_low": low, "policy_ratio_high": high} if measured else {}
            timed = timed.model_copy(update={"policy_ratio": ratio, **interval})
        made.append(timed)
    return tuple(made)


def _useful_times_s(outcome: Measurement) -> tuple[float, ...]:
    """Seconds for one step of useful work: skipped steps stretch the others."""
    share = max(useful_share(outcome), 1e-3)
    return tuple(time_s / share for time_s in outcome.step_times_s)
