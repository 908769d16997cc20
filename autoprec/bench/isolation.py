"""The bench in a process of its own: it may die, hang or run out of memory, and the study goes on."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from autoprec.bench.worker import Answer, Call, Start
from autoprec.errors import WorkerError
from autoprec.policy import Policy, Precision
from autoprec.records import Failure, FailureKind, Look, Measurement, Profile, Window

if TYPE_CHECKING:  # torch and CUDA are the process's business; this side stays light
    from autoprec.bench.target import Target

_FACTORY = "autoprec.bench.bench:Bench"
# Importing torch, building the model and one FP32 step; and tracing or profiling, which runs some dozens of steps.
_START_TIMEOUT_S = 600.0
_PROFILE_TIMEOUT_S = 1800.0
_POLL_S = 0.2
_LOG_TAIL_BYTES = 4000


class _Died(Exception):
    """The worker gave no answer: why, and what it printed last."""

    def __init__(self, kind: FailureKind, message: str, log: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.message = message
        self.log = log

    def as_failure(self) -> Failure:
        return Failure(kind=self.kind, message=self.message, traceback=self.log)


class IsolatedBench:
    """The methods of ``Bench``, run in one persistent process that is started again after it dies.

    Ctrl-C here ends the process and is raised on. Use ``close()`` or a ``with`` block at the end.

    Args:
        reference: a workload that another process can load (a path or a dotted name).
        target: where to measure.
        factory: what the process builds, ``module:callable``.

    Raises:
        WorkloadError: the workload does not load, or does not train one step in FP32.
        WorkerError: the process could not be started.
    """

    def __init__(self, reference: str, target: Target, *, factory: str = _FACTORY) -> None:
        self.target = target
        self._start_request = Start(factory, reference, target, tuple(path or os.getcwd() for path in sys.path))
        self._worker: _Worker | None = None
        try:
            self.notes: tuple[str, ...] = self._ask(Call("notes"), _START_TIMEOUT_S)
        except _Died as death:
            raise WorkerError(
                f"The bench's process ended while it started. {death.message}", hint=_last_lines(death.log)
            ) from None

    def look(self) -> Look:
        """See ``Bench.look``.

        Raises:
            WorkerError: the process died or hung.
        """
        return self._ask_or_raise(Call("look", ()), _PROFILE_TIMEOUT_S)  # type: ignore[no-any-return]

    def window(self, policy: Policy, window: Window) -> Measurement | Failure:
        """See ``Bench.window``; a process that dies, hangs or is killed for memory is a failure like any other."""
        try:
            return self._ask(Call("window", (policy, window)), window.timeout_s)  # type: ignore[no-any-return]
        except _Died as death:
            return death.as_failure()

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Measurement | Failure]:
        """See ``Bench.interleave``; where the process dies, every arm gets the same failure."""
        try:
            return self._ask(Call("interleave", (tuple(policies), window)), window.timeout_s * len(policies))  # type: ignore[no-any-return]
        except _Died as death:
            return [death.as_failure() for _ in policies]

    def profile(self, precisions: tuple[Precision, ...]) -> Profile:
        """See ``Bench.profile``.

        Raises:
            WorkerError: the process died or hung.
        """
        return self._ask_or_raise(Call("profile", (precisions,)), _PROFILE_TIMEOUT_S)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def __enter__(self) -> IsolatedBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask_or_raise(self, call: Call, timeout_s: float) -> Any:
        try:
            return self._ask(call, timeout_s)
        except _Died as death:
            raise WorkerError(
                f"The bench's process gave no answer to '{call.name}'. {death.message}", hint=_last_lines(death.log)
            ) from None

    def _ask(self, call: Call, timeout_s: float) -> Any:
        """Sends a request, starting the process first where there is none; any exception but an answered one ends it."""
        try:
            if self._worker is None:
                self._worker = _Worker()
                started = self._worker.ask(self._start_request, _START_TIMEOUT_S)
                if started.error is not None:
                    raise started.error
            answer = self._worker.ask(call, timeout_s)
        except BaseException:  # Ctrl-C included: a process in the middle of a window cannot be asked anything else
            self.close()
            raise
        if answer.leaving:
            self.close()
        if answer.error is not None:
            raise answer.error
        return answer.value


class _Worker:
    """One process with its pipes and its log."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="autoprec-worker-", suffix=".log")
        os.close(handle)
        self._log = Path(name)
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", "autoprec.bench.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        self._answers: queue.Queue[Answer | None] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_read_answers, args=(self._process.stdout, self._answers), daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._process, self._log)

    def ask(self, request: Start | Call, timeout_s: float) -> Answer:
        """Sends a request and waits for the answer.

        Raises:
            _Died: the process ended, or the time is over.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; _wait says how
            self._process.stdin.write(pickle.dumps(request))
            self._process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                answer = self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                answer = None
                if self._process.poll() is None:
                    if time.monotonic() < deadline:
                        continue
                    raise _Died("timeout", f"No answer after {timeout_s:g} s; the process was ended.", self.log_tail()) from None
            if answer is not None:
                return answer
            raise self._death()

    def _death(self) -> _Died:
        code = self._process.wait()
        log = self.log_tail()
        if code == -getattr(signal, "SIGKILL", 9):
            return _Died("out_of_memory", "The process was killed by the system, most often because host memory ran out.", log)
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return _Died("crashed", f"The process ended {how}.", log)

    def log_tail(self) -> str:
        """The last of what the process and the user's code in it printed."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        """Ends the process and everything it started, at once."""
        self._finalizer()


def _read_answers(stream: BinaryIO, answers: queue.Queue[Answer | None]) -> None:
    """Puts answers into the queue, and None at the end of the stream."""
    try:
        while True:
            answers.put(pickle.load(stream))
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        answers.put(None)


def _end(process: subprocess.Popen[bytes], log: Path) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # its session: loader workers too
        else:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    log.unlink(missing_ok=True)


def _last_lines(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return "Its last words: " + " | ".join(lines[-3:]) if lines else "It printed nothing."
