"""What a policy's windows on several seeds say: harm or noise, and the loss scale it should have started from."""

from __future__ import annotations

import pytest
from scripted_run import SEEDS, scripted, trained

from autoprec.policy import LossScale, Policy
from autoprec.records import Failure, Window
from autoprec.session.judging import at_settled_scale, does_harm, judged, trained_on_seeds

WINDOW = Window(steps=40)
DIVERGED = Failure(kind="diverged", message="the loss is NaN", step=3)


def low_policy(context) -> Policy:
    return context.plain_fp32().model_copy(update={"default": "fp16", "loss_scale": LossScale(init=8192.0)})


@pytest.mark.parametrize(
    ("gaps", "harmful"),
    [
        ((0.0, 0.001, 0.0), False),  # passed
        ((0.05, 0.06, 0.05), True),  # rejected
        ((0.008, 0.012, 0.009), True),  # inconclusive, but higher than FP32 for certain
        ((0.05, -0.04, 0.0), False),  # inconclusive about FP32's own loss: noise
    ],
)
def test_harm_is_a_gap_that_is_real_and_noise_about_fp32_is_none(gaps, harmful) -> None:
    context, _ = scripted(lambda _policy, window: trained(window, gaps[window.seed]))
    outcomes = trained_on_seeds(context, low_policy(context), "test")
    assert len(outcomes) == SEEDS
    assert does_harm(judged(context, outcomes)) is harmful


def test_a_window_that_fails_is_harm_and_no_further_seed_runs() -> None:
    context, _ = scripted(lambda _policy, _window: DIVERGED)
    outcomes = trained_on_seeds(context, low_policy(context), "test")
    assert outcomes == [DIVERGED]
    assert judged(context, outcomes) is None and does_harm(None)


def test_a_scale_that_came_down_is_started_at_the_lowest_that_any_seed_ended_at() -> None:
    context, _ = scripted(lambda _policy, window: trained(window))
    policy = low_policy(context)
    outcomes = [trained(WINDOW, skipped=3, final_scale=1024.0), trained(WINDOW, skipped=5, final_scale=256.0), trained(WINDOW)]
    settled = at_settled_scale(policy, outcomes)
    assert settled is not None and settled.loss_scale.init == 256.0
    assert settled.model_copy(update={"loss_scale": policy.loss_scale}) == policy, "nothing else changes"


@pytest.mark.parametrize("outcome", [trained(WINDOW, final_scale=16384.0), trained(WINDOW), DIVERGED])
def test_a_scale_that_never_came_down_is_left_alone(outcome) -> None:
    context, _ = scripted(lambda _policy, window: trained(window))
    assert at_settled_scale(low_policy(context), [outcome]) is None
