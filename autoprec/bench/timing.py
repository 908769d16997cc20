"""Step times: device events on CUDA, the wall clock on a CPU, and whether the device waits for the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")

# The device is done when the host has issued the step: it waited for the host. Own choice of what counts as "done".
HOST_BOUND_LAG_SHARE = 0.1


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
    """Times steps without waiting for them."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_s: list[float] = []
        self._lags: list[tuple[float, float]] = []

    def time(self, step: Callable[[], None]) -> None:
        """Runs and times a step."""
        if not self._on_cuda:
            start_s = time.perf_counter()
            step()
            self._times_s.append(time.perf_counter() - start_s)
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        self._pairs.append((start, end))

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
        """Seconds of every timed step; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
            self._times_s += [start.elapsed_time(end) / 1e3 for start, end in self._pairs]
            self._pairs = []
        return tuple(self._times_s)

    def drop_last(self, steps: int) -> int:
        """Forgets the samples of the last steps; returns how many that were."""
        kept = self._pairs if self._on_cuda else self._times_s
        dropped = min(steps, len(kept))
        del kept[len(kept) - dropped :]
        return dropped

    @property
    def host_bound(self) -> bool:
        """True where the device was done almost as soon as the host had issued the step."""
        return bool(self._lags) and statistics.median(lag / whole for lag, whole in self._lags) < HOST_BOUND_LAG_SHARE
