"""Turns what goes wrong in a window into a value that says which layer and why."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor, nn

from autoprec.bench.memory import is_out_of_memory
from autoprec.bench.source import raised_at
from autoprec.errors import WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, FailureKind
from autoprec.runtime.layers import named_layers
from autoprec.runtime.tree import iter_tensors

# After one of these the CUDA context is unusable, so the process has to go.
_DEAD_DEVICE = re.compile(r"CUDA error|device-side assert|illegal memory access|CUBLAS_STATUS_EXECUTION_FAILED", re.I)
# Share of skipped steps from which training counts as stuck, once this many steps were taken. Own choice.
STUCK_SHARE, STUCK_AFTER_STEPS = 0.5, 12


def is_plain_fp32(policy: Policy) -> bool:
    """True where the policy does nothing to numerics, so that an error is the user's own."""
    return policy.default == "fp32" and not policy.layers and policy.execution == "eager" and not policy.padding.layers


def failure_of(error: Exception, policy: Policy, model: nn.Module | None, step: int | None) -> Failure:
    """The failure an exception means.

    Raises:
        WorkloadError: plain FP32 raised it, so the workload itself is at fault.
    """
    message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")
    message += raised_at(error)
    layer = raising_layer(error.__traceback__, model) if model is not None else None
    kind: FailureKind = "unsupported"
    if is_out_of_memory(error):
        kind = "out_of_memory"
    elif _DEAD_DEVICE.search(str(error)):
        kind = "crashed"
    elif is_plain_fp32(policy):
        where = f" in layer '{layer}'" if layer else ""
        last = "".join(traceback.format_exception(error)[-3:]).strip()
        raise WorkloadError(
            f"The model fails in plain FP32{where}: {message}\n{last}", hint="Mend model.py; it has to train in FP32 first."
        ) from error
    text = "".join(traceback.format_exception(error))[-4000:]
    return Failure(kind=kind, message=message, layer=layer, step=step, traceback=text)


def raising_layer(trace: TracebackType | None, model: nn.Module) -> str | None:
    """Name of the innermost module of the model whose method is on the traceback."""
    names = {id(module): name for name, module in named_layers(model).items()}
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)]
        trace = trace.tb_next
    return found


def divergence_of(losses: list[float], scales: list[float], policy: Policy) -> Failure | None:
    """The failure that the losses and scales so far show; None while training goes on."""
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return Failure(kind="diverged", message=f"the loss is {loss} at step {step}", step=step)
    if not scales:
        return None
    skipped = skipped_steps(scales, policy.loss_scale.init)
    if len(scales) >= STUCK_AFTER_STEPS and len(skipped) > STUCK_SHARE * len(scales):
        text = f"{len(skipped)} of {len(scales)} steps were skipped; the loss scale is {scales[-1]:g}"
        return Failure(kind="scale_collapsed", message=text, step=len(scales) - 1)
    if scales[-1] < policy.loss_scale.floor:
        text = f"the loss scale fell to {scales[-1]:g}, under the floor of {policy.loss_scale.floor:g}"
        return Failure(kind="scale_collapsed", message=text, step=len(scales) - 1)
    return None


def skipped_steps(scales: list[float], init: float) -> list[int]:
    """Steps that were skipped: those after which the scale is smaller than before."""
    return [step for step, (before, after) in enumerate(zip([init, *scales], scales, strict=False)) if after < before]


def nonfinite_buffers(model: nn.Module) -> frozenset[str]:
    """Names of the floating buffers that hold NaN or infinity."""
    return frozenset(name for name, buffer in model.named_buffers() if _is_bad(buffer))


def broken_buffer(model: nn.Module, at_start: frozenset[str]) -> str | None:
    """Name of the first buffer that went non-finite in training (BatchNorm's running statistics, say).

    Args:
        model: after training.
        at_start: what was non-finite before the first step: masks of minus infinity are no sign of trouble.
    """
    return next((name for name, buffer in model.named_buffers() if name not in at_start and _is_bad(buffer)), None)


def first_nonfinite_layer(model: nn.Module, run: Callable[[], None]) -> str | None:
    """Runs ``run`` with a hook on every module and names the first whose output is not finite, innermost first."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if not found and any(_is_bad(tensor) for tensor in iter_tensors(output)):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in named_layers(model).items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor.detach()).all())
