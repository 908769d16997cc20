"""The errors autoprec raises: what was given, what is allowed, what to do next.

``UserError`` and its kinds are mistakes a person can mend (the command line prints them without a traceback and exits 2);
any other ``AutoprecError`` exits 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoprecError(Exception):
    """Root of every error raised on purpose.

    Attributes:
        message: what was given and what is allowed.
        hint: what to do next; may be empty.
        exit_code: what the command line returns for it.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors cross process borders.
        return (_rebuild, (type(self), self.message, self.hint))

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


def _rebuild(cls: type[AutoprecError], message: str, hint: str) -> AutoprecError:
    return cls(message, hint=hint)


class UserError(AutoprecError):
    """A mistake in what the user gave; exit code 2 and no traceback."""

    exit_code = 2


class WorkloadError(UserError):
    """model.py is missing, misspelt, not reproducible, or does not train in FP32."""


class PolicyError(UserError):
    """A policy file cannot be read: corrupt, newer than this version, or with values that are not allowed."""


class PolicyMismatch(PolicyError):
    """The policy was made for another list of layers."""


class SearchSpaceError(UserError):
    """A search-space file cannot be read or contradicts itself."""


class DeviceError(UserError):
    """The GPU asked for is unknown, is not here, or cannot do what was asked."""


class RunFolderError(UserError):
    """The output folder holds another run, or cannot be written."""


class WorkerError(AutoprecError):
    """The process that runs windows could not be started or answered nonsense."""


def suggest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Returns ``" Did you mean 'x'?"`` for the nearest known word, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""
