from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autoprec.policy import Batch, Evidence, Fingerprint, LayerSetting, Policy, Reason
from autoprec.records import Candidate, Environment, Failure, Layer, Measurement, Verdict, Window, evaluation_key

ENVIRONMENT = Environment(
    device="cpu", capability=None, driver=None, torch_version="2.14.1", python_version="3.11", platform="Linux"
)


def policy(**changes: object) -> Policy:
    made_for = Fingerprint.of({"a": "Linear"}, device="cpu", capability=None, torch_version="2.14.1", workload_sha256="0" * 64)
    return Policy(**{"default": "fp16", "batch": Batch(effective=8, micro=8), "fingerprint": made_for, **changes})


def measurement(**changes: object) -> Measurement:
    fields = {"losses": (2.0, 1.0), "step_times_s": (0.5,), "speed_origin": "measured", "batch_samples": 8, "peak_bytes": 1}
    return Measurement(**{**fields, "environment": ENVIRONMENT, **changes})


any_float = st.floats(allow_nan=False)


@given(
    losses=st.lists(any_float, min_size=1, max_size=6).map(tuple),
    times=st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=6).map(tuple),
    skipped=st.integers(0, 5),
    scale=st.none() | any_float,
    note=st.text(max_size=20),
)
def test_a_candidate_with_any_samples_survives_its_line_of_json(losses, times, skipped, scale, note):
    outcome = measurement(
        losses=losses,
        step_times_s=times,
        skipped_steps=skipped,
        late_skipped_steps=1,
        final_scale=scale,
        host_bound=True,
        note=note,
    )
    window = Window(steps=6, warmup_steps=2, seed=3, perturbation=2**-24, timeout_s=9.5, purpose="repair")
    candidate = Candidate(number=4, role="search", policy=policy(), window=window, outcome=outcome, trial=2)
    line = candidate.model_dump_json()
    assert "\n" not in line
    assert Candidate.model_validate_json(line) == candidate


def test_nan_and_infinite_losses_survive_json():
    again = Measurement.model_validate_json(measurement(losses=(math.inf, -math.inf, math.nan)).model_dump_json())
    assert again.losses[:2] == (math.inf, -math.inf)
    assert math.isnan(again.losses[2])


@given(layer=st.none() | st.text(max_size=10), step=st.none() | st.integers(0, 10**6), trace=st.text(max_size=30))
def test_a_failure_stays_a_failure_through_json(layer, step, trace):
    outcome = Failure(kind="scale_collapsed", message="the scale fell to 1", layer=layer, step=step, traceback=trace)
    candidate = Candidate(number=0, role="start", policy=policy(), window=Window(steps=1), outcome=outcome)
    assert Candidate.model_validate_json(candidate.model_dump_json()) == candidate


def test_skipped_steps_do_not_count_as_fast():
    assert measurement(losses=(1.0,) * 4, step_times_s=(0.5,)).samples_per_s == 16.0
    assert measurement(losses=(1.0,) * 4, step_times_s=(0.5,), skipped_steps=2).samples_per_s == 8.0
    assert measurement(losses=(1.0,) * 4, step_times_s=(0.5,), skipped_steps=4).samples_per_s == 0.0


def test_skipped_steps_without_samples_are_taken_off_once() -> None:
    """Ten steps of 8 samples at 0.5 s, two of which were skipped and are no samples: 64 samples in 5 s."""
    assert measurement(losses=(1.0,) * 10, step_times_s=(0.5,) * 8, skipped_steps=2, batch_samples=8).samples_per_s == 64 / 5


def test_dropped_samples_are_told_by_number_and_cause_and_change_no_speed() -> None:
    quiet = measurement(losses=(1.0,) * 60, step_times_s=(0.5,) * 45)
    loud = quiet.model_copy(update={"shared_steps": 12, "throttled_steps": 3})
    assert (quiet.dropped, quiet.disturbed) == ("", False)
    assert loud.disturbed
    assert loud.dropped == (
        "12 of 60 steps dropped: another process used the card; 3 of 60 steps dropped: heat or power held the clocks down"
    )
    assert loud.samples_per_s == quiet.samples_per_s


def test_measurements_written_before_blocks_were_kept_still_load() -> None:
    old = json.loads(measurement().model_dump_json())
    for name in ("block_steps", "throttled_steps", "shared_steps"):
        del old[name]
    assert Measurement.model_validate(old) == measurement()


def test_a_step_takes_the_median_time():
    assert measurement(step_times_s=(1.0, 9.0, 2.0)).step_s == 2.0


def test_a_layers_signature_is_its_kind_and_its_own_shapes_by_name():
    layer = Layer(name="conv", kind="Conv2d", parameters={"weight": (64, 3, 7, 7), "bias": (64,), "scale": ()})
    assert layer.signature == "Conv2d bias=64 scale=scalar weight=64x3x7x7"
    assert Layer(name="pool", kind="MaxPool2d").signature == "MaxPool2d"


def test_the_same_set_up_in_the_same_window_is_the_same_evaluation():
    setting = LayerSetting(precision="fp32", reason=Reason(kind="speed", text="once"))
    plain, other = policy(layers={"a": setting}), policy(layers={"a": LayerSetting(precision="fp32")})
    told = plain.model_copy(update={"evidence": Evidence(run="x", verdict="passed", speed_origin="measured")})
    window = Window(steps=5, seed=1)
    key = evaluation_key(plain, window)
    assert key == evaluation_key(other, window) == evaluation_key(told, window)
    assert key == evaluation_key(plain, window.model_copy(update={"purpose": "verification", "timeout_s": 1.0}))


@pytest.mark.parametrize("change", [{"steps": 6}, {"seed": 2}, {"warmup_steps": 1}, {"perturbation": 1e-7}])
def test_another_window_is_another_evaluation(change):
    window = Window(steps=5, seed=1)
    assert evaluation_key(policy(), window) != evaluation_key(policy(), window.model_copy(update=change))


def test_another_set_up_is_another_evaluation():
    window = Window(steps=5)
    assert evaluation_key(policy(), window) != evaluation_key(policy(execution="compile"), window)
    assert evaluation_key(policy(), window) != evaluation_key(
        policy(batch=Batch(effective=8, micro=4, accumulation_steps=2)), window
    )


def test_records_are_frozen_and_refuse_unknown_keys():
    with pytest.raises(ValidationError, match="frozen"):
        Window(steps=5).steps = 6  # type: ignore[misc]
    with pytest.raises(ValidationError, match="wamrup"):
        Window(steps=5, wamrup=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Window(steps=0)


def test_an_infinite_verdict_survives_json():
    fields = {"low": math.inf, "high": math.inf, "tolerance": 0.01, "noise_floor": 0.0, "seeds": 2, "text": "Rejected."}
    verdict = Verdict(status="rejected", loss_gap=math.inf, **fields)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
