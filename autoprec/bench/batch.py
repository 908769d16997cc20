"""A batch of training data: any nesting of tuples, lists, dicts, dataclasses and named tuples of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autoprec.runtime.tree import iter_tensors, map_tensors

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def to_device(batch: Any, device: str, channels_last: bool = False) -> Any:
    """Copies a batch to ``device`` without waiting for it (from pinned memory); structure and types are kept.

    Args:
        batch: nested tensors; left as they are.
        device: ``cuda`` or ``cpu``.
        channels_last: lay floating image tensors (4 or 5 axes) out with the channels last.
    """

    def move(tensor: Tensor) -> Tensor:
        moved = tensor.to(device, non_blocking=True)
        if channels_last and moved.is_floating_point() and moved.dim() in _LAYOUTS:
            return moved.contiguous(memory_format=_LAYOUTS[moved.dim()])
        return moved

    return map_tensors(batch, move)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor of a batch, in the order of its structure."""
    return iter_tensors(batch)


def batch_length(batch: Any) -> int | None:
    """Samples in a batch: the size of axis 0 that all its tensors share; None where they share none."""
    lengths = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def batch_bytes(batch: Any) -> int:
    """Memory of a batch's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def why_unsplittable(batch: Any) -> str:
    """Why a batch cannot be cut into micro-batches along axis 0; an empty string where it can."""
    strange = next(_other_data(batch), None)
    if strange is not None:
        return f"it holds a {strange}, which cannot be cut along the samples"
    lengths = sorted({tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()})
    if not lengths:
        return "it holds no tensor with an axis of samples"
    if len(lengths) > 1:
        return f"its tensors have different sizes along axis 0: {', '.join(map(str, lengths))}"
    return ""


def _other_data(value: Any) -> Iterator[str]:
    """Types of what lies in a batch besides tensors and single values, and so may belong to the samples one by one."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested:
            yield "sparse or nested tensor"
        return
    items = _items_of(value)
    if items is not None:
        if isinstance(value, (list, tuple)) and items and all(isinstance(item, (str, int, float)) for item in items):
            yield f"{type(value).__name__} of {type(items[0]).__name__}"
        for item in items:
            yield from _other_data(item)
    elif value is not None and not isinstance(value, (str, int, float, torch.dtype, torch.device)):
        yield type(value).__name__


def _items_of(value: Any) -> list[Any] | None:
    """What a container holds; None for anything else, and for a packed sequence, whose samples are interleaved."""
    if isinstance(value, PackedSequence):
        return None
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def split_batch(batch: Any, micro: int) -> list[Any]:
    """Cuts a batch into micro-batches of ``micro`` samples: views of the same data, in order. 0-axis tensors go to each.

    Raises:
        ValueError: the batch cannot be cut, or not into equal parts.
    """
    reason = why_unsplittable(batch)
    length = batch_length(batch)
    if length == micro:
        return [batch]
    if reason or length is None:
        raise ValueError(f"The batch cannot be split: {reason}.")
    if micro < 1 or length % micro:
        raise ValueError(f"A batch of {length} samples does not split into equal micro-batches of {micro}.")

    def part(start: int) -> Any:
        return map_tensors(batch, lambda tensor: tensor[start : start + micro] if tensor.dim() else tensor)

    return [part(start) for start in range(0, length, micro)]


def pin(batch: Any) -> Any:
    """The batch in page-locked memory, so that copies to the GPU do not wait; unchanged without CUDA."""
    if not torch.cuda.is_available():
        return batch
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory())


def equal_batches(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors, in order and to the bit; NaN equals NaN."""
    mine, yours = tensors_of(one), tensors_of(other)
    return len(mine) == len(yours) and all(_equal(a, b) for a, b in zip(mine, yours, strict=True))


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)
