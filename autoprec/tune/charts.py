"""Charts as inline SVG: no script, no request, colours from the page's CSS variables so that they follow light and dark.

Every chart takes a width in pixels and is drawn for it, because scaling a wide drawing down to a phone makes its text unreadable.
Text from users is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from autoprec.policy import Precision
from autoprec.records import Record
from autoprec.tune import drawing
from autoprec.tune.drawing import Axis


class Point(Record):
    """A dot of the Pareto picture. ``style`` is ``chosen``, ``baseline``, ``feasible`` or ``rejected``."""

    samples_per_s: float
    loss_gap: float
    style: str
    label: str = ""
    title: str = ""


class Curve(Record):
    """The loss of each step of one run. ``style``: ``reference``, ``twin`` (FP32 again: the noise), ``stock``, ``tuned``."""

    name: str
    losses: tuple[float, ...]
    style: str


class Bar(Record):
    """One bar: its value, the text at its end, and whether the value is predicted (drawn with a dashed edge)."""

    name: str
    value: float
    text: str
    predicted: bool
    chosen: bool = False


class LayerCell(Record):
    """One layer of the heat strip. ``gained_s`` is the time its precision saves against FP32."""

    name: str
    precision: Precision
    gained_s: float | None
    sensitivity: float | None
    title: str


# --- Pareto ---------------------------------------------------------------------------------------------------------------


def pareto(points: Sequence[Point], *, noise_floor: float, tolerance: float, width: int) -> Markup:
    """Samples/s against the loss gap to FP32 (logarithmic), with the noise band, the tolerance and the chosen policy.

    Gaps under a third of the noise floor, and losses below FP32's, are drawn on the bottom edge: nothing is to be told apart
    there.
    """
    height = 360 if width > 500 else 340
    if not points:
        return drawing.svg(width, 60, "no points", [drawing.text(8, 34, "No candidate finished with a finite loss.", "note")])
    floor = max(noise_floor, tolerance / 1000) / 3
    top = max([tolerance, noise_floor, *(point.loss_gap for point in points)]) * 2
    speeds = [point.samples_per_s for point in points]
    margin = 0.08 * (max(speeds) - min(speeds)) or 0.1 * max(speeds)
    left = 80
    x_axis = Axis(max(min(speeds) - margin, 0), max(speeds) + margin, left, width - 14)
    y_axis = Axis(floor, max(top, floor * 100), height - 46, 14, log=True)
    notes = [("gap allowed", y_axis(tolerance) - 5)]
    if y_axis.start - y_axis(noise_floor) > 18:  # room for a line of text
        notes.append(("noise of FP32", y_axis.start - 7))
    parts = [
        drawing.rect(
            left, y_axis(noise_floor), x_axis.end - left, y_axis.start - y_axis(noise_floor), "noise", title="FP32's own noise"
        ),
        *drawing.frame(x_axis, y_axis, x_format="plain", y_format="percent", x_ticks=6 if width > 500 else 3, y_ticks=5),
        drawing.line(left, y_axis(tolerance), x_axis.end, y_axis(tolerance), "tolerance"),
        *(drawing.text(x_axis.end - 4, y, text, "note", "end") for text, y in notes),
        drawing.text((left + x_axis.end) / 2, height - 8, "samples/s, faster to the right", "label", "middle"),
        f'<text transform="translate(13 {height / 2 - 16:.0f}) rotate(-90)" text-anchor="middle" class="label">'
        "loss gap to FP32, lower is better</text>",
    ]
    order = {"rejected": 0, "feasible": 1, "baseline": 2, "chosen": 3}
    drawn = sorted(points, key=lambda point: order.get(point.style, 0))
    places = [(x_axis(point.samples_per_s), y_axis(max(point.loss_gap, floor))) for point in drawn]
    parts += [_dot(point, *place) for point, place in zip(drawn, places, strict=True)]
    reserved = [(x_axis.end - 4 - drawing.CHAR_PX * len(text), y - 11, x_axis.end - 4, y + 3) for text, y in notes]
    parts += _labels(drawn, places, reserved, x_axis, y_axis)
    return drawing.svg(width, height, "Throughput against loss gap of every candidate", parts)


def _dot(point: Point, x: float, y: float) -> str:
    radius = {"chosen": 7, "baseline": 5.5}.get(point.style, 4)
    title = f"<title>{escape(point.title or point.label)}</title>"
    if point.style == "baseline":
        side = radius * 1.7
        return drawing.rect(x - side / 2, y - side / 2, side, side, "dot baseline", title=point.title or point.label, radius=1.5)
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="dot {escape(point.style)}">{title}</circle>'


def _labels(
    points: Sequence[Point],
    places: Sequence[tuple[float, float]],
    reserved: Sequence[tuple[float, float, float, float]],
    x_axis: Axis,
    y_axis: Axis,
) -> list[str]:
    """Names beside their dots, each in the first free place round its dot; the chosen one first. One without room is left out."""
    taken = [*reserved, *((x - 5, y - 5, x + 5, y + 5) for x, y in places)]
    parts = []
    for index in sorted(range(len(points)), key=lambda i: points[i].style != "chosen"):
        point, (x, y) = points[index], places[index]
        if not point.label:
            continue
        size = drawing.CHAR_PX * len(point.label)
        for dx, dy, anchor in _AROUND:
            left = x + dx - {"start": 0.0, "middle": size / 2, "end": size}[anchor]
            box = (left, y + dy - 11, left + size, y + dy + 3)
            inside = box[0] >= x_axis.start and box[2] <= x_axis.end and box[1] >= y_axis.end - 8 and box[3] <= y_axis.start
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                css = "name strong" if point.style == "chosen" else "name"
                if abs(dy - 4) > 20:
                    parts.append(drawing.line(x, y, x + dx * 0.6, y + dy - (0 if dy < 0 else 10), "leader"))
                parts.append(drawing.text(x + dx, y + dy, point.label, css, anchor))
                break
    return parts


_AROUND = tuple(
    (dx, dy, anchor)
    for reach in (0, 14, 28, 42, 56, 70)
    for dx, dy, anchor in (
        (10, 4 - reach, "start"),
        (-10, 4 - reach, "end"),
        (10, 4 + reach, "start"),
        (-10, 4 + reach, "end"),
        (0, -12 - reach, "middle"),
        (0, 20 + reach, "middle"),
    )
)

Box = tuple[float, float, float, float]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# --- Loss curves ----------------------------------------------------------------------------------------------------------


def loss_curves(curves: Sequence[Curve], *, width: int) -> Markup:
    """The loss of every step above; below, its departure from the FP32 reference in percent, with the band FP32 itself covers."""
    reference = next((curve for curve in curves if curve.style == "reference"), None)
    if reference is None or len(reference.losses) < 2:
        return drawing.svg(width, 60, "no curves", [drawing.text(8, 34, "No FP32 run to compare with.", "note")])
    twins = [curve for curve in curves if curve.style == "twin"]
    others = [curve for curve in curves if curve.style not in ("reference", "twin")]
    finite = [loss for curve in (reference, *others) for loss in curve.losses if math.isfinite(loss)]
    if not finite:
        return drawing.svg(width, 60, "no curves", [drawing.text(8, 34, "No loss is finite.", "note")])
    left, upper, lower = 72, 210, 130
    x_axis = Axis(1, len(reference.losses), left, width - 14)
    y_axis = Axis(min(0.0, *finite), _high(finite), upper, 14)
    wide = width > 500
    x_ticks = 6 if wide else 4
    parts = drawing.frame(x_axis, y_axis, x_format="plain", y_format="plain", x_ticks=0, y_ticks=4)
    parts += [drawing.path(drawing.bins(curve.losses), x_axis, y_axis, f"curve {curve.style}") for curve in (reference, *others)]
    gaps = {curve.name: _departure(reference.losses, curve.losses) for curve in (*twins, *others)}
    top, bottom = upper + 52, upper + 52 + lower
    reach = _reach([gap for values in gaps.values() for gap in values])
    gap_axis = Axis(-reach, reach, bottom, top)
    parts.append(drawing.band(_widths([gaps[curve.name] for curve in twins]), x_axis, gap_axis))
    parts += drawing.frame(x_axis, gap_axis, x_format="plain", y_format="percent", x_ticks=x_ticks, y_ticks=4)
    parts.append(drawing.line(left, gap_axis(0), x_axis.end, gap_axis(0), "curve reference"))
    parts += [drawing.path(drawing.bins(gaps[curve.name]), x_axis, gap_axis, f"curve {curve.style}") for curve in others]
    parts += [
        drawing.text(
            left, upper + 40, "departure from FP32, with FP32's own noise as a band" if wide else "departure from FP32", "label"
        ),
        drawing.text((left + x_axis.end) / 2, bottom + 36, "step", "label", "middle"),
        f'<text transform="translate(13 {upper / 2:.0f}) rotate(-90)" text-anchor="middle" class="label">loss</text>',
    ]
    return drawing.svg(width, bottom + 46, "Loss by step", parts)


def _high(values: Sequence[float]) -> float:
    # A diverging arm must not flatten the others: the top tenth of a percent may leave the picture.
    ordered = sorted(values)
    high = ordered[min(int(0.999 * len(ordered)), len(ordered) - 1)]
    return high + 0.05 * abs(high)


def _reach(gaps: Sequence[float]) -> float:
    sizes = sorted(abs(gap) for gap in gaps if math.isfinite(gap))
    return max(1.2 * sizes[int(0.98 * (len(sizes) - 1))], 1e-6) if sizes else 0.01


def _departure(reference: Sequence[float], losses: Sequence[float]) -> list[float]:
    """(loss - reference) / reference of every step, smoothed over a twentieth of the run; NaN where not finite."""
    raw = [(loss - base) / abs(base) if base else math.nan for base, loss in zip(reference, losses, strict=False)]
    span = max(len(raw) // 20, 1)
    return [sum(part) / len(part) for i in range(len(raw)) if (part := raw[max(0, i - span + 1) : i + 1])]


def _widths(gaps: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """(step, size) of FP32's own noise, which is as likely above as below: the band is symmetrical about the reference."""
    length = min((len(values) for values in gaps), default=0)
    return drawing.bins([max(abs(values[i]) for values in gaps) for i in range(length)])


# --- Bars -----------------------------------------------------------------------------------------------------------------


def bars(items: Sequence[Bar], *, width: int) -> Markup:
    """Horizontal bars from zero, a name and a text each; predicted ones have a dashed edge."""
    wide = width > 500
    name_px = min(max((drawing.CHAR_PX * len(item.name) for item in items), default=0) + 14, 240) if wide else 0
    text_px = max((1.1 * drawing.CHAR_PX * len(item.text) for item in items), default=0) + 14
    row = 34 if wide else 48
    top = max((item.value for item in items), default=1.0) or 1.0
    axis = Axis(0, top, name_px, width - text_px)
    parts = []
    for index, item in enumerate(items):
        y = index * row + (6 if wide else 20)
        css = " ".join(("bar", "chosen" if item.chosen else "", "predicted" if item.predicted else ""))
        parts.append(
            drawing.rect(name_px + 1, y, axis(item.value) - name_px, 22, css, title=f"{item.name}: {item.text}", radius=3)
        )
        strong = " strong" if item.chosen else ""
        if wide:
            parts.append(drawing.text(name_px - 10, y + 15.5, item.name, f"name{strong}", "end"))
        else:
            parts.append(drawing.text(0, y - 6, item.name, f"name{strong}"))
        parts.append(drawing.text(axis(item.value) + 9, y + 15.5, item.text, f"value{strong}"))
    return drawing.svg(width, len(items) * row + 6, "Throughput of the arms", parts)


# --- Layers ---------------------------------------------------------------------------------------------------------------


def layer_strip(cells: Sequence[LayerCell], *, width: int) -> Markup:
    """A column a layer in order of use: its precision, the time it gains and its sensitivity; the title says why."""
    left, cell = 92, 14 if width > 500 else 13
    per_row = max(int((width - left) // cell), 1)
    most_gained = max((item.gained_s or 0 for item in cells), default=0)
    logs = [math.log10(item.sensitivity) for item in cells if item.sensitivity and math.isfinite(item.sensitivity)]
    parts: list[str] = []
    block = 3 * (cell + 3) + 26
    for start in range(0, len(cells), per_row):
        stretch = cells[start : start + per_row]
        y = start // per_row * block + 16
        end = f" … {stretch[-1].name}" if len(stretch) > 1 else ""
        parts.append(drawing.text(left, y - 5, _shorten(f"{stretch[0].name}{end}", width - left), "tick"))
        for line, word in enumerate(("precision", "time gained", "sensitivity")):
            parts.append(drawing.text(left - 8, y + line * (cell + 3) + 11, word, "tick", "end"))
        for column, item in enumerate(stretch):
            x = left + column * cell
            shades = (1.0, _gain_shade(item.gained_s, most_gained), _risk_shade(item.sensitivity, logs))
            for line, (css, shade) in enumerate(zip((f"p-{item.precision}", "gain", "risk"), shades, strict=True)):
                place = (x, y + line * (cell + 3), cell - 2, cell)
                parts.append(drawing.rect(*place, f"cell {css}", title=item.title, style=f"fill-opacity:{shade:.2f}", radius=2))
    rows = math.ceil(len(cells) / per_row)
    return drawing.svg(width, max(rows * block, 20), "Precision, time gained and sensitivity of every layer", parts)


def _gain_shade(gained_s: float | None, most: float) -> float:
    return 0.06 if not gained_s or gained_s <= 0 or most <= 0 else 0.12 + 0.88 * gained_s / most


def _risk_shade(sensitivity: float | None, logs: Sequence[float]) -> float:
    if not sensitivity or not logs:
        return 0.06
    if not math.isfinite(sensitivity):
        return 1.0
    low, high = min(logs), max(logs)
    return 0.12 + 0.88 * ((math.log10(sensitivity) - low) / (high - low) if high > low else 0.5)


def _shorten(text: str, width: float) -> str:
    room = int(width / drawing.CHAR_PX)
    return text if len(text) <= room else f"{text[: room // 2 - 1]}…{text[-(room // 2 - 1) :]}"
