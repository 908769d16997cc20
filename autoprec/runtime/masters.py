"""Half copies of a model's weights for one forward, all made in one pass; the parameters are the float32 masters.

Without it each layer casts its own weights: two small kernels a parameter and step, which a model of many layers waits for on the
host. Here one multi-tensor copy makes all of them when the model's forward begins, and one gives all gradients back in float32 when
the backward pass ends. Numbers are the same: each weight is rounded once either way. The parameters stay where they are, so
checkpoints, optimizers and averaged copies see float32 as before. A recompute in activation checkpointing, which runs after forward
has ended, finds the masters and casts them layer by layer.

Source: one H200, torch 2.11, ViT-B/16 in fp16: 32.1 ms a step with stock AMP; in pure half 29.4 where layers cast their own weights and
28.3 in one pass; 28.2 with half parameters and masters by hand (reports/half-weights-h200).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from autoprec.policy import Precision
from autoprec.runtime.dtypes import HALF_DTYPES
from autoprec.runtime.pure import carry_back

# Under autocast only parameters that every use would cast to half anyway may be half from the start: by kind, those of these names.
_PROJECTIONS = ("weight", "bias")
_ATTENTION = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_CAST_BY_AUTOCAST: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: _PROJECTIONS,
    nn.modules.linear.NonDynamicallyQuantizableLinear: _PROJECTIONS,
    nn.Conv1d: _PROJECTIONS,
    nn.Conv2d: _PROJECTIONS,
    nn.Conv3d: _PROJECTIONS,
    nn.ConvTranspose1d: _PROJECTIONS,
    nn.ConvTranspose2d: _PROJECTIONS,
    nn.ConvTranspose3d: _PROJECTIONS,
    nn.MultiheadAttention: _ATTENTION,
}


class Replaced(NamedTuple):
    """One replaced entry of a module's parameters: where it is, what was there, and what stands there now."""

    entries: dict[str, Any]
    name: str
    master: nn.Parameter
    copy: torch.Tensor
    version: int


class _Copies(torch.autograd.Function):
    """Half copies of float32 tensors; gradients come back in float32, all at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(_copied(masters, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative is wanted: an operation that has one
            return (None, *(grad if grad is None else grad.float() for grad in grads))
        raised = iter(_copied([grad for grad in grads if grad is not None], torch.float32))
        return (None, *(grad if grad is None else next(raised) for grad in grads))


def _copied(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def copies_pay() -> bool:
    """Whether one pass over all weights may be made here.

    Not inside ``torch.compile``, which fuses casts, nor under ``torch.func``, nor in a job of several processes: there gradients must
    leave as they become ready, layer by layer.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return not several


def put_copies(model: nn.Module) -> list[Replaced]:
    """Replaces the parameters that run in half by half copies, in place, and returns what ``take_copies`` needs."""
    users: dict[torch.dtype, dict[int, tuple[nn.Parameter, list[tuple[dict[str, Any], str]]]]] = {}
    for entries, name, dtype in _lowered(model):
        parameter = entries[name]
        users.setdefault(dtype, {}).setdefault(id(parameter), (parameter, []))[1].append((entries, name))
    replaced: list[Replaced] = []
    for dtype, found in users.items():
        masters = [parameter for parameter, _ in found.values()]
        for (master, places), copy in zip(found.values(), _half(masters, dtype), strict=True):
            for entries, name in places:
                entries[name] = copy
                replaced.append(Replaced(entries, name, master, copy, _version(copy)))
    return replaced


def take_copies(replaced: Sequence[Replaced]) -> None:
    """Puts the masters back, except where something else replaced the entry in between. They take over what forward wrote."""
    for entries, name, master, copy, version in replaced:
        if entries.get(name) is copy:
            entries[name] = master
            if _version(copy) != version:
                carry_back(master, copy)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _half(masters: Sequence[nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    """A copy for each; those of trained masters lead gradients back."""
    trained = [master for master in masters if master.requires_grad and torch.is_grad_enabled()]
    frozen = [master for master in masters if not (master.requires_grad and torch.is_grad_enabled())]
    with torch.no_grad():
        of_frozen = iter(_copied(frozen, dtype))
    of_trained = iter(_Copies.apply(dtype, *trained) if trained else ())
    known = {id(master) for master in trained}
    return [next(of_trained) if id(master) in known else next(of_frozen) for master in masters]


def _lowered(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.dtype]]:
    """Where every float32 parameter stands that runs in half, with its half type; precisions are inherited down the tree.

    In the order of ``named_modules``, so that a module registered twice has the precision of its first name.
    """
    seen: set[int] = set()
    waiting: list[tuple[nn.Module, Precision]] = [(model, "fp32")]
    while waiting:
        module, precision = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind = type(module)
        island = getattr(kind, "autoprec_island", None)
        precision = getattr(island, "precision", None) or precision
        dtype = HALF_DTYPES.get(precision)
        if dtype is not None:
            for name in _names(module, getattr(kind, "autoprec_original", kind), precision):
                parameter = module._parameters.get(name)
                # By exact type: a DTensor or another subclass has its own ways.
                if type(parameter) is nn.Parameter and parameter.dtype == torch.float32:
                    yield module._parameters, name, dtype
        children = [child for name, child in module._modules.items() if child is not None and name != "parametrizations"]
        waiting += [(child, precision) for child in reversed(children)]


def _names(module: nn.Module, original: type[nn.Module], precision: Precision) -> Sequence[str]:
    if "parametrizations" in module._modules:
        return ()  # its weights are computed from the masters
    if not precision.endswith("_pure"):
        # A hook may read the weight, and would read another than under autocast.
        return () if module._forward_pre_hooks or module._forward_hooks else _CAST_BY_AUTOCAST.get(original, ())
    # For the same reasons as in pure.py and islands.py.
    looked_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (module.sparse or module.max_norm is not None)
    return () if looked_up or isinstance(module, (_NormBase, nn.RNNBase)) else list(module._parameters)
