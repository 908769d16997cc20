"""The first stage of a tune: builds a workload's model, traces one FP32 step and says what is there to be tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.batch import split_batch, to_device, why_unsplittable
from autoprec.bench.dtype_plan import loss_needs_float32
from autoprec.bench.layer_times import measure_step
from autoprec.bench.memory import free_memory, is_out_of_memory
from autoprec.bench.optrace import OpTrace
from autoprec.bench.roofline import predict_matmul_share
from autoprec.bench.target import Target
from autoprec.bench.trace import Traced, trace_model
from autoprec.bench.workload import Workload, steps_with_closure
from autoprec.bench.workload_check import obstacle_of
from autoprec.errors import WorkloadError
from autoprec.records import Look
from autoprec.runtime.padding import why_unpaddable

# Sizes of tensor-core operands: 16-bit matmuls and convolutions run at full rate where they are multiples of 8.
# Source: NVIDIA, Deep Learning Performance Guide, "Tensor Core Requirements".
MULTIPLE = 8
# Halvings of the effective batch that are offered: beyond an eighth the launches cost more than the memory is worth (assumption).
_HALVINGS = 3


def look(workload: Workload, target: Target, *, seed: int = 0) -> Look:
    """Traces one FP32 step of the workload; see ``trace_workload``, which also returns the operations."""
    return trace_workload(workload, target, seed=seed)[0]


def trace_workload(workload: Workload, target: Target, *, seed: int = 0) -> tuple[Look, OpTrace]:
    """Builds the model, runs one FP32 step of the effective batch (or the largest part of it that fits) and reports it.

    Waits for the GPU. Process-wide random state is restored.
    """
    devices = list(range(torch.cuda.device_count())) if target.device == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = workload.build_model().to(target.device)
        model.train()
        batch = to_device(next(iter(workload.batches(workload.batch_size, seed))), target.device)
        micro_batches, reason = possible_micro_batches(model, batch, workload.batch_size)
        traced = _trace_what_fits(workload, model, batch, micro_batches)
        state_bytes, forbids = _try_optimizer(workload, model)
    trace = replace(traced.op_trace, optimizer_state_bytes=state_bytes)
    shares = _shares(workload, target, model, batch, trace)
    record = Look(
        layers=traced.layers,
        idle=traced.idle,
        edges=traced.edges,
        matmul_share=shares.matmul,
        heavy_s=shares.heavy_s,
        light_s=shares.light_s,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        effective_batch=workload.batch_size,
        micro_batches=micro_batches,
        unsplittable=reason,
        odd_layers=odd_layers(model, traced),
        has_conv=_has_image_conv(traced.op_trace),
        outputs="fp32" if loss_needs_float32(trace) else "computed",
        loss=traced.loss,
        forbids_fp16=forbids,
        workload_sha256=workload.sha256,
        device_name=target.device_name,
        capability=target.capability,
        torch_version=torch.__version__,
    )
    return record, trace


def possible_micro_batches(model: nn.Module, batch: Any, effective: int) -> tuple[tuple[int, ...], str]:
    """The effective batch and its halves, quarters and eighths where the batch can be split, largest first; and why not more.

    A model with batch statistics keeps at least ``MULTIPLE`` samples together: they are taken over the micro-batch, so a smaller
    one trains another function.
    """
    reason = why_unsplittable(batch)
    if reason:
        return (effective,), reason
    least = MULTIPLE if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()) else 1
    parts = [2**power for power in range(1, _HALVINGS + 1)]
    sizes = [effective // part for part in parts if effective % part == 0 and effective // part >= least]
    return (effective, *sizes), ""


def part_of(batch: Any, micro: int, effective: int) -> Any:
    """The first ``micro`` samples of a batch of ``effective``."""
    return batch if micro >= effective else split_batch(batch, micro)[0]


def _trace_what_fits(workload: Workload, model: nn.Module, batch: Any, micro_batches: Sequence[int]) -> Traced:
    """Traces the largest micro-batch whose FP32 step fits into memory.

    Raises:
        WorkloadError: none does.
    """
    for micro in micro_batches:
        try:
            return trace_model(model, part_of(batch, micro, workload.batch_size), workload.loss, samples=micro)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
    raise WorkloadError(
        f"An FP32 step runs out of memory with {micro_batches[-1]} samples, the least into which the batch of "
        f"{workload.batch_size} is divided.",
        hint="autoprec compares with FP32, so FP32 has to fit: lower BATCH_SIZE.",
    )


def _try_optimizer(workload: Workload, model: nn.Module) -> tuple[int, str]:
    """Bytes of optimizer state after one step, and why fp16 is off the table (or an empty string).

    Takes the step on zero gradients, so no second forward pass is needed, and puts the parameters back.
    """
    optimizer = workload.build_optimizer(model)
    closure = steps_with_closure(workload, optimizer)
    forbids = obstacle_of(model, optimizer, closure=closure)
    if closure:
        return 0, forbids
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.numel() * value.element_size() for value in states), forbids


def odd_layers(model: nn.Module, traced: Traced) -> tuple[str, ...]:
    """Layers that multiply matrices or convolve with a feature or channel size off the multiples of 8, and that can be padded."""
    modules = dict(model.named_modules())
    heavy = {op.layer for op in traced.op_trace.ops if op.is_heavy}
    return tuple(
        layer.name
        for layer in traced.layers
        if layer.name in heavy and _is_odd(modules[layer.name]) and not why_unpaddable(modules[layer.name])
    )


def _is_odd(module: nn.Module) -> bool:
    sizes = [size for parameter in module.parameters(recurse=False) if parameter.dim() >= 2 for size in parameter.shape[:2]]
    return any(size % MULTIPLE for size in sizes)


def _has_image_conv(trace: OpTrace) -> bool:
    return any(op.kind == "conv" and op.inputs and len(op.inputs[0].shape) >= 4 for op in trace.ops)


@dataclass(frozen=True)
class _Shares:
    """Share of matmuls and convolutions in the FP32 step, and the seconds of a whole step that precision could shorten."""

    matmul: float
    heavy_s: float = 0.0
    light_s: float = 0.0


def _shares(workload: Workload, target: Target, model: nn.Module, batch: Any, trace: OpTrace) -> _Shares:
    """From the profiler where speed is measured, else from the roofline."""
    if target.timing == "predicted" and target.gpu is not None:
        return _Shares(predict_matmul_share(trace, target.gpu))
    part = part_of(batch, trace.samples, workload.batch_size)
    times = measure_step(model, lambda: workload.loss(model, part), target.device)
    parts = workload.batch_size / max(trace.samples, 1)
    share = times.heavy_s / times.total_s if times.total_s else 0.0
    return _Shares(share, parts * times.heavy_work_s, parts * times.light_work_s)
