"""A bench whose windows misbehave as their purpose says; runs in the worker process of the isolation tests."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from autoprec.errors import WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Look, Window

FACTORY = "fake_bench:FakeBench"


class FakeBench:
    def __init__(self, reference: Any, target: Any) -> None:
        if reference == "exits":
            print("leaving now")
            os._exit(5)
        if reference == "wrong":
            raise WorkloadError("The model file is wrong.", hint="Mend it.")
        self.notes = (f"loaded {reference} on {target.name}", str(os.getpid()))

    def window(self, policy: Policy, window: Window) -> Failure:  # noqa: C901
        what = window.purpose
        if what == "exit":
            print("user code says goodbye")
            os._exit(3)
        elif what == "segfault":
            ctypes.string_at(0)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
        elif what == "print":
            print("x" * 100_000)
            os.write(1, b"raw noise on the standard output\n")
        elif what == "read":
            return Failure(kind="crashed", message=repr(sys.stdin.read()))
        elif what == "bug":
            raise KeyError("a bug in the bench")
        elif what == "users mistake":
            raise WorkloadError("The loss is nan.", hint="Mend it.")
        elif what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif what == "unsendable":
            return lambda: None  # type: ignore[return-value]
        return Failure(kind="diverged", message=f"answer from {os.getpid()}", step=window.steps)

    def interleave(self, policies: Any, window: Window) -> list[Failure]:
        return [self.window(policy, window) for policy in policies]

    def look(self) -> Look:
        os._exit(4)
