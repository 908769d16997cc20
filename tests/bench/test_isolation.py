"""The worker process: whatever the user's code does, the parent gets an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from isolated_benches import FAILURE, LOOK, MEASUREMENT, TARGET, Broken, Good, Misbehaving, open_files, policy, profile_of

from autoprec.bench.isolation import IsolatedBench
from autoprec.errors import WorkerError, WorkloadError
from autoprec.records import Failure, Window

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def is_running(pid: int) -> bool:
    """False for a process that is gone; an orphan that only waits to be reaped is gone too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], object], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


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


def test_a_bug_in_a_window_is_a_failure_with_its_traceback_and_a_new_worker_follows(bench):
    outcome = run(bench, "bug")
    assert (outcome.kind, outcome.message) == ("crashed", "the worker failed in 'window': ZeroDivisionError: division by zero")
    assert "in do_bug" in outcome.traceback
    assert run(bench, "count").message == "1"


def test_a_bug_in_a_stage_is_a_worker_error_with_its_traceback(bench):
    with pytest.raises(WorkerError, match="'profile' has no result") as caught:
        bench.profile(("fp16",))
    assert "KeyError: 'a fault in profile'" in caught.value.message
    assert "worker.log" in caught.value.hint


def test_a_bench_that_cannot_be_made_is_named(tmp_path):
    with IsolatedBench("model.py", TARGET, make=Broken) as broken:
        with pytest.raises(WorkerError, match=r"ValueError: no bench for model\.py"):
            broken.look()
        assert "no bench for model.py" in run(broken, "any").message


def test_a_bench_that_cannot_travel_is_refused_before_a_process_starts():
    lost = IsolatedBench("model.py", TARGET, make=lambda workload, target: None)
    with pytest.raises(WorkerError, match="cannot travel to a worker process"):
        lost.look()
    lost.close()


def test_an_answer_that_cannot_be_sent_is_a_failure(bench):
    assert "the answer cannot be sent" in run(bench, "unsendable").message
    assert run(bench, "count").message == "1"


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    unlucky = IsolatedBench("model.py", TARGET, make=Good, log_path=tmp_path / "file" / "worker.log")
    with pytest.raises(WorkerError, match="could not be started") as caught:
        unlucky.look()
    assert "output folder can be written" in caught.value.hint


def test_every_value_comes_back_equal_and_of_its_own_type(tmp_path):
    with IsolatedBench("model.py", ("a", "target"), make=Good, log_path=tmp_path / "new" / "folder" / "log") as good:
        assert good.look() == LOOK
        assert good.profile(["fp16", "bf16_pure"]) == profile_of(("fp16", "bf16_pure"))
        measured = good.window(policy(4), Window(steps=1, seed=9))
        assert measured == MEASUREMENT.model_copy(update={"note": "4 9 ('model.py', ('a', 'target'))"})
        assert good.interleave([policy(8), policy(4)], Window(steps=1)) == [MEASUREMENT, FAILURE]


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


def test_a_crash_is_seen_though_a_forked_helper_holds_the_pipe(bench):
    run(bench, "count")
    outcome = run(bench, "exit_with_helper", timeout_s=30)
    assert (outcome.kind, outcome.message) == ("crashed", "the process ended with exit code 7")


def test_what_a_hanging_worker_printed_is_shown_and_what_it_started_ends_with_it(bench):
    run(bench, "count")
    assert run(bench, "hang_aloud", timeout_s=0.5).message.endswith("its last output was:\nabout to wait")
    run(bench, "count")
    helper = int(run(bench, "hang_with_helper", timeout_s=0.5).message.split()[-1])
    assert wait_for(lambda: not is_running(helper))


def test_output_of_an_earlier_worker_is_not_shown_for_a_later_one(bench):
    assert "last words" in run(bench, "exit").message
    assert "last words" not in run(bench, "exit_with_helper").message


def test_fifty_calls_and_five_crashes_leave_no_open_files_and_no_threads(bench):
    run(bench, "count")
    before, threads = (open_files(), int(run(bench, "open_files").message)), threading.active_count()
    for _ in range(50):
        run(bench, "count")
    assert (open_files(), int(run(bench, "open_files").message)) == before
    for _ in range(5):
        assert run(bench, "exit").kind == "crashed"
    run(bench, "count")
    assert (open_files(), threading.active_count()) == (before[0], threads)


def test_an_interrupt_of_the_whole_group_leaves_the_worker_alone(bench):
    pid = int(run(bench, "pid").message)
    os.kill(pid, signal.SIGINT)
    assert run(bench, "count").message == "2"


PRELUDE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from isolated_benches import Misbehaving, TARGET, policy
from autoprec.bench.isolation import IsolatedBench
from autoprec.records import Window
print("script runs", flush=True)
bench = IsolatedBench("nothing", TARGET, make=Misbehaving)
def run(purpose, **fields):
    return bench.window(policy(), Window(steps=1, purpose=purpose, **fields)).message
"""


def start_script(folder: Path, text: str, **more) -> subprocess.Popen:
    (folder / "script.py").write_text(PRELUDE + text)
    return subprocess.Popen([sys.executable, "script.py"], cwd=folder, stdout=subprocess.PIPE, text=True, **more)


def read_pid(process: subprocess.Popen) -> int:
    assert process.stdout.readline() == "script runs\n"
    return int(process.stdout.readline())


def test_a_worker_in_the_middle_of_a_window_ends_when_its_parent_is_killed(tmp_path):
    with start_script(tmp_path, "print(run('pid'), flush=True)\nrun('hang')\n") as script:
        worker = read_pid(script)
        script.kill()
    assert wait_for(lambda: not is_running(worker))


def test_control_c_during_a_window_ends_the_worker_and_is_raised(tmp_path):
    text = (
        "print(run('pid'), flush=True)\ntry:\n    run('hang')\nexcept KeyboardInterrupt:\n    print('stopped', bench._process)\n"
    )
    with start_script(tmp_path, text, start_new_session=True) as script:
        worker = read_pid(script)
        time.sleep(0.5)
        os.killpg(script.pid, signal.SIGINT)
        assert script.stdout.readline() == "stopped None\n"
    assert script.returncode == 0
    assert not is_running(worker)


@pytest.mark.parametrize("ending", ["", "bench.close()\nprint(run('pid'), flush=True)\n"])
def test_the_interpreter_ends_and_takes_an_unclosed_worker_along(tmp_path, ending):
    with start_script(tmp_path, "print(run('pid'), flush=True)\n" + ending) as script:
        out, _ = script.communicate(timeout=60)
    workers = [int(line) for line in out.splitlines()[1:]]
    assert len(workers) == 1 + bool(ending)
    assert not any(is_running(pid) for pid in workers)


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["-c", "import script"]])
def test_a_script_without_a_main_guard_does_not_start_itself_again(tmp_path, how):
    (tmp_path / "script.py").write_text(PRELUDE + "print(run('count'))\nprint(run('path'))\n")
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[:2] == ["script runs", "1"], done.stderr
    assert done.stdout.count("script runs") == 1
    # Modules beside the script and in the current folder are found by the worker too.
    assert {str(tmp_path), str(HERE)} <= set(done.stdout.splitlines()[2].split(os.pathsep))
