"""Floating buffers in a pure island: read in half precision, written in their own.

A cast buffer that forward then writes (an average, a counter, a cache) would lose the write, or its low bits if it were carried
back. So a buffer stands in as a view of itself, of a tensor class that casts where it is read and passes writes on to the buffer.
Source: of 20 module kinds tried (rotary tables, masks, frozen norms, averages, counters, caches, codebooks), all train and keep
float32 state; ``tests/runtime/test_pure_buffers.py`` holds them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoprec.runtime.tree import map_tensors

_HALF = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)


def _methods(names: str) -> frozenset[Any]:
    owners = (torch.Tensor, torch)
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


# Methods whose name ends in "_" write their tensor, and so does item assignment; the dunder names are the operators' in-place forms.
_WRITES = frozenset(
    getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and not name.endswith("__")
) | _methods("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__")
# Results of these share the tensor's memory, so that a write to them is a write to the buffer.
_VIEWS = _methods(
    "__getitem__ view view_as reshape reshape_as t transpose swapaxes swapdims permute movedim moveaxis narrow select squeeze "
    "unsqueeze expand expand_as flatten unflatten ravel diagonal unfold chunk split tensor_split unbind detach as_strided "
    "contiguous adjoint"
)
# Answered by the buffer itself: its exact values, or nothing that depends on them.
_EXACT = _methods(
    "float double long int item tolist numpy size dim ndimension numel nelement stride storage_offset data_ptr untyped_storage "
    "is_contiguous element_size is_floating_point is_complex __len__ __int__ __float__ __bool__ __index__ __repr__ __format__ "
    "__hash__ __deepcopy__ __reduce_ex__"
)
# Take half inputs with float32 running statistics, and write those.
_STATISTICS = frozenset({F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm})


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, HalfReadBuffer):
        return _plain(tensor)
    return tensor.float() if tensor.dtype in _HALF else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A view, because torch.compile knows no as_subclass back to torch.Tensor.
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.view_as(tensor)


class HalfReadBuffer(torch.Tensor):
    """A view of a float32 buffer: operations read it cast to half precision and write it as it is."""

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The type that operations see."""
        return _read_dtype(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _STATISTICS:
            # The input keeps its type; weight, bias and statistics are all float32 beside it.
            return func(first, *map_tensors(args[1:], _exact), **map_tensors(kwargs, _exact))
        if isinstance(first, HalfReadBuffer):
            if func in _WRITES:
                args, kwargs = map_tensors(args[1:], _exact), map_tensors(kwargs, _exact)
                with torch._C.DisableTorchFunctionSubclass():
                    return func(first, *args, **kwargs)
            if func in _VIEWS:
                with torch._C.DisableTorchFunctionSubclass():
                    return _again(func(*args, **kwargs), first)
            if func in _EXACT or _is_wide_cast(func, args, kwargs):
                with torch._C.DisableTorchFunctionSubclass():
                    found = func(*args, **kwargs)
                # float() of a float32 tensor is that tensor.
                return _exact(found) if isinstance(found, HalfReadBuffer) else found
            if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
                with torch._C.DisableTorchFunctionSubclass():
                    found = func(*args, **kwargs)
                    return _again(found, first) if isinstance(found, torch.Tensor) else found
        if kwargs.get("out") is not None:
            return func(*map_tensors(args, _exact), **map_tensors(kwargs, _exact))
        return func(*map_tensors(args, read_in_half), **map_tensors(kwargs, read_in_half))


def _again(value: Any, like: HalfReadBuffer) -> Any:
    dtype = _read_dtype(like)
    return stand_in_for(value, dtype) if isinstance(value, torch.Tensor) else type(value)([stand_in_for(v, dtype) for v in value])


def _is_wide_cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Asked for by name, the values come without a rounding in between.
    if func is not torch.Tensor.to and func is not torch.Tensor.type:
        return False
    return any(isinstance(arg, torch.dtype) and arg in _WIDE for arg in (*args, *kwargs.values()))


class Float16ReadBuffer(HalfReadBuffer):
    """Read in float16."""


class Bfloat16ReadBuffer(HalfReadBuffer):
    """Read in bfloat16."""


def _read_dtype(tensor: torch.Tensor) -> torch.dtype:
    # By class rather than by attribute: torch.compile looks attributes up on the tensor beneath.
    return torch.float16 if isinstance(tensor, Float16ReadBuffer) else torch.bfloat16


def read_in_half(tensor: torch.Tensor) -> torch.Tensor:
    """What an operation reads: a stand-in's values in half precision; any other tensor as it is."""
    if isinstance(tensor, HalfReadBuffer):
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.to(_read_dtype(tensor))
    return tensor


def stand_in_for(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A view of the buffer that is read in ``dtype`` and written as it is."""
    if dtype == torch.float16:
        return buffer.as_subclass(Float16ReadBuffer)
    return buffer.as_subclass(Bfloat16ReadBuffer)


def as_stored(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that forward put in a buffer's place, as a plain one of the buffer's type."""
    plain = _plain(value) if isinstance(value, HalfReadBuffer) else value
    return plain.to(dtype) if plain.dtype in _HALF else plain
