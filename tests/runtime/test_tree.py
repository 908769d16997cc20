"""Nested values keep their exact types."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from autoprec.runtime.tree import iter_tensors, map_tensors


class Pair(NamedTuple):
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Output(collections.OrderedDict):  # a model output as Hugging Face builds them: dict and attributes together
    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        super().__setitem__("loss", self.loss)
        super().__setitem__("logits", self.logits)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return (Output, (self.loss, self.logits))


class Items(list):
    name = "kept"


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.dtype == torch.float32 else tensor


X = torch.arange(3.0)


@pytest.mark.parametrize(
    "value",
    [(X, 1), [X], {"a": [X]}, Pair(X, "cat"), collections.OrderedDict(a=X), Items([X]), Frozen(X), collections.UserDict(a=X)],
    ids=lambda value: type(value).__name__,
)
def test_a_container_keeps_its_exact_type_and_its_tensors_are_mapped(value: Any) -> None:
    mapped = map_tensors(value, half)
    assert type(mapped) is type(value)
    before, after = (iter_tensors(v) if not isinstance(v, collections.UserDict) else [v["a"]] for v in (value, mapped))
    assert [t.dtype for t in before] == [torch.float32]
    assert [t.dtype for t in after] == [torch.float16]


def test_a_model_output_keeps_attribute_and_key_in_step() -> None:
    mapped = map_tensors(Output(loss=X, logits=None), half)
    assert type(mapped) is Output
    assert mapped.loss.dtype == mapped["loss"].dtype == torch.float16
    assert mapped.logits is None


def test_a_packed_sequence_is_mapped_by_its_data_and_its_batch_sizes_stay() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 4), [3, 2], batch_first=True)
    mapped = map_tensors(packed, half)
    assert type(mapped) is PackedSequence
    assert mapped.data.dtype == torch.float16
    assert mapped.batch_sizes is packed.batch_sizes


def test_torchs_own_result_tuples_keep_their_type() -> None:
    result = torch.max(torch.ones(2, 2), dim=0)
    mapped = map_tensors(result, half)
    assert type(mapped) is type(result)
    assert mapped.values.dtype == torch.float16
    assert mapped.indices.dtype == torch.int64


def test_a_frozen_dataclass_is_not_changed_in_place() -> None:
    value = Frozen(X, scale=3.0)
    mapped = map_tensors(value, half)
    assert value.x is X
    assert mapped.scale == 3.0


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(X), st.just(torch.arange(2)))
trees = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.tuples(inner), st.dictionaries(st.text(), inner)))


@given(trees)
def test_mapping_with_the_identity_returns_the_same_object(value: Any) -> None:
    assert map_tensors(value, lambda tensor: tensor) is value


@given(trees)
def test_every_float_tensor_is_reached_and_nothing_else_changes(value: Any) -> None:
    mapped = map_tensors(value, half)
    assert type(mapped) is type(value)
    assert [half(t).dtype for t in iter_tensors(value)] == [t.dtype for t in iter_tensors(mapped)]


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("label", "x")
    x: torch.Tensor
    label: str


def test_a_frozen_dataclass_with_slots_is_mapped() -> None:
    mapped = map_tensors(Slotted(X, "cat"), half)
    assert type(mapped) is Slotted
    assert (mapped.x.dtype, mapped.label) == (torch.float16, "cat")


def test_a_default_dict_keeps_its_factory() -> None:
    mapped = map_tensors(collections.defaultdict(list, a=X), half)
    assert type(mapped) is collections.defaultdict
    assert mapped["a"].dtype == torch.float16
    assert mapped["missing"] == []


def test_a_dataclass_keeps_attributes_that_are_no_fields() -> None:
    plain = dataclasses.make_dataclass("Plain", ["x"])(X)
    plain.note = "kept"
    assert map_tensors(plain, half).note == "kept"
