"""What the driver says about the card: its version, whether the clocks are held down, and who else computes on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
# A process that keeps the multiprocessors busy for a smaller share of a sample (in percent) is left out: a desktop's own windows
# take a few percent for good, and nobody could tune there. Own choice.
LEAST_SHARE_PERCENT = 5
# The driver averages utilisation over at most this long. Source: NVIDIA, NVML API reference, nvmlUtilization_t: "the sample period
# may be between 1 second and 1/6 second, depending on the product".
SAMPLE_S = 1.0
PROC = Path("/proc")


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


class Card:
    """One card as its driver sees it. Opened once: each look is a call or two, well under a millisecond.

    A card that NVML does not know, or a question that it does not answer, is never a finding.
    """

    def __init__(self, uuid: str) -> None:
        """Opens NVML for the rest of the process.

        Args:
            uuid: of the card, as torch gives it in its device properties.
        """
        self._handle: object = None
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        except pynvml.NVMLError:
            return  # no driver, or a card that it hides: nothing is told

    def is_throttled(self) -> bool:
        """Whether heat or power holds the clocks down right now."""
        if self._handle is None:
            return False
        try:
            return bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle) & _THROTTLE)
        except pynvml.NVMLError:
            return False

    def others_at_work(self, since_s: float) -> tuple[float, ...] | None:
        """When other processes were seen to compute.

        Args:
            since_s: by ``time.time()``; only samples that the driver took later count.

        Returns:
            The times of those samples, each of which speaks of up to ``SAMPLE_S`` before it; None where the driver does not say who
            computes.
        """
        if self._handle is None:
            return None
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, int(since_s * 1e6))
        except pynvml.NVMLError as error:
            # No process computed since then.
            return () if error.value in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS) else None
        busy: dict[int, list[float]] = {}
        for sample in samples:
            # Entries that the driver left blank have no process and any percentage.
            if sample.pid and LEAST_SHARE_PERCENT <= sample.smUtil <= 100 and sample.timeStamp > since_s * 1e6:
                busy.setdefault(sample.pid, []).append(sample.timeStamp / 1e6)
        return tuple(sorted(at_s for pid in self._strangers(set(busy)) for at_s in busy[pid]))

    def others_present(self) -> bool:
        """Whether other processes have a context on the card, at work or not."""
        return bool(self._strangers(self._with_a_context()))

    def _strangers(self, pids: set[int]) -> set[int]:
        """Those of some processes that are certainly not ours.

        Processes that this one started belong to the training: a DataLoader's workers may decode on the card. In a container the
        driver may number processes as its host does, so that this process is not found under its own number. Then nobody can be told
        from us, and only more processes than we can be are a finding.
        """
        if not pids:
            return set()
        if os.getpid() in pids | self._with_a_context():
            return {pid for pid in pids if not _is_ours(pid)}
        return pids if len(pids) > 1 + _num_started_on_a_card() else set()

    def _with_a_context(self) -> set[int]:
        if self._handle is None:
            return set()
        try:
            return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except pynvml.NVMLError:
            return set()


def _is_ours(pid: int) -> bool:
    """Whether a process is this one or was started by it, directly or not."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == os.getpid():
            return True
        seen.add(pid)
        pid = _parent_of(pid)
    return False


def _num_started_on_a_card() -> int:
    """How many processes that this one started, directly or not, have a card open."""
    numbers = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal()) if PROC.is_dir() else ()
    return sum(pid != os.getpid() and _is_ours(pid) and _has_a_card_open(pid) for pid in numbers)


def _has_a_card_open(pid: int) -> bool:
    try:
        return any(os.readlink(file).startswith("/dev/nvidia") for file in (PROC / str(pid) / "fd").iterdir())
    except OSError:
        return False  # it is gone


def _parent_of(pid: int) -> int:
    """The number of a process' parent; 0 where the process is gone or the system does not say."""
    try:
        # The name, in brackets, may hold anything; state and parent follow it. Source: man 5 proc.
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
