"""The study as people review it in Optuna Dashboard: a note on the study, one on each trial, and the verdict as attributes.

optuna-dashboard 0.21 lists no constraint values on a trial's page, so the notes carry them. Notes are system attributes of the
study: saving one again replaces it.
"""

from __future__ import annotations

import math

from optuna import Study, Trial
from optuna.trial import FrozenTrial
from optuna_dashboard import get_note, save_note

from autoprec.policy import Policy
from autoprec.tune import quantities
from autoprec.tune.describe import differences_from_stock_amp, group_layers, group_line
from autoprec.tune.report import apply_code, comparison_table, headline, markdown_text, verdict_line
from autoprec.tune.report_data import ReportData, speedup
from autoprec.tune.rows import TrialRow, role_words
from autoprec.tune.study import finished_trials, open_study, storage_errors
from autoprec.tune.yardstick import CONSTRAINTS

CONSTRAINT_WORDS = {
    "memory": "peak memory over the limit, less one; 1 after running out of memory",
    "finite": "1 where the loss was not finite or the loss scale collapsed",
    "divergence": "loss gap to FP32 over the gap allowed, less one",
    "runs": "1 where the window could not run (unsupported, timed out, crashed)",
}


def write_notes(study_url: str, data: ReportData) -> None:
    """Writes the notes and attributes into a study; one that already reads the same is left alone.

    Args:
        study_url: the storage, such as ``sqlite:///study.db``. Its study is changed in place.
        data: what the report shows.

    Raises:
        RunFolderError: the study's file is locked or cannot be used.
    """
    with storage_errors(study_url):
        study = open_study(study_url)
        rows = {row.trial: row for row in reversed(data.trials) if row.trial is not None}
        for trial in finished_trials(study):
            _save(Trial(study, trial._trial_id), trial_note(trial, rows.get(trial.number), data))
        _save(study, study_note(data))
        for name, value in study_attributes(data).items():
            if study.user_attrs.get(name) != value:
                study.set_user_attr(name, value)


def _save(target: Study | Trial, note: str) -> None:
    if get_note(target) != note:
        save_note(target, note)


def study_attributes(data: ReportData) -> dict[str, str | float | int]:
    """The answer in a few attributes, as the study's page lists them; only what is known."""
    verdict = data.verdict
    known = {
        "headline": headline(data),
        "verdict": verdict.status if verdict else (data.policy.evidence.verdict if data.policy.evidence else "unverified"),
        "verdict_text": verdict.text if verdict else data.not_worth_it or data.cut_short or None,
        "target": data.target,
        "speeds_are": data.speed_origin,
        "losses_are": "measured",
        "speedup_vs_stock_amp": speedup(data, data.stock_arm),
        "speedup_vs_fp32": speedup(data, data.fp32_arm),
        "loss_gap": verdict.loss_gap if verdict and math.isfinite(verdict.loss_gap) else None,
        "noise_floor": data.noise_floor,
        "tolerance": data.tolerance,
        "chosen_trial": _chosen_trial(data),
        "policy_sha256": data.policy.setup_hash(),
    }
    return {name: value for name, value in known.items() if value is not None}


def study_note(data: ReportData) -> str:
    """The study's note in Markdown: the answer, the comparison, how to apply it, how to read the study."""
    where = f"{markdown_text(data.workload)} on {markdown_text(data.target)}, effective batch {data.policy.batch.effective}."
    parts = [f"## {markdown_text(headline(data))}", f"{where} Speeds are {data.speed_origin}, losses are measured."]
    if data.verdict:
        parts.append(verdict_line(data.verdict))
    if why := data.not_worth_it or data.cut_short:
        parts.append(markdown_text(why))
    chosen = _chosen_trial(data)
    parts += [f"The policy is trial **{chosen}** of this study."] if chosen is not None else []
    parts += [comparison_table(data)] if data.arms else []
    parts += ["### What the policy does", _policy_list(data.policy)]
    code = apply_code(data.policy, grad_clip=data.grad_clip)
    parts += ["### How to apply it", f"```python\n{code}\n```"]
    parts += ["### What the constraints mean", _constraint_list(), *_reading(data)]
    return "\n\n".join(parts) + "\n"


def _policy_list(policy: Policy) -> str:
    lines = differences_from_stock_amp(policy) + [group_line(group) for group in group_layers(policy)]
    return "\n".join(f"- {markdown_text(line)}" for line in lines) or "The same as stock AMP."


def _constraint_list() -> str:
    lines = [f"- **{name}**: {CONSTRAINT_WORDS[name]}." for name in CONSTRAINTS]
    return "\n".join(("A trial is feasible where all four are 0 or below; infeasible ones are grey.", "", *lines))


def _reading(data: ReportData) -> list[str]:
    floor = quantities.gap(data.noise_floor)
    return [
        "### How to read the study",
        f"samples\\_per\\_s is {data.speed_origin}; divergence is the measured relative loss gap to FP32, never below {floor}, "
        "which is what two FP32 runs differ by. front\\_index picks a plan of precisions: 0 is the safest, the last the "
        "fastest. Pruned trials have no samples: they ran out of memory, diverged or could not run, as their note says.",
    ]


def trial_note(trial: FrozenTrial, row: TrialRow | None, data: ReportData) -> str:
    """A trial's note in Markdown: what it was, what came of it, and its constraints."""
    attributes = trial.user_attrs
    chosen = trial.number == _chosen_trial(data)
    title = role_words(str(attributes.get("role", "search")))
    parts = [f"**{markdown_text(title)}**{': the exported policy' if chosen else ''}"]
    lines = [f"layers: {attributes['assignment']}"] if "assignment" in attributes else []
    if row and row.num_exceptions:
        lines.append(f"default {row.default_precision}; {row.num_exceptions} with a setting of their own")
    if chosen:
        lines += [group_line(group) for group in group_layers(data.policy)]
    lines += [f"loss scale: {attributes['loss_scale']}"] if "loss_scale" in attributes else []
    lines += _outcome_lines(trial, row)
    parts.append("\n".join(f"- {markdown_text(line)}" for line in lines))
    parts.append(_constraint_table(trial.constraints))
    return "\n\n".join(parts) + "\n"


def _outcome_lines(trial: FrozenTrial, row: TrialRow | None) -> list[str]:
    attributes = trial.user_attrs
    if "failure" in attributes:
        return [f"no samples: {attributes['failure']}"]
    lines = []
    if "samples_per_s" in attributes:
        origin = attributes.get("origin", "")
        memory = f", peak memory {quantities.memory(attributes['peak_bytes'])}" if "peak_bytes" in attributes else ""
        lines.append(f"{quantities.throughput(attributes['samples_per_s'])} samples/s{memory} ({origin})")
    if "divergence" in attributes:
        lines.append(f"loss gap to FP32 {quantities.gap(attributes['divergence'])} (measured)")
    if attributes.get("skipped_steps"):
        lines.append(f"{attributes['skipped_steps']} steps skipped by the loss scaler")
    lines += [attributes["dropped"]] if attributes.get("dropped") else []
    if row and row.verdict:
        lines.append(f"verification: {row.verdict}")
    return lines


def _constraint_table(values: dict[str, float]) -> str:
    lines = ["| constraint | value | |", "|---|---:|---|"]
    for name in CONSTRAINTS:
        if name in values:
            broken = values[name] > 0
            lines.append(f"| {name} | {values[name]:.3g} | {f'**broken**: {CONSTRAINT_WORDS[name]}' if broken else 'holds'} |")
    return "\n".join(lines)


def _chosen_trial(data: ReportData) -> int | None:
    return next((row.trial for row in data.trials if row.number == data.chosen_number), None)
