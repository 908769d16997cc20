"""Where the runs of these tests lie."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder, in memory where the system has such a place: a study waits for the disk several times a trial."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path / "run"
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path) / "run"
