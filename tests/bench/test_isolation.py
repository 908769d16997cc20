"""The worker process: whatever the user's code does, the parent gets an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoprec.bench.isolation import IsolatedBench
from autoprec.errors import WorkerError, WorkloadError
from autoprec.policy import Batch, Fingerprint, Policy
from autoprec.records import Failure, Window

ROOT = Path(__file__).parent.parent.parent
TARGET = "any value that pickles"
FINGERPRINT = Fingerprint.of({"a": "Linear"}, device="cpu", capability=None, torch_version="2", workload_sha256="0")


def policy(micro: int = 8) -> Policy:
    return Policy(default="fp32", batch=Batch(effective=8, micro=micro, accumulation_steps=8 // micro), fingerprint=FINGERPRINT)


class Misbehaving:
    """Does what the window's purpose says."""

    def __init__(self, workload, target):
        self.calls = 0

    def window(self, policy, window):
        self.calls += 1
        return getattr(self, f"do_{window.purpose}")(policy, window)

    def interleave(self, policies, window):
        return [self.window(policy, window) for policy in policies]

    def look(self):
        os._exit(3)

    def do_count(self, policy, window):
        return Failure(kind="unsupported", message=str(self.calls), step=window.seed)

    def do_exit(self, policy, window):
        print("last words of the model", flush=True)
        os._exit(7)

    def do_kill(self, policy, window):
        os.kill(os.getpid(), signal.SIGKILL)

    def do_segfault(self, policy, window):
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_hang(self, policy, window):
        time.sleep(600)

    def do_user_error(self, policy, window):
        raise WorkloadError("what was given", hint="what to do")

    def do_bug(self, policy, window):
        return 1 / 0

    def do_dead_device(self, policy, window):
        return Failure(kind="crashed", message="CUDA error: device-side assert triggered")

    def do_prints(self, policy, window):
        print("noise" * 10000)
        sys.stderr.write("noise")
        return Failure(kind="unsupported", message="quiet")


@pytest.fixture
def bench(tmp_path):
    made = IsolatedBench("nothing", TARGET, log_path=tmp_path / "worker.log", make=Misbehaving, stage_timeout_s=60)
    yield made
    made.close()


def run(bench, purpose, **fields):
    return bench.window(policy(), Window(steps=1, purpose=purpose, **fields))


def test_values_travel_both_ways_and_the_worker_stays(bench):
    assert run(bench, "count", seed=5) == Failure(kind="unsupported", message="1", step=5)
    assert run(bench, "count").message == "2"


@pytest.mark.parametrize(("purpose", "words"), [("exit", "exit code 7"), ("kill", "SIGKILL"), ("segfault", "SIGSEGV")])
def test_a_worker_that_dies_is_a_failure_with_its_reason_and_the_next_call_works(bench, purpose, words):
    outcome = run(bench, purpose)
    assert outcome.kind == "crashed"
    assert words in outcome.message
    assert run(bench, "count").message == "1"


def test_the_last_output_of_a_dead_worker_is_shown(bench):
    assert "last words of the model" in run(bench, "exit").message


def test_a_worker_that_hangs_is_ended_after_the_timeout(bench):
    run(bench, "count")
    outcome = run(bench, "hang", timeout_s=0.5)
    assert outcome.kind == "timeout"
    assert run(bench, "count").message == "1"


def test_errors_for_people_are_raised_as_they_were(bench):
    with pytest.raises(WorkloadError, match="what was given") as caught:
        run(bench, "user_error")
    assert caught.value.hint == "what to do"
    assert run(bench, "count").message == "2"


def test_a_bug_in_the_worker_is_a_worker_error_with_its_traceback(bench):
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        run(bench, "bug")


def test_a_dead_device_gets_a_new_process(bench):
    assert run(bench, "dead_device").kind == "crashed"
    assert run(bench, "count").message == "1"


def test_what_the_user_prints_goes_to_the_log_only(bench, tmp_path, capfd):
    assert run(bench, "prints").message == "quiet"
    assert "noise" in (tmp_path / "worker.log").read_text()
    assert "noise" not in capfd.readouterr().out


def test_every_arm_gets_the_failure_of_a_dead_worker(bench):
    outcomes = bench.interleave([policy(8), policy(4)], Window(steps=1, purpose="exit"))
    assert [outcome.kind for outcome in outcomes] == ["crashed", "crashed"]


def test_a_stage_without_samples_raises_when_the_worker_dies(bench):
    with pytest.raises(WorkerError, match="exit code 3"):
        bench.look()


def test_closing_leaves_no_process(bench):
    run(bench, "count")
    pid = bench._process.pid
    bench.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_without_a_main_guard_does_not_start_itself_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "print('script runs')\n"
        "from test_isolation import Misbehaving, TARGET, policy\n"
        "from autoprec.bench.isolation import IsolatedBench\n"
        "from autoprec.records import Window\n"
        "bench = IsolatedBench('nothing', TARGET, make=Misbehaving)\n"
        "print(bench.window(policy(), Window(steps=1, purpose='count')).message)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[:2] == ["script runs", "1"], done.stderr
    assert done.stdout.count("script runs") == 1
