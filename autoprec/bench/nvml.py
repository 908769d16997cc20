"""What the NVIDIA driver knows: its version, whether clocks are held down, who else computes; None where it does not answer."""

from __future__ import annotations

import os
from typing import Any

import pynvml
import torch

# Reasons that hold clocks under what the card would otherwise run at; a plain power cap is how a loaded card works and is none.
# Source: NVML API reference, nvmlClocksEventReasons.
_SLOWDOWNS = 0x08 | 0x20 | 0x40 | 0x80  # hardware slowdown, software thermal, hardware thermal, hardware power brake


class Card:
    """The current CUDA device as NVML sees it; every answer is None where NVML or the driver is not there."""

    def __init__(self) -> None:
        self._handle: Any = None
        if not torch.cuda.is_available():
            return
        try:
            pynvml.nvmlInit()
            self._handle = _handle()
        except pynvml.NVMLError:
            self._handle = None

    def driver_version(self) -> str | None:
        """Version of the driver."""
        if self._handle is None:
            return None
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        except pynvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def throttled(self) -> bool | None:
        """Whether heat or a power brake holds the clocks down now; takes some tens of microseconds of host time."""
        if self._handle is None:
            return None
        try:
            reasons = int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except (pynvml.NVMLError, AttributeError):
            return None
        return bool(reasons & _SLOWDOWNS)

    def other_processes(self) -> int | None:
        """How many other processes compute on the card; each disturbs timings."""
        if self._handle is None:
            return None
        try:
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except pynvml.NVMLError:
            return None
        return sum(1 for process in running if process.pid != os.getpid())


def _handle() -> Any:
    """By UUID, because CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
