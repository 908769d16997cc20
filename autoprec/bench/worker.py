"""The process behind ``IsolatedBench``: reads requests, measures, answers; the parent lives on whatever happens here.

Started as ``python -m autoprec.bench.worker``, not by forking or by ``multiprocessing``: those would run the user's script again,
and a script that calls ``autoprec.tune()`` without a ``__main__`` guard would start itself without end.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from autoprec.bench.source import describe
from autoprec.errors import AutoprecError, WorkerError
from autoprec.records import Failure

_PARENT_CHECK_S = 1.0


@dataclass(frozen=True)
class Start:
    """The first request: what to build and how to import it. ``factory`` is ``module:callable``."""

    factory: str
    reference: object
    target: object
    path: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A later request: a method of what was built, or an attribute of it where ``args`` is None."""

    name: str
    args: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Answer:
    """``value``, or an ``error`` to raise in the parent. ``leaving``: the process cannot go on and ends now."""

    value: Any = None
    error: AutoprecError | None = None
    leaving: bool = False


def main() -> None:
    """Serves requests until the parent closes its end."""
    # Ctrl-C reaches the whole process group; it is the parent that decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = _take_over_streams()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    served: Any = None
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        answer, served = _answer(request, served)
        _send(replies, answer)
        if answer.leaving:
            os._exit(0)


def _take_over_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keeps the pipes for requests and replies; what user code prints or reads goes to the log and to nothing."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _end_with_parent(parent: int) -> None:
    """Ends this process when its parent has gone without a word (killed), also in the middle of a window."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def _answer(request: Start | Call, served: Any) -> tuple[Answer, Any]:
    try:
        if isinstance(request, Start):
            sys.path[:] = request.path
            module, _, name = request.factory.partition(":")
            served = getattr(importlib.import_module(module), name)(request.reference, request.target)
            return Answer(None), served
        member = getattr(served, request.name)
        value = member if request.args is None else member(*request.args)
        return Answer(value, leaving=_is_broken(value)), served
    except AutoprecError as error:
        return Answer(error=error), served
    except Exception as error:
        hint = "This is not a mistake of yours where the text does not say so: please report it."
        return Answer(error=WorkerError(f"The bench raised {describe(error)}", hint=hint)), served


def _is_broken(value: Any) -> bool:
    """After some CUDA errors every further call fails: a process in that state must be replaced."""
    outcomes = value if isinstance(value, Sequence) else (value,)
    torch = sys.modules.get("torch")  # not imported here: the loop itself starts without it
    if torch is None or not any(isinstance(outcome, Failure) for outcome in outcomes) or not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _send(replies: BinaryIO, answer: Answer) -> None:
    try:
        data = pickle.dumps(answer)
    except Exception as error:  # whatever a value's own pickling raises
        data = pickle.dumps(Answer(error=WorkerError(f"An answer could not be sent: {describe(error)}")))
    replies.write(data)
    replies.flush()


if __name__ == "__main__":
    # Pickle looks its classes up by module name, so the loop must run in the module of that name and not in __main__.
    importlib.import_module("autoprec.bench.worker").main()
