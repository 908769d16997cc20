"""The report of a run: ``report.html`` (one file, no script, no request) and ``report.md`` (for a pull request)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from markupsafe import Markup

from autoprec.errors import RunFolderError
from autoprec.policy import Figures, Origin, Policy, write_atomically
from autoprec.records import Record, Verdict
from autoprec.tune import charts, quantities
from autoprec.tune.charts import Bar, Curve, LayerCell, Point
from autoprec.tune.describe import REASON_WORDS, differences_from_stock_amp, group_layers
from autoprec.tune.long_run_page import long_run_chart
from autoprec.tune.pages import page_environment, wide_and_narrow
from autoprec.tune.report_data import Rejected, ReportData, speedup
from autoprec.tune.rows import TrialRow, is_baseline, role_words


class Tile(Record):
    """A figure of the headline."""

    label: str
    value: str
    detail: str
    origin: Origin


def headline(data: ReportData) -> str:
    """The answer in a sentence."""
    if data.cut_short:
        return "FP32 for now: the budget was over before everything was tried"
    if data.not_worth_it:
        return "Stay with FP32: mixed precision does not pay here"
    if data.tuned_arm == data.stock_arm:
        return f"Nothing beats {role_words(data.stock_arm)} here"
    over_stock, over_fp32 = speedup(data, data.stock_arm), speedup(data, data.fp32_arm)
    speed = "A policy of unknown speed"
    if over_stock is not None:
        speed = f"{quantities.ratio(over_stock)} the speed of stock AMP"
    elif over_fp32 is not None:
        speed = f"{quantities.ratio(over_fp32)} the speed of FP32"
    endings = {
        "passed": "trains like FP32",
        "rejected": "but it does not train like FP32",
        "inconclusive": "whether it trains like FP32 is not settled",
    }
    return f"{speed}, {endings[data.verdict.status] if data.verdict else 'not verified'}"


def tiles(data: ReportData) -> list[Tile]:
    """The figures of the headline: speed against stock AMP and FP32, memory, loss."""
    made = []
    evidence = data.policy.evidence
    for label, over in (("against stock AMP", data.stock_arm), ("against FP32", data.fp32_arm)):
        gain = speedup(data, over)
        # Where the answer is FP32 itself, a ratio to a slower stock AMP would read like a gain.
        if gain is None or data.not_worth_it or data.cut_short:
            continue
        detail = role_words(over)
        measured = data.speed_origin == "measured"  # predicted step times are all equal: no interval over them
        if measured and over == data.stock_arm and evidence and evidence.speedup_low and evidence.speedup_high:
            detail += f"; 95% interval {quantities.ratio(evidence.speedup_low)} to {quantities.ratio(evidence.speedup_high)}"
        made.append(Tile(label=label, value=quantities.ratio(gain), detail=detail, origin=data.speed_origin))
    tuned, stock = data.arm(data.tuned_arm), data.arm(data.stock_arm)
    if tuned and tuned.peak_bytes is not None:
        less = f"stock AMP {quantities.memory(stock.peak_bytes)}" if stock and stock.peak_bytes is not None else ""
        memory = quantities.memory(tuned.peak_bytes)
        made.append(Tile(label="peak memory", value=memory, detail=less, origin=data.speed_origin))
    if data.verdict:
        detail = f"allowed {quantities.gap(data.limit)}; FP32's own noise {quantities.gap(data.verdict.noise_floor)}"
        made.append(Tile(label="loss gap to FP32", value=quantities.gap(data.verdict.loss_gap), detail=detail, origin="measured"))
    return made


def apply_code(policy: Policy, *, policy_path: str = "policy.json", grad_clip: float | None = None) -> str:
    """A training loop for this policy: only the lines it needs."""
    steps = policy.batch.accumulation_steps
    call = "model" if policy.execution == "eager" else "train_model"
    lines = [
        *([] if grad_clip is None else ["import torch"]),
        "import autoprec",
        "",
        f"policy = autoprec.load_policy({policy_path!r})",
        "applied = autoprec.apply_policy(model, policy)  # in place, after model.to(device)",
        "scaler = applied.grad_scaler()" + ("" if policy.needs_loss_scale else "  # disabled: no layer is fp16"),
    ]
    lines += [] if call == "model" else ["train_model = applied.compiled()"]
    lines += ["", f"for i, (x, y) in enumerate(loader):  # batches of {policy.batch.micro}"]
    lines += ["    with applied.autocast():", f"        loss = criterion({call}(x), y)" + (f" / {steps}" if steps > 1 else "")]
    lines += ["    scaler.scale(loss).backward()"]
    lines += [f"    if (i + 1) % {steps}:", "        continue"] if steps > 1 else []
    if grad_clip is not None:
        lines += [
            "    scaler.unscale_(optimizer)",
            f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {grad_clip:g})",
        ]
    lines += ["    scaler.step(optimizer)", "    scaler.update()", "    optimizer.zero_grad()"]
    return "\n".join(lines)


def rejections(data: ReportData) -> list[Rejected]:
    """What was tried and not taken: failed trials grouped by reason, finalists that were rejected, and what the run adds."""
    groups: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in data.trials:
        if row.outcome != "ok":
            groups[row.outcome, row.failure].append(row)
        elif row.verdict in ("rejected", "inconclusive"):
            groups[f"verdict {row.verdict}", f"loss gap {quantities.gap(row.loss_gap)} on its trial window"].append(row)
    made = [Rejected(what=_who(rows), why=f"{kind.replace('_', ' ')}: {why}") for (kind, why), rows in groups.items()]
    return [*made, *data.rejected]


def _who(rows: list[TrialRow]) -> str:
    names = [f"#{row.number} {role_words(row.role)}" for row in rows]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def pareto_points(data: ReportData) -> list[Point]:
    """The dots of the Pareto picture; one for each policy that finished with a finite loss."""
    points = []
    for row in data.trials:
        chosen, baseline = row.number == data.chosen_number, is_baseline(row.role)
        if row.samples_per_s is None or row.loss_gap is None or not math.isfinite(row.loss_gap):
            continue
        if row.trial is None and not chosen:
            continue  # verification and repair run other windows, whose gaps are not comparable
        within = row.loss_gap <= data.limit
        style = "chosen" if chosen else "baseline" if baseline else "feasible" if within else "rejected"
        name = ", ".join((*(("chosen",) if chosen else ()), *((role_words(row.role),) if baseline else ())))
        figures = f"{quantities.throughput(row.samples_per_s)} samples/s ({row.origin}), loss gap {quantities.gap(row.loss_gap)}"
        title = f"#{row.number} {role_words(row.role)}: {figures}"
        points.append(Point(samples_per_s=row.samples_per_s, loss_gap=row.loss_gap, style=style, label=name, title=title))
    return points


def arm_bars(data: ReportData) -> list[Bar]:
    """The bars of the final comparison, slowest first."""
    stock = data.arm(data.stock_arm)
    made = []
    for arm in data.arms:
        if arm.samples_per_s is None:
            continue
        versus = f" · {quantities.ratio(arm.samples_per_s / stock.samples_per_s)}" if stock and stock.samples_per_s else ""
        made.append(
            Bar(
                name=role_words(arm.name),
                value=arm.samples_per_s,
                text=f"{quantities.throughput(arm.samples_per_s)}{versus}",
                predicted=arm.speed_origin == "predicted",
                chosen=arm.name == data.tuned_arm,
            )
        )
    return sorted(made, key=lambda bar: bar.value)


def layer_cells(data: ReportData) -> list[LayerCell]:
    """The columns of the layer strip, in order of use."""
    profiles = {item.layer: item for item in data.profile.layers} if data.profile else {}
    lowered = data.policy.default if data.policy.default != "fp32" else None
    cells = []
    for layer in data.look.layers:
        precision = data.policy.precision_of(layer.name)
        found, setting = profiles.get(layer.name), data.policy.layers.get(layer.name)
        gained, sensitivity = None, None
        lines = [f"{layer.name or '(root)'} ({layer.kind}): {precision}"]
        if found:
            times, harms = found.time_s, found.sensitivity
            gained = times["fp32"] - times[precision] if "fp32" in times and precision in times else None
            sensitivity = harms.get(lowered) if lowered else max(harms.values(), default=None)
            if gained is not None:
                whole = quantities.duration(times["fp32"])
                figure = f"gains {quantities.duration(gained)} of {whole}" if gained else f"takes {whole}"
                lines.append(f"{figure} ({found.time_origin})")
            if sensitivity is not None:
                lines.append(f"sensitivity {sensitivity:.2g} (measured)")
        if setting and setting.reason:
            lines.append(f"{REASON_WORDS[setting.reason.kind]}: {setting.reason.text}")
        name = layer.name or "(root)"
        title = "\n".join(lines)
        cells.append(LayerCell(name=name, precision=precision, gained_s=gained, sensitivity=sensitivity, title=title))
    return cells


def _both(draw: str, items: Iterable[object], **options: float) -> Markup:
    """A chart for wide and for narrow pages; the page's style shows one of them."""
    chart, drawn = getattr(charts, draw), list(items)
    return wide_and_narrow(lambda width: chart(drawn, width=width, **options))


def render_html(data: ReportData) -> str:
    """The whole page. Text from users is escaped by the template, or by the charts where it enters them."""
    cells = layer_cells(data)
    long_runs = [
        (section, wide_and_narrow(lambda width, section=section: long_run_chart(section.curves, section.limit, width=width)))  # type: ignore[misc]
        for section in data.long_runs
    ]
    return (
        page_environment()
        .get_template("report.html.j2")
        .render(
            long_runs=long_runs,
            data=data,
            headline=headline(data),
            tiles=tiles(data),
            arms=_fastest_first(data),
            failures=arm_failures(data),
            stock_speed=getattr(data.arm(data.stock_arm), "samples_per_s", None),
            differences=differences_from_stock_amp(data.policy),
            cells=cells,
            curves=shown_curves(data),
            groups=group_layers(data.policy),
            reason_words=REASON_WORDS,
            precisions=list(dict.fromkeys(cell.precision for cell in cells)),
            rejections=rejections(data),
            code=apply_code(data.policy, grad_clip=data.grad_clip),
            bar_chart=_both("bars", arm_bars(data)),
            pareto_chart=_both("pareto", pareto_points(data), noise_floor=data.noise_floor, tolerance=data.limit),
            curve_chart=_both("loss_curves", shown_curves(data)),
            layer_chart=_both("layer_strip", cells),
        )
    )


def _fastest_first(data: ReportData) -> list[Figures]:
    """The arms by speed; the answer leads where others are as fast."""
    return sorted(data.arms, key=lambda arm: (-(arm.samples_per_s or 0), arm.name != data.tuned_arm))


def arm_failures(data: ReportData) -> dict[str, str]:
    """Why arms have no figures, by their name: the kind of failure of the evaluation with that role."""
    kinds = {row.role: row.outcome.replace("_", " ") for row in reversed(data.trials) if row.outcome != "ok"}
    return {arm.name: kinds[role] for arm in data.arms for role in kinds if arm.name in (role, role_words(role))}


def shown_curves(data: ReportData) -> tuple[Curve, ...]:
    """The curves, where the answer is stock AMP itself only once."""
    tuned = {curve.name for curve in data.curves if curve.style == "tuned"}
    return tuple(curve for curve in data.curves if curve.style != "stock" or curve.name not in tuned)


def comparison_table(data: ReportData) -> str:
    """The final comparison as a Markdown table, fastest first."""
    stock = data.arm(data.stock_arm)
    lines = ["| | samples/s | against stock AMP | peak memory | loss gap | speed is |", "|---|---:|---:|---:|---:|---|"]
    failures = arm_failures(data)
    for arm in _fastest_first(data):
        versus = arm.samples_per_s / stock.samples_per_s if arm.samples_per_s and stock and stock.samples_per_s else None
        name = markdown_text(role_words(arm.name))
        figures = (
            f"**{name}**" if arm.name == data.tuned_arm else name,
            quantities.throughput(arm.samples_per_s),
            quantities.ratio(versus),
            quantities.memory(arm.peak_bytes),
            quantities.gap(arm.loss_gap),
            arm.speed_origin if arm.samples_per_s else failures.get(arm.name, "not run"),
        )
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def markdown_text(text: str) -> str:
    """Text made harmless inside a Markdown table: no bar, line break, tag or emphasis of its own."""
    for sign in ("\\", "|", "`", "*", "_", "[", "]", "<", ">"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def verdict_line(verdict: Verdict) -> str:
    """The verdict in Markdown; its own text begins with its status as a rule, which is not said twice."""
    text = verdict.text.removeprefix(f"{verdict.status.capitalize()}: ")
    return f"Verdict **{verdict.status}**: {markdown_text(text)}"


def render_markdown(data: ReportData) -> str:
    """The report in a few lines and a table."""
    lines = [f"### autoprec: {markdown_text(headline(data))}", ""]
    lines.append(f"{markdown_text(data.workload)} on {markdown_text(data.target)}; speeds are {data.speed_origin}.")
    if data.verdict:
        lines.append(verdict_line(data.verdict))
    lines += [markdown_text(text) for text in (data.not_worth_it, data.cut_short, *data.notes) if text]
    lines += ["", comparison_table(data), ""] if data.arms else [""]
    differing = differences_from_stock_amp(data.policy)
    lines += ["Differs from stock AMP in:", *(f"- {markdown_text(line)}" for line in differing), ""] if differing else []
    lines += [f"`{data.command.replace('`', '')}`", ""] if data.command else []
    return "\n".join(lines)


def write_report(folder: Path, data: ReportData) -> Path:
    """Writes ``report.html``, ``report.md`` and ``report.json`` into a folder; returns the path of the page.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        write_atomically(folder / "report.json", data.model_dump_json() + "\n")
        write_atomically(folder / "report.md", render_markdown(data))
        write_atomically(folder / "report.html", render_html(data))
    except OSError as error:
        hint = "Free some space or mend the permissions, then run 'autoprec report'."
        raise RunFolderError(f"Cannot write the report into {folder}: {error}", hint=hint) from None
    return folder / "report.html"
