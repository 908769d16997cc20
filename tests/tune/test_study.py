from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import optuna
import optuna_dashboard
import pytest
from decision_fakes import REFERENCE, WINDOW, bound, fake_evaluate, layer, layer_profile, look_of, profile_of, small_model
from optuna.trial import TrialState

from autoprec.errors import RunFolderError, WorkloadError
from autoprec.policy import Policy
from autoprec.records import Candidate, Failure, Outcome, Window
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.study import finished_trials, open_study, run_study
from autoprec.tune.trial_record import record_outcome
from autoprec.tune.yardstick import CONSTRAINTS, Yardstick

LOOK, PROFILE = small_model()
SPACE = bound(LOOK, PROFILE)
BASELINES = baseline_policies(LOOK, ("fp32", "fp16", "bf16"), cuda=True, capability="8.9")
EVALUATE = fake_evaluate(LOOK, PROFILE)
YARDSTICK = Yardstick(REFERENCE, noise_floor=0.0005)


def _run(evaluate: Callable[[Policy, Window], Outcome] = EVALUATE, **options: object) -> list[Candidate]:
    chosen = {"window": WINDOW, "baselines": BASELINES, "trials": 20} | options
    return run_study(SPACE, evaluate, YARDSTICK, **chosen)  # type: ignore[arg-type]


def _url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def _states(study: optuna.Study) -> dict[str, int]:
    names = [trial.state.name for trial in study.trials]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def test_the_baselines_come_first_and_the_trials_in_total_are_those_asked_for() -> None:
    candidates = _run(trials=24)
    assert len(candidates) == 24
    assert [c.role for c in candidates[:8]] == list(BASELINES)
    assert [c.policy for c in candidates[:8]] == list(BASELINES.values())
    assert {c.role for c in candidates[8:]} == {"start", "search", "refine"}
    assert [c.number for c in candidates] == [c.trial for c in candidates] == list(range(24))


def test_the_baselines_run_even_where_fewer_trials_are_asked_for() -> None:
    assert [c.role for c in _run(trials=3)] == list(BASELINES)


def test_the_same_seed_gives_the_same_study_and_another_seed_another() -> None:
    one, two, other = _run(seed=7, trials=30), _run(seed=7, trials=30), _run(seed=8, trials=30)
    assert one == two
    assert [c.policy for c in one] != [c.policy for c in other]


def test_no_policy_runs_twice() -> None:
    hashes = [c.policy.setup_hash() for c in _run(trials=60)]
    assert len(set(hashes)) == len(hashes)


def test_a_plan_that_breaks_a_hard_risk_is_only_run_as_the_baseline() -> None:
    failed = [c for c in _run(trials=50) if isinstance(c.outcome, Failure)]
    assert [c.role for c in failed] == ["amp_fp16", "amp_fp16_channels_last"]


def test_the_search_finds_the_fast_corner_within_thirty_trials() -> None:
    best_known = min(plan.time_s for points in SPACE.plans.values() for plan in points if plan.harm < 0.01) * 0.7 * 0.95
    for seed in range(3):
        speeds = [c.outcome.samples_per_s for c in _run(seed=seed, trials=30) if YARDSTICK.feasible(c.outcome)]  # type: ignore[union-attr]
        assert max(speeds) >= 0.98 * 64 / best_known


def test_where_the_fastest_plan_harms_a_bisection_finds_the_last_one_that_does_not() -> None:
    names = [f"l{i:02d}" for i in range(16)]
    look = look_of([layer(name) for name in names], micro_batches=(64,))
    profile = profile_of([layer_profile(n, fp32_s=1e-3 * (1 + i % 3), harm=1e-3 * (1 + i % 5)) for i, n in enumerate(names)])
    space = bound(look, profile, precisions=("fp32", "fp16"), cuda=False)
    baselines = baseline_policies(look, ("fp32", "fp16"), cuda=False)
    candidates = run_study(space, fake_evaluate(look, profile), YARDSTICK, window=WINDOW, baselines=baselines, trials=14)
    started = [c for c in candidates if c.role == "start"]
    passing = [plan.time_s for plan in space.plans["fp16"] if plan.harm <= YARDSTICK.limit]
    assert 3 <= len(started) <= 5
    best = max(c.outcome.samples_per_s for c in started if YARDSTICK.feasible(c.outcome))  # type: ignore[union-attr]
    assert best == pytest.approx(64 / min(passing))


def test_a_small_space_ends_when_every_policy_was_tried() -> None:
    look = look_of([layer("a")], micro_batches=(64,))
    profile = profile_of([layer_profile("a")])
    space = bound(look, profile, precisions=("fp32", "bf16"), cuda=False)
    candidates = run_study(space, fake_evaluate(look, profile), YARDSTICK, window=WINDOW, baselines={}, trials=50)
    assert {c.policy.default for c in candidates} == {"fp32", "bf16"} and len(candidates) == 2


def test_what_a_person_reads_is_in_the_study(tmp_path: Path) -> None:
    _run(storage=_url(tmp_path))
    study = open_study(_url(tmp_path))
    assert study.metric_names == ["samples_per_s", "divergence"]
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert _states(study) == {"COMPLETE": 18, "PRUNED": 2}
    fp32, stock, start = study.trials[0], study.trials[2], study.trials[8]
    assert (fp32.user_attrs["role"], fp32.params["front_index"], fp32.user_attrs["divergence"]) == ("fp32", 0, 0.0)
    assert fp32.values == [fp32.user_attrs["samples_per_s"], 0.0005]
    assert fp32.user_attrs["assignment"] == "10 fp32" and fp32.user_attrs["origin"] == "measured"
    assert {"peak_bytes", "skipped_steps", "step_s", "verdict"} <= set(fp32.user_attrs)
    assert stock.user_attrs["failure"] == "diverged in head at step 3: the loss is NaN"
    assert stock.user_attrs["loss_scale"] == "init 65536, growth after 2000"
    assert stock.user_attrs["verdict"] == "breaks finite"
    assert {"dtype", "front_index", "init_scale", "growth_interval", "micro_batch", "padding", "tf32"} <= set(start.params)
    assert all(len(trial.params) <= 15 for trial in study.trials)


def test_constraints_reach_the_sampler_and_the_dashboards_old_list() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"])

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        return record_outcome(trial, Failure(kind="out_of_memory", message="24.3 GB asked, 24 GB there"), YARDSTICK)

    study.optimize(objective, n_trials=1)
    seen = study.trials
    assert seen[0].state == TrialState.PRUNED
    assert {name: seen[0].constraints[name] for name in CONSTRAINTS} == {"memory": 1, "finite": 0, "divergence": 0, "runs": 0}
    assert seen[0].system_attrs["constraints"] == [1.0, 0.0, 0.0, 0.0]
    assert seen[0].user_attrs["failure"] == "out_of_memory: 24.3 GB asked, 24 GB there"


def test_the_dashboard_shows_the_constraints_of_every_trial(tmp_path: Path) -> None:
    _run(storage=_url(tmp_path), trials=9)
    storage = optuna.storages.RDBStorage(_url(tmp_path))
    answer: list[str] = []
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies/1", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO()}
    body = b"".join(optuna_dashboard.wsgi(storage)(request, lambda status, headers, exc=None: answer.append(status)))
    assert answer == ["200 OK"]
    shown = {trial["number"]: trial["constraints"] for trial in json.loads(body)["trials"]}
    assert shown[0] == [0.0, 0.0, -1.0, 0.0] and shown[2] == [0.0, 1.0, 0.0, 0.0]
    assert all(len(values) == len(CONSTRAINTS) for values in shown.values())


def test_a_policy_over_the_tolerance_is_complete_but_infeasible(tmp_path: Path) -> None:
    harmful = fake_evaluate(LOOK, profile_of([p.model_copy(update={"risks": ()}) for p in PROFILE.layers]))

    def evaluate(policy: Policy, window: Window) -> Outcome:
        outcome = harmful(policy, window)
        assert not isinstance(outcome, Failure)
        return outcome.model_copy(update={"losses": tuple(1.3 * x for x in REFERENCE)}) if policy.default == "bf16" else outcome

    _run(evaluate, storage=_url(tmp_path))
    study = open_study(_url(tmp_path))
    bf16 = next(trial for trial in study.trials if trial.user_attrs["role"] == "amp_bf16")
    assert bf16.state == TrialState.COMPLETE and bf16.values[1] == pytest.approx(0.3)
    assert bf16.constraints["divergence"] > 0 and bf16.user_attrs["verdict"] == "breaks divergence"
    assert bf16.number not in {trial.number for trial in study.best_trials}


def test_failing_trials_never_end_as_fail_and_the_search_leaves_their_region() -> None:
    def evaluate(policy: Policy, window: Window) -> Outcome:
        if policy.batch.micro == 64 and policy.default != "fp32":
            return Failure(kind="out_of_memory", message="too large")
        return EVALUATE(policy, window)

    late = [c for c in _run(evaluate, trials=70, seed=1) if c.number >= 30]
    failed = sum(isinstance(c.outcome, Failure) for c in late)
    assert failed <= len(late) / 3, f"{failed} of {len(late)}"


def test_a_resumed_study_counts_earlier_trials_and_repeats_nothing(tmp_path: Path) -> None:
    first = _run(storage=_url(tmp_path), trials=14)
    second = _run(storage=_url(tmp_path), trials=22, earlier=first)
    assert second[:14] == first and len(second) == 22
    assert len({c.policy.setup_hash() for c in second}) == 22
    assert len(finished_trials(open_study(_url(tmp_path)))) == 22
    assert _run(storage=_url(tmp_path), trials=22, earlier=second) == second


def test_a_later_call_may_bring_a_further_policy_that_runs_beyond_the_trials(tmp_path: Path) -> None:
    first = _run(storage=_url(tmp_path), trials=12)
    repaired = BASELINES["fp32"].model_copy(update={"default": "fp16", "execution": "compile"})
    second = _run(storage=_url(tmp_path), trials=12, earlier=first, baselines=BASELINES | {"repair": repaired})
    assert [c.role for c in second[12:]] == ["repair"] and second[12].policy == repaired


def test_ctrl_c_keeps_finished_trials_and_the_interrupted_one_is_tried_again_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def interrupted(policy: Policy, window: Window) -> Outcome:
        calls.append(policy.setup_hash())
        if len(calls) == 10:
            raise KeyboardInterrupt
        return EVALUATE(policy, window)

    with pytest.raises(KeyboardInterrupt):
        _run(interrupted, storage=_url(tmp_path))
    assert _states(open_study(_url(tmp_path))) == {"COMPLETE": 7, "PRUNED": 2, "FAIL": 1}
    resumed = _run(storage=_url(tmp_path))
    study = open_study(_url(tmp_path))
    assert len(finished_trials(study)) == 20
    assert [t.user_attrs["retry_of"] for t in study.trials if "retry_of" in t.user_attrs] == [9]
    assert calls[-1] in {c.policy.setup_hash() for c in resumed}


def test_an_interrupted_baseline_runs_again(tmp_path: Path) -> None:
    def interrupted(policy: Policy, window: Window) -> Outcome:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(interrupted, storage=_url(tmp_path))
    assert {c.role for c in _run(storage=_url(tmp_path), trials=0)} == set(BASELINES)


def test_an_error_that_is_no_outcome_ends_the_study(tmp_path: Path) -> None:
    def broken(policy: Policy, window: Window) -> Outcome:
        raise WorkloadError("the loss is NaN in FP32")

    with pytest.raises(WorkloadError, match="NaN in FP32"):
        _run(broken, storage=_url(tmp_path))


KILLED = """
import os, sys
sys.path[:0] = [{here!r}]
import test_study
def evaluate(policy, window):
    if policy.setup_hash() == {sha!r} or len(calls) == 9:
        os.kill(os.getpid(), 9)
    calls.append(1)
    return test_study.EVALUATE(policy, window)
calls = []
test_study._run(evaluate, storage={url!r})
"""


def test_a_killed_process_leaves_a_trial_that_is_marked_failed_and_tried_once_more(tmp_path: Path) -> None:
    code = KILLED.format(here=str(Path(__file__).parent), sha="", url=_url(tmp_path))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    dead = [trial for trial in open_study(_url(tmp_path)).trials if trial.state == TrialState.RUNNING]
    assert [trial.number for trial in dead] == [9]
    candidates = _run(storage=_url(tmp_path))
    study = open_study(_url(tmp_path))
    assert study.trials[9].state == TrialState.FAIL
    again = [trial for trial in study.trials if trial.user_attrs.get("retry_of") == 9]
    assert len(again) == 1 and again[0].params == dead[0].params and again[0].state == TrialState.COMPLETE
    assert again[0].constraints["divergence"] < 0, "constraints are set anew"
    assert len(finished_trials(study)) == 20 and len(candidates) == 11


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_running_trial_of_a_live_process_is_left_alone(tmp_path: Path) -> None:
    study = open_study(_url(tmp_path))
    study.enqueue_trial({}, user_attrs={"role": "search", "process": f"{os.uname().nodename}:{os.getppid()}"})
    study.ask()
    _run(storage=_url(tmp_path), trials=9)
    assert open_study(_url(tmp_path)).trials[0].state == TrialState.RUNNING


def test_a_study_of_another_space_is_refused(tmp_path: Path) -> None:
    _run(storage=_url(tmp_path), trials=0)
    other = bound(LOOK, PROFILE, device_name="Another GPU")
    with pytest.raises(RunFolderError, match="made for another search space, model or device"):
        run_study(other, EVALUATE, YARDSTICK, window=WINDOW, baselines={}, trials=1, storage=_url(tmp_path))


def test_a_locked_study_file_is_named_in_plain_words(tmp_path: Path) -> None:
    open_study(_url(tmp_path))
    lock = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    lock.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(RunFolderError, match="The study file is locked by another process"):
            _run(storage=_url(tmp_path), lock_timeout_s=0.1)
    finally:
        lock.execute("ROLLBACK")
        lock.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("not a database, but long enough to be read as one" * 20)
    with pytest.raises(RunFolderError, match="The study file cannot be used"):
        _run(storage=_url(tmp_path))


def test_progress_gets_each_candidate_with_the_best_so_far() -> None:
    seen: list[tuple[int, int | None]] = []
    _run(trials=12, on_trial=lambda c, best: seen.append((c.number, best.number if best else None)))
    assert [number for number, _ in seen] == list(range(12))
    assert seen[0] == (0, 0) and seen[2][1] == 0, "stock AMP diverges and cannot be the best"


def test_the_caller_can_end_the_study_early() -> None:
    left = iter([False] * 5 + [True])
    assert len(_run(should_stop=lambda: next(left))) == 5


def test_optunas_log_level_is_as_before() -> None:
    before = optuna.logging.get_verbosity()
    _run(trials=0)
    assert optuna.logging.get_verbosity() == before
