"""The house rules that a machine can check: floors, imports, sizes."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "autoprec").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
FORBIDDEN_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "manager.py", "misc.py"}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_files_to_check():
    assert len(FILES) > 40


def test_imports_go_down_only():
    command = shutil.which("lint-imports", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert command, "import-linter is not installed: pip install -e '.[test]'"
    result = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "3 kept, 0 broken" in result.stdout


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "cli.py"], ids=named)
def test_imports_stand_at_the_top_of_a_file(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = [
        f"{function.name}, line {node.lineno}"
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inner == []


@pytest.mark.parametrize("path", FILES, ids=named)
def test_files_and_functions_stay_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    sizes = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(ast.parse(text))}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", FILES, ids=named)
def test_no_error_is_swallowed_without_a_word(path):
    handlers = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ExceptHandler))
    silent = [
        node.lineno for node in handlers if node.type is None or (len(node.body) == 1 and isinstance(node.body[0], ast.Pass))
    ]
    assert silent == []


def test_no_file_is_named_after_nothing_in_particular():
    assert {path.name for path in FILES} & FORBIDDEN_NAMES == set()


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "tune"], ids=named)
def test_deciding_never_mentions_torch_as_a_module(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "torch" not in modules
