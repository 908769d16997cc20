"""Wires measuring into deciding: what ``autoprec.tune()`` and the command line both call."""

from autoprec.session.export import TuneResult
from autoprec.session.opening import Interrupted
from autoprec.session.progress import Progress
from autoprec.session.run import run_tune, tune
from autoprec.session.settings import Settings

__all__ = ["Interrupted", "Progress", "Settings", "TuneResult", "run_tune", "tune"]
