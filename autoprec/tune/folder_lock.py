"""One tune to a folder: a lock that its owner's death releases."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import IO

from autoprec.errors import RunFolderError

if sys.platform != "win32":
    import fcntl


class FolderLock:
    """Holds ``<folder>/.lock`` for one process.

    The operating system's lock on the open file decides, so that a process that dies lets go by dying. The process id and host
    written into it are for people, and for folders on a disk that several machines share, where the lock of another host may
    not be seen.

    Attributes:
        taken_over: whose stale lock was found and replaced, in words; an empty string as a rule.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock.

        Raises:
            RunFolderError: another live process holds it, or it cannot be written.
        """
        self.path = folder / ".lock"
        self.taken_over = ""
        try:
            self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - open for as long as the lock is held
        except OSError as error:
            raise RunFolderError(
                f"Cannot write into {folder}: {error.strerror}.", hint="Give a folder that you may write to with --out."
            ) from None
        try:
            _lock(self._file)
            self._replace_owner()
        except BlockingIOError:
            owner = self._owner()
            self._file.close()
            raise self._in_use(owner) from None
        except RunFolderError:
            self._file.close()
            raise

    def _owner(self) -> dict[str, object]:
        self._file.seek(0)
        try:
            owner = json.loads(self._file.read() or "{}")
        except ValueError:  # half-written by a process that died: its lock is gone with it
            return {}
        return owner if isinstance(owner, dict) else {}

    def _replace_owner(self) -> None:
        owner, host = self._owner(), socket.gethostname()
        if owner and owner.get("host") != host:
            raise self._in_use(owner)
        if owner:
            self.taken_over = f"process {owner.get('pid')} left its lock behind when it died; took it over"
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": host}))
        self._file.flush()

    def _in_use(self, owner: dict[str, object]) -> RunFolderError:
        who = f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'this machine')}"
        return RunFolderError(
            f"{self.path.parent} is in use by another tune ({who}).",
            hint=f"Wait for it, or give another folder with --out. If that process is gone, delete {self.path}.",
        )

    def release(self) -> None:
        """Lets go; harmless when done twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def _lock(file: IO[str]) -> None:
    # Windows refuses to share what is locked, readers included; there the owner in the file is all there is.
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
