"""Remembers what the stages found, for the report, while passing it on to whoever watches."""

from __future__ import annotations

import time

from autoprec.session.progress import Progress
from autoprec.tune.report_data import Stage


class Logbook:
    """A ``Progress`` that keeps every line under its stage, with the stage's wall time."""

    def __init__(self, watcher: Progress) -> None:
        self._watcher = watcher
        self._name = "start"
        self._start_s = time.monotonic()
        self._lines: list[str] = []
        self._stages: list[Stage] = []

    def stage(self, name: str, total: int) -> None:
        """Closes the stage before and begins the next."""
        self._close()
        self._name, self._start_s, self._lines = name, time.monotonic(), []
        self._watcher.stage(name, total)

    def advance(self, text: str = "") -> None:
        """Passed on."""
        self._watcher.advance(text)

    def found(self, text: str) -> None:
        """Kept and passed on."""
        self._lines.append(text)
        self._watcher.found(text)

    def stages(self) -> tuple[Stage, ...]:
        """Every stage that found something, the current one included."""
        self._close()
        self._lines = []
        return tuple(self._stages)

    def _close(self) -> None:
        if self._lines:
            text = "; ".join(line.removeprefix(f"{self._name}: ") for line in self._lines)
            self._stages.append(Stage(name=self._name, text=text, cost_s=time.monotonic() - self._start_s))
