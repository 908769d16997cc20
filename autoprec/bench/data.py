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

# Batches kept on the host per seed. Own choice: a small part of a workstation's memory.
KEPT_BYTES = 4 * 2**30


class Batches:
    """Batch ``i`` of one seed, always the same, on the host.

    Batches that do not fit into the limit are not made: the stream starts over from the first one. A batch made anew in every window,
    or copied from ordinary memory, would make the host the limit of a fast step; and all set-ups still see the same data.
    """

    def __init__(self, workload: Workload, seed: int, *, pinned: bool, limit_bytes: int = KEPT_BYTES) -> None:
        self._workload, self._seed, self._pinned, self._limit_bytes = workload, seed, pinned, limit_bytes
        self._kept: list[Any] = []
        self._bytes = 0
        self._full = False
        self._stream: Iterator[Any] = iter(workload.batches(workload.batch_size, seed))

    def __getitem__(self, index: int) -> Any:
        while len(self._kept) <= index and not self._full:
            batch = self._draw()
            size = batch_bytes(batch)
            self._full = bool(self._kept) and self._bytes + size > self._limit_bytes
            if not self._full:
                self._kept.append(pin(batch) if self._pinned else batch)
                self._bytes += size
        return self._kept[index % len(self._kept)]

    def _draw(self) -> Any:
        try:
            return next(self._stream)
        except StopIteration:
            raise WorkloadError(
                f"batches(batch_size={self._workload.batch_size}, seed={self._seed}) ended after {len(self._kept)} batches; a window "
                "needs more.",
                hint="Make batches() endless: start over when the data is used up.",
            ) from None


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
