"""autoprec: mixed-precision training that tunes itself.

Importing this package loads neither torch nor the search: each name below is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.errors import AutoprecError, PolicyError, PolicyMismatch, UserError, WorkloadError
    from autoprec.policy import Policy, load_policy, save_policy
    from autoprec.runtime import AppliedPolicy, apply_policy, remove_policy
    from autoprec.session import TuneResult, VerifyResult, tune, verify

__version__ = "0.1.0"

_HOMES = {
    "AppliedPolicy": "autoprec.runtime",
    "AutoprecError": "autoprec.errors",
    "Policy": "autoprec.policy",
    "PolicyError": "autoprec.errors",
    "PolicyMismatch": "autoprec.errors",
    "TuneResult": "autoprec.session",
    "UserError": "autoprec.errors",
    "VerifyResult": "autoprec.session",
    "WorkloadError": "autoprec.errors",
    "apply_policy": "autoprec.runtime",
    "load_policy": "autoprec.policy",
    "remove_policy": "autoprec.runtime",
    "save_policy": "autoprec.policy",
    "tune": "autoprec.session",
    "verify": "autoprec.session",
}
__all__ = [
    "AppliedPolicy",
    "AutoprecError",
    "Policy",
    "PolicyError",
    "PolicyMismatch",
    "TuneResult",
    "UserError",
    "VerifyResult",
    "WorkloadError",
    "__version__",
    "apply_policy",
    "load_policy",
    "remove_policy",
    "save_policy",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoprec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
