"""A verification in short, as the report of its run shows it and a head line says it."""

from __future__ import annotations

from pathlib import Path

from autoprec.errors import RunFolderError
from autoprec.records import Record, VerdictStatus
from autoprec.tune.long_run import LongRun, long_run_folders, read_long_run
from autoprec.tune.long_run_curves import LongRunCurves, curves_of

ENDINGS: dict[VerdictStatus, str] = {
    "passed": "The policy trains like FP32 over",
    "rejected": "The policy does not train like FP32 over",
    "inconclusive": "Whether the policy trains like FP32 is not settled after",
}


class LongRunSection(Record):
    """What the report says of one verification; ``page`` is its own page, seen from the run's folder."""

    name: str
    page: str
    headline: str
    status: VerdictStatus
    text: str
    where: str
    warnings: tuple[str, ...]
    curves: LongRunCurves
    limit: float


def headline(run: LongRun) -> str:
    """The answer in a sentence."""
    return f"{ENDINGS[run.status]} {run.steps:,} steps"


def where(run: LongRun) -> str:
    """On what it was verified, and when."""
    made = run.environment
    software = f"torch {made.torch_version}" + (f", driver {made.driver}" if made.driver else "")
    seeds = len(run.arm("policy").runs)
    return f"{made.device}, {software}; {seeds} {'seed' if seeds == 1 else 'seeds'} of {run.steps:,} steps; {run.created}"


def section_of(run: LongRun, page: str) -> LongRunSection:
    """The section of one verification."""
    return LongRunSection(
        name=run.name,
        page=page,
        headline=headline(run),
        status=run.status,
        text=run.text,
        where=where(run),
        warnings=run.warnings,
        curves=curves_of(run),
        limit=run.limit,
    )


def sections_of(run_folder: Path) -> tuple[LongRunSection, ...]:
    """The sections of every verification in a run's folder that can be read, oldest first."""
    sections = []
    for folder in long_run_folders(run_folder):
        try:
            run = read_long_run(folder)
        except RunFolderError:  # of another version, say: the run's own report must not fail for it
            continue
        sections.append(section_of(run, f"{folder.name}/verify.html"))
    return tuple(sections)
