"""Batches of any structure: moved, measured and split without changing data or types."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from autoprec.bench.batch import batch_bytes, batch_length, equal_batches, split_batch, to_device, why_unsplittable


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    image: Tensor
    info: dict[str, Any]


def _nested(length: int) -> list[Any]:
    x, y = torch.arange(length * 3.0).view(length, 3), torch.arange(length)
    return [
        (x, y),
        [x, y],
        {"x": x, "more": {"y": y, "none": None}},
        OrderedDict(x=x, y=y),
        Pair(x, y),
        Sample(x, {"y": y, "name": "batch"}),
        (x, {"y": [y, Pair(x, y)]}),
        (x, torch.tensor(0.5)),
    ]


@pytest.mark.parametrize("index", range(8))
def test_micro_batches_are_the_same_data_in_the_same_structure(index: int) -> None:
    batch = _nested(6)[index]
    parts = split_batch(batch, 2)
    assert [batch_length(part) for part in parts] == [2, 2, 2]
    assert all(type(part) is type(batch) for part in parts)
    for part, start in zip(parts, (0, 2, 4), strict=True):
        whole = _nested(6)[index]
        assert equal_batches(part, _slice(whole, start))


def _slice(value: Any, start: int) -> Any:
    from autoprec.runtime.tree import map_tensors

    return map_tensors(value, lambda t: t[start : start + 2] if t.dim() else t)


@settings(max_examples=30, deadline=None)
@given(parts=st.integers(1, 6), micro=st.integers(1, 5))
def test_parts_put_together_are_the_batch(parts: int, micro: int) -> None:
    x = torch.randn(parts * micro, 2)
    pieces = split_batch({"x": x}, micro)
    assert len(pieces) == parts
    assert torch.equal(torch.cat([piece["x"] for piece in pieces]), x)


def test_the_whole_batch_is_handed_back_as_it_is() -> None:
    batch = (torch.zeros(4, 2), torch.zeros(4))
    assert split_batch(batch, 4)[0] is batch


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 samples does not split into equal micro-batches of 4"):
        split_batch(torch.zeros(6, 2), 4)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), "different sizes along axis 0: 3, 4"),
        (pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)]), "PackedSequence"),
        ({"x": torch.zeros(2, 3), "names": ["a", "b"]}, "list of str"),
        ((torch.tensor(1.0),), "no tensor with an axis of samples"),
        ((torch.zeros(2), object()), "object"),
        (torch.eye(3).to_sparse(), "sparse or nested tensor"),
    ],
)
def test_what_cannot_be_split_says_why(batch: Any, reason: str) -> None:
    assert reason in why_unsplittable(batch)
    with pytest.raises(ValueError, match="cannot be split"):
        split_batch(batch, 1)


def test_splittable_batches_have_no_reason() -> None:
    assert [why_unsplittable(batch) for batch in _nested(4)] == [""] * 8


def test_channels_last_applies_to_images_only() -> None:
    images, labels = to_device((torch.zeros(2, 3, 4, 4), torch.zeros(2, 3)), "cpu", channels_last=True)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert not images.is_contiguous()
    assert labels.is_contiguous()


def test_bytes_count_every_tensor() -> None:
    assert batch_bytes((torch.zeros(4, 2), {"y": torch.zeros(4, dtype=torch.int64)})) == 4 * 2 * 4 + 4 * 8


def test_equal_batches_see_a_changed_value_type_or_structure() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert equal_batches((nan, torch.ones(2)), (nan.clone(), torch.ones(2)))
    assert not equal_batches((torch.ones(2),), (torch.zeros(2),))
    assert not equal_batches((torch.ones(2),), (torch.ones(2).double(),))
    assert not equal_batches((torch.ones(2),), (torch.ones(2), torch.ones(2)))
