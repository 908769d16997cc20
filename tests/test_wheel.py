"""What is installed is what is here: the data files are in the wheel and are found from it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEARCH_SPACES = sorted(path.name for path in (ROOT / "search_spaces").glob("*.toml"))


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    environment = None if path is None else {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files and nothing else; its dependencies are those of this environment."""
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    run(*pip, cwd=target)
    return target


def test_the_wheel_holds_every_data_file_and_no_test(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert SEARCH_SPACES, "no search space to install"
    wanted = {
        "autoprec/py.typed",
        "autoprec/policy.schema.json",
        "autoprec/bench/gpus.toml",
        "autoprec/tune/templates/report.html.j2",
        *(f"autoprec/search_spaces/{name}" for name in SEARCH_SPACES),
    }
    assert wanted - names == set()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"autoprec"}
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_has_its_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "autoprec = autoprec.cli:main" in archive.read(entry_points).decode()


def test_search_spaces_gpus_schema_and_template_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = f"""
import json
from pathlib import Path
import autoprec
from autoprec.bench.gpus import GPUS
from autoprec.tune.space import load_search_space
home = Path(autoprec.__file__).parent
json.loads((home / "policy.schema.json").read_text())
spaces = [load_search_space(name.removesuffix(".toml")) for name in {SEARCH_SPACES!r}]
print(json.dumps([str(home), len(GPUS), len(spaces), (home / "tune/templates/report.html.j2").is_file()]))
"""
    home, gpus, spaces, template = json.loads(run(sys.executable, "-c", code, cwd=tmp_path, path=installed))
    assert Path(home) == installed / "autoprec"
    assert gpus > 10
    assert spaces == len(SEARCH_SPACES)
    assert template
