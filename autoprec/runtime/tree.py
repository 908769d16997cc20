"""Tensors inside nested values, with every container's exact type kept."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence

Value = TypeVar("Value")
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(value: Value, fn: TensorFunction) -> Value:
    """Applies ``fn`` to every tensor in a nesting of tuples, lists, mappings, dataclasses and packed sequences.

    A container in which nothing changed is returned as it is, the same object; otherwise a new one of the same type is made
    (named tuples, dict subclasses such as model outputs, frozen dataclasses included). Nothing is changed in place. Other
    objects are left alone. The batch sizes of a packed sequence are never passed to ``fn``: torch wants them on the CPU.
    """
    return _map(value, fn)  # type: ignore[no-any-return]


def _map(value: Any, fn: TensorFunction) -> Any:
    # The exact types come first: they are nearly all that is met, and tracing by torch.compile follows them without help.
    if isinstance(value, torch.Tensor):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:
        mapped = [_map(item, fn) for item in value]
        return value if _same(value, mapped) else kind(mapped)
    if kind is dict:
        changed = {key: _map(item, fn) for key, item in value.items()}
        return value if _same(value.values(), changed.values()) else changed
    if value is None or kind in (int, float, bool, str):
        return value
    return _map_special(value, fn)


def _map_special(value: Any, fn: TensorFunction) -> Any:
    if isinstance(value, PackedSequence):
        return _map_packed(value, fn)
    if isinstance(value, tuple):
        return _map_tuple(value, fn)
    if isinstance(value, list):
        items = [_map(item, fn) for item in value]
        return value if _same(value, items) else _replaced_list(value, items)
    if isinstance(value, Mapping):
        return _map_mapping(value, fn)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, fn)
    return value


def _same(before: Any, after: Any) -> bool:
    # torch.compile cannot compare containers by identity; a rebuilt container is as good there.
    return not torch.compiler.is_compiling() and all(old is new for old, new in zip(before, after, strict=True))


def _map_packed(value: PackedSequence, fn: TensorFunction) -> PackedSequence:
    data = fn(value.data)
    indices = (value.sorted_indices, value.unsorted_indices)
    order, back = (fn(index) if index is not None else None for index in indices)
    if _same((value.data, *indices), (data, order, back)):
        return value
    return PackedSequence(data, value.batch_sizes, order, back)


def _map_tuple(value: tuple[Any, ...], fn: TensorFunction) -> Any:
    if isinstance(value, torch.Size):
        return value
    items = [_map(item, fn) for item in value]
    if _same(value, items):
        return value
    make = getattr(type(value), "_make", None)
    # A named tuple takes its items through _make; torch's own result tuples and other subclasses take one sequence.
    return make(items) if make is not None else type(value)(items)


def _replaced_list(value: list[Any], items: list[Any]) -> list[Any]:
    twin = copy.copy(value)
    twin[:] = items
    return twin


def _map_mapping(value: Mapping[Any, Any], fn: TensorFunction) -> Any:
    items = {key: _map(item, fn) for key, item in value.items()}
    if _same(value.values(), items.values()):
        return value
    if not isinstance(value, MutableMapping):
        return cast(Any, type(value))(items)
    if type(value) is OrderedDict:  # torch.compile follows its making, not its copying
        return OrderedDict(items)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, items)
    twin = copy.copy(value)
    for key, item in items.items():
        twin[key] = item
    return twin


def _map_dataclass(value: Any, fn: TensorFunction) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    items = {name: _map(getattr(value, name), fn) for name in names}
    if _same([getattr(value, name) for name in names], items.values()):
        return value
    # Not copy.copy: it fails on a frozen dataclass with slots, and torch.compile does not follow it.
    twin = object.__new__(type(value))
    for name, item in (getattr(value, "__dict__", {}) | items).items():
        # Past a frozen dataclass's own __setattr__: the twin is new, nobody else holds it.
        object.__setattr__(twin, name, item)
    return twin


def iter_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in the order ``map_tensors`` meets them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map(value, note)
    return found
