"""The bisection along an assignment front: few plans tried, and the fastest feasible one found."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoprec.records import Environment, Failure, Measurement, Outcome
from autoprec.tune.assignment import Assignment
from autoprec.tune.bisection import decided_by_numerics, next_index
from autoprec.tune.yardstick import Yardstick

YARDSTICK = Yardstick((1.0,) * 20, tolerance=0.01)
HERE = Environment(device="x", capability=None, driver=None, torch_version="x", python_version="3", platform="x")


def measured(gap: float, skipped: int = 0) -> Measurement:
    return Measurement(
        losses=(1.0 + gap,) * 20,
        step_times_s=(1.0,),
        skipped_steps=skipped,
        speed_origin="measured",
        batch_samples=1,
        peak_bytes=1,
        environment=HERE,
    )


def front(harms: list[float]) -> list[Assignment]:
    return [Assignment(precisions={"a": "fp32"}, default="fp32", time_s=1.0 / (i + 1), harm=harm) for i, harm in enumerate(harms)]


def tried(harms: list[float], gaps: list[float | None]) -> tuple[list[int], int]:
    """Indices the bisection tries, and the fastest feasible one it knows at the end; a gap of None is a failed window."""
    known: dict[int, Outcome] = {}

    def outcome(index: int) -> Outcome:
        gap = gaps[index]
        return Failure(kind="diverged", message="NaN") if gap is None else measured(gap)

    known[len(harms) - 1] = outcome(len(harms) - 1)
    order = []
    while (index := next_index(front(harms), len(harms) - 1, known.get, YARDSTICK)) is not None:
        assert index not in known
        known[index] = outcome(index)
        order.append(index)
    return order, max((i for i, found in known.items() if YARDSTICK.feasible(found)), default=0)


def test_a_feasible_fastest_plan_leaves_nothing_to_try():
    assert tried([0.0, 1.0, 2.0], [0.0, 0.001, 0.002]) == ([], 2)


def test_the_measured_gap_says_which_plan_to_try_next():
    harms = [0.0, 0.001, 0.002, 0.004, 0.008, 0.016, 0.1, 0.2]
    order, best = tried(harms, [harm * 2 for harm in harms])  # 0.2 gave a gap of 0.4: 0.005 of predicted harm is bearable
    assert order[0] == 3
    assert best == 3
    assert len(order) <= 3


def test_a_failed_window_has_no_gap_so_the_middle_is_next():
    order, best = tried([0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.001, 0.002, None, None])
    assert order[0] == 2
    assert best == 2


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=14, unique=True), st.floats(1e-4, 1e2), st.booleans())
def test_the_fastest_feasible_plan_is_found_in_few_trials_where_harm_orders_the_plans(harms, factor, fails):
    harms = [0.0, *sorted(harms)]
    gaps = [None if fails and harm * factor > 0.05 else harm * factor for harm in harms]
    order, best = tried(harms, gaps)
    assume(all(gap is None or abs(gap - 0.01) > 1e-9 for gap in gaps))  # the limit itself is a matter of rounding
    assert best == max(i for i, gap in enumerate(gaps) if gap is not None and gap <= 0.01)
    assert len(order) <= len(harms) - 2 or not order


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (measured(0.5), True),
        (measured(0.5, skipped=2), False),
        (Failure(kind="unsupported", message="no kernel"), True),
        (Failure(kind="diverged", message="NaN"), False),
        (Failure(kind="out_of_memory", message="too large"), False),
    ],
)
def test_only_a_window_without_skips_or_one_that_cannot_run_speaks_of_the_layers_alone(outcome, expected):
    assert decided_by_numerics(outcome) is expected
