"""Endless streams of whole batches, from a user's ``batches()`` or ``dataset()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autoprec.bench.batch import batch_length
from autoprec.bench.seeding import RandomState, seed_everything
from autoprec.bench.source import call_user
from autoprec.errors import WorkloadError

Batches = Callable[[int, int], Iterable[Any]]


def whole_batches(source: Batches) -> Callable[[int, int], Iterator[Any]]:
    """Wraps a user's ``batches``: what can be iterated again starts over, and short last batches are left out.

    A one-shot generator ends where it ends; whoever needs more says how many came.
    """

    def stream(batch_size: int, seed: int) -> Iterator[Any]:
        given = source(batch_size, seed)
        full: int | None = None
        while True:
            came = 0
            for batch in given:
                length = batch_length(batch)
                full = full if full is not None else length
                if length is None or full is None or length >= full:
                    came += 1
                    yield batch
            if not came or iter(given) is given:
                return

    return stream


class _Once:
    """Calls ``dataset()`` once and keeps what it returned: reading a dataset in may take long."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._built: Any = None

    def __call__(self) -> Any:
        if self._built is None:
            self._built = call_user("dataset()", self._build, hint="It must return a torch.utils.data.Dataset.")
        if not hasattr(self._built, "__getitem__") and not hasattr(self._built, "__iter__"):
            raise WorkloadError(
                f"dataset() returned a {type(self._built).__name__}; it must return a torch.utils.data.Dataset.",
                hint="Return an object with __len__ and __getitem__, or define batches(batch_size, seed) instead.",
            )
        return self._built


def dataset_batches(build: Callable[[], Any], collate: Callable[[Any], Any] | None) -> Callable[[int, int], Iterator[Any]]:
    """Endless shuffled batches of a dataset, the same for the same seed, whatever random functions its transforms use."""

    def stream(batch_size: int, seed: int) -> Iterator[Any]:
        loader = _loader(build(), collate, batch_size, seed)
        return own_random_state(_epochs(loader), seed)

    return stream


def once(build: Callable[[], Any]) -> Callable[[], Any]:
    """``build``, called once at most; what it raises becomes a ``WorkloadError``."""
    return _Once(build)


def num_samples(build: Callable[[], Any]) -> Callable[[], int | None]:
    """How many samples the dataset has; None where it has no length."""
    return lambda: len(build()) if hasattr(build(), "__len__") else None


def _loader(dataset: Any, collate: Callable[[Any], Any] | None, batch_size: int, seed: int) -> DataLoader[Any]:
    iterable = isinstance(dataset, IterableDataset)
    if not iterable and len(dataset) < batch_size:
        raise WorkloadError(
            f"dataset() has {len(dataset)} samples, fewer than one batch of {batch_size}.",
            hint=f"Set BATCH_SIZE = {len(dataset)} or less in the model file, or give a larger dataset.",
        )
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=None if iterable else True,
        drop_last=True,
        collate_fn=collate,
        generator=generator,
    )


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        came = 0
        for batch in loader:
            came += 1
            yield batch
        if not came:
            return


def own_random_state(batches: Iterator[Any], seed: int) -> Iterator[Any]:
    """Draws each batch under a random state of its own, so that neither the transforms nor the training disturb each other."""
    outside = RandomState.now()
    seed_everything(seed)
    own = RandomState.now()
    outside.restore()
    while True:
        outside = RandomState.now()
        own.restore()
        try:
            batch = next(batches, None)
            own = RandomState.now()
        finally:
            outside.restore()
        if batch is None:
            return
        yield batch
