"""What the driver says about the card: its version, and whether the clocks are held down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pynvml

# Reasons that make samples worthless: heat or a power brake hold the clocks down. A software power cap is how a card under full
# load runs for good, and its samples are what training will see.
# Source: NVIDIA, NVML API reference, nvmlClocksEventReasons.
_THROTTLE = (
    pynvml.nvmlClocksThrottleReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)


@contextmanager
def _session() -> Iterator[bool]:
    """Opens NVML; False where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """The driver's version, or None without one."""
    with _session() as open_:
        if not open_:
            return None
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


def is_throttled(uuid: str) -> bool:
    """Whether heat or power holds the clocks of a card down right now; False where NVML cannot tell.

    Args:
        uuid: of the card, as torch gives it in its device properties.
    """
    with _session() as open_:
        if not open_:
            return False
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            return bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & _THROTTLE)
        except pynvml.NVMLError:
            return False
