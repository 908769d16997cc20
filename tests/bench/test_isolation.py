"""The bench's process may die in any way; the parent gets a reason and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_bench import FACTORY

from autoprec.bench.isolation import IsolatedBench
from autoprec.errors import WorkerError, WorkloadError
from autoprec.policy import Batch, Fingerprint, Policy
from autoprec.records import Failure, Window

CPU: Any = SimpleNamespace(name="cpu")
POLICY = Policy(
    default="fp32",
    batch=Batch(effective=1, micro=1),
    fingerprint=Fingerprint.of({}, device="cpu", capability=None, torch_version="2", workload_sha256="0"),
)


@pytest.fixture(scope="module")
def bench() -> Iterator[IsolatedBench]:
    with IsolatedBench("some.model", CPU, factory=FACTORY) as bench:
        yield bench


def _window(bench: IsolatedBench, what: str, timeout_s: float = 30.0) -> Failure:
    outcome = bench.window(POLICY, Window(steps=7, purpose=what, timeout_s=timeout_s))
    assert isinstance(outcome, Failure)
    return outcome


def _answers_from(bench: IsolatedBench) -> str:
    outcome = _window(bench, "answer")
    assert outcome.step == 7
    return outcome.message


def test_one_process_answers_every_call(bench: IsolatedBench) -> None:
    assert bench.notes[0] == "loaded some.model on cpu"
    first = _answers_from(bench)
    assert first == _answers_from(bench)
    assert first != f"answer from {os.getpid()}"


def test_prints_do_not_disturb_the_answers_and_input_is_empty(bench: IsolatedBench) -> None:
    assert _window(bench, "print").kind == "diverged"
    assert _window(bench, "read").message == "''"


def test_an_interrupt_does_not_end_the_process(bench: IsolatedBench) -> None:
    before = _answers_from(bench)
    assert _window(bench, "interrupt").message == before


def test_errors_travel_to_the_parent(bench: IsolatedBench) -> None:
    with pytest.raises(WorkloadError, match="The loss is nan") as error:
        _window(bench, "users mistake")
    assert error.value.hint == "Mend it."
    with pytest.raises(WorkerError, match="KeyError: 'a bug in the bench'"):
        _window(bench, "bug")
    with pytest.raises(WorkerError, match="could not be sent"):
        _window(bench, "unsendable")


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("exit", "crashed", "The process ended with exit code 3."),
        ("segfault", "crashed", "The process ended by signal SIGSEGV."),
        ("kill", "out_of_memory", "killed by the system"),
        ("hang", "timeout", "No answer after 1.5 s"),
    ],
)
def test_a_death_is_a_failure_and_a_new_process_follows(bench: IsolatedBench, what: str, kind: str, said: str) -> None:
    before = _answers_from(bench)
    failure = _window(bench, what, 1.5 if what == "hang" else 30.0)
    assert failure.kind == kind
    assert said in failure.message
    after = _answers_from(bench)
    assert after != before


def test_the_last_output_is_kept_with_the_failure(bench: IsolatedBench) -> None:
    assert "user code says goodbye" in _window(bench, "exit").traceback
    assert "string_at" in _window(bench, "segfault").traceback


def test_every_arm_of_a_dead_process_gets_the_failure(bench: IsolatedBench) -> None:
    outcomes = bench.interleave([POLICY, POLICY], Window(steps=7, purpose="exit"))
    assert [outcome.kind for outcome in outcomes if isinstance(outcome, Failure)] == ["crashed", "crashed"]


def test_a_death_while_tracing_is_an_error_with_the_reason(bench: IsolatedBench) -> None:
    with pytest.raises(WorkerError, match=r"no answer to 'look'\. The process ended with exit code 4"):
        bench.look()


def test_a_wrong_workload_is_told_at_the_start() -> None:
    with pytest.raises(WorkloadError, match="The model file is wrong"):
        IsolatedBench("wrong", CPU, factory=FACTORY)


def test_a_death_at_the_start_is_an_error_with_its_last_words() -> None:
    with pytest.raises(WorkerError, match=r"ended while it started\. The process ended with exit code 5") as error:
        IsolatedBench("exits", CPU, factory=FACTORY)
    assert "leaving now" in error.value.hint


ROOT = Path(__file__).parents[2]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def _script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    prelude = f"""
    import sys
    sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
    from test_isolation import CPU, FACTORY, POLICY, IsolatedBench, Window
    """
    path.write_text(textwrap.dedent(prelude) + textwrap.dedent(text))
    return path


def _wait_for(condition: Any, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent as on POSIX")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_parent(tmp_path: Path, sent: signal.Signals) -> None:
    path = _script(
        tmp_path,
        """
        bench = IsolatedBench("some.model", CPU, factory=FACTORY)
        print(bench.notes[1], flush=True)
        bench.window(POLICY, Window(steps=1, purpose="hang", timeout_s=60))
        """,
    )
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, str(path)], cwd=tmp_path, **pipes)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    assert _alive(child)
    parent.send_signal(sent)
    _, errors = parent.communicate(timeout=15)
    assert _wait_for(lambda: not _alive(child))
    if sent is signal.SIGINT:
        assert "KeyboardInterrupt" in errors


def test_a_script_without_a_main_guard_is_not_run_again_by_the_process(tmp_path: Path) -> None:
    path = _script(
        tmp_path,
        """
        print("script runs", flush=True)
        with IsolatedBench("some.model", CPU, factory=FACTORY) as bench:
            print(bench.window(POLICY, Window(steps=1)).kind)
        """,
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["script runs", "diverged"]
