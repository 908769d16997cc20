from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from dashboard_api import study_detail
from made_up_run import candidates, report_data

from autoprec.records import Verdict
from autoprec.tune.review import CONSTRAINT_WORDS, study_attributes, study_note, write_notes
from autoprec.tune.study import METRIC_NAMES, open_study
from autoprec.tune.trial_record import describe_policy, record_outcome
from autoprec.tune.yardstick import CONSTRAINTS, Yardstick

CHOSEN, OUT_OF_MEMORY, DIVERGED = 34, 8, 9


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A study that holds the made-up run, with its notes written."""
    made = candidates()
    address = f"sqlite:///{tmp_path_factory.mktemp('study') / 'study.db'}"
    study = open_study(address)
    yardstick = Yardstick(made[0].outcome.losses, memory_limit_bytes=24 * 10**9)  # type: ignore[union-attr]
    for candidate in made:
        study.enqueue_trial({}, user_attrs={"role": candidate.role})

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        candidate = made[trial.number]
        describe_policy(trial, candidate.policy)
        return record_outcome(trial, candidate.outcome, yardstick)

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study.optimize(objective, n_trials=len(made))
    write_notes(address, report_data())
    return address


@pytest.fixture(scope="module")
def detail(url: str) -> dict:
    return study_detail(url)


def test_the_dashboard_shows_the_study_note_with_headline_comparison_code_and_constraints(detail):
    note = detail["note"]["body"]
    assert note.startswith("## 2.07× the speed of stock AMP, trains like FP32\n")
    assert "| **tuned policy** | 6,160 | 2.07× | 5.37 GB | 0.24 % | predicted |" in note
    assert "autoprec.load_policy('digits_cnn-4090d/policy.json')" in note
    assert "- stages.\\*.bn\\* (16 layers): fp16\\_pure; faster" in note
    for name in CONSTRAINTS:
        assert f"- **{name}**: " in note


def test_the_dashboard_shows_metric_names_and_the_constraints_of_every_trial(detail):
    assert tuple(detail["objective_names"]) == METRIC_NAMES
    trials = {trial["number"]: trial for trial in detail["trials"]}
    assert len(trials) == 35
    assert trials[OUT_OF_MEMORY]["constraints"] == [1.0, 0.0, 0.0, 0.0]
    assert trials[DIVERGED]["constraints"] == [0.0, 1.0, 0.0, 0.0]
    assert trials[CHOSEN]["constraints"][0] == pytest.approx(6e9 / 24e9 - 1)


def test_every_trial_has_one_note_that_says_what_came_of_it(detail):
    notes = {trial["number"]: trial["note"] for trial in detail["trials"]}
    assert {note["version"] for note in notes.values()} == {1}
    assert "no samples: out\\_of\\_memory in stages.3.conv1: tried to allocate 2.1 GB" in notes[OUT_OF_MEMORY]["body"]
    assert f"| memory | 1 | **broken**: {CONSTRAINT_WORDS['memory']} |" in notes[OUT_OF_MEMORY]["body"]
    assert "no samples: diverged in head at step 14: the loss is nan" in notes[DIVERGED]["body"]
    assert notes[0]["body"].startswith("**FP32**\n")
    assert "samples/s, peak memory 6.00 GB (predicted)" in notes[0]["body"]


def test_the_chosen_trial_says_that_it_is_the_policy_and_lists_its_exceptions_in_groups(detail):
    note = next(trial["note"]["body"] for trial in detail["trials"] if trial["number"] == CHOSEN)
    assert "the exported policy" in note
    assert "layers: 18 fp16, 16 fp16\\_pure, 1 fp32" in note
    assert "stages.\\*.bn\\* (16 layers): fp16\\_pure" in note
    assert "loss scale: init 8192, growth after 200" in note
    assert "verification: passed" in note
    assert "| memory | -0.75 | holds |" in note


def test_the_study_carries_the_verdict_as_attributes(detail):
    shown = {item["key"]: item["value"] for item in detail["user_attrs"]}
    expected = {
        "verdict": "passed",
        "speeds_are": "predicted",
        "losses_are": "measured",
        "chosen_trial": "34",
        "loss_gap": "0.0024",
    }
    assert {name: shown[name] for name in expected} == expected


def test_writing_notes_again_changes_nothing_and_a_new_answer_replaces_the_note(url):
    write_notes(url, report_data())
    again = study_detail(url)
    assert {again["note"]["version"], *(trial["note"]["version"] for trial in again["trials"])} == {1}
    write_notes(url, report_data(not_worth_it="FP32 is as fast.", arms=(), verdict=None))
    changed = study_detail(url)["note"]
    assert changed["version"] == 2
    assert "Stay with FP32" in changed["body"]
    assert "2.07" not in changed["body"]


def test_notes_are_written_without_a_word_on_the_terminal_and_without_torch(url):
    code = (
        "import sys; from made_up_run import report_data; from autoprec.tune.review import write_notes;"
        f"write_notes({url!r}, report_data()); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'tests' / 'tune'}", "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_users_text_cannot_break_the_note():
    note = study_note(report_data(workload="a|b<script>alert(1)</script>.py"))
    assert "<script>" not in note.replace("\\<", "").replace("\\>", "")
    assert "a\\|b" in note


def test_a_gap_that_is_not_finite_is_left_out_of_the_attributes():
    broken = Verdict(
        status="rejected",
        loss_gap=float("inf"),
        low=0,
        high=float("inf"),
        tolerance=0.01,
        noise_floor=0.001,
        seeds=1,
        text="Rejected: the loss became NaN or infinite on 1 of 1 seed.",
    )
    attributes = study_attributes(report_data(verdict=broken))
    assert attributes["verdict"] == "rejected"
    assert "loss_gap" not in attributes


def test_every_constraint_is_explained():
    assert tuple(CONSTRAINT_WORDS) == CONSTRAINTS
