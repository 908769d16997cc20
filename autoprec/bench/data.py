"""The batches of a seed, made once and kept, so that making them is never timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoprec.bench.batch import batch_bytes, pin
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
