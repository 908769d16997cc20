"""What every page is made with: the templates and their filters, and charts for wide and narrow screens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2
from markupsafe import Markup

from autoprec.tune import quantities
from autoprec.tune.rows import role_words

# Widths the charts are drawn for, in CSS pixels: a laptop's text column and the narrowest phone in use (360 less margins).
WIDE_PX, NARROW_PX = 900, 328


def page_environment() -> jinja2.Environment:
    """Templates that escape what they are given, with the filters that turn figures into text."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        throughput=quantities.throughput,
        ratio=quantities.ratio,
        memory=quantities.memory,
        duration=quantities.duration,
        gap=quantities.gap,
        role=role_words,
    )
    return environment


def wide_and_narrow(draw: Callable[[int], Markup]) -> Markup:
    """A chart for wide and for narrow pages; the page's style shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(WIDE_PX), draw(NARROW_PX))
