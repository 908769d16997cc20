"""The bench in a process of its own, which may die, hang or run out of memory without ending the study."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from autoprec.errors import AutoprecError, WorkerError
from autoprec.policy import Policy, Precision
from autoprec.records import Ceiling, Failure, FailureKind, Look, Outcome, Profile, Window

if TYPE_CHECKING:  # the parent needs no torch to talk to a worker
    from autoprec.bench.target import Target

# A fresh process imports torch and starts CUDA before its first answer. Own choice: ten times what a slow disk took.
STARTUP_S = 180.0
# Tracing and profiling have no window of their own to say how long they may take.
STAGE_TIMEOUT_S = 1800.0
# Lines, and at most bytes, of the worker's output that go into an error message.
_SHOWN_LINES = 12
_SHOWN_BYTES = 8192
# How long a process that was asked to end may take before it is killed.
_GRACE_S = 3.0
# A killed process may be held by the driver while its device memory is given back. Own choice.
_KILLED_S = 30.0
# How often the parent looks whether the worker still lives, and the worker whether its parent does.
_POLL_S = 0.2
_PARENT_CHECK_S = 1.0

# What the worker answers: a value, an error for people, or the traceback of an error nobody meant to raise.
_Answer = tuple[Literal["value", "error", "bug"], Any]


class _Died(Exception):
    """A call has no answer and its worker is gone; never leaves this module."""

    def __init__(self, kind: FailureKind, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback

    def as_failure(self) -> Failure:
        return Failure(kind=self.kind, message=self.message, traceback=self.traceback)


class IsolatedBench:
    """A ``Bench`` that lives in one persistent worker process; a new one is started after the old one died.

    A window that ends the process, hangs, or raises what nobody meant to raise comes back as a ``Failure``; for ``look`` and
    ``profile`` that is a ``WorkerError``. Errors meant for people (``AutoprecError``) are raised here as they were raised there.
    One call at a time; the worker ends with ``close``, with the interpreter, and when this process dies.
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
            make: makes the bench in the worker (``Bench``, as a rule); a function or class that a module holds, not ``__main__``.
            log_path: receives what the user's code prints (appended; its folder is made); None drops it.
            stage_timeout_s: most seconds for ``look`` and ``profile``.
        """
        self._job = (make, workload, target)
        self._log_path = log_path
        self._log_start = 0
        self._stage_timeout_s = stage_timeout_s
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._owner = os.getpid()

    def __enter__(self) -> IsolatedBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> Look:
        """See ``Bench.look``. Raises WorkerError where the worker dies, hangs or breaks."""
        return cast(Look, self._stage("look"))

    def ceiling(self, allowed: Mapping[str, Sequence[Precision]], fp32: Policy) -> Ceiling:
        """See ``Bench.ceiling``. Raises WorkerError where the worker dies, hangs or breaks."""
        return cast(Ceiling, self._stage("ceiling", dict(allowed), fp32))

    def profile(self, precisions: Sequence[Precision]) -> Profile:
        """See ``Bench.profile``. Raises WorkerError where the worker dies, hangs or breaks."""
        return cast(Profile, self._stage("profile", tuple(precisions)))

    def rescore(self, policy: Policy) -> dict[str, float]:
        """See ``Bench.rescore``. Raises WorkerError where the worker dies, hangs or breaks."""
        return cast("dict[str, float]", self._stage("rescore", policy))

    def window(self, policy: Policy, window: Window) -> Outcome:
        """See ``Bench.window``; a worker that dies, hangs or breaks is a Failure.

        Raises:
            WorkerError: no worker could be started.
        """
        try:
            outcome: Outcome = self._call("window", window.timeout_s, policy, window)
        except _Died as end:
            return end.as_failure()
        return self._checked([outcome])[0]

    def interleave(self, policies: Sequence[Policy], window: Window) -> list[Outcome]:
        """See ``Bench.interleave``; a worker that dies, hangs or breaks is a Failure of every arm.

        It may take ``window.timeout_s`` for each arm.

        Raises:
            WorkerError: no worker could be started.
        """
        try:
            outcomes: list[Outcome] = self._call("interleave", window.timeout_s * max(len(policies), 1), tuple(policies), window)
        except _Died as end:
            return [end.as_failure() for _ in policies]
        return self._checked(outcomes)

    def close(self) -> None:
        """Ends the worker: asks, terminates, kills. Harmless when done twice; a later call starts a new worker."""
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
            said = f" All it printed is in {self._log_path}." if self._log_path else ""
            raise WorkerError(
                f"'{method}' has no result: {end.message}\n{end.traceback}".rstrip(),
                hint=f"See whether one training step of the model runs by itself; where it does, report this.{said}",
            ) from None

    def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        """Sends one call to the worker and waits for its answer.

        Raises:
            _Died: there is no answer; the worker is gone.
            AutoprecError: as the worker raised it.
            WorkerError: no worker could be started.
        """
        if self._process is None:
            self._start()
            timeout_s += STARTUP_S
        try:
            kind, value = self._exchange((method, arguments), timeout_s)
        except BaseException:
            # Ctrl-C, say: half a conversation is left in the pipe.
            self._stop(at_once=True)
            raise
        if kind == "error":
            raise value
        if kind == "bug":
            # Whatever broke may be the process's state.
            self._stop()
            last = value.strip().rpartition("\n")[2]
            raise _Died("crashed", f"the worker failed in '{method}': {last}", value)
        return value

    def _exchange(self, call: tuple[str, tuple[Any, ...]], timeout_s: float) -> _Answer:
        assert self._pipe is not None and self._process is not None
        try:
            self._pipe.send(call)
            deadline_s = time.monotonic() + timeout_s
            while not self._pipe.poll(_POLL_S):
                # Not the pipe's end alone: processes that the user's code forked may hold it open.
                if not self._process.is_alive() and not self._pipe.poll():
                    raise EOFError
                if time.monotonic() >= deadline_s and not self._pipe.poll():
                    self._stop(at_once=True)
                    raise _Died("timeout", f"no answer after {timeout_s:.0f} s; the process was ended{self._last_output()}")
            data = self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            raise _Died("crashed", self._how_it_ended() + self._last_output()) from None
        return _unpacked(data)

    def _start(self) -> None:
        """Starts a worker.

        Raises:
            WorkerError: the log cannot be written, the job cannot travel, or the system starts no process.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        try:
            # Opened here already, so that a folder that cannot be written is an error of its own.
            with open(self._prepared_log(), "ab") as log:
                self._log_start = log.seek(0, os.SEEK_END) if self._log_path else 0
            arguments = (theirs, _packed_job(self._job), str(self._log_path or os.devnull), os.getpid())
            # Not a daemon: the user's DataLoader may start workers of its own.
            process = context.Process(target=_serve, args=arguments, name="autoprec-worker", daemon=False)
            with _without_main_module(), _interrupts_ignored():
                process.start()
        except OSError as error:
            ours.close()
            raise WorkerError(
                f"The worker process could not be started: {error}.",
                hint="Free memory or processes, and check that the output folder can be written.",
            ) from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._pipe, self._owner = process, ours, os.getpid()
        # After multiprocessing's own handler, which waits for every child, so that it runs before that one.
        atexit.register(self.close)

    def _prepared_log(self) -> Path:
        if self._log_path is None:
            return Path(os.devnull)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return self._log_path

    def _stop(self, *, at_once: bool = False) -> None:
        atexit.unregister(self.close)
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None or self._owner != os.getpid():  # in a fork of this process the worker is not ours to end
            return
        if not at_once:
            process.join(_GRACE_S)  # the closed pipe tells it to go
        for hard, wait_s in ((False, _GRACE_S), (True, _KILLED_S)):
            if process.is_alive():
                _end(process, hard=hard)
                process.join(wait_s)
        if not process.is_alive():
            process.close()

    def _how_it_ended(self) -> str:
        """What is known about a worker that went away; forgets it."""
        process = self._process
        assert process is not None
        process.join(_GRACE_S)
        code = process.exitcode
        self._stop(at_once=True)
        if code is None:
            return "the process closed its pipe without an answer"
        if code >= 0:
            return f"the process ended with exit code {code}"
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        killed = " (killed; out of host memory, perhaps)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{killed}"

    def _last_output(self) -> str:
        """The last lines that this worker, and not one before it, wrote to its log."""
        if self._log_path is None or not self._log_path.is_file():
            return ""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _SHOWN_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]
        return "; its last output was:\n" + "\n".join(lines) if lines else ""


def _packed_job(job: tuple[Callable[[str, Target], Any], str, Target]) -> bytes:
    """Pickled here and not with the process, so that the worker imports and fails with its output redirected."""
    try:
        return pickle.dumps(job)
    except Exception as error:  # whatever a value's own pickling raises
        raise WorkerError(
            f"The bench cannot travel to a worker process: {error}.",
            hint="Name the workload as text, and make the bench with a function or class that a module holds.",
        ) from None


def _unpacked(data: bytes) -> _Answer:
    try:
        answer: _Answer = pickle.loads(data)
    except Exception as error:  # an error class of the user's module, say, which this process cannot import
        return ("bug", f"{type(error).__name__}: the answer cannot be read here: {error}")
    return answer


def _end(process: BaseProcess, *, hard: bool) -> None:
    """Ends a living worker and all it started; not after its death, when its number may be somebody else's."""
    assert process.pid is not None
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):  # so young that it has no session of its own yet
            os.killpg(process.pid, signal.SIGKILL if hard else signal.SIGTERM)
            return
    (process.kill if hard else process.terminate)()


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
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


def _serve(pipe: Connection, packed_job: bytes, log: str, parent: int) -> None:
    """The worker's whole life: makes the bench, answers calls one at a time, ends when the pipe closes or the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A session of its own: what the user's code starts is ended with it.
    if hasattr(os, "setsid"):
        os.setsid()
    _redirect_output(log)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    bench: Any = None
    while True:
        try:
            method, values = pipe.recv()
        except (EOFError, OSError):
            return
        answer: _Answer
        try:
            if bench is None:
                make, *arguments = pickle.loads(packed_job)
                bench = make(*arguments)
            answer = ("value", getattr(bench, method)(*values))
        except AutoprecError as error:
            answer = ("error", error)
        except Exception as error:
            answer = ("bug", "".join(traceback.format_exception(error)))
        try:
            pipe.send_bytes(_packed(answer))
        except OSError:
            return


def _redirect_output(log: str) -> None:
    """Sends what this process and its libraries print to the log, line by line, so that a crash loses nothing."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()


def _end_with_parent(parent: int) -> None:
    """Ends this process and what it started when the parent went without a word, also in the middle of a window."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _packed(answer: _Answer) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as error:  # whatever a value's own pickling raises
        return pickle.dumps(("bug", f"{type(error).__name__}: the answer cannot be sent: {error}"))
