"""Padding of the data axis: sequences of a batch rounded up to a multiple, with mask and labels.

Only by request: unlike a padded layer, a longer sequence is visible to the model, so the mask must hide what was added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

# Labels under this value are left out by cross_entropy. Source: torch.nn.functional.cross_entropy, ignore_index=-100.
IGNORED_LABEL = -100
_LABEL_NAMES = frozenset({"labels", "label", "targets", "target", "y"})


def pad_batch(
    batch: Any,
    multiple: int,
    *,
    axis: int = 1,
    labels: tuple[str | int, ...] | None = None,
    pad_values: Mapping[str | int, float] | None = None,
) -> Any:
    """Pads the tensors of a batch along the data axis to the next multiple; nothing is changed in place.

    Args:
        batch: a dict of tensors or a tuple or list of them. Tensors whose size along ``axis`` is that of the batch's longest
            (its first tensor with such an axis decides) are padded; others are left alone.
        multiple: the length becomes a multiple of this.
        axis: the data axis, 1 for ``[batch, length, ...]``.
        labels: keys or positions of the labels, padded with -100, which cross-entropy ignores. By default the usual names in a
            dict, and the last of two integer tensors in a tuple.
        pad_values: other values by key or position; everything else is padded with 0 (False), so a mask hides what was added.

    Returns:
        A batch of the same type; the same object when nothing needs padding.
    """
    items: dict[str | int, Any] = dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))
    lengths = [value.shape[axis] for value in items.values() if isinstance(value, torch.Tensor) and value.dim() > axis]
    if not lengths or not -lengths[0] % multiple:
        return batch
    length = lengths[0]
    label_keys = _label_keys(items) if labels is None else set(labels)
    padded = {}
    for key, value in items.items():
        if isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == length:
            fill = IGNORED_LABEL if key in label_keys else 0
            padded[key] = _pad_axis(value, axis, -length % multiple, (pad_values or {}).get(key, fill))
    return _with_items(batch, items | padded)


def _label_keys(items: Mapping[str | int, Any]) -> set[str | int]:
    if 0 not in items:
        return {key for key in items if isinstance(key, str) and key.lower() in _LABEL_NAMES}
    last = items[len(items) - 1]
    whole = isinstance(last, torch.Tensor) and not last.is_floating_point() and last.dtype != torch.bool
    return {len(items) - 1} if len(items) > 1 and whole else set()


def _pad_axis(value: torch.Tensor, axis: int, more: int, fill: float) -> torch.Tensor:
    around = (0, 0) * (value.dim() - axis - 1)
    return F.pad(value, (*around, 0, more), value=bool(fill) if value.dtype == torch.bool else fill)


def _with_items(batch: Any, items: Mapping[str | int, Any]) -> Any:
    if isinstance(batch, Mapping):
        twin = type(batch)(batch)  # type: ignore[call-arg]
        for key, value in items.items():
            twin[key] = value  # type: ignore[index]
        return twin
    values = list(items.values())
    make = getattr(type(batch), "_make", type(batch))
    return make(values)


class PaddedCollate:
    """A collate function whose batches are padded; picklable where the wrapped function is, for loader workers."""

    def __init__(self, collate: Callable[[Any], Any], multiple: int, options: Mapping[str, Any]) -> None:
        self._collate = collate
        self._multiple = multiple
        self._options = dict(options)

    def __call__(self, samples: Any) -> Any:
        """Collates the samples and pads the batch."""
        return pad_batch(self._collate(samples), self._multiple, **self._options)


def pad_collate(collate: Callable[[Any], Any], multiple: int, **options: Any) -> PaddedCollate:
    """Wraps a collate function so that its batches come out padded; ``options`` are those of ``pad_batch``."""
    return PaddedCollate(collate, multiple, options)
