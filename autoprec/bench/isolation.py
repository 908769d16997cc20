"""The bench in a process of its own, which may die, hang or run out of memory without ending the study."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoprec.errors import AutoprecError, WorkerError
from autoprec.policy import Policy, Precision
from autoprec.records import Failure, FailureKind, Look, Outcome, Profile, Window

if TYPE_CHECKING:  # the parent needs no torch to talk to a worker
    from autoprec.bench.target import Target

# A fresh process imports torch and starts CUDA before its first answer. Own choice: ten times what a slow disk took.
STARTUP_S = 180.0
# Tracing and profiling have no window of their own to say how long they may take.
STAGE_TIMEOUT_S = 1800.0
# Lines of the worker's output that go into an error message.
_SHOWN_LINES = 12
# How long a process that was asked to end may take before it is killed.
_GRACE_S = 3.0


class _Died(Exception):
    """The worker gave no answer; never leaves this module."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class IsolatedBench:
    """A ``Bench`` that lives in one persistent worker process; a new one is started after the old one died.

    Windows that end the process come back as a ``Failure``; for ``look`` and ``profile`` that is a ``WorkerError``. Errors meant
    for people (``AutoprecError``) are raised here as they were raised there.
    """

    def __init__(
        self,
        workload: str,
        target: Target,
        *,
        make: Callable[[str, Target], Any],
        log_path: Path | None = None,
        stage_timeout_s: float = STAGE_TIMEOUT_S,
    ) -> None:
        """Starts nothing yet: the first call does.

        Args:
            workload: reference that ``load_workload`` takes.
            target: where to measure.
            make: makes the bench in the worker (``Bench``, as a rule); a function or class that a module holds.
            log_path: receives what the user's code prints; None drops it.
            stage_timeout_s: most seconds for ``look`` and ``profile``.
        """
        self._arguments = (workload, target)
        self._make = make
        self._log_path = log_path
        self._stage_timeout_s = stage_timeout_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        atexit.register(self.close)

    def look(self) -> Look:
        """See ``Bench.look``. Raises WorkerError where the worker dies."""
        look: Look = self._stage("look")
        return look

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        """See ``Bench.profile``. Raises WorkerError where the worker dies."""
        profile: Profile = self._stage("profile", tuple(precisions))
        return profile

    def window(self, policy: Policy, window: Window) -> Outcome:
        """See ``Bench.window``; a worker that dies or hangs is a Failure."""
        try:
            outcome: Outcome = self._call("window", window.timeout_s, policy, window)
        except _Died as end:
            return Failure(kind=end.kind, message=end.message)
        return self._checked([outcome])[0]

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        """See ``Bench.interleave``; a worker that dies or hangs is a Failure of every arm."""
        try:
            outcomes: list[Outcome] = self._call("interleave", window.timeout_s * max(len(policies), 1), tuple(policies), window)
        except _Died as end:
            return [Failure(kind=end.kind, message=end.message) for _ in policies]
        return self._checked(outcomes)

    def close(self) -> None:
        """Ends the worker; harmless when done twice."""
        atexit.unregister(self.close)
        self._stop()

    def _checked(self, outcomes: list[Outcome]) -> list[Outcome]:
        # A CUDA error leaves the process without a usable device, so the next call gets a new one.
        if any(isinstance(outcome, Failure) and outcome.kind == "crashed" for outcome in outcomes):
            self._stop()
        return outcomes

    def _stage(self, method: str, *arguments: Any) -> Any:
        try:
            return self._call(method, self._stage_timeout_s, *arguments)
        except _Died as end:
            where = f" Its output is in {self._log_path}." if self._log_path else ""
            raise WorkerError(
                f"The worker process ended during '{method}': {end.message}", hint=f"Mend model.py.{where}"
            ) from None

    def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        """Sends one call to the worker and waits for its answer.

        Raises:
            _Died: no answer came; the worker is gone.
            AutoprecError: as the worker raised it.
        """
        if self._process is None:
            self._start()
            timeout_s += STARTUP_S
        assert self._pipe is not None
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(timeout_s):
                self._stop(at_once=True)
                raise _Died("timeout", f"no answer after {timeout_s:.0f} s; the process was ended")
            answered, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise _Died("crashed", self._last_words()) from None
        except KeyboardInterrupt:
            # Half a conversation is left in the pipe.
            self._stop(at_once=True)
            raise
        if not answered:
            raise value
        return value

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        log = str(self._log_path) if self._log_path else os.devnull
        arguments = (theirs, self._make, self._arguments, log)
        # Not a daemon: the user's DataLoader may start workers of its own.
        self._process = context.Process(target=_serve, args=arguments, name="autoprec-worker", daemon=False)
        with _without_main_module(), _interrupts_ignored():
            self._process.start()
        theirs.close()

    def _stop(self, *, at_once: bool = False) -> None:
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return
        if not at_once:
            # The closed pipe tells it to go.
            process.join(_GRACE_S)
        for end in (process.terminate, process.kill):
            if process.is_alive():
                end()
                process.join(_GRACE_S)
        process.close()

    def _last_words(self) -> str:
        """What is known about a worker that went away, and its last lines of output."""
        assert self._process is not None
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        self._stop(at_once=True)
        text = "the process ended without an answer" if code is None else f"the process ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            killed = " (killed; out of host memory, perhaps)" if name == "SIGKILL" else ""
            text = f"the process was ended by {name}{killed}"
        lines = _last_lines(self._log_path)
        return f"{text}; its last output was:\n{lines}" if lines else text


def _last_lines(path: Path | None) -> str:
    if path is None or not path.is_file():
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:])


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hides the main script from a process being spawned.

    multiprocessing imports the parent's main module in every child. Here nothing of it is needed, and a script that calls
    ``autoprec.tune`` without a main guard would start itself again and again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ctrl-C goes to the whole process group; a child started in here inherits that it ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, make: Callable[[str, Target], Any], arguments: tuple[str, Target], log: str) -> None:
    """The worker's whole life: makes the bench, answers calls one at a time, ends when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    bench: Any = None
    while True:
        try:
            method, values = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if bench is None:
                bench = make(*arguments)
            answer = (True, getattr(bench, method)(*values))
        except AutoprecError as error:
            answer = (False, error)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            answer = (
                False,
                WorkerError(f"The worker failed in '{method}':\n{text}", hint="This is a fault of autoprec: report it."),
            )
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionError):
            return
