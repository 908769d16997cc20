"""A training job, and a person who only reads a policy, wait for no library that they do not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "policy_v1.json"
HEAVY = ("torch", "optuna", "pandas", "click", "rich", "scipy", "jinja2", "sklearn", "plotly")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that are loaded after ``code`` ran in a new interpreter."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code",
    [
        "import autoprec",
        f"import autoprec; assert autoprec.load_policy({str(GOLDEN)!r}).version == 1",
        "import autoprec.policy, autoprec.records, autoprec.errors",
    ],
)
def test_importing_and_loading_a_policy_load_nothing_heavy(code: str) -> None:
    found = loaded_by(code)
    assert "autoprec" in found
    assert found.isdisjoint(HEAVY), found & set(HEAVY)


def test_applying_a_policy_needs_torch_and_nothing_of_the_search() -> None:
    found = loaded_by("import autoprec; autoprec.apply_policy")
    assert "torch" in found
    # torch itself may load jinja2; everything else here is the search's.
    assert found.isdisjoint({"optuna", "pandas", "click", "rich", "scipy", "sklearn", "plotly"})


def test_the_search_decides_without_torch() -> None:
    modules = "report, review, run_folder, describe, charts, study, assignment, verdict"
    assert "torch" not in loaded_by(f"from autoprec.tune import {modules}")


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    import autoprec

    assert [name for name in autoprec.__all__ if getattr(autoprec, name, None) is None] == []
    assert set(autoprec.__all__) <= set(dir(autoprec))
    with pytest.raises(AttributeError, match="no attribute 'aply_policy'"):
        _ = autoprec.aply_policy
