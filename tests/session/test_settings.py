"""What a tune is asked for, and how its time is split."""

from __future__ import annotations

import pytest

from autoprec.errors import UserError
from autoprec.session.run import workload_name
from autoprec.session.settings import LONGEST_TRIAL_STEPS, SHORTEST_TRIAL_STEPS, Settings, plan_windows


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


def test_slow_steps_get_short_windows_and_fast_ones_no_more_than_is_useful():
    settings = Settings(workload="model.py", budget_s=240, trials=24)
    assert plan_windows(5.0, settings, 8).trial_steps == SHORTEST_TRIAL_STEPS
    assert plan_windows(1e-5, settings, 8).trial_steps == LONGEST_TRIAL_STEPS


def test_the_planned_windows_fill_the_budget_but_do_not_pass_it():
    settings = Settings(workload="model.py", budget_s=240, trials=24)
    plan = plan_windows(0.05, settings, 8)
    assert 60 < plan.trial_steps * 0.05 * 32 <= 0.4 * 240
    assert plan.verify_steps >= plan.trial_steps


def test_a_verification_window_is_never_shorter_than_a_trial():
    for step_s in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        plan = plan_windows(step_s, Settings(workload="m.py"), 8)
        assert plan.verify_steps >= plan.trial_steps > plan.trial_warmup_steps


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
