"""Sizes of tensors and of their differences, with little memory traffic and without waiting for the device.

A scoring pass looks at every activation and every gradient of a model, so what it reads and writes decides what it costs. Sums of
squares are therefore taken in float32 where its range serves, differences are made in one scratch memory that all layers share,
and the figures stay on the device until they are read together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

LEAST_RMS = 1e-13
"""Root mean square from which float32 squares serve. Source: rounding errors of fp16 are 2^-11 = 5e-4 of a value and less, so those
of 1e-13 are around 1e-17 and their squares around 1e-34: over the smallest normal float32, 1.2e-38."""

MOST_NORM = 1e18
"""Norm up to which float32 squares serve. Source: the largest float32 is 3.4e38, so a norm of 1.8e19 overflows when squared; the
difference from what a half type holds of it (fp16 at most 65504) stays below."""

_ROW = 4096
"""Elements added up in one go, of a tensor of 32 rows and more. Source: torch's CPU kernel is off by 7e-4 over 10^7 elements in one
go, by 1e-7 by rows of 4096, and by 2e-6 over 10^5 elements in one go."""


def norm(tensor: Tensor) -> Tensor:
    """Root of the sum of squares, as a scalar on the device in the tensor's own type; not finite where a value is not."""
    if not tensor.is_contiguous():
        tensor = _as_it_lies(tensor)
    rows = tensor.numel() // _ROW
    if rows < 32:
        return _norm(tensor)
    flat = tensor.view(-1)
    parts = _norm(flat[: rows * _ROW].view(rows, _ROW), dim=1)
    rest = flat[rows * _ROW :]
    if rest.numel():
        parts = torch.cat((parts, _norm(rest).view(1)))
    return _norm(parts)


_norm: Callable[..., Tensor] = torch.linalg.vector_norm


def _as_it_lies(tensor: Tensor) -> Tensor:
    """The elements in the order of memory where they fill it (channels last, say), else a contiguous copy."""
    if _fills_its_memory(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, each once."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def serves_float32(tensor_norm: float, elements: int) -> bool:
    """Whether sums of squares of a tensor, and of rounding errors in it, may be taken in float32."""
    return LEAST_RMS * math.sqrt(elements) <= tensor_norm <= MOST_NORM


def read(scalars: Sequence[Tensor]) -> Iterator[float]:
    """The values of scalars on devices, in order; waits once for each device and type, however many they are."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, scalar in enumerate(scalars):
        groups.setdefault((scalar.device, scalar.dtype), []).append(index)
    values = [0.0] * len(scalars)
    for indices in groups.values():
        found = torch.stack([scalars[index] for index in indices]).tolist()
        for index, value in zip(indices, found, strict=True):
            values[index] = float(value)
    return iter(values)


class Scratch:
    """Memory for differences, used again and again: fresh memory costs more than the arithmetic on a CPU.

    What a method returns is good until the next call.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def minus(self, low: Tensor, exact: Tensor, dtype: torch.dtype, *, factor: float = 1.0) -> Tensor:
        """``low - factor * exact`` in a floating type at least as wide as both, shaped as ``exact``."""
        out = self._like(exact, dtype, 0)
        if low.dtype == exact.dtype == dtype or (low.is_cuda and dtype == exact.dtype):
            return torch.sub(low, exact, alpha=factor, out=out)  # CUDA widens while it reads
        out.copy_(low)
        if exact.dtype == dtype or exact.is_cuda:
            return out.sub_(exact, alpha=factor)
        return out.sub_(self._like(exact, dtype, 1).copy_(exact), alpha=factor)  # a CPU would make the wide copy in fresh memory

    def times(self, exact: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
        """``exact * factor``, rounded once to ``dtype``, in memory of its own."""
        if factor == 1.0:
            return exact.to(dtype, copy=True)
        if exact.dtype == dtype:
            return exact * factor
        if exact.is_cuda:
            return torch.mul(exact, factor, out=torch.empty_like(exact, dtype=dtype))
        return torch.mul(exact, factor, out=self._like(exact, exact.dtype, 0)).to(dtype)

    def _like(self, tensor: Tensor, dtype: torch.dtype, slot: int) -> Tensor:
        """Uninitialised memory with a tensor's shape, its strides where it fills its own memory."""
        key = (tensor.device, dtype, slot)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < tensor.numel():
            buffer = self._buffers[key] = torch.empty(tensor.numel(), device=tensor.device, dtype=dtype)
        if tensor.is_contiguous() or not _fills_its_memory(tensor):
            return buffer[: tensor.numel()].view(tensor.shape)
        return buffer.as_strided(tensor.shape, tensor.stride())
