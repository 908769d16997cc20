"""Where samples are taken."""

from __future__ import annotations

import platform
from functools import cache

import torch

from autoprec.bench.nvml import driver_version
from autoprec.records import Environment


@cache
def environment(device: str) -> Environment:
    """Device, driver and versions of this process; ``device`` is ``cuda`` or ``cpu``."""
    on_cuda = device == "cuda"
    return Environment(
        device=torch.cuda.get_device_name() if on_cuda else processor_name(),
        capability=".".join(map(str, torch.cuda.get_device_capability())) if on_cuda else None,
        driver=driver_version() if on_cuda else None,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=platform.platform(),
        cuda_version=torch.version.cuda if on_cuda else None,
    )


def processor_name() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()
