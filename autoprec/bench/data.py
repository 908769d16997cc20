"""The batches and the initial model of a seed, made once and kept, so that making them is never timed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoprec.bench.batch import batch_bytes, pin
from autoprec.bench.seeding import seed_everything
from autoprec.bench.stream import own_random_state
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
            try:
                batch = next(self._stream)
            except StopIteration:
                raise self._ended(len(self._kept)) from None
            self._keep(batch)
        return self._kept[index % len(self._kept)]

    def _keep(self, batch: Any) -> Any:
        """The batch, pinned where asked; kept where it fits. The first one always is."""
        batch = pin(batch) if self._pinned else batch
        size = batch_bytes(batch)
        self._full = self._full or (bool(self._kept) and self._bytes + size > self._limit_bytes)
        if not self._full:
            self._kept.append(batch)
            self._bytes += size
        return batch

    def _ended(self, came: int) -> WorkloadError:
        return WorkloadError(
            f"batches(batch_size={self._workload.batch_size}, seed={self._seed}) ended after {came} batches; a window needs more.",
            hint="Make batches() endless: start over when the data is used up.",
        )


class LongBatches(Batches):
    """The same for runs of many steps, which are to see all the data: what is not kept is made again in every window.

    A stream that ends is started again with the same seed. Batches are drawn under a random state of their own, so that it does
    not matter which of them a window has to make.

    Attributes:
        pass_length: after how many batches the stream ended; None where it has not.
    """

    def __init__(self, workload: Workload, seed: int, *, pinned: bool, limit_bytes: int = KEPT_BYTES) -> None:
        super().__init__(workload, seed, pinned=pinned, limit_bytes=limit_bytes)
        self.pass_length: int | None = None
        self._restart()

    def __getitem__(self, index: int) -> Any:
        place = index % self.pass_length if self.pass_length else index
        if place < len(self._kept):
            return self._kept[place]
        if place < self._drawn:
            self._restart()
        batch: Any = None
        while self._drawn <= place:
            try:
                batch = next(self._stream)
            except StopIteration:
                if not self._drawn:
                    raise self._ended(0) from None
                self.pass_length = self._drawn
                return self[index]
            if self._drawn == len(self._kept) or self._drawn == place:
                batch = self._keep(batch)
            self._drawn += 1
        return batch

    def _restart(self) -> None:
        self._drawn = 0
        self._stream = own_random_state(iter(self._workload.batches(self._workload.batch_size, self._seed)), self._seed)


class Start:
    """Where every window of a seed starts: the model as built under the seed, and the batches.

    A window gets a deep copy of the model; one that cannot be copied is built anew each time.
    """

    def __init__(self, workload: Workload, seed: int, *, pinned: bool, kind: type[Batches] = Batches) -> None:
        self.batches = kind(workload, seed, pinned=pinned)
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
