"""Samples by the number of their step, and whether the host is the limit."""

from __future__ import annotations

import time

import pytest
import torch

from autoprec.bench import timing
from autoprec.bench.timing import HOST_BOUND_LAG_SHARE, StepClock


def timed(numbers: list[int]) -> StepClock:
    clock = StepClock("cpu")
    for number in numbers:
        clock.time(lambda number=number: time.sleep(1e-3 * (1 + number % 3)), number)
    return clock


def test_a_sample_is_the_wall_time_of_its_step_on_a_cpu() -> None:
    clock = StepClock("cpu")
    clock.time(lambda: time.sleep(0.02))
    assert clock.times_s() == pytest.approx((0.02,), abs=0.015)


def test_dropped_steps_leave_no_sample_and_the_others_keep_theirs() -> None:
    clock = timed([5, 6, 7, 8])
    before = clock.times_s()
    assert clock.drop(range(6, 8)) == 2
    assert clock.times_s() == (before[0], before[3])
    assert (clock.drop(range(6, 8)), clock.count(range(5, 9)), clock.count([6])) == (0, 2, 0)


def test_steps_that_were_never_timed_can_be_dropped() -> None:
    clock = timed([3])
    assert clock.drop([0, 1, 2, 9]) == 0
    assert len(clock.times_s()) == 1


def test_steps_without_a_number_count_on_from_the_last() -> None:
    clock = timed([4])
    clock.time(lambda: None)
    assert clock.count([5]) == 1


class Device:
    """A device that lags behind the host by a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.busy_until_s = 0.0
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now_s)

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.busy_until_s)

    def issue(self, host_s: float, lag_s: float) -> None:
        self.now_s += host_s
        self.busy_until_s = self.now_s + lag_s


def test_a_device_that_is_done_when_the_host_is_waited_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = Device(monkeypatch), StepClock("cuda")
    for _ in range(3):
        clock.probe_host(lambda: device.issue(1.0, 0.5 * HOST_BOUND_LAG_SHARE))
    assert clock.host_bound


def test_one_late_probe_of_three_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, clock = Device(monkeypatch), StepClock("cuda")
    for host_s in (0.1, 5.0, 0.1):  # in the second the host was held up
        clock.probe_host(lambda host_s=host_s: device.issue(host_s, 0.4))
    assert not clock.host_bound


def test_a_clock_without_probes_calls_nothing_host_bound() -> None:
    assert not timed([1]).host_bound
