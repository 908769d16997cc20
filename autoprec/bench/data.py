"""The batches and the initial model of a seed, made once and kept, so that making them is never timed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoprec.bench.batch import batch_bytes, pin
from autoprec.bench.seeding import seed_everything
from autoprec.bench.workload import Workload
from autoprec.errors import WorkloadError

# Batches kept on the host per seed; further ones are made again. Own choice: a small part of a workstation's memory.
KEPT_BYTES = 4 * 2**30


class Batches:
    """Batch ``i`` of one seed, always the same, on the host."""

    def __init__(self, workload: Workload, seed: int, *, pinned: bool) -> None:
        self._workload, self._seed, self._pinned = workload, seed, pinned
        self._kept: list[Any] = []
        self._bytes = 0
        self._rest: Iterator[Any] = iter(workload.batches(workload.batch_size, seed))
        self._next = 0

    def __getitem__(self, index: int) -> Any:
        if index < len(self._kept):
            return self._kept[index]
        if index < self._next:
            self._rest, self._next = iter(self._workload.batches(self._workload.batch_size, self._seed)), 0
        batch = None
        while self._next <= index:
            batch = self._draw()
            self._keep(batch)
            self._next += 1
        return batch

    def _draw(self) -> Any:
        try:
            return next(self._rest)
        except StopIteration:
            raise WorkloadError(
                f"batches(batch_size={self._workload.batch_size}, seed={self._seed}) ended after {self._next} batches; a window "
                "needs more.",
                hint="Make batches() endless: start over when the data is used up.",
            ) from None

    def _keep(self, batch: Any) -> None:
        # Only an unbroken stretch from the start can be kept.
        size = batch_bytes(batch)
        if self._next == len(self._kept) and self._bytes + size <= KEPT_BYTES:
            self._kept.append(pin(batch) if self._pinned else batch)
            self._bytes += size


class Start:
    """Where every window of a seed starts: the model as built under the seed, and the batches.

    A window gets a deep copy of the model; one that cannot be copied is built anew each time.
    """

    def __init__(self, workload: Workload, seed: int, *, pinned: bool) -> None:
        self.batches = Batches(workload, seed, pinned=pinned)
        self._workload, self._seed = workload, seed
        self._model: nn.Module | None = None
        self._copies = True

    def model(self) -> nn.Module:
        """A fresh model on the host; random states are seeded when it returns."""
        seed_everything(self._seed)
        if not self._copies:
            return self._workload.build_model()
        if self._model is None:
            self._model = self._workload.build_model()
        try:
            return copy.deepcopy(self._model)
        except (RuntimeError, TypeError, ValueError, AttributeError):
            # Non-leaf tensors, locks and the like refuse to be copied.
            self._copies, made = False, self._model
            self._model = None
            return made
