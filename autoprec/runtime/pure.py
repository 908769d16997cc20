"""Parameters used in half precision for the length of one forward, with float32 masters.

The entries of ``module._parameters`` are replaced by casts that autograd sees through, and put back when forward ends. Three
mechanisms were tried once on torch 2.14 (one CPU core, microseconds a call of a small block, all included): replaced entries 86,
attribute access through ``__getattr__`` 87, a ``TorchFunctionMode`` 215. All three compile with ``fullgraph=True`` without a
graph break. Replacing won because it also serves a parent that reads a child's weight without calling the child
(``nn.MultiheadAttention.out_proj``), casts each parameter once however often it is read, and costs nothing outside forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autoprec.runtime.buffers import as_stored, stand_in_for

# Set on a module while its parameters are lowered; the parametrized properties look at it.
LOWERED = "_autoprec_lowered"
_LOWERABLE = (torch.float32, torch.float16, torch.bfloat16)

Path = tuple[str, ...]


class _Lowered(NamedTuple):
    """One replaced entry: where it is, what was there (None: nothing), and what stands there now."""

    entries: dict[str, Any]
    name: str
    master: Any
    stand_in: Any


class LoweredProperty(property):
    """A parametrized weight that follows the cast of the other parameters while forward runs."""

    @classmethod
    def of(cls, computed: property) -> LoweredProperty:
        """The property that computes as ``computed`` does and casts the result while its module is lowered."""

        def get(self: nn.Module) -> Any:
            value = cast(Any, computed.fget)(self)
            dtype = self.__dict__.get(LOWERED)
            return value if dtype is None else value.to(dtype)

        return computed if isinstance(computed, cls) else cls(get, computed.fset, computed.fdel)


def lower(module: nn.Module, dtype: torch.dtype, reads: tuple[Path, ...] = ()) -> list[_Lowered]:
    """Replaces parameters by casts to ``dtype`` and returns what ``restore`` needs.

    The module's own parameters and buffers are replaced, and those of children that were not swapped (they never run themselves).
    Every other child casts its own in its own forward: there FSDP2 has gathered them, and a recompute in activation checkpointing,
    which starts at some child, issues the same operations as the first pass.

    Args:
        module: the module whose forward is about to run.
        dtype: float16 or bfloat16.
        reads: paths of further parameters below it, which its own code reads.
    """
    undo: list[_Lowered] = []
    _lower_own(module, dtype, undo)
    _lower_children(module, dtype, undo)
    for path in reads:
        owner = module
        for name in path[:-1]:
            owner = cast(nn.Module, owner._modules[name])
        _replace(_casts(owner._parameters, path[-1:], dtype), undo)
    return undo


def restore(undo: list[_Lowered]) -> None:
    """Puts the masters back, except where something else (FSDP's resharding) replaced the entry in between.

    A parameter that forward wrote in place (``nn.Embedding(max_norm=...)``) takes over what was written; a buffer that forward
    replaced keeps the new value, in the buffer's own type.
    """
    for entries, name, master, stand_in in undo:
        now: Any = entries.get(name)
        if now is stand_in:
            if master is None:
                del entries[name]
                continue
            entries[name] = master
            if isinstance(master, nn.Parameter) and _was_written(stand_in):
                carry_back(master, stand_in)
        elif isinstance(now, torch.Tensor) and isinstance(master, torch.Tensor) and not isinstance(master, nn.Parameter):
            entries[name] = as_stored(now, master.dtype)


def _was_written(cast_parameter: torch.Tensor) -> bool:
    # Neither a trace nor inference mode counts versions.
    return not torch.compiler.is_compiling() and not cast_parameter.is_inference() and cast_parameter._version > 0


@torch.no_grad()
def carry_back(master: nn.Parameter, stand_in: torch.Tensor) -> None:
    """Writes into a master, in place, what forward wrote into its cast; every other element keeps its low bits."""
    master.copy_(torch.where(stand_in != master.to(stand_in.dtype), stand_in.to(master.dtype), master))


def _lower_children(module: nn.Module, dtype: torch.dtype, undo: list[_Lowered]) -> None:
    for name, child in module._modules.items():
        # A parametrization is computed from float32 masters; only its result is cast.
        if child is not None and name != "parametrizations" and getattr(type(child), "autoprec_island", None) is None:
            _lower_own(child, dtype, undo)
            _lower_children(child, dtype, undo)


def _lower_own(module: nn.Module, dtype: torch.dtype, undo: list[_Lowered]) -> None:
    # BatchNorm's kernels take half inputs with float32 weights and statistics, and its running averages need float32.
    # Recurrent layers keep a flat copy of their weights; they run under autocast instead, which casts that.
    if isinstance(module, (_NormBase, nn.RNNBase)):
        return
    parameters = module._parameters
    changes = _casts(parameters, parameters, dtype)
    if "parametrizations" in module._modules or module._forward_pre_hooks:
        changes += _computed(module, dtype)
    if module._buffers:
        changes += _buffers(module, dtype)
    _replace(changes, undo)


def _replace(changes: list[_Lowered], undo: list[_Lowered]) -> None:
    for entries, name, _, stand_in in changes:
        entries[name] = stand_in
    undo += changes


def _casts(parameters: dict[str, Any], names: Any, dtype: torch.dtype) -> list[_Lowered]:
    changes: list[_Lowered] = []
    for name in names:
        parameter = parameters[name]
        if parameter is None or parameter.dtype == dtype or parameter.dtype not in _LOWERABLE:
            continue
        changes.append(_Lowered(parameters, name, parameter, parameter.to(dtype)))
    return changes


def _buffers(module: nn.Module, dtype: torch.dtype) -> list[_Lowered]:
    # A buffer that the class's code replaces by a new tensor (self.mean = 0.9 * self.mean + ...) stays in float32: computed from
    # a rounded one, a slow average would stand still.
    assigned = getattr(type(module), "autoprec_assigned", ())
    buffers: dict[str, Any] = module._buffers
    names = [
        name
        for name, buffer in buffers.items()
        if type(buffer) is torch.Tensor and buffer.dtype == torch.float32 and name not in assigned
    ]
    if not torch.compiler.is_compiling():
        return [_Lowered(buffers, name, buffers[name], stand_in_for(buffers[name], dtype)) for name in names]
    # torch.compile does not follow the stand-in everywhere. A plain cast serves where nothing is written; else they stay float32.
    island = getattr(type(module), "autoprec_island", None)
    if island is None or island.writes:
        return []
    return [_Lowered(buffers, name, buffers[name], buffers[name].to(dtype)) for name in names]


def _computed(module: nn.Module, dtype: torch.dtype) -> list[_Lowered]:
    """Weights that a hook or a parametrization computes anew for each call."""
    attributes = module.__dict__
    changes: list[_Lowered] = []
    for name in _hook_weights(module):
        weight = attributes[name]
        if weight.dtype != dtype and weight.dtype in _LOWERABLE:
            changes.append(_Lowered(attributes, name, weight, weight.to(dtype)))
    if "parametrizations" in module._modules:
        if not torch.compiler.is_compiling():
            _follow_the_cast(module)
        changes.append(_Lowered(attributes, LOWERED, attributes.get(LOWERED), dtype))
    return changes


def _follow_the_cast(module: nn.Module) -> None:
    """Wraps properties of parametrizations registered after the policy was applied; torch made the class for this instance alone."""
    kind = type(module)
    for name in cast(nn.ModuleDict, module._modules["parametrizations"]):
        computed = vars(kind).get(name)
        if isinstance(computed, property) and not isinstance(computed, LoweredProperty):
            setattr(kind, name, LoweredProperty.of(computed))


def _hook_weights(module: nn.Module) -> list[str]:
    """Names of plain tensor attributes written by the hook-based ``weight_norm`` and ``spectral_norm``."""
    found = []
    for name in module._parameters:
        base = name.removesuffix("_orig") if name.endswith("_orig") else name.removesuffix("_g")
        if base != name and isinstance(module.__dict__.get(base), torch.Tensor):
            found.append(base)
    return found
