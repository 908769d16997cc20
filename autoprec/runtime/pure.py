"""Parameters used in half precision for the length of one forward, with float32 masters.

The entries of ``module._parameters`` are replaced by casts that autograd sees through, and put back when forward ends. Three
mechanisms were tried once on torch 2.14 (one CPU core, microseconds a call of a small block, all included): replaced entries 86,
attribute access through ``__getattr__`` 87, a ``TorchFunctionMode`` 215. All three compile with ``fullgraph=True`` without a
graph break. Replacing won because it also serves a parent that reads a child's weight without calling the child
(``nn.MultiheadAttention.out_proj``), casts each parameter once however often it is read, and costs nothing outside forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

# Set on a module while its parameters are lowered; the swapped class's parametrized properties look at it.
LOWERED = "_autoprec_lowered"
_LOWERABLE = (torch.float32, torch.float16, torch.bfloat16)


class _Lowered(NamedTuple):
    """One replaced entry: where it is, what was there (None: nothing), and what stands there now."""

    entries: dict[str, Any]
    name: str
    master: Any
    stand_in: Any


def lower(module: nn.Module, dtype: torch.dtype) -> list[_Lowered]:
    """Replaces parameters by casts to ``dtype`` and returns what ``restore`` needs.

    The module's own parameters are replaced, and those of children that were not swapped (they never run themselves). Every other
    child casts its own in its own forward: there FSDP2 has gathered them, and a recompute in activation checkpointing, which
    starts at some child, issues the same operations as the first pass.

    Args:
        module: the module whose forward is about to run.
        dtype: float16 or bfloat16.
    """
    undo: list[_Lowered] = []
    _lower_own(module, dtype, undo)
    _lower_children(module, dtype, undo)
    return undo


def restore(undo: list[_Lowered]) -> None:
    """Puts the masters back, except where something else (FSDP's resharding) replaced the entry in between."""
    for entries, name, master, stand_in in undo:
        if entries.get(name) is stand_in:
            if master is None:
                del entries[name]
            else:
                entries[name] = master


def _lower_children(module: nn.Module, dtype: torch.dtype, undo: list[_Lowered]) -> None:
    for name, child in module._modules.items():
        # A parametrization is computed from float32 masters; only its result is cast.
        if child is not None and name != "parametrizations" and getattr(type(child), "autoprec_island", None) is None:
            _lower_own(child, dtype, undo)
            _lower_children(child, dtype, undo)


def _lower_own(module: nn.Module, dtype: torch.dtype, undo: list[_Lowered]) -> None:
    # BatchNorm's kernels take half inputs with float32 weights and statistics, and its running averages need float32.
    # Recurrent layers keep a flat copy of their weights; they run under autocast instead, which casts that.
    if isinstance(module, _NormBase | nn.RNNBase):
        return
    parameters: dict[str, Any] = module._parameters
    changes: list[_Lowered] = []
    for name, parameter in parameters.items():
        if parameter is None or parameter.dtype == dtype or parameter.dtype not in _LOWERABLE:
            continue
        changes.append(_Lowered(parameters, name, parameter, parameter.to(dtype)))
    changes += _computed(module, dtype)
    for entries, name, _, stand_in in changes:
        entries[name] = stand_in
    undo += changes


def _computed(module: nn.Module, dtype: torch.dtype) -> list[_Lowered]:
    """Weights that a hook or a parametrization computes anew for each call."""
    attributes = module.__dict__
    changes: list[_Lowered] = []
    for name in _hook_weights(module):
        weight = attributes[name]
        if weight.dtype != dtype and weight.dtype in _LOWERABLE:
            changes.append(_Lowered(attributes, name, weight, weight.to(dtype)))
    if "parametrizations" in module._modules:
        changes.append(_Lowered(attributes, LOWERED, attributes.get(LOWERED), dtype))
    return changes


def _hook_weights(module: nn.Module) -> list[str]:
    """Names of plain tensor attributes written by the hook-based ``weight_norm`` and ``spectral_norm``."""
    found = []
    for name in module._parameters:
        base = name.removesuffix("_orig") if name.endswith("_orig") else name.removesuffix("_g")
        if base != name and isinstance(module.__dict__.get(base), torch.Tensor):
            found.append(base)
    return found
