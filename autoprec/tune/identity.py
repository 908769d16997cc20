"""What a run is about, and whether another one may go on in its folder."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field

from autoprec.records import Record
from autoprec.tune.rows import Value


class Identity(Record):
    """What a folder's run is about. A tune may go on in a folder only where everything but the last three is equal.

    Attributes:
        workload: the reference the user gave.
        workload_sha256: hash of the user's source and batch settings.
        layer_list_sha256: hash of the model's layer list.
        search_space_sha256: hash of the search space as it was bound.
        target: the GPU or processor that is tuned for.
        torch_version: version of torch that ran.
        settings: what else changes results (tolerance, execution, window lengths).
        budget: how much is searched (trials, seconds); more may be asked for when resuming.
        command: the command line, for people.
        autoprec_version: for people.
    """

    workload: str
    workload_sha256: str
    layer_list_sha256: str
    search_space_sha256: str
    target: str
    torch_version: str
    settings: dict[str, Value] = Field(default_factory=dict)
    budget: dict[str, Value] = Field(default_factory=dict)
    command: str = ""
    autoprec_version: str = ""


_COMPARED = {
    "workload_sha256": "the model's file",
    "layer_list_sha256": "the layer list",
    "search_space_sha256": "the search space",
    "target": "the GPU",
    "torch_version": "torch",
}


def differences(held: Identity, asked: Identity) -> list[str]:
    """What keeps two runs apart, a line each; empty where the second may go on from the first."""
    lines = []
    for field, label in _COMPARED.items():
        mine, theirs = str(getattr(held, field)), str(getattr(asked, field))
        if mine != theirs:
            short = slice(12) if field.endswith("sha256") else slice(None)
            lines.append(f"{label}: the folder holds {mine[short]}, asked was {theirs[short]}")
    for key in sorted(held.settings.keys() | asked.settings.keys()):
        mine, theirs = (repr(settings.get(key)) for settings in (held.settings, asked.settings))
        if mine != theirs:
            lines.append(f"{key}: the folder holds {mine}, asked was {theirs}")
    return lines


def default_path(model: str, gpu: str) -> Path:
    """``reports/<model>-<gpu>`` for a workload's name and a target's name, with signs that shells dislike left out."""
    words = (re.sub(r"[^A-Za-z0-9_.]+", "-", word).strip("-.") or "run" for word in (model, gpu))
    return Path("reports", "-".join(words))
