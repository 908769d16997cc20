"""Fixtures for every test: process-wide torch state must leave a test as it entered."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# A shell's background jobs ignore Control-C, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _global_state() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "matmul TF32": torch.backends.cuda.matmul.allow_tf32,
        "cuDNN TF32": torch.backends.cudnn.allow_tf32,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "autocast dtype on cpu": torch.get_autocast_dtype("cpu"),
        "autocast on cuda": torch.is_autocast_enabled("cuda"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _global_torch_state_is_restored() -> Iterator[None]:
    before = _global_state()
    rng = torch.get_rng_state()
    yield
    after = _global_state()
    torch.set_rng_state(rng)
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"the test left global state changed (before, after): {changed}"
