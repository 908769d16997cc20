"""Where samples are taken: device, driver and versions."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

from autoprec.bench.nvml import Card
from autoprec.bench.target import Target
from autoprec.records import Environment


def environment_of(target: Target) -> Environment:
    """The machine that runs the numerics of a target, and times them where its speed is measured."""
    on_gpu = target.device == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if on_gpu else None
    return Environment(
        device=torch.cuda.get_device_name() if on_gpu else processor_name(),
        capability=capability,
        driver=driver_version() if on_gpu else None,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
    )


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version; it cannot change while a process runs."""
    return Card().driver_version()


@functools.cache
def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has it
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
