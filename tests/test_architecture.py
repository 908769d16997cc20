"""The floors, and the house rules that a machine can check."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoprec

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autoprec"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_down_only() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kept, 0 broken" in done.stdout


def imports_inside_functions(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (inner.lineno for inner in ast.walk(node) if isinstance(inner, ast.Import | ast.ImportFrom))


def test_the_check_for_imports_inside_functions_finds_one() -> None:
    assert list(imports_inside_functions(ast.parse("def f():\n    if True:\n        import os"))) == [3]


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "cli.py"], ids=label)
def test_no_function_imports(path: Path) -> None:
    assert list(imports_inside_functions(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert path.stem not in VAGUE_NAMES
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "no docstring at the top"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_no_error_is_swallowed_without_a_word(path: Path) -> None:
    handlers = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ExceptHandler)]
    silent = [handler.lineno for handler in handlers if all(isinstance(step, ast.Pass) for step in handler.body)]
    assert silent == []


def test_every_module_imports() -> None:
    found = [module.name for module in pkgutil.walk_packages(autoprec.__path__, "autoprec.")]
    assert len(found) == len(SOURCES) - 1, "a folder without __init__.py is left out"
    for name in found:
        importlib.import_module(name)


def test_no_tracked_text_names_a_folder_of_the_machine_it_was_written_on() -> None:
    foreign = re.compile(r"(?<![\w.])/(?:home|Users|root)/\w+")
    for folder in ("autoprec", "examples", "search_spaces"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".toml", ".json", ".j2", ".md"}:
                assert not foreign.search(path.read_text(encoding="utf-8")), label(path)
