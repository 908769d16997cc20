"""An NVML whose card is throttled and shared as a test says."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

HEAT = pynvml.nvmlClocksEventReasonSwThermalSlowdown


class FakeNvml:
    """Stands in for the driver.

    Attributes:
        reasons: why the clocks are as they are.
        contexts: processes with a context on the card; None where the driver does not tell.
        samples: (process, seconds, percent of the multiprocessors' time) of every sample; None where the driver takes none.
        inits: how often NVML was opened.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons = 0
        self.contexts: list[int] | None = [os.getpid()]
        self.samples: list[tuple[int, float, int]] | None = []
        self.inits = 0
        names = {
            "nvmlInit": self._init,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
            "nvmlDeviceGetComputeRunningProcesses": self._processes,
            "nvmlDeviceGetProcessUtilization": self._utilization,
        }
        for name, function in names.items():
            monkeypatch.setattr(pynvml, name, function)

    def _init(self) -> None:
        self.inits += 1

    def _processes(self, handle: Any) -> list[SimpleNamespace]:
        if self.contexts is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid, usedGpuMemory=2**30) for pid in self.contexts]

    def _utilization(self, handle: Any, since_us: int) -> list[SimpleNamespace]:
        if self.samples is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        found = [
            SimpleNamespace(pid=pid, timeStamp=int(at_s * 1e6), smUtil=percent)
            for pid, at_s, percent in self.samples
            if at_s * 1e6 > since_us
        ]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found


class FakeCard:
    """A card by a script, on a clock of its own: who computes when, and when the clocks are held down.

    Attributes:
        now_s: the time; a pause lets it pass.
        shared_s: spans in which another process computes, sampled every 0.2 s.
        hot_s: spans in which the card is throttled.
    """

    SAMPLES_EVERY_S = 0.2

    def __init__(
        self, *, shared_s: list[tuple[float, float]] | None = None, hot_s: list[tuple[float, float]] | None = None
    ) -> None:
        self.now_s = 100.0
        self.shared_s, self.hot_s = shared_s or [], hot_s or []
        self.told, self.present = True, False
        self.pauses = 0

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        self.now_s += seconds

    def is_throttled(self) -> bool:
        return any(start <= self.now_s <= end for start, end in self.hot_s)

    def others_at_work(self, since_s: float) -> tuple[float, ...] | None:
        if not self.told:
            return None
        times = [n * self.SAMPLES_EVERY_S for n in range(int(self.now_s / self.SAMPLES_EVERY_S) + 1)]
        return tuple(at for at in times if at > since_s and any(start <= at <= end for start, end in self.shared_s))

    def others_present(self) -> bool:
        return self.present
