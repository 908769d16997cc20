"""Batches and weights that every window starts from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.bench.batch import batch_bytes, equal_batches
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.seeding import RandomState, seeded
from autoprec.bench.workload import Workload
from autoprec.errors import WorkloadError

MakeWorkload = Callable[..., Workload]


def test_batches_are_drawn_once_and_in_order(make_workload: MakeWorkload) -> None:
    workload = make_workload()
    cache = DataCache(workload)
    few, more = cache.take(0, 3), cache.take(0, 5)
    assert all(one is other for one, other in zip(few, more, strict=False))
    stream = workload.batches(16, 0)
    assert all(equal_batches(batch, next(stream)) for batch in more)


def test_batches_over_the_limit_start_over_whatever_else_is_kept(make_workload: MakeWorkload) -> None:
    workload = make_workload()
    size = batch_bytes(next(workload.batches(16, 0)))
    cache = DataCache(workload, limit_bytes=3 * size)
    taken = cache.take(0, 7)
    assert [id(batch) for batch in taken] == [id(taken[i % 3]) for i in range(7)]
    cache.take(1, 7)
    assert cache.capacity(0) == 3
    assert all(equal_batches(one, other) for one, other in zip(cache.take(0, 7), taken, strict=True))


def test_too_few_batches_say_how_many_came(make_workload: MakeWorkload) -> None:
    from bench_stands import image_batches

    def four(batch_size: int, seed: int) -> Any:
        stream = image_batches(batch_size, seed)
        return (next(stream) for _ in range(4))

    with pytest.raises(WorkloadError, match="ended after 4 batches; 6 are needed"):
        DataCache(make_workload(batches=four)).take(0, 6)


def test_models_of_a_seed_start_equal_and_are_independent(make_workload: MakeWorkload) -> None:
    cache = ModelCache(make_workload())
    one, other, third = cache.fresh(0), cache.fresh(0), cache.fresh(1)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.head.weight, third.head.weight)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        one.head.weight.zero_()  # type: ignore[union-attr, operator]
    assert cache.fresh(0).head.weight.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_a_model_that_cannot_be_copied_is_built_anew_with_the_same_weights(make_workload: MakeWorkload) -> None:
    class Uncopyable(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no copies")

    cache = ModelCache(make_workload(build_model=lambda: Uncopyable(36, 3)))
    assert torch.equal(cache.fresh(0).weight, cache.fresh(0).weight)  # type: ignore[arg-type]


def test_a_perturbation_moves_weights_by_its_size(make_workload: MakeWorkload) -> None:
    cache = ModelCache(make_workload())
    plain, twin = cache.fresh(0).head.weight, cache.fresh(0, 2.0**-20).head.weight  # type: ignore[union-attr]
    change = ((twin - plain) / plain).abs()  # type: ignore[operator]
    assert 0 < change.max() < 6 * 2.0**-20


def test_neither_data_nor_models_touch_the_random_state(make_workload: MakeWorkload) -> None:
    before = RandomState.now()
    ModelCache(make_workload()).fresh(0)
    DataCache(make_workload()).take(0, 2)
    after = RandomState.now()
    assert torch.equal(before.cpu, after.cpu)
    assert before.python == after.python
    assert np.array_equal(before.numpy[1], after.numpy[1])


def test_seeded_blocks_repeat_and_leave_no_trace() -> None:
    import random

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    before = RandomState.now()
    with seeded(5):
        first = draw()
    with seeded(5):
        assert draw() == first
    assert torch.equal(before.cpu, torch.get_rng_state())
