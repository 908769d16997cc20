"""What charts are drawn with: axes, lines, text and curves as pieces of inline SVG.

Colours come from the page's CSS variables, so that a picture follows light and dark. Text from users is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from markupsafe import Markup

# Mean width of a character at the charts' 12 px text in a wide face (DejaVu Sans); bold is a tenth wider. An estimate for placing
# labels: no renderer is asked.
CHAR_PX = 7.0
MAX_CURVE_POINTS = 240


class Axis:
    """Maps values to pixels, linearly or by logarithm."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        if not high > low:
            span = max(abs(low) * 0.1, 0.5)  # half a unit is lost beside a very large value
            low, high = (low / 2, low * 2) if log and low > 0 else (low - span, low + span)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        low, high, at = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values inside the range."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(powers) <= 2:
                every = [10.0**power * factor for power in range(powers.start - 1, powers.stop) for factor in (1, 2, 5)]
                inside = [tick for tick in every if self.low <= tick <= self.high]
                return inside[:: max(1, math.ceil(len(inside) / (2 * count + 2)))]
            step = max(1, math.ceil(len(powers) / max(count, 1)))
            return [10.0**power for power in list(powers)[::step]]
        raw = (self.high - self.low) / max(count, 1)
        size = 10.0 ** math.floor(math.log10(raw))
        step_size = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
        first = math.ceil(self.low / step_size - 1e-9)
        return [index * step_size for index in range(first, math.floor(self.high / step_size + 1e-9) + 1)]


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> Markup:
    """A whole chart; ``label`` is what a screen reader says of it."""
    head = f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img"'
    return Markup(f'{head} aria-label="{escape(label)}">{"".join(parts)}</svg>')


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    """Words at a place; ``anchor`` is the end of them that lies there."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def rect(
    x: float, y: float, width: float, height: float, css: str, *, title: str = "", style: str = "", radius: float = 0
) -> str:
    """A rectangle; ``title`` is shown when it is pointed at."""
    extra = f' style="{style}"' if style else ""
    extra += f' rx="{radius:g}"' if radius else ""
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" class="{css}"{extra}'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def frame(x_axis: Axis, y_axis: Axis, *, x_format: str, y_format: str, x_ticks: int, y_ticks: int) -> list[str]:
    """Grid, ticks and the lower axis."""
    parts = []
    for value in y_axis.ticks(y_ticks):
        y = y_axis(value)
        parts.append(line(x_axis.start, y, x_axis.end, y, "grid"))
        parts.append(text(x_axis.start - 8, y + 4, tick_text(value, y_format), "tick", "end"))
    for value in x_axis.ticks(x_ticks):
        x = x_axis(value)
        parts.append(line(x, y_axis.start, x, y_axis.start + 4, "axis"))
        parts.append(text(x, y_axis.start + 18, tick_text(value, x_format), "tick", "middle"))
    parts.append(line(x_axis.start, y_axis.start, x_axis.end, y_axis.start, "axis"))
    return parts


def tick_text(value: float, style: str) -> str:
    """A tick's value; ``style`` is ``percent`` or ``plain``."""
    if style == "percent":
        short = f"{100 * value:.3g}"
        return f"{short} %" if "e" not in short else f"{100 * value:g} %"
    return f"{value:,.10g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.0e}"


def bins(values: Sequence[float]) -> list[tuple[float, float]]:
    """(step, mean value) of at most MAX_CURVE_POINTS stretches, so that long runs stay small files."""
    size = max(math.ceil(len(values) / MAX_CURVE_POINTS), 1)
    stretches = ((start, values[start : start + size]) for start in range(0, len(values), size))
    return [(start + (len(part) + 1) / 2, sum(part) / len(part)) for start, part in stretches]


def path(points: Iterable[tuple[float, float]], x_axis: Axis, y_axis: Axis, css: str) -> str:
    """A curve through (step, value); it ends with a cross where the values stop being finite."""
    steps, parts, ended = [], [], False
    for step, value in points:
        if not math.isfinite(value):
            ended = True
            break
        steps.append(f"{x_axis(step):.1f} {y_axis(value):.1f}")
    if steps:
        parts.append(f'<path d="M{"L".join(steps)}" class="{css}"/>')
        if ended:
            x, y = steps[-1].split()
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle" class="lost">✕<title>not finite from here</title></text>')
    return "".join(parts)


def band(points: Iterable[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    """The area within (step, size) above and below zero."""
    sizes = [(step, size) for step, size in points if math.isfinite(size)]
    upper = [f"{x_axis(step):.1f} {y_axis(size):.1f}" for step, size in sizes]
    lower = [f"{x_axis(step):.1f} {y_axis(-size):.1f}" for step, size in reversed(sizes)]
    return f'<path d="M{"L".join(upper + lower)}Z" class="noise"/>' if sizes else ""
