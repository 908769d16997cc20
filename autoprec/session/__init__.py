"""Wires measuring into deciding: what ``autoprec.tune()``, ``autoprec.verify()`` and the command line call."""

from autoprec.session.export import TuneResult
from autoprec.session.long_run import VerifyResult, run_verify, verify
from autoprec.session.long_run_settings import VerifySettings
from autoprec.session.opening import Interrupted
from autoprec.session.progress import Progress
from autoprec.session.run import run_tune, tune
from autoprec.session.settings import Settings

__all__ = [
    "Interrupted",
    "Progress",
    "Settings",
    "TuneResult",
    "VerifyResult",
    "VerifySettings",
    "run_tune",
    "run_verify",
    "tune",
    "verify",
]
