"""Pictures and page of a long run: ``verify.svg`` and ``verify.html``."""

from __future__ import annotations

import math
from pathlib import Path

from markupsafe import Markup

from autoprec.policy import write_atomically
from autoprec.tune import drawing, quantities
from autoprec.tune.drawing import Axis
from autoprec.tune.long_run import ROLE_NAMES, LongRun
from autoprec.tune.long_run_curves import LongRunCurves, curves_of
from autoprec.tune.long_run_section import headline, where
from autoprec.tune.pages import WIDE_PX, page_environment, wide_and_narrow

PICTURE_FILE, PAGE_FILE = "verify.svg", "verify.html"
LEFT_PX, UPPER_PX, LOWER_PX, GAP_PX = 72, 210, 150, 52
# The picture alone: the page's colours by the viewer's light or dark setting.
PICTURE_STYLE = """<style>
svg { --page: #ffffff; --ink: #1a1f26; --soft: #57606c; --line: #dfe3e8; --accent: #0b7d77; --base: #76818e; --bad: #c2362b; --warn: #9a6200; --noise: #0b7d7722; }
@media (prefers-color-scheme: dark) { svg { --page: #101418; --ink: #e7eaee; --soft: #9aa5b1; --line: #2b323a; --accent: #45c4bb; --base: #8a95a2; --bad: #f0776c; --warn: #e5b454; --noise: #45c4bb26; } }
.sheet { fill: var(--page); } text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: var(--ink); }
.tick, .note, .label { fill: var(--soft); } .strong { font-weight: 680; font-size: 15px; } .lost { fill: var(--bad); font-weight: 700; }
.grid { stroke: var(--line); } .axis { stroke: var(--base); } .noise { fill: var(--noise); } .tolerance { stroke: var(--warn); stroke-width: 1.4; stroke-dasharray: 5 4; }
.curve { fill: none; stroke-width: 1.7; stroke-linejoin: round; } .curve.reference { stroke: var(--ink); } .curve.tuned { stroke: var(--accent); stroke-width: 2.2; }
.curve.seed { stroke: var(--accent); stroke-width: 1; opacity: .45; } .curve.broken { stroke: var(--bad); }
</style>"""  # noqa: E501


def long_run_parts(curves: LongRunCurves, limit: float, width: int) -> tuple[list[str], int]:
    """The pieces of the picture and its height: losses above; below, the departure from FP32 with FP32's own band."""
    known = [loss for values in (curves.fp32, curves.policy, curves.lost) for loss in values if math.isfinite(loss)]
    x_axis = Axis(0, curves.steps[-1], LEFT_PX, width - 14)
    y_axis = Axis(min(0.0, *known), _top(known), UPPER_PX, 14)
    wide = width > 500
    parts = drawing.frame(x_axis, y_axis, x_format="plain", y_format="plain", x_ticks=0, y_ticks=4)
    parts.append(drawing.path(zip(curves.steps, curves.fp32, strict=False), x_axis, y_axis, "curve reference"))
    parts.append(drawing.path(zip(curves.steps, curves.policy, strict=False), x_axis, y_axis, "curve tuned"))
    if curves.lost:
        lost = [*zip(curves.steps, curves.lost, strict=False), (curves.steps[-1], math.nan)]
        parts.append(drawing.path(lost, x_axis, y_axis, "curve broken"))
    top = UPPER_PX + GAP_PX
    bottom = top + LOWER_PX
    # The band of the first steps, where losses fall steeply, must not flatten the rest.
    sizes = sorted(abs(v) for values in (*curves.departures, curves.band) for v in values if math.isfinite(v))
    reach = 1.15 * max(limit, sizes[int(0.98 * (len(sizes) - 1))] if sizes else 0.0)
    gap_axis = Axis(-reach, reach, bottom, top)
    parts.append(drawing.band(zip(curves.steps, (min(v, reach) for v in curves.band), strict=False), x_axis, gap_axis))
    parts += drawing.frame(x_axis, gap_axis, x_format="plain", y_format="percent", x_ticks=6 if wide else 3, y_ticks=4)
    parts += [drawing.line(LEFT_PX, gap_axis(at), x_axis.end, gap_axis(at), "tolerance") for at in (-limit, limit)]
    parts.append(drawing.line(LEFT_PX, gap_axis(0), x_axis.end, gap_axis(0), "curve reference"))
    parts += [drawing.path(zip(curves.steps, one, strict=False), x_axis, gap_axis, "curve seed") for one in curves.departures]
    parts.append(drawing.path(zip(curves.steps, curves.departure, strict=False), x_axis, gap_axis, "curve tuned"))
    words = "the policy's departure from FP32; band: FP32's own noise; dashed: the gap allowed"
    parts += [
        drawing.text(LEFT_PX, UPPER_PX + 40, words if wide else "departure from FP32", "label"),
        drawing.text((LEFT_PX + x_axis.end) / 2, bottom + 36, "step", "label", "middle"),
        f'<text transform="translate(13 {UPPER_PX / 2:.0f}) rotate(-90)" text-anchor="middle" class="label">loss</text>',
    ]
    return parts, bottom + 46


def _top(values: list[float]) -> float:
    # A run that was lost must not flatten the others: the top percent may leave the picture.
    ordered = sorted(values)
    high = ordered[int(0.99 * (len(ordered) - 1))] if len(ordered) > 100 else ordered[-1]
    return high + 0.05 * abs(high)


def long_run_chart(curves: LongRunCurves, limit: float, *, width: int) -> Markup:
    """The picture as part of a page, whose style it takes."""
    parts, height = long_run_parts(curves, limit, width)
    return drawing.svg(width, height, "Loss of the policy and of FP32 by step, and the departure between them", parts)


def picture(run: LongRun) -> str:
    """The picture as a file of its own, with a heading and a legend; light or dark as its viewer is."""
    parts, height = long_run_parts(curves_of(run), run.limit, WIDE_PX)
    head, title = 62, headline(run)
    legend = [
        drawing.text(LEFT_PX, 24, title, "strong"),
        drawing.line(LEFT_PX, 44, LEFT_PX + 22, 44, "curve reference"),
        drawing.text(LEFT_PX + 28, 48, "FP32"),
        drawing.line(LEFT_PX + 80, 44, LEFT_PX + 102, 44, "curve tuned"),
        drawing.text(LEFT_PX + 108, 48, "the policy, mean over the seeds; thin: each seed"),
        drawing.text(WIDE_PX - 14, 48, run.target, "note", "end"),
    ]
    whole = height + head
    size = f'viewBox="0 0 {WIDE_PX} {whole}" width="{WIDE_PX}" height="{whole}"'
    sheet = f'<rect width="{WIDE_PX}" height="{whole}" class="sheet"/>'
    body = f'<g transform="translate(0 {head})">{"".join(parts)}</g>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{Markup.escape(title)}</title>'
    return f"{start}{PICTURE_STYLE}{sheet}{''.join(legend)}{body}</svg>\n"


def render_html(run: LongRun) -> str:
    """The whole page. Text from users is escaped by the template, or by the drawing where it enters it."""
    curves = curves_of(run)
    charts = wide_and_narrow(lambda width: long_run_chart(curves, run.limit, width=width))
    policy = run.arm("policy")
    rows = [
        {
            "seed": one.seed,
            "end": quantities.significant(sum(one.losses[-10:]) / len(one.losses[-10:])) if one.losses else quantities.NOTHING,
            "gap": one.loss_gap,
            "twin": next((twin.loss_gap for twin in run.arm("fp32_twin").runs if twin.seed == one.seed), None),
            "tf32": next((twin.loss_gap for twin in run.arm("fp32_tf32").runs if twin.seed == one.seed), None),
            "failure": one.failure.kind.replace("_", " ") if one.failure else "",
            "skipped": one.skipped_steps,
        }
        for one in policy.runs
    ]
    return (
        page_environment()
        .get_template("verify.html.j2")
        .render(
            run=run,
            data=run,
            headline=headline(run),
            where=where(run),
            chart=charts,
            rows=rows,
            role_names=ROLE_NAMES,
            ratio_to_fp32=next((speed.policy_ratio for speed in run.speeds if speed.name == "FP32"), None),
        )
    )


def write_pages(folder: Path, run: LongRun) -> None:
    """Writes ``verify.svg`` and ``verify.html``. Raises OSError where it cannot."""
    write_atomically(folder / PICTURE_FILE, picture(run))
    write_atomically(folder / PAGE_FILE, render_html(run))
