"""``verify``: the long run before a big training, on a new card or with a new torch: does a policy still train like FP32?"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoprec import __version__
from autoprec.bench.bench import LongRunBench
from autoprec.bench.environment import environment
from autoprec.bench.source import check_reference
from autoprec.bench.target import Target, resolve_target_of
from autoprec.errors import PolicyMismatch, RunFolderError
from autoprec.policy import Policy
from autoprec.records import Look, Measurement, Verdict, VerdictStatus
from autoprec.session.arms import COMPILE_TIMEOUT_S
from autoprec.session.budget import LEAST_TIMEOUT_S
from autoprec.session.context import Context, Measuring
from autoprec.session.logbook import Logbook
from autoprec.session.long_run_arms import Job, timed_arms, trained_arms
from autoprec.session.long_run_settings import DEFAULT_SEEDS, Given, VerifySettings, chosen_steps, given_policy
from autoprec.session.opening import PROBES, Interrupted, first_look, fp32_that_fits, opened_bench, probed, workload_name
from autoprec.session.progress import Progress, Silent
from autoprec.session.settings import Plan, Settings
from autoprec.tune import quantities
from autoprec.tune.describe import EXECUTION_WORDS, fingerprint_warnings
from autoprec.tune.folder_lock import FolderLock
from autoprec.tune.identity import Identity, default_path, differences
from autoprec.tune.long_run import FOLDER_PREFIX, LongRun, noise_of, verdict_of, write_long_run
from autoprec.tune.long_run_page import PAGE_FILE, PICTURE_FILE, write_pages
from autoprec.tune.long_run_section import sections_of
from autoprec.tune.report import write_report
from autoprec.tune.report_data import read_report_data
from autoprec.tune.run_folder import RunFolder, make_folder
from autoprec.tune.study_space import fingerprint_of, has_tf32
from autoprec.tune.verdict import DEFAULT_TOLERANCE

# Steps of an arm when arms are timed in turns; the same as a tune's.
TIMED_STEPS = 62
# A window that takes this many times what FP32's probe foretold hangs. Own choice: a policy may be slow on another card.
TIMES_FORETOLD = 20.0


@dataclass(frozen=True)
class VerifyResult:
    """What a verification ends in.

    Attributes:
        long_run: every loss and what it says; ``verify.json`` holds the same.
        folder: of the evidence.
        run_report: the report of the policy's run, written again with this verification in it; None where there is none.
    """

    long_run: LongRun
    folder: Path
    run_report: Path | None = None

    @property
    def status(self) -> VerdictStatus:
        return self.long_run.status

    @property
    def verdict(self) -> Verdict | None:
        return self.long_run.verdict

    @property
    def page_path(self) -> Path:
        return self.folder / PAGE_FILE

    @property
    def picture_path(self) -> Path:
        return self.folder / PICTURE_FILE


def verify(
    policy: str | os.PathLike[str] | Policy,
    workload: Any,
    *,
    steps: int | None = None,
    seeds: int = DEFAULT_SEEDS,
    tolerance: float = DEFAULT_TOLERANCE,
    gpu: str | None = None,
    predict: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Trains FP32, FP32's twins and a policy for many steps from the same start, and says whether the policy tracks FP32.

    For before a big training, and on a new card or torch version. What was measured is kept as it happens: the same call carries
    on where an earlier one stopped.

    Args:
        policy: path of a policy.json or of a run's folder, or the policy itself.
        workload: as in ``tune``.
        steps: of every training; None is ten times the tune's trial window, or 1,200.
        seeds: trainings of every set-up; up to twice as many while the verdict is unclear.
        tolerance: relative loss gap to FP32 that passes, unless FP32's own noise is larger.
        gpu: a card's name, ``cpu``, or None for the CUDA device here (without one the CPU stands in for the policy's card).
        predict: allow another CUDA card to stand in for the one named.
        out: folder of the evidence; None is ``verify-<n>`` in the run's folder, or beside the policy.
        progress: is told what happens; None is silent.

    Raises:
        UserError: something given is wrong, the policy is for another model, or FP32 itself does not train.
    """
    settings = VerifySettings(
        policy=policy,
        workload=workload,
        steps=steps,
        seeds=seeds,
        tolerance=tolerance,
        gpu=gpu,
        predict=predict,
        out=Path(out) if out is not None else None,
    )
    return run_verify(settings, progress or Silent())


def run_verify(settings: VerifySettings, progress: Progress) -> VerifyResult:
    """Runs a verification as the settings say; see ``verify``."""
    given = given_policy(settings.policy)
    target = resolve_target_of(given.policy.fingerprint, settings.gpu, predict=settings.predict)
    check_reference(settings.workload)
    steps, steps_chosen = chosen_steps(settings, given.run)
    policy, changes = _runnable(given.policy, target)
    base = _base(settings, given, target)
    logbook = Logbook(progress)
    with opened_bench(settings.workload, target, LongRunBench, base / "verify.log") as bench:
        warnings = _head(given, target, logbook)
        look = first_look(bench, target, logbook)
        warnings += _said(logbook, fingerprint_warnings(given.policy, workload_sha256=look.workload_sha256))
        _said(logbook, changes)
        warnings += _said(logbook, _slow(policy, target))
        _check_fits(bench, policy, look)
        identity = _identity(settings, policy, target, look, steps)
        with RunFolder.open(settings.out or _numbered(base, identity), identity) as folder:
            try:
                logbook.found(f"verify: {steps:,} steps ({steps_chosen}) on {settings.seeds} seeds; evidence in {folder.path}")
                tf32 = _tf32_is_here(target)
                compiles = policy.execution != "eager"
                length = _Length(steps, settings.seeds, arms=4 if tf32 else 3, compiles=compiles)
                plan = _plan(bench, folder, look, length, logbook)
                asked = Settings(workload=settings.workload, tolerance=settings.tolerance, budget_s=math.inf)
                context = Context(asked, target, bench, look, plan, folder, logbook, time.monotonic())
                job = Job(context, policy, tf32)
                about = _About(settings, given, steps_chosen, warnings, changes)
                return _written(job, about, _measured(job, about))
            except KeyboardInterrupt:
                raise Interrupted(
                    f"Stopped. {len(folder.candidates)} finished windows are kept in {folder.path}.",
                    hint="Run the same command again to go on from there.",
                ) from None


@dataclass(frozen=True)
class _About:
    """What the record says besides samples."""

    settings: VerifySettings
    given: Given
    steps_chosen: str
    warnings: tuple[str, ...]
    changes: tuple[str, ...]


def _runnable(policy: Policy, target: Target) -> tuple[Policy, tuple[str, ...]]:
    """The policy as it can run here, and what that changes."""
    if target.device == "cuda" or policy.execution == "eager":
        return policy, ()
    words = EXECUTION_WORDS[policy.execution]
    text = (
        f"The policy runs under {words}. There is no CUDA device here, so its eager numerics are verified, not the compiled ones."
    )
    return policy.model_copy(update={"execution": "eager"}), (text,)


def _slow(policy: Policy, target: Target) -> tuple[str, ...]:
    used = {policy.default, *(setting.precision for setting in policy.layers.values())}
    slow = sorted(used - set(target.precisions))
    return (f"{', '.join(slow)} is nothing that {target.name} computes at a useful speed.",) if slow else ()


def _base(settings: VerifySettings, given: Given, target: Target) -> Path:
    """The folder that holds the evidence, or its numbered folders."""
    beside = given.path.parent if given.path is not None else None
    named = default_path(workload_name(settings.workload), target.gpu.key if target.gpu else target.name)
    base = settings.out or beside or named
    make_folder(base)
    if not os.access(base, os.W_OK):
        raise RunFolderError(f"Cannot write into {base}.", hint="Give a folder that you may write to with --out.")
    return base


def _head(given: Given, target: Target, logbook: Logbook) -> tuple[str, ...]:
    """Says what was tuned where and what is here; returns what is not the same."""
    made, here = given.policy.fingerprint, environment(target.device)
    device = here.device if target.timing == "measured" else target.device_name
    stands_in = "" if target.timing == "measured" else f" ({here.device} stands in for it)"
    logbook.found(
        f"policy: {given.name}, tuned on {made.device} with torch {made.torch_version}; "
        f"here {device}{stands_in} with torch {here.torch_version}"
    )
    for note in target.notes:
        logbook.found(f"policy: {note}")
    return _said(logbook, fingerprint_warnings(given.policy, torch_version=here.torch_version, device=device))


def _said(logbook: Logbook, texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        logbook.found(f"Note: {text}")
    return texts


def _check_fits(bench: Measuring, policy: Policy, look: Look) -> None:
    """Refuses a policy for another model before anything long begins; whatever else goes wrong belongs to the run itself.

    Raises:
        PolicyMismatch: other layers, or another batch.
    """
    try:
        bench.window(policy.model_copy(update={"execution": "eager"}), PROBES[0])
    except PolicyMismatch as error:
        hint = "Give the model.py that the policy was tuned with, or run 'autoprec tune' on this one."
        raise PolicyMismatch(error.message, hint=hint) from None
    if policy.batch.effective != look.effective_batch:
        raise PolicyMismatch(
            f"The policy was tuned for batches of {policy.batch.effective} samples; the model's file gives {look.effective_batch}.",
            hint=f"Set BATCH_SIZE = {policy.batch.effective} in the model's file, or tune again with the batch you train with.",
        )


def _identity(settings: VerifySettings, policy: Policy, target: Target, look: Look, steps: int) -> Identity:
    here = environment(target.device)
    return Identity(
        workload=str(settings.workload),
        workload_sha256=look.workload_sha256,
        layer_list_sha256=fingerprint_of(look).layer_list_sha256,
        search_space_sha256="",
        target=f"{target.name} ({target.timing})",
        torch_version=look.torch_version,
        settings={
            "policy": policy.setup_hash(),
            "steps": steps,
            "device": here.device,
            "driver": here.driver,
            "cuda": here.cuda_version,
        },
        budget={"seeds": settings.seeds, "tolerance": settings.tolerance},
        command=shlex.join(sys.argv),
        autoprec_version=__version__,
    )


def _numbered(base: Path, identity: Identity) -> Path:
    """The folder of an equal verification, to be carried on, or the next free one."""
    for number in itertools.count(1):
        path = base / f"{FOLDER_PREFIX}{number}"
        if not path.exists():
            return path
        try:
            if not differences(RunFolder.read(path).identity, identity):
                return path
        except RunFolderError:  # something else under that name, or of another version
            continue
    raise AssertionError("counting does not end")


@dataclass(frozen=True)
class _Length:
    """How much is trained: steps of a training, seeds, set-ups a seed; and whether one of them is compiled."""

    steps: int
    seeds: int
    arms: int
    compiles: bool


def _plan(bench: Measuring, folder: RunFolder, look: Look, length: _Length, logbook: Logbook) -> Plan:
    """The lengths of an earlier session of the folder, or from what FP32 takes."""
    known = folder.load_stage("plan", Plan)
    if known is not None:
        return known
    fp32 = fp32_that_fits(bench, look)
    probe = probed(bench, fp32)
    foretold_s = probe.overhead_s + probe.step_s * length.steps
    whole = quantities.duration(length.seeds * length.arms * foretold_s)
    logbook.found(f"verify: {whole} if every set-up takes as long as FP32 and the verdict is clear")
    plan = Plan(
        trial_steps=length.steps,
        trial_warmup_steps=min(8, length.steps // 3),
        verify_steps=length.steps,
        verify_seeds=length.seeds,
        # Not as long as a training, or the folder's memory could not tell the two apart.
        timed_steps=TIMED_STEPS if length.steps != TIMED_STEPS else TIMED_STEPS - 1,
        timeout_s=max(LEAST_TIMEOUT_S, TIMES_FORETOLD * foretold_s) + (COMPILE_TIMEOUT_S if length.compiles else 0.0),
        fp32_micro=fp32.batch.micro,
    )
    folder.save_stage("plan", plan)
    return plan


def _tf32_is_here(target: Target) -> bool:
    capability = environment(target.device).capability
    return target.device == "cuda" and has_tf32(True, capability)


def _measured(job: Job, about: _About) -> LongRun:
    """Trains and times, and puts it all into one value."""
    context, settings = job.context, about.settings
    arms = trained_arms(job, settings.seeds, settings.tolerance)
    noise = noise_of(arms, settings.tolerance)
    policy = next(arm for arm in arms if arm.role == "policy")
    status, text, verdict = verdict_of(policy, noise, settings.tolerance)
    context.progress.found(f"verdict: {text}")
    speeds = timed_arms(job) if policy.failed is None else ()
    notes = [note for arm in arms for run in arm.runs if (note := run.note)]
    notes += [
        f"timed in turns, {speed.name}: {speed.note}" for speed in speeds if speed.note and speed.speed_origin == "measured"
    ]
    if about.given.policy.default == "fp32" and not about.given.policy.layers and not about.given.policy.backend.tf32:
        notes.append("The policy is plain FP32: the reference itself, in its own memory layout and batch.")
    samples = (c.outcome for c in reversed(context.folder.candidates) if isinstance(c.outcome, Measurement))
    return LongRun(
        name=context.folder.path.name,
        status=status,
        text=text,
        verdict=verdict,
        policy=job.policy,
        policy_file=about.given.name,
        changes=about.changes,
        workload=str(settings.workload),
        target=context.target.name,
        numerics=context.target.numerics,
        warnings=about.warnings,
        notes=tuple(dict.fromkeys((*context.look.notes, *notes, *context.folder.notes))),
        steps=context.plan.verify_steps,
        steps_chosen=about.steps_chosen,
        seeds=settings.seeds,
        tolerance=settings.tolerance,
        arms=arms,
        noise=noise,
        speeds=speeds,
        environment=next(samples).environment,
        command=shlex.join(["autoprec", *sys.argv[1:]]) if Path(sys.argv[0]).name == "autoprec" else "autoprec.verify(...)",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        autoprec_version=__version__,
    )


def _written(job: Job, about: _About, run: LongRun) -> VerifyResult:
    """Writes the evidence, and the report of the policy's run anew where the evidence lies in it."""
    folder = job.context.folder.path
    try:
        write_long_run(folder, run)
        write_pages(folder, run)
    except OSError as error:
        hint = "Free some space or mend the permissions; the same command writes it from what was measured."
        raise RunFolderError(f"Cannot write into {folder}: {error}", hint=hint) from None
    inside = about.given.run is not None and folder.parent.resolve() == about.given.run.resolve()
    return VerifyResult(run, folder, _into_report(about.given.run, job.context.progress) if inside and about.given.run else None)


def _into_report(run: Path, progress: Progress) -> Path | None:
    """Writes the report of a tune again with its verifications in it; None where it cannot be."""
    try:
        lock = FolderLock(run)
    except RunFolderError as error:
        progress.found(f"The run's report was left as it is: {error.message}")
        return None
    try:
        data = read_report_data(run)
        return write_report(run, data.model_copy(update={"long_runs": sections_of(run)}))
    except RunFolderError as error:
        progress.found(f"The run's report was left as it is: {error.message}")
        return None
    finally:
        lock.release()
