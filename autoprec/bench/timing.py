"""Step times: device events on CUDA, the wall clock on a CPU, and whether the device waits for the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

_T = TypeVar("_T")

# The device is done when the host has issued the step: it waited for the host. Own choice of what counts as "done".
HOST_BOUND_LAG_SHARE = 0.1
# Steps of the warm-up that are run alone to see whether the host is the limit. Own choice: of three, one that a garbage collection
# or another process of the host delayed is not the median.
HOST_PROBES = 3
# Untimed steps after the device has been waited for, on CUDA. Source: ResNet-50 in fp16 on an H200 took 23 ms a step in a long row
# and up to 30 ms in the first steps after a wait, because the host needs about as long to issue one.
LEAD_STEPS = 3


def seconds_of(run: Callable[[], _T]) -> tuple[_T, float]:
    """What a function returns and the wall time it took; waits for the device before and after, where CUDA was started."""
    _wait_for_device()
    start_s = time.perf_counter()
    result = run()
    _wait_for_device()
    return result, time.perf_counter() - start_s


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


class StepClock:
    """Times steps without waiting for them; each sample belongs to the number of its step."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._pairs: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._times_s: dict[int, float] = {}
        self._lags: list[tuple[float, float]] = []
        self._next = 0

    def time(self, step: Callable[[], None], number: int | None = None) -> None:
        """Runs and times a step.

        Args:
            step: issues the step's work.
            number: of the step in its training, as ``drop`` takes it; one more than the last where None. No number comes twice.
        """
        number = self._next if number is None else number
        self._next = number + 1
        if not self._on_cuda:
            start_s = time.perf_counter()
            step()
            self._times_s[number] = time.perf_counter() - start_s
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        self._pairs[number] = (start, end)

    def probe_host(self, step: Callable[[], None]) -> None:
        """Runs a step alone and notes how long the device still works once the host has issued it; waits for the device."""
        if not self._on_cuda:
            step()
            return
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        step()
        issued_s = time.perf_counter()
        torch.cuda.synchronize()
        end_s = time.perf_counter()
        self._lags.append((end_s - issued_s, end_s - start_s))

    def times_s(self) -> tuple[float, ...]:
        """Seconds of every timed step that was not dropped, in order; waits for the device."""
        if self._pairs:
            torch.cuda.synchronize()
            self._times_s |= {number: start.elapsed_time(end) / 1e3 for number, (start, end) in self._pairs.items()}
            self._pairs = {}
        return tuple(self._times_s[number] for number in sorted(self._times_s))

    def drop(self, numbers: Iterable[int]) -> int:
        """Forgets the samples of some steps, as far as there are any; returns how many that were."""
        gone = set(numbers) & (self._times_s.keys() | self._pairs.keys())
        self._times_s = {number: time_s for number, time_s in self._times_s.items() if number not in gone}
        self._pairs = {number: pair for number, pair in self._pairs.items() if number not in gone}
        return len(gone)

    def count(self, numbers: Iterable[int]) -> int:
        """How many of some steps have a sample."""
        return len(set(numbers) & (self._times_s.keys() | self._pairs.keys()))

    @property
    def host_bound(self) -> bool:
        """True where the device was done almost as soon as the host had issued the step: the median probe decides."""
        return bool(self._lags) and statistics.median(lag / whole for lag, whole in self._lags) < HOST_BOUND_LAG_SHARE
