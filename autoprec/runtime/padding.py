"""Feature and channel counts rounded up inside forward: the same function, no parameter touched.

The weight is cast first where autocast would cast it, then padded with zeros, and the padding sliced off the output, so tensor
cores see aligned sizes and the optimizer, the checkpoint and the caller see the model as it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import PolicyError

PaddedForward = Callable[..., torch.Tensor]


def _gap(size: int, multiple: int) -> int:
    return -size % multiple


def _in_compute_dtype(weight: torch.Tensor) -> torch.Tensor:
    # Casting before padding moves half the bytes through the pad.
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return weight.to(torch.get_autocast_dtype(kind))
    return weight


def _padded_linear(self: nn.Linear, multiple: int, input: torch.Tensor) -> torch.Tensor:
    x = input  # the parameter's name is that of nn.Linear.forward: it may be given by keyword
    if x.is_nested:  # cannot be padded; the layer computes as it does without
        return F.linear(x, self.weight, self.bias)
    rows, columns = self.weight.shape
    more_rows, more_columns = _gap(rows, multiple), _gap(columns, multiple)
    weight = F.pad(_in_compute_dtype(self.weight), (0, more_columns, 0, more_rows))
    bias = self.bias if self.bias is None or not more_rows else F.pad(_in_compute_dtype(self.bias), (0, more_rows))
    y = F.linear(F.pad(x, (0, more_columns)) if more_columns else x, weight, bias)
    # Contiguous again, so that a later .view() works as it did without padding.
    return y[..., :rows].contiguous() if more_rows else y


def _padded_conv(self: Any, multiple: int, input: torch.Tensor) -> torch.Tensor:
    x = input
    rows, columns = self.weight.shape[:2]
    more_rows, more_columns = _gap(rows, multiple), _gap(columns, multiple)
    around = (0, 0) * (self.weight.dim() - 2)
    weight = F.pad(_in_compute_dtype(self.weight), (*around, 0, more_columns, 0, more_rows))
    bias = self.bias if self.bias is None or not more_rows else F.pad(_in_compute_dtype(self.bias), (0, more_rows))
    if more_columns:
        x = F.pad(x, (*around, 0, more_columns))
    y = cast(torch.Tensor, self._conv_forward(x, weight, bias))
    if not more_rows:
        return y
    channels = y.dim() - self.weight.dim() + 1  # 1 for a batch of images, 0 for a single one
    return y.narrow(channels, 0, rows).contiguous(memory_format=_layout_of(y))


def _layout_of(y: torch.Tensor) -> torch.memory_format:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.dim())
    if layout is None or y.is_contiguous() or not y.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    return layout


_PADDED: dict[Any, PaddedForward] = {
    nn.Linear.forward: _padded_linear,
    nn.Conv1d.forward: _padded_conv,
    nn.Conv2d.forward: _padded_conv,
    nn.Conv3d.forward: _padded_conv,
}


# What the forwards above call; a subclass may replace it (weight standardisation) and then sees the weight before padding.
_CONV_FORWARDS = {kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


def padded_forward(cls: type[nn.Module]) -> PaddedForward | None:
    """The padded counterpart of a class's forward, or None where the class computes something else than its kind's own."""
    own = _PADDED.get(cls.forward)
    if own is _padded_conv and getattr(cls, "_conv_forward", None) not in _CONV_FORWARDS:
        return None
    return own


def why_unpaddable(module: nn.Module) -> str:
    """Why padding could change a layer's function, or an empty string where it cannot."""
    if padded_forward(type(module)) is None:
        return "only Linear and Conv1d/2d/3d with torch's own forward can be padded"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if getattr(module, "groups", 1) != 1:
        return "padding a grouped convolution would move channels between groups"
    return ""


def check_paddable(name: str, module: nn.Module) -> None:
    """Refuses layers whose function padding could change.

    Raises:
        PolicyError: neither Linear nor Conv, a subclass or instance with a forward of its own, or a grouped convolution.
    """
    reason = why_unpaddable(module)
    if reason:
        raise PolicyError(
            f"padding.layers: '{name}' is a {type(module).__name__} and cannot be padded: {reason}.",
            hint="Remove the layer from the policy's padding.",
        )
