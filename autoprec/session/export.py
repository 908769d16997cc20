"""Stage 9: the policy with its evidence, the report, the table of trials, and the notes in the dashboard."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from autoprec import __version__
from autoprec.policy import Evidence, Figures, Policy
from autoprec.records import Candidate, Environment, Failure, Measurement, Verdict, dropped_words
from autoprec.session.arms import RANK_BASELINE, RANK_STOCK, RANK_TF32
from autoprec.session.context import Context
from autoprec.session.logbook import Logbook
from autoprec.session.reference import ROUNDING
from autoprec.session.search import Found, Tried
from autoprec.session.verification import Verified
from autoprec.tune.charts import Curve
from autoprec.tune.choice import Arm, median_s, speedup
from autoprec.tune.divergence import loss_gap, noise_floor
from autoprec.tune.long_run_section import sections_of
from autoprec.tune.quantities import duration
from autoprec.tune.report import write_report
from autoprec.tune.report_data import ReportData
from autoprec.tune.review import write_notes
from autoprec.tune.rows import TrialRow, rows_of
from autoprec.tune.study import open_study

TUNED = "tuned"
HOST_BOUND = " The GPU waits for the host here: a larger batch or CUDA graphs would gain more than a lower precision."


@dataclass(frozen=True)
class TuneResult:
    """What a tune ends in.

    Attributes:
        policy: the exported policy, evidence included.
        verdict: of the policy; None where it is plain FP32, the reference itself.
        arms: the final comparison, FP32 first.
        chosen: name of the policy's arm.
        worth_it: whether low precision (or TF32) beats FP32 beyond noise, as far as the budget let it be known.
        message: the outcome in words.
        folder: the run's folder.
        left_out: what the budget did not hold.
    """

    policy: Policy
    verdict: Verdict | None
    arms: tuple[Figures, ...]
    chosen: str
    worth_it: bool
    message: str
    folder: Path
    left_out: tuple[str, ...] = ()

    @property
    def policy_path(self) -> Path:
        return self.folder / "policy.json"

    @property
    def study_path(self) -> Path:
        return self.folder / "study.db"

    @property
    def report_path(self) -> Path:
        return self.folder / "report.html"

    @property
    def trials_path(self) -> Path:
        return self.folder / "trials.csv"


def export(context: Context, found: Tried, verified: Verified, logbook: Logbook) -> TuneResult:
    """Writes policy.json, trials.csv, report.html, report.md and the dashboard's notes."""
    context.progress.stage("export", 1)
    chosen_name = TUNED if verified.chosen.rank >= RANK_BASELINE else verified.chosen.name
    arms = _shown_arms(verified)
    figures = tuple(_figures(context, arm, chosen_name if arm is verified.chosen else arm.name) for arm in arms)
    policy = verified.chosen.policy.model_copy(update={"evidence": _evidence(context, verified, figures)})
    worth_it = verified.chosen.rank >= RANK_TF32
    cut_short = _cut_short(context, verified)
    message = _message(context, verified, chosen_name)
    rows = trial_rows(context, found)
    context.folder.save_policy(policy)
    context.folder.write_trials(rows)
    data = ReportData(
        name=context.folder.path.name,
        workload=str(context.settings.workload),
        target=context.target.name,
        speed_origin=context.target.timing,
        numerics=context.target.numerics,
        policy=policy,
        look=context.look,
        profile=found.profile if isinstance(found, Found) else None,
        trials=rows,
        chosen_number=_number_of(context, verified.chosen.policy),
        arms=figures,
        tuned_arm=chosen_name,
        stock_arm=stock.name if (stock := best_stock(verified)) else "stock AMP fp16",
        fp32_arm="FP32",
        verdict=verified.chosen.verdict,
        noise_floor=_noise(context),
        tolerance=context.settings.tolerance,
        long_runs=sections_of(context.folder.path),
        curves=_curves(context, verified, chosen_name),
        stages=logbook.stages(),
        not_worth_it="" if worth_it or cut_short else message,
        cut_short=cut_short,
        grad_clip=context.look.grad_clip,
        environment=_environment(context),
        command=shlex.join(["autoprec", *sys.argv[1:]]) if Path(sys.argv[0]).name == "autoprec" else "autoprec.tune(...)",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        autoprec_version=__version__,
        notes=_notes(context, verified, worth_it=worth_it),
    )
    write_report(context.folder.path, data)
    write_notes(context.folder.study_url, data)
    context.progress.advance()
    context.progress.found(_spent(context, logbook))
    left_out = tuple(context.left_out)
    return TuneResult(policy, verified.chosen.verdict, figures, chosen_name, worth_it, message, context.folder.path, left_out)


def _notes(context: Context, verified: Verified, *, worth_it: bool) -> tuple[str, ...]:
    """What a reader of the report should know besides the answer."""
    notes = list(context.folder.notes)
    if verified.not_worth_it and worth_it:
        notes.append(f"No low precision pays here: {verified.not_worth_it}")
    if context.left_out:
        notes.append(
            f"Left out, because the budget of {duration(context.settings.budget_s)} was over: {'; '.join(context.left_out)}."
        )
    return tuple(notes + dropped_notes(context.folder.candidates))


def dropped_notes(candidates: Iterable[Candidate]) -> list[str]:
    """How many of a run's timed steps do not count, and why."""
    measured = [c.outcome for c in candidates if isinstance(c.outcome, Measurement) and c.outcome.speed_origin == "measured"]
    never = sum(isinstance(c.outcome, Failure) and c.outcome.kind == "disturbed" for c in candidates)
    throttled, shared = sum(o.throttled_steps for o in measured), sum(o.shared_steps for o in measured)
    notes = []
    if throttled + shared:
        total = throttled + shared + sum(len(o.step_times_s) for o in measured)
        windows = sum(o.disturbed for o in measured)
        notes.append(
            f"In {windows} of {len(measured)} timed windows samples were dropped and taken again where that was possible; in all "
            f"{dropped_words(throttled, shared, total)}."
        )
    if never:
        notes.append(f"{never} {'window has' if never == 1 else 'windows have'} no result, because the card was never quiet.")
    return notes


def _spent(context: Context, logbook: Logbook) -> str:
    """How the time was spent, in a line."""
    parts = ", ".join(f"{stage.name} {stage.cost_s:.0f}" for stage in logbook.stages() if stage.cost_s and stage.cost_s >= 1)
    used_s = context.settings.budget_s - context.time_left_s
    return f"budget: {duration(used_s)} used of {duration(context.settings.budget_s)}" + (f" (seconds: {parts})" if parts else "")


def trial_rows(context: Context, found: Tried) -> tuple[TrialRow, ...]:
    """A row for every evaluation of the run, with the study's parameters where it was a trial."""
    stock = max((_speed(found.outcome(role)) for role in ("amp_fp16", "amp_bf16")), default=0.0)
    study = open_study(context.folder.study_url)
    params = {trial.number: trial.params for trial in study.get_trials(deepcopy=False)}
    gaps = {candidate.number: gap for candidate in context.folder.candidates if (gap := _gap(context, candidate)) is not None}
    return rows_of(context.folder.candidates, loss_gaps=gaps, stock_samples_per_s=stock or None, params=params)


def best_stock(verified: Verified) -> Arm | None:
    """The faster stock AMP that ran; None where neither did."""
    return min((arm for arm in verified.arms if arm.rank == RANK_STOCK and arm.step_times_s), key=median_s, default=None)


def _speed(outcome: object) -> float:
    return outcome.samples_per_s if isinstance(outcome, Measurement) else 0.0


def _gap(context: Context, candidate: Candidate) -> float | None:
    seed = candidate.window.seed - context.settings.seed
    outcome = candidate.outcome
    if (
        not isinstance(outcome, Measurement)
        or seed >= context.plan.verify_seeds
        or len(outcome.losses) > context.plan.verify_steps
    ):
        return None
    reference = _curve(context, seed)
    return loss_gap(reference[: len(outcome.losses)], outcome.losses) if reference else None


def _curve(context: Context, seed: int, *, twin: bool = False) -> tuple[float, ...]:
    """FP32's losses on a seed, or its twin's, where they were trained; the report trains nothing."""
    window = context.verify_window(seed, "", perturbation=ROUNDING if twin else 0.0)
    outcome = context.folder.lookup(context.plain_fp32(), window)
    return outcome.losses if isinstance(outcome, Measurement) else ()


def _noise(context: Context) -> float:
    """The noise floor over the seeds that ran; 0 where none did."""
    pairs = [(_curve(context, seed), _curve(context, seed, twin=True)) for seed in range(context.plan.verify_seeds)]
    return noise_floor([pair for pair in pairs if all(pair)])


def _shown_arms(verified: Verified) -> list[Arm]:
    """Stock set-ups first, then the rest by speed; the chosen arm last, where it is not a stock set-up."""
    stock = [arm for arm in verified.arms if arm.rank <= RANK_STOCK]
    rest = sorted(
        (arm for arm in verified.arms if arm.rank > RANK_STOCK and arm is not verified.chosen), key=_order, reverse=True
    )
    return [*stock, *rest, *([verified.chosen] if verified.chosen.rank > RANK_STOCK else [])]


def _order(arm: Arm) -> float:
    return median_s(arm) if arm.step_times_s else float("inf")


def _figures(context: Context, arm: Arm, name: str) -> Figures:
    return Figures(
        name=name,
        samples_per_s=context.look.effective_batch / median_s(arm) if arm.step_times_s else None,
        peak_bytes=arm.peak_bytes,
        loss_gap=arm.verdict.loss_gap if arm.verdict else (0.0 if arm.rank == 0 else None),
        speed_origin=arm.speed_origin,
    )


def _evidence(context: Context, verified: Verified, figures: tuple[Figures, ...]) -> Evidence:
    chosen = verified.chosen
    fp32 = next(arm for arm in verified.arms if arm.rank == 0)
    stock = best_stock(verified)
    timed = bool(chosen.step_times_s and fp32.step_times_s)
    ratio = speedup(stock, chosen) if stock and timed else (None, None, None)
    return Evidence(
        run=context.folder.path.name,
        verdict=chosen.verdict.status if chosen.verdict else "passed",
        speed_origin=chosen.speed_origin,
        loss_gap=chosen.verdict.loss_gap if chosen.verdict else 0.0,
        tolerance=context.settings.tolerance,
        speedup_vs_fp32=speedup(fp32, chosen)[0] if timed else None,
        speedup_vs_stock_amp=ratio[0],
        speedup_low=ratio[1],
        speedup_high=ratio[2],
        arms=figures,
        note=_note(context, verified),
    )


def _note(context: Context, verified: Verified) -> str:
    """What the verdict rests on, and why low precision was not searched for or not verified."""
    told = verified.chosen.verdict.text if verified.chosen.verdict else "Plain FP32 is the reference itself."
    why = _cut_short(context, verified)
    if verified.not_worth_it:
        why = f"No low precision pays here: {verified.not_worth_it}"
    return f"{told} {why}".rstrip()


def _cut_short(context: Context, verified: Verified) -> str:
    """Why plain FP32 is no answer but all that is left; empty where the tune came to an answer."""
    if verified.not_worth_it or verified.chosen.rank > 0:
        return ""
    if not context.untried:
        return ""
    if any(arm.rank >= RANK_STOCK and (arm.verdict or arm.failure) for arm in verified.arms):
        return (
            f"Nothing that was verified within the budget of {duration(context.settings.budget_s)} is faster than FP32 beyond noise, so "
            f"the policy is plain FP32. Not tried: {'; '.join(context.untried)}. A longer --budget may find more."
        )
    return (
        f"The budget of {duration(context.settings.budget_s)} was over before any low precision could be verified, so the policy is "
        "plain FP32. That says nothing about what low precision would give here: give a longer --budget."
    )


def _message(context: Context, verified: Verified, name: str) -> str:
    chosen = verified.chosen
    fp32 = next(arm for arm in verified.arms if arm.rank == 0)
    if cut_short := _cut_short(context, verified):
        return cut_short
    if chosen is fp32 and verified.not_worth_it:
        return f"Not worth it, the policy is plain FP32: {verified.not_worth_it}"
    if chosen is fp32:
        return (
            "Not worth it here: no set-up that trains like FP32 is faster than FP32 beyond noise, so the policy is plain FP32."
            + (HOST_BOUND if fp32.host_bound else "")
        )
    against, least, most = speedup(fp32, chosen)
    text = f"{name}: {against:.2f}x FP32"
    if verified.not_worth_it:
        text = f"No low precision pays here; {chosen.name} does: {against:.2f}x FP32 ({least:.2f} to {most:.2f})"
    stock = best_stock(verified)
    if stock is not None and chosen is not stock:
        ratio, low, high = speedup(stock, chosen)
        interval = f" ({low:.2f} to {high:.2f})" if chosen.speed_origin == "measured" else ""
        text += f" and {ratio:.2f}x {stock.name}{interval}"
    text += f", {chosen.speed_origin}. {chosen.verdict.text if chosen.verdict else ''}"
    if verified.not_worth_it:
        return f"{text} {verified.not_worth_it[:1].upper()}{verified.not_worth_it[1:]}"
    return text + (HOST_BOUND if chosen.host_bound else "")


def _number_of(context: Context, policy: Policy) -> int | None:
    eager = policy.model_copy(update={"execution": "eager"}).setup_hash()
    matches = [c for c in context.folder.candidates if c.policy.setup_hash() in (eager, policy.setup_hash())]
    return next((c.number for c in matches if c.trial is not None), matches[0].number if matches else None)


def _curves(context: Context, verified: Verified, chosen_name: str) -> tuple[Curve, ...]:
    styles = (("FP32", "reference", _curve(context, 0)), ("FP32 twin 1", "twin", _curve(context, 0, twin=True)))
    curves = [Curve(name=name, losses=losses, style=style) for name, style, losses in styles if losses]
    shown = ((best_stock(verified), "stock", ""), (verified.chosen, "tuned", chosen_name))
    for arm, style, name in shown:
        outcome = context.folder.lookup(arm.policy, context.verify_window(0, "")) if arm else None
        if arm and isinstance(outcome, Measurement) and arm.rank > 0:
            curves.append(Curve(name=name or arm.name, losses=outcome.losses, style=style))
    return tuple(curves)


def _environment(context: Context) -> Environment:
    return next(c.outcome.environment for c in context.folder.candidates if isinstance(c.outcome, Measurement))
