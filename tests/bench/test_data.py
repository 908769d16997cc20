"""Batches and initial models: made once, the same for every window of a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec.bench.batch import batch_bytes
from autoprec.bench.data import Batches, LongBatches, Start
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


class Five:
    """Five batches, numbered, and how many were made."""

    BATCH_SIZE = 2
    made = 0

    @staticmethod
    def build_model():
        return torch.nn.Linear(1, 1)

    @classmethod
    def batches(cls, batch_size, seed):
        for number in range(5):
            cls.made += 1
            yield (torch.full((batch_size, 1), float(number)) + torch.rand(1),)

    @staticmethod
    def loss(model, batch):
        return model(batch[0]).mean()


def number(batch):
    return int(batch[0][0, 0])


def test_a_long_run_starts_data_that_ended_again_and_knows_after_how_many_batches():
    batches = LongBatches(load_workload(Five), 0, pinned=False)
    assert [number(batches[i]) for i in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert batches.pass_length == 5


@pytest.mark.parametrize("kept", [1, 2, 4, 5, 100])
def test_a_long_run_sees_all_the_data_however_little_is_kept_and_every_window_the_same(kept):
    workload = load_workload(Five)
    one = batch_bytes(Batches(workload, 0, pinned=False)[0])
    batches = LongBatches(workload, 0, pinned=False, limit_bytes=kept * one)
    first, second = ([batches[i][0].clone() for i in range(12)] for _ in range(2))
    assert [int(batch[0, 0]) for batch in first] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))


def test_a_window_that_begins_again_in_the_middle_of_a_pass_gets_the_first_batches():
    workload = load_workload(Five)
    one = batch_bytes(Batches(workload, 0, pinned=False)[0])
    batches = LongBatches(workload, 0, pinned=False, limit_bytes=2 * one)
    assert [number(batches[i]) for i in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert [number(batches[i]) for i in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 3, 4, 0]


def test_making_batches_does_not_disturb_the_training():
    batches = LongBatches(load_workload(Five), 0, pinned=False)
    torch.manual_seed(3)
    batches[4]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


def test_data_without_a_batch_is_refused_in_a_long_run_too():
    class Nothing(Five):
        @staticmethod
        def batches(batch_size, seed):
            yield from ()

    with pytest.raises(WorkloadError, match="after 0 batches"):
        LongBatches(load_workload(Nothing), 0, pinned=False)[0]
