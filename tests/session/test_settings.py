"""What a tune is asked for, and how its time is split."""

from __future__ import annotations

import pytest

from autoprec.errors import UserError
from autoprec.session.budget import LEAST_TRIAL_STEPS, LONGEST_TRIAL_STEPS, plan_windows
from autoprec.session.run import workload_name
from autoprec.session.settings import Settings


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("execution", "egaer", "Did you mean 'eager'"),
        ("trials", -1, "0 or more"),
        ("budget_s", 0.0, "more than 0"),
        ("tolerance", 1.5, "between 0 and 1"),
    ],
)
def test_a_setting_outside_its_range_says_what_is_allowed(field, value, words):
    with pytest.raises(UserError, match=words):
        Settings(workload="model.py", **{field: value})


def plan(step_s, overhead_s=0.0, **settings):
    return plan_windows(step_s, overhead_s, Settings(workload="model.py", **settings), num_baselines=8, on_cuda=False)


def test_slow_steps_get_short_windows_and_fast_ones_no_more_than_is_useful():
    assert plan(5.0).trial_steps == LEAST_TRIAL_STEPS
    assert plan(1e-5).trial_steps == LONGEST_TRIAL_STEPS


def test_the_planned_trials_fill_their_share_of_the_budget_but_do_not_pass_it():
    windows = 24 + 8
    assert (
        0.25 * 240 < plan(0.05, 0.2, budget_s=240.0, trials=24).trial_steps * 0.05 * 1.4 * windows + 0.2 * windows <= 0.35 * 240
    )


def test_a_window_that_costs_more_to_set_up_trains_fewer_steps():
    assert plan(0.05, 1.0).trial_steps < plan(0.05, 0.0).trial_steps


def test_a_verification_window_is_never_shorter_than_a_trial():
    for step_s in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        made = plan(step_s)
        assert made.verify_steps >= made.trial_steps > made.trial_warmup_steps


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        ("examples/digits_cnn.py", "digits_cnn"),
        ("a/model.py:big", "model"),
        ("package.models:Tiny", "Tiny"),
        (Settings, "Settings"),
    ],
)
def test_a_run_is_named_after_its_workload(workload, name):
    assert workload_name(workload) == name
