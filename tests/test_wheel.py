"""The wheel holds what is read at run time, and finds it when installed away from the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = shutil.ignore_patterns("reports", "shared", ".*", "build", "dist", "*.egg-info", "__pycache__", "venv*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is left beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("autoprec", "search_spaces"):
        shutil.copytree(ROOT / name, source / name, ignore=LEFT_BEHIND)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "out"), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = (folder / "out").glob("autoprec-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's package and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    return target


def run_outside(installed: Path, code: str) -> str:
    """What code prints in a fresh interpreter that sees the installed package and not the repository."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_the_data_that_is_read_at_run_time(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    spaces = {f"autoprec/search_spaces/{path.name}" for path in (ROOT / "search_spaces").glob("*.toml")}
    assert len(spaces) >= 6
    expected = {"bench/gpus.toml", "tune/templates/report.html.j2", "policy.schema.json", "py.typed"}
    assert spaces | {f"autoprec/{name}" for name in expected} <= names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "reports/"))]


def test_every_search_space_loads_from_the_installed_wheel(installed):
    names = sorted(path.stem for path in (ROOT / "search_spaces").glob("*.toml"))
    code = (
        "import autoprec; from autoprec.tune.space import load_search_space\n"
        f"for name in {names!r}: assert load_search_space(name).rules, name\n"
        "print(autoprec.__file__)"
    )
    assert run_outside(installed, code).startswith(str(installed))


def test_the_gpu_table_loads_from_the_installed_wheel(installed):
    code = "from autoprec.bench.gpus import GPUS, find_gpu; print(len(GPUS), find_gpu('4090d').name)"
    count, name = run_outside(installed, code).split(maxsplit=1)
    assert int(count) > 10
    assert "4090 D" in name


def test_the_report_is_drawn_from_the_installed_wheel(installed):
    code = (
        f"import sys; sys.path.append({str(ROOT / 'tests' / 'tune')!r})\n"
        "from made_up_run import report_data; import autoprec.tune.report as report\n"
        "print(report.__file__, len(report.render_html(report_data())))"
    )
    path, size = run_outside(installed, code).split()
    assert path.startswith(str(installed))
    assert int(size) > 20_000


def test_the_command_is_part_of_the_wheel(wheel):
    archive = zipfile.ZipFile(wheel)
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "autoprec = autoprec.cli:main" in archive.read(entry).decode()
