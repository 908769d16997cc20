"""What every window starts from: the same batches and the same initial weights for the same seed, made once and kept."""

from __future__ import annotations

import copy
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoprec.bench.batch import batch_bytes, pin
from autoprec.bench.seeding import seed_everything, untouched_random_state
from autoprec.bench.source import call_user
from autoprec.bench.workload import Workload
from autoprec.bench.workload_check import DATA_HINT, build_checked, ended_early

# Batches kept in memory, for all seeds together. Source: assumption: 50 batches of 128 float32 images of 3x224x224 are 3.9 GB.
_LIMIT_BYTES = 4 * 2**30
_SHARE_OF_MEMORY = 0.25
# Untouched models kept, one a seed: verification uses a handful of seeds, one after the other.
_MODELS_KEPT = 3


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 16 * 2**30


@dataclass
class _Stream:
    source: Iterator[Any]
    batches: list[Any] = field(default_factory=list)
    capacity: int = 0


class DataCache:
    """Batches by seed, drawn once, so that making data is never timed. Page-locked where CUDA is there.

    Where the batches of a window do not fit into the limit, it starts over from the first one: every arm sees the same data.
    """

    def __init__(self, workload: Workload, *, limit_bytes: int | None = None) -> None:
        self._workload = workload
        self._limit = limit_bytes if limit_bytes is not None else min(_LIMIT_BYTES, int(_memory_bytes() * _SHARE_OF_MEMORY))
        self._streams: OrderedDict[int, _Stream] = OrderedDict()

    def take(self, seed: int, count: int) -> list[Any]:
        """The first ``count`` batches of a seed, on the CPU.

        Raises:
            WorkloadError: ``batches`` raised, or ended before that many came.
        """
        with untouched_random_state():
            stream = self._stream(seed)
            needed = min(count, stream.capacity)
            missing = needed - len(stream.batches)
            if missing > 0:
                drawn = call_user("batches()", lambda: list(itertools.islice(stream.source, missing)), hint=DATA_HINT)
                stream.batches.extend(pin(batch) for batch in drawn)
        if len(stream.batches) < needed:
            raise ended_early(self._workload, seed, len(stream.batches), count)
        return [stream.batches[index % len(stream.batches)] for index in range(count)]

    def capacity(self, seed: int) -> int:
        """How many different batches of a seed are kept."""
        with untouched_random_state():
            return self._stream(seed).capacity

    def _stream(self, seed: int) -> _Stream:
        if seed in self._streams:
            self._streams.move_to_end(seed)
            return self._streams[seed]
        source = call_user("batches()", self._workload.batches, self._workload.batch_size, seed, hint=DATA_HINT)
        first = call_user("batches()", lambda: next(source, None), hint=DATA_HINT)
        if first is None:
            raise ended_early(self._workload, seed, 0, 1)
        capacity = max(2, self._limit // max(batch_bytes(first), 1))
        while self._streams and self._kept_bytes() + batch_bytes(first) > self._limit:
            self._streams.popitem(last=False)
        self._streams[seed] = _Stream(source, [pin(first)], capacity)
        return self._streams[seed]

    def _kept_bytes(self) -> int:
        return sum(batch_bytes(stream.batches[0]) * len(stream.batches) for stream in self._streams.values())


class ModelCache:
    """Fresh models with the initial weights of a seed; the kept ones are never trained."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._kept: OrderedDict[int, nn.Module] = OrderedDict()
        self._copyable = True

    def fresh(self, seed: int, perturbation: float = 0.0) -> nn.Module:
        """A model of its own on the CPU, in training mode.

        Args:
            seed: seeds ``build_model``.
            perturbation: relative size of a random change of every floating parameter; 2^-24 moves some by one unit in the
                last place, which makes a harmless twin of a run.

        Raises:
            WorkloadError: ``build_model`` raised.
        """
        with untouched_random_state():
            model = self._copy(seed) if self._copyable else self._build(seed)
            if perturbation:
                _perturb(model, perturbation, seed)
        return model.train()

    def _build(self, seed: int) -> nn.Module:
        seed_everything(seed)
        return build_checked(self._workload)

    def _copy(self, seed: int) -> nn.Module:
        if seed not in self._kept:
            self._kept[seed] = self._build(seed)
            while len(self._kept) > _MODELS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(seed)
        try:
            return copy.deepcopy(self._kept[seed])
        except Exception:  # whatever a user's __deepcopy__ or an uncopyable member raises: building anew gives the same
            self._copyable = False
            self._kept.clear()
            return self._build(seed)


def _perturb(model: nn.Module, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                change = 1 + size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.device)
                # In float64, because 1 + 2^-24 is 1 in float32.
                parameter.copy_((parameter.double() * change).to(parameter.dtype))
