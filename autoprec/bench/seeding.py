"""Random states: set, kept and put back, for torch, NumPy and Python alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that training code uses without naming one."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        """The current state. CUDA's is read only where CUDA has been started."""
        started = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        cuda = tuple(torch.cuda.get_rng_state_all()) if started else ()
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Puts the generators back to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def seed_everything(seed: int) -> None:
    """Seeds torch (every device), NumPy and Python."""
    torch.manual_seed(seed)
    _seed_beside_torch(seed)


def _seed_beside_torch(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Everything seeded inside; every random state as before outside."""
    before = RandomState.now()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        seed_everything(seed)
    else:  # torch would note the seed for a CUDA that may start later, with a stack trace each time
        torch.default_generator.manual_seed(seed)
        _seed_beside_torch(seed)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def untouched_random_state() -> Iterator[None]:
    """Every random state as before on exit."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
