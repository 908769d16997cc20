"""The search on small models with planted hazards: which layers a verified policy keeps out of fp16, and which it does not."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.bench.workload import load_workload
from autoprec.session.settings import Settings

ROOT = Path(__file__).parent.parent.parent
TRAPS = ROOT / "tests" / "workloads" / "traps"


@pytest.fixture
def trap_report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("trap_report")


def searched(trap_report: Any, workload: str, search: str) -> Any:
    """The last row of a quick search: of the policy with fp16 layers, where every precision is allowed."""
    settings = Settings("trap", trials=0, budget_s=3600.0, execution="eager", tolerance=0.03)
    plan = trap_report.plan_of(24, 32, verify_seeds=1)
    return trap_report.report(TRAPS / f"{workload}.py", trap_report.target_here(), [search], settings, plan)[-1]


@pytest.mark.parametrize(
    ("workload", "search", "kept"),
    [
        # A container's own product overflows: it is lifted and the projections inside it are not; bf16 is enough.
        ("container_attention", "all", {"blocks.0.cross": "bf16"}),
        # Two hazards at the two ends: curing one changes nothing in the loss.
        ("two_ends", "fp16", {"stem.level": "fp32", "finish.share": "fp32"}),
        # Only a neighbour's precision makes it a hazard: found by looking at the plan itself.
        ("norm_then_square", "fp16", None),
    ],
)
def test_the_layers_at_fault_and_at_most_one_more_are_kept_out_of_fp16(
    trap_report: Any, workload: str, search: str, kept: dict[str, str] | None
) -> None:
    row = searched(trap_report, workload, search)
    assert row.verdict == "passed" and not row.wrong, "what passed tracks FP32 on fresh seeds too"
    assert len(row.extra) <= 1, "one seed of a short window cannot always tell a cured plan from one with a layer more in fp32"
    if kept is not None:
        assert {name: row.kept[name] for name in row.kept if name not in row.extra} == kept and row.missed == ()


def test_every_trap_names_layers_that_its_model_has(trap_report: Any) -> None:
    paths = trap_report.traps_in(TRAPS)
    assert len(paths) >= 10
    for path in paths:
        model = load_workload(str(path)).build_model()
        assert set(trap_report.trap_of(path)["layers"]) <= {name for name, _ in model.named_modules()}, path.stem
