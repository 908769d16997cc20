"""Process-wide torch flags and the weights' memory layout, set for a policy and put back exactly."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.policy import Backend

Undo = Callable[[], None]

# torch 2.9 brought fp32_precision beside allow_tf32. Reading allow_tf32 raises once the two disagree, so it is asked first:
# where it answers, the old setter is used (it writes both); where it raises, the user mixed them and only the new ones are used.
_OLD_FLAGS: tuple[tuple[Any, str], ...] = ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"))


def _new_flags() -> list[tuple[Any, str]]:
    owners = (torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None), getattr(torch.backends.cudnn, "rnn", None))
    return [(owner, "fp32_precision") for owner in owners if owner is not None and hasattr(owner, "fp32_precision")]


def _set(owner: Any, name: str, value: Any) -> None:
    with warnings.catch_warnings():
        # torch recommends the new TF32 flags at the first use of the old ones; the user did not write them here.
        warnings.simplefilter("ignore")
        setattr(owner, name, value)


def _agree(owner: Any, name: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(owner, name)
    except RuntimeError:
        return False
    return True


def _set_tf32(enabled: bool) -> Undo:
    new = [(owner, name, getattr(owner, name)) for owner, name in _new_flags()]
    consistent = all(_agree(owner, name) for owner, name in _OLD_FLAGS)
    old = [(owner, name, getattr(owner, name)) for owner, name in _OLD_FLAGS] if consistent else []
    if consistent:
        for owner, name, _ in old:
            _set(owner, name, enabled)
    else:
        for owner, name, _ in new:
            _set(owner, name, "tf32" if enabled else "ieee")

    def undo() -> None:
        for owner, name, value in (*old, *new):
            if not consistent or name == "allow_tf32" or getattr(owner, name) != value:
                _set(owner, name, value)

    return undo


def _set_flag(owner: Any, name: str, value: bool) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def set_flags(backend: Backend) -> Undo:
    """Sets TF32, ``cudnn.benchmark`` and fp16 accumulation for the whole process and returns what puts them back.

    A flag the running torch does not have is left out; ``fp16_accumulation`` where it is missing only costs speed.
    """
    undos = [_set_tf32(backend.tf32), _set_flag(torch.backends.cudnn, "benchmark", backend.cudnn_benchmark)]
    matmul = torch.backends.cuda.matmul
    try:
        undos.append(_set_flag(matmul, "allow_fp16_accumulation", backend.fp16_accumulation))
    except (AttributeError, RuntimeError):
        if backend.fp16_accumulation:
            warnings.warn(
                f"torch {torch.__version__} has no fp16 accumulation in matmuls here; the policy runs without it.", stacklevel=4
            )

    def undo() -> None:
        for one in reversed(undos):
            one()

    return undo


def set_channels_last(model: nn.Module) -> Undo:
    """Lays out every 4-D parameter and buffer (and its gradient) channels last, in place, and returns what undoes it.

    Values and identities stay; only strides change. The undo gives each tensor the strides it had.
    """
    changed: list[tuple[weakref.ref[torch.Tensor], tuple[int, ...]]] = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=torch.channels_last):
            changed.append((weakref.ref(tensor), tensor.stride()))
            _lay_out(tensor, lambda data: data.contiguous(memory_format=torch.channels_last))

    def undo() -> None:
        for reference, stride in changed:
            tensor = reference()
            if tensor is not None:
                _lay_out(tensor, lambda data, stride=stride: _with_stride(data, stride))  # type: ignore[misc]

    return undo


def _lay_out(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor.data = change(tensor.data)
    if tensor.grad is not None:
        tensor.grad.data = change(tensor.grad.data)


def _with_stride(data: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(data.shape, stride, dtype=data.dtype, device=data.device).copy_(data)
