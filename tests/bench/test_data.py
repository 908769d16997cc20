"""Batches and initial models: made once, the same for every window of a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec.bench.batch import batch_bytes
from autoprec.bench.data import Batches, Start
from autoprec.bench.workload import load_workload
from autoprec.errors import WorkloadError

WORKLOAD = load_workload(str(Path(__file__).parent.parent / "workloads" / "tiny_mlp.py"))


def test_a_batch_is_made_once_and_is_that_of_the_stream():
    batches = Batches(WORKLOAD, 3, pinned=False)
    stream = WORKLOAD.batches(16, 3)
    expected = [next(stream) for _ in range(4)]
    assert all(torch.equal(batches[i][0], expected[i][0]) for i in (2, 0, 3, 1))
    assert batches[2] is batches[2]


def test_a_stream_that_does_not_fit_starts_over_from_the_first_batch():
    one = batch_bytes(Batches(WORKLOAD, 0, pinned=False)[0])
    batches = Batches(WORKLOAD, 0, pinned=False, limit_bytes=3 * one)
    assert [batches[i] is batches[i % 3] for i in (3, 4, 5, 7)] == [True] * 4
    assert batches[0] is not batches[1]


def test_a_batch_larger_than_the_limit_is_still_given():
    batches = Batches(WORKLOAD, 0, pinned=False, limit_bytes=1)
    assert batches[0] is batches[1]


def test_a_stream_that_ends_says_after_how_many_batches():
    class Few:
        BATCH_SIZE = 2

        @staticmethod
        def build_model():
            return torch.nn.Linear(1, 1)

        @staticmethod
        def batches(batch_size, seed):
            for _ in range(3):
                yield (torch.ones(batch_size, 1),)

        @staticmethod
        def loss(model, batch):
            return model(batch[0]).mean()

    batches = Batches(load_workload(Few), 0, pinned=False)
    with pytest.raises(WorkloadError, match="after 3 batches"):
        batches[3]


def test_every_window_of_a_seed_gets_its_own_copy_of_the_same_model():
    start = Start(WORKLOAD, 5, pinned=False)
    one, other = start.model(), start.model()
    with torch.no_grad():
        one[0].weight.zero_()
    assert torch.equal(other[0].weight, start.model()[0].weight)
    torch.manual_seed(5)
    assert torch.equal(other[0].weight, WORKLOAD.build_model()[0].weight)
