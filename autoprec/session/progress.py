"""What a running tune tells whoever watches it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives what happens; the command line draws it, ``autoprec.tune`` is silent unless given one."""

    def stage(self, name: str, total: int) -> None:
        """A stage begins; ``total`` is how many windows or solves it is expected to take."""

    def advance(self, text: str = "") -> None:
        """One more window of the stage is done; ``text`` is the best so far."""

    def found(self, text: str) -> None:
        """A stage, or a step of it, found something worth a line."""


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int) -> None:
        """Ignored."""

    def advance(self, text: str = "") -> None:
        """Ignored."""

    def found(self, text: str) -> None:
        """Ignored."""
