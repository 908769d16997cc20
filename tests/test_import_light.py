"""Importing autoprec and reading a policy must not load what a training job has no use for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "optuna", "pandas", "click", "rich", "scipy", "jinja2", "numpy", "optuna_dashboard", "sklearn")


def loaded_after(statement: str) -> set[str]:
    """Heavy modules that a fresh interpreter holds after a statement."""
    code = f"import sys, json\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    "statement",
    [
        "import autoprec",
        "import autoprec; dir(autoprec); autoprec.PolicyError, autoprec.__version__",
        f"import autoprec; assert autoprec.load_policy({str(ROOT / 'tests/golden/policy_v1.json')!r}).default == 'fp16'",
        "import autoprec.records",
    ],
)
def test_importing_and_reading_a_policy_loads_nothing_heavy(statement):
    assert loaded_after(statement) == set()


def test_applying_a_policy_loads_torch_and_nothing_of_the_search():
    assert loaded_after("import autoprec; autoprec.apply_policy") <= {"torch", "numpy"}


def test_everything_the_package_names_exists():
    code = (
        "import autoprec; from importlib import import_module\n"
        "homes = autoprec._HOMES\n"
        "assert sorted(autoprec.__all__) == sorted([*homes, '__version__'])\n"
        "print(all(hasattr(import_module(home), name) for name, home in homes.items()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "True\n"


def test_an_unknown_name_is_an_attribute_error():
    code = "import autoprec\ntry: autoprec.aply_policy\nexcept AttributeError as error: print(error)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "module 'autoprec' has no attribute 'aply_policy'\n"
