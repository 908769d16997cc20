"""Where a workload comes from: a file, a module or an object, loaded with clear errors and hashed."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autoprec.errors import UserError, WorkloadError, suggest

_FORMS = "Give path/model.py, path/model.py:object or package.module:object."
_MODULE_PREFIX = "autoprec_workload_"
_LONGEST_LINE = 80  # characters of a user's line shown in a message


@dataclass(frozen=True)
class Found:
    """A place that holds a workload's functions.

    Attributes:
        home: the module, class or object.
        name: short name for folders and tables.
        label: how messages call it.
        reference: what loads it again; empty for an object in memory.
        sources: texts of its source, in a fixed order.
    """

    home: Any
    name: str
    label: str
    reference: str
    sources: tuple[str, ...]

    def hash_with(self, settings: str) -> str:
        """SHA-256 over the sources and the settings."""
        digest = hashlib.sha256()
        for text in (*self.sources, settings):
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()


def find_source(reference: Any) -> Found:
    """Loads what a reference names.

    Raises:
        WorkloadError: nothing is there, or it does not load.
    """
    if isinstance(reference, os.PathLike):
        reference = os.fspath(reference)
    if not isinstance(reference, str):
        return _in_memory(reference)
    head, colon, tail = reference.rpartition(":")
    if colon and head.endswith(".py"):
        return _from_file(Path(head), tail)
    if reference.endswith(".py") or os.sep in reference or Path(reference).exists():
        return _from_file(Path(reference), "")
    return _from_module(head, tail) if colon else _from_module(reference, "")


def check_reference(reference: Any) -> None:
    """Sees that a file named by a reference is there, without running it.

    Raises:
        WorkloadError: there is no such file.
    """
    head = str(reference).rpartition(":")[0] if str(reference).rpartition(":")[0].endswith(".py") else str(reference)
    if isinstance(reference, (str, Path)) and (head.endswith(".py") or os.sep in head):
        _existing(Path(head))


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    if path.is_dir():
        inside = path / "model.py"
        hint = f"It holds a model.py: give {inside}." if inside.is_file() else _FORMS
        raise WorkloadError(f"{path} is a folder; a workload is a Python file.", hint=hint)
    if not path.is_file():
        with_suffix = path.with_name(path.name + ".py")
        siblings = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = f" Did you mean '{with_suffix.name}'?" if with_suffix.is_file() else suggest(path.name, siblings)
        raise WorkloadError(f"No model file at {path}.{near}", hint=_FORMS)
    return path


def _from_file(path: Path, attribute: str) -> Found:
    path = _existing(path)
    module = _run_file(path)
    home = _attribute(module, attribute, path.name) if attribute else module
    label = f"{path.name}:{attribute}" if attribute else path.name
    name = f"{path.stem}-{attribute}" if attribute else path.stem
    reference = f"{path}:{attribute}" if attribute else str(path)
    return Found(home, name, label, reference, (*_texts(path), attribute))


def _from_module(module_name: str, attribute: str) -> Found:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise WorkloadError(f"'{module_name}' is neither a file nor the name of a Python module.", hint=_FORMS)
    with _user_code(f"module {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
                raise
            raise WorkloadError(
                f"No module named '{error.name}' can be imported, and no such file is here.", hint=_FORMS
            ) from None
    home = _attribute(module, attribute, module_name) if attribute else module
    label = f"{module_name}:{attribute}" if attribute else module_name
    name = attribute or module_name.rpartition(".")[2]
    file = getattr(module, "__file__", None)
    texts = _texts(Path(file)) if file and file.endswith(".py") else (module_name,)
    return Found(home, name, label, label, (*texts, attribute))


def _in_memory(value: Any) -> Found:
    if isinstance(value, ModuleType):
        name = value.__name__.rpartition(".")[2]
    elif isinstance(value, type):
        name = value.__name__
    else:
        name = getattr(value, "name", None) or type(value).__name__
    return Found(value, str(name).lower(), f"The {name} object", "", tuple(_source_of_object(value)))


def _source_of_object(value: Any) -> Iterator[str]:
    kind = value if isinstance(value, (type, ModuleType)) else type(value)
    parts = [kind, *(part for _, part in sorted(getattr(value, "__dict__", {}).items()) if inspect.isfunction(part))]
    for part in parts:
        try:
            yield inspect.getsource(part)
        except (OSError, TypeError):
            yield getattr(part, "__qualname__", repr(kind))


def _attribute(module: ModuleType, path: str, label: str) -> Any:
    value: Any = module
    for step in path.split("."):
        if not hasattr(value, step):
            names = [name for name in dir(value) if not name.startswith("_")]
            raise WorkloadError(
                f"{label} has no '{path}'.{suggest(step, names)}",
                hint=f"It defines {', '.join(names[:12]) or 'nothing'}. Give one of these after the colon, or leave it out.",
            )
        value = getattr(value, step)
    return value


_loading: set[str] = set()


def _run_file(path: Path) -> ModuleType:
    """Runs a model file as a module of its own name; its folder becomes importable, as when Python runs the file itself."""
    if str(path) in _loading:
        raise WorkloadError(
            f"{path.name} starts autoprec on itself while autoprec is loading it.",
            hint="Put that call under: if __name__ == '__main__':",
        )
    text = _read(path)
    name = _MODULE_PREFIX + hashlib.sha256(str(path).encode()).hexdigest()[:12]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module = ModuleType(name)
    module.__file__ = str(path)
    # Registered before it runs and kept: dataclasses, pickling and loader workers look their module up by name.
    sys.modules[name] = module
    _loading.add(str(path))
    try:
        with _user_code(path.name):
            exec(compile(text, str(path), "exec"), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        _loading.discard(str(path))
    return module


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"Cannot read {path}: {error}.", hint="Give a readable Python file in UTF-8.") from None


def _texts(path: Path) -> tuple[str, ...]:
    """The text of a file and of the files beside it that it imports, sorted by path."""
    found: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = file.read_text(encoding="utf-8", errors="replace")
        waiting.extend(_imported_beside(found[file], path.parent))
    return tuple(found[file] for file in sorted(found))


def _imported_beside(text: str, folder: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            base = folder.joinpath(*name.split("."))
            yield from (file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file())


@contextmanager
def _user_code(label: str) -> Iterator[None]:
    """Turns what the user's code raises while it is loaded into an error that shows the line and no traceback of ours."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise WorkloadError(_syntax_text(label, error), hint="Mend the line; 'python FILE' shows the same error.") from None
    except ModuleNotFoundError as error:
        raise WorkloadError(
            f"{label} imports '{error.name}', which is not installed here.\n{user_line(error)}",
            hint=f"Install it into this Python ({sys.executable}), or mend the import.",
        ) from None
    except SystemExit as error:
        raise WorkloadError(
            f"{label} ended the program while it was loaded (exit code {error.code}).",
            hint="Put what should only run as a script under: if __name__ == '__main__':",
        ) from None
    except Exception as error:
        raise WorkloadError(
            f"{label} raised {describe(error)} while it was loaded.\n{user_line(error)}",
            hint="It must load without an error; 'python FILE' shows the whole traceback.",
        ) from None


def _syntax_text(label: str, error: SyntaxError) -> str:
    where = Path(error.filename).name if error.filename else label
    line = (error.text or "").rstrip("\n")
    mark = f"\n    {' ' * max((error.offset or 1) - 1, 0)}^" if line else ""
    return f"{where} has a syntax error in line {error.lineno}: {error.msg}\n    {line}{mark}"


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def user_line(error: BaseException) -> str:
    """The innermost line of the user's own code in an exception's traceback, as file, line, function and text."""
    for frame in reversed(_own_frames(error) or list(traceback.extract_tb(error.__traceback__))):
        return f"    {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line or ''}".rstrip(": ")
    return ""


def raised_at(error: BaseException) -> str:
    """`` at 'scores.masked_fill(mask, -1e9)' (model.py, line 12)``: which of the user's operations raised; empty where none did."""
    for frame in reversed(_own_frames(error)):
        if frame.line:
            return f" at '{textwrap.shorten(frame.line, _LONGEST_LINE)}' ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    ours = str(Path(__file__).resolve().parents[1])
    libraries = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen")
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith(ours) and not any(part in f.filename for part in libraries)]


def call_user(what: str, function: Callable[..., Any], *args: Any, hint: str) -> Any:
    """Calls a user's function; what it raises becomes a ``WorkloadError`` that shows the line.

    Raises:
        WorkloadError: the function raised.
    """
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        raise WorkloadError(f"{what} raised {describe(error)}\n{user_line(error)}", hint=hint) from error
