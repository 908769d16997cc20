from __future__ import annotations

import math

import pytest
from decision_fakes import REFERENCE, WINDOW, layer, look_of, measured
from hypothesis import given
from hypothesis import strategies as st

from autoprec.policy import Backend, Policy
from autoprec.records import Candidate, Failure, Outcome
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.front import finalists, hypervolume, kind_of, pareto, score
from autoprec.tune.yardstick import CONSTRAINTS, WORST, Yardstick

POLICIES = baseline_policies(look_of([layer("fc")]), ("fp32", "fp16", "bf16"), cuda=True, capability="8.9")
YARDSTICK = Yardstick(REFERENCE, noise_floor=0.001, memory_limit_bytes=2 * 10**9)


def _candidate(number: int, policy: Policy, outcome: Outcome) -> Candidate:
    return Candidate(number=number, role="search", policy=policy, window=WINDOW, outcome=outcome)


def _run(gap: float = 0.0, **options: object) -> Outcome:
    return measured([x * (1 + gap) for x in REFERENCE], **options)  # type: ignore[arg-type]


def test_constraints_are_zero_or_less_exactly_where_a_candidate_may_win() -> None:
    assert YARDSTICK.constraints(_run(0.005)) == pytest.approx({"memory": -0.5, "finite": 0, "divergence": -0.5, "runs": 0})
    assert YARDSTICK.feasible(_run(0.005)) and YARDSTICK.feasible(_run(-0.2))
    assert YARDSTICK.constraints(_run(0.02))["divergence"] == pytest.approx(1.0)
    assert YARDSTICK.constraints(_run(peak_bytes=3 * 10**9))["memory"] == pytest.approx(0.5)
    assert YARDSTICK.constraints(measured([math.nan] * 20))["finite"] == 1.0
    assert YARDSTICK.constraints(_run(5.0))["divergence"] == WORST
    assert YARDSTICK.constraints(_run(skipped_steps=20))["finite"] == 1.0, "every step skipped is no training"


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("out_of_memory", "memory"),
        ("diverged", "finite"),
        ("scale_collapsed", "finite"),
        ("crashed", "runs"),
        ("timeout", "runs"),
        ("unsupported", "runs"),
    ],
)
def test_each_failure_breaks_its_constraint(kind: str, broken: str) -> None:
    values = YARDSTICK.constraints(Failure(kind=kind, message="m"))  # type: ignore[arg-type]
    assert values == dict.fromkeys(CONSTRAINTS, 0.0) | {broken: 1.0}


def test_gaps_under_the_noise_floor_count_as_equal() -> None:
    assert YARDSTICK.divergence(measured()) == 0.001
    assert YARDSTICK.divergence(_run(-0.0005)) == 0.001  # type: ignore[arg-type]
    assert YARDSTICK.divergence(_run(-0.02)) == pytest.approx(0.02)  # type: ignore[arg-type]


def test_a_noise_floor_over_the_tolerance_is_the_limit() -> None:
    assert Yardstick(REFERENCE, noise_floor=0.05).feasible(_run(0.04))
    assert not Yardstick(REFERENCE, noise_floor=0.05).feasible(_run(0.06))


def test_the_front_holds_what_nothing_beats_and_nothing_infeasible() -> None:
    fp32, amp = POLICIES["fp32"], POLICIES["amp_fp16"]
    candidates = [
        _candidate(0, fp32, _run(0.0, step_s=0.04)),
        _candidate(1, amp, _run(0.004, step_s=0.01)),
        _candidate(2, amp, _run(0.005, step_s=0.02)),
        _candidate(3, amp, _run(0.5, step_s=0.001)),
        _candidate(4, amp, Failure(kind="diverged", message="NaN")),
        _candidate(5, amp, _run(0.004, step_s=0.01)),
    ]
    scored = score(candidates, YARDSTICK)
    assert [item.candidate.number for item in pareto(scored)] == [1, 0]
    assert [item.feasible for item in scored] == [True, True, True, False, False, True]
    assert scored[4].divergence == math.inf and scored[4].samples_per_s == 0.0


def test_the_hypervolume_is_the_area_under_the_steps() -> None:
    assert hypervolume([], (0.0, 1.0)) == 0.0
    assert hypervolume([(10.0, 0.5)], (0.0, 1.0)) == 5.0
    assert hypervolume([(10.0, 0.5), (4.0, 0.25), (3.0, 0.9)], (0.0, 1.0)) == 5.0 + 4.0 * 0.25
    assert hypervolume([(10.0, 1.5), (-1.0, 0.5)], (0.0, 1.0)) == 0.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8))
def test_the_hypervolume_counts_the_covered_cells(points: list[tuple[int, int]]) -> None:
    cells = {(x, y) for speed, divergence in points for x in range(speed) for y in range(divergence, 10)}
    assert hypervolume([(float(s), float(d)) for s, d in points], (0.0, 10.0)) == len(cells)


def test_finalists_are_of_different_kinds_then_the_next_fastest() -> None:
    fp32, fp16, bf16 = POLICIES["fp32"], POLICIES["amp_fp16"], POLICIES["amp_bf16"]
    nhwc, flags = Backend(channels_last=True), Backend(cudnn_benchmark=True)
    runs = [
        (fp16.model_copy(update={"backend": nhwc}), 0.010),
        (fp16.model_copy(update={"backend": nhwc.model_copy(update={"cudnn_benchmark": True})}), 0.011),
        (fp16, 0.020),
        (bf16.model_copy(update={"backend": nhwc}), 0.013),
        (bf16, 0.021),
        (fp32, 0.040),
        (fp16, 0.019),
        (fp16.model_copy(update={"backend": flags}), 0.001),
    ]
    candidates = [_candidate(i, policy, _run(0.5 if i == 7 else 0.0, step_s=step_s)) for i, (policy, step_s) in enumerate(runs)]
    scored = score(candidates, YARDSTICK)
    assert [item.candidate.number for item in finalists(scored, 4)] == [0, 3, 6, 4]
    assert [item.candidate.number for item in finalists(scored, 7)] == [0, 3, 6, 4, 5, 1]
    assert kind_of(runs[3][0]) == ("bf16", True)


def test_nothing_feasible_gives_no_finalists() -> None:
    assert finalists(score([_candidate(0, POLICIES["fp32"], _run(0.5))], YARDSTICK)) == []
