"""A run's folder: what a tune found out, written as it happens, so that a second tune goes on where the first one stopped.

Files: ``run.json`` (what is being tuned), ``candidates.jsonl`` (raw samples, one evaluation a line), ``stages.json`` (results of
stages), ``look.json``, ``profile.json``, ``study.db``, ``trials.csv``, ``policy.json``, ``report.html``, ``report.md`` and
``report.json`` (the report's data).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pandas as pd
from pydantic import ValidationError

from autoprec.errors import RunFolderError
from autoprec.policy import Policy, save_policy, write_atomically
from autoprec.records import UNDECIDED_FAILURES, Candidate, Failure, Look, Outcome, Profile, Record, Window, evaluation_key
from autoprec.tune.folder_lock import FolderLock
from autoprec.tune.identity import Identity, differences
from autoprec.tune.rows import TrialRow

R = TypeVar("R", bound=Record)

OTHER_FOLDER = "Give another folder with --out, or delete this one to start over."


class RunFolder:
    """The folder of one run, locked while it is written.

    Attributes:
        path: the folder.
        identity: what the run is about.
        resumed: whether an earlier run is carried on.
        notes: what a person should know about opening it (a torn line, a lock left behind).
        candidates: every evaluation so far, in order.
    """

    def __init__(self, path: Path, identity: Identity, *, resumed: bool, lock: FolderLock | None) -> None:
        self.path = path
        self.identity = identity
        self.resumed = resumed
        self.notes: list[str] = [lock.taken_over] if lock and lock.taken_over else []
        self._lock = lock
        found, self._sound_bytes = _read_candidates(self.candidates_path, self.notes)
        self.candidates: list[Candidate] = []
        self._memo: dict[str, Outcome] = {}
        for candidate in found:
            self._remember(candidate)

    @classmethod
    def open(cls, path: str | os.PathLike[str], identity: Identity) -> RunFolder:
        """Opens a folder for a tune: new, or to carry on an equal run. Creates it where needed and takes its lock.

        Raises:
            RunFolderError: the path is a file, cannot be written, is in use, or holds another run.
        """
        folder = Path(path)
        make_folder(folder)
        lock = FolderLock(folder)
        try:
            resumed = cls._accept(folder, identity)
            opened = cls(folder, identity, resumed=resumed, lock=lock)
            write_atomically(opened.run_path, identity.model_dump_json(indent=2) + "\n")
            opened._cut_torn_line()
        except BaseException:
            lock.release()
            raise
        return opened

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Opens a finished or running folder to look at; takes no lock and writes nothing.

        Raises:
            RunFolderError: there is no run in it, or it cannot be read.
        """
        folder = Path(path)
        if not (folder / "run.json").is_file():
            raise RunFolderError(f"No run in {folder}: it has no run.json.", hint="Give the folder that 'autoprec tune' wrote.")
        return cls(folder, _read_identity(folder / "run.json"), resumed=True, lock=None)

    @staticmethod
    def _accept(folder: Path, identity: Identity) -> bool:
        run_path = folder / "run.json"
        if not run_path.exists():
            if (folder / "candidates.jsonl").exists():
                raise RunFolderError(f"{folder} holds candidates.jsonl but no run.json that says of what.", hint=OTHER_FOLDER)
            return False
        lines = differences(_read_identity(run_path), identity)
        if lines:
            raise RunFolderError("\n".join((f"{folder} holds another run:", *(f"  {line}" for line in lines))), hint=OTHER_FOLDER)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock; harmless when done twice."""
        if self._lock:
            self._lock.release()

    # Where everything lies.
    @property
    def run_path(self) -> Path:
        return self.path / "run.json"

    @property
    def candidates_path(self) -> Path:
        return self.path / "candidates.jsonl"

    @property
    def stages_path(self) -> Path:
        return self.path / "stages.json"

    @property
    def look_path(self) -> Path:
        return self.path / "look.json"

    @property
    def profile_path(self) -> Path:
        return self.path / "profile.json"

    @property
    def policy_path(self) -> Path:
        return self.path / "policy.json"

    @property
    def study_path(self) -> Path:
        return self.path / "study.db"

    @property
    def study_url(self) -> str:
        """The storage URL Optuna and its dashboard take."""
        return f"sqlite:///{self.study_path.absolute()}"

    @property
    def trials_path(self) -> Path:
        return self.path / "trials.csv"

    # Evaluations.
    def lookup(self, policy: Policy, window: Window) -> Outcome | None:
        """What came of the same set-up in the same window earlier in this run.

        None where it has not been evaluated, or where the card was never quiet: that may be over by now.
        """
        known = self._memo.get(evaluation_key(policy, window))
        return None if isinstance(known, Failure) and known.kind == "disturbed" else known

    def record(self, role: str, policy: Policy, window: Window, outcome: Outcome, trial: int | None = None) -> Candidate:
        """Appends an evaluation under the next free number and returns it; on disk when this returns."""
        number = self.candidates[-1].number + 1 if self.candidates else 0
        candidate = Candidate(number=number, role=role, policy=policy, window=window, outcome=outcome, trial=trial)
        self.add(candidate)
        return candidate

    def add(self, candidate: Candidate) -> None:
        """Appends a candidate with a number of its own; on disk when this returns.

        Raises:
            ValueError: its number does not follow the last one.
            RunFolderError: it cannot be written.
        """
        if self.candidates and candidate.number <= self.candidates[-1].number:
            raise ValueError(f"candidate {candidate.number} after {self.candidates[-1].number}: numbers grow")
        line = candidate.model_dump_json().encode() + b"\n"
        self._cut_torn_line()
        with self._writing(), open(self.candidates_path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._sound_bytes += len(line)
        self._remember(candidate)

    def _remember(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        # The first evaluation stays: a resumed run must see what the first one decided on. One that a dying or hanging process
        # ended is replaced, where somebody tried again.
        key = evaluation_key(candidate.policy, candidate.window)
        known = self._memo.get(key)
        if known is None or (isinstance(known, Failure) and known.kind in UNDECIDED_FAILURES):
            self._memo[key] = candidate.outcome

    def _cut_torn_line(self) -> None:
        # Left by a crash, or by a full disk in this process: a line after it would be glued to it.
        if self.candidates_path.exists() and self.candidates_path.stat().st_size > self._sound_bytes:
            os.truncate(self.candidates_path, self._sound_bytes)

    # Results of stages.
    def save_stage(self, name: str, result: Record) -> None:
        """Keeps the result of a stage (the noise floor, a finalist's verdict) under a name; replaces an earlier one."""
        with self._writing():
            stages = self._stages()
            stages[name] = json.loads(result.model_dump_json())
            write_atomically(self.stages_path, json.dumps(stages, indent=1) + "\n")

    def load_stage(self, name: str, kind: type[R]) -> R | None:
        """The result kept under a name; None where the stage has not ended yet.

        Raises:
            RunFolderError: it does not read as ``kind``.
        """
        data = self._stages().get(name)
        if data is None:
            return None
        return _parse(kind, json.dumps(data), f"{self.stages_path}, stage '{name}'")

    def _stages(self) -> dict[str, Any]:
        if not self.stages_path.exists():
            return {}
        try:
            stages = json.loads(self.stages_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"Cannot read {self.stages_path}: {error}", hint=OTHER_FOLDER) from None
        if not isinstance(stages, dict):
            raise RunFolderError(f"{self.stages_path} is no table of stages.", hint=OTHER_FOLDER)
        return stages

    def save_look(self, look: Look) -> None:
        self._save(self.look_path, look)

    def load_look(self) -> Look | None:
        return _load(self.look_path, Look)

    def save_profile(self, profile: Profile) -> None:
        self._save(self.profile_path, profile)

    def load_profile(self) -> Profile | None:
        return _load(self.profile_path, Profile)

    def save_policy(self, policy: Policy) -> None:
        with self._writing():
            save_policy(policy, self.policy_path)

    def write_trials(self, rows: Iterable[TrialRow]) -> None:
        """Writes ``trials.csv``: a row a candidate, the study's parameters as ``params.<name>``."""
        with self._writing():
            write_atomically(self.trials_path, trials_frame(rows).to_csv(index=False))

    def _save(self, path: Path, record: Record) -> None:
        with self._writing():
            write_atomically(path, record.model_dump_json() + "\n")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            hint = "Free some space or mend the permissions; the same command goes on from what is there."
            raise RunFolderError(f"Cannot write into {self.path}: {error}", hint=hint) from None


def make_folder(path: Path) -> None:
    """Creates a folder, so that a tune can refuse before it spends time.

    Raises:
        RunFolderError: the path or one above it is a file, or may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RunFolderError(f"{path} is a file, not a folder.", hint="Give a folder with --out.") from None
    except OSError as error:
        hint = "Give a folder that you may write to with --out."
        raise RunFolderError(f"Cannot make the folder {path}: {error.strerror}.", hint=hint) from None


def trials_frame(rows: Iterable[TrialRow]) -> pd.DataFrame:
    """The rows as a table; one column a field and one a parameter."""
    records = []
    for row in rows:
        record = row.model_dump()
        record.update({f"params.{name}": value for name, value in record.pop("params").items()})
        records.append(record)
    frame = pd.DataFrame.from_records(records)
    # Whole numbers with gaps would become floats (trial 3 as 3.0).
    whole = {"trial": "Int64", "peak_bytes": "Int64", "skipped_steps": "Int64"}
    return frame.astype({name: kind for name, kind in whole.items() if name in frame})


def _read_identity(path: Path) -> Identity:
    try:
        return _parse(Identity, path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise RunFolderError(f"Cannot read {path}: {error.strerror}.", hint=OTHER_FOLDER) from None


def _load(path: Path, kind: type[R]) -> R | None:
    return _parse(kind, path.read_text(encoding="utf-8"), str(path)) if path.exists() else None


def _parse(kind: type[R], text: str, source: str) -> R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "the whole"
        raise RunFolderError(
            f"{source} is corrupt or from another version of autoprec ({where}: {first['msg']}).", hint=OTHER_FOLDER
        ) from None


def _read_candidates(path: Path, notes: list[str]) -> tuple[list[Candidate], int]:
    """Every candidate in the file, and how many bytes of it are sound; a torn last line is left out and noted."""
    if not path.exists():
        return [], 0
    lines = path.read_bytes().splitlines(keepends=True)
    candidates: list[Candidate] = []
    sound = 0
    for index, line in enumerate(lines):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut short")
            candidates.append(Candidate.model_validate_json(line))
        except ValueError:  # pydantic's ValidationError and bad UTF-8 are ValueErrors
            if index < len(lines) - 1:
                raise RunFolderError(f"{path} is corrupt in line {index + 1}.", hint=OTHER_FOLDER) from None
            notes.append(f"the last line of {path.name} was cut short by a crash and is left out; that evaluation runs again")
            break
        sound += len(line)
    return candidates, sound
