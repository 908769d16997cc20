"""The most that low precision could give on a GPU whose speed is predicted: a bound that no assignment of precisions passes.

Every operation is priced in the cheapest type that its layer may take, without casts, in the better memory layout, padded where that
helps. The host issues what plain FP32 issues: lower precision only adds casts to that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoprec.bench import roofline
from autoprec.bench.dtype_plan import Dtype, PlannedOp
from autoprec.bench.gpus import Gpu
from autoprec.bench.ops import cast_rule
from autoprec.bench.optrace import Op, OpTrace
from autoprec.bench.roofline import (
    Pricer,
    Setting,
    predict_device_and_host_s,
    predict_optimizer_s,
)
from autoprec.policy import Backend, Policy, Precision
from autoprec.records import Ceiling

# The host's constants are those of a desktop processor; the bound is taken for one twice as fast, so that a device which then has
# something to do is not called idle. Own choice.
HOST_DOUBT = 0.5


def predict_ceiling(
    trace: OpTrace, gpu: Gpu, allowed: Mapping[str, Sequence[Precision]], fp32: Policy, *, most_micro: int
) -> Ceiling:
    """Bounds the speed of every policy of one model on one GPU, eager.

    Args:
        trace: one traced FP32 step.
        gpu: the card.
        allowed: precisions by layer.
        fp32: plain FP32 as it would run, in the micro-batch that fits.
        most_micro: the largest micro-batch of the workload: low precision may be what makes it fit.
    """
    stock = [predict_device_and_host_s(trace, fp32.model_copy(update={"backend": backend}), gpu) for backend in _backends(gpu)]
    device_s, host_s = predict_device_and_host_s(trace, fp32, gpu)
    steps = max(1, fp32.batch.effective // most_micro)
    pricers = [
        Pricer(trace, gpu, Setting(backend, padded), most_micro)
        for backend in _backends(gpu)
        for padded in (frozenset[str](), frozenset(allowed))
    ]
    least_device_s = steps * sum(_least_s(op, trace, allowed, pricers) for op in trace.ops)
    least_host_s = steps * sum(roofline.HOST_VIEW_S if op.kind == "view" else roofline.HOST_OP_S for op in trace.ops)
    optimizer_device_s, optimizer_host_s = predict_optimizer_s(trace, gpu, scaler=False)
    least_device_s, least_host_s = least_device_s + optimizer_device_s, least_host_s + optimizer_host_s

    def gain(host: float) -> float:
        best_s = min(max(device, host * issued) for device, issued in stock)
        return max(best_s / max(least_device_s, host * least_host_s), 1.0)

    best_s = min(max(times) for times in stock)
    floor_s = best_s / max(gain(1.0), gain(HOST_DOUBT))
    return Ceiling(
        fp32_step_s=max(device_s, host_s),
        best_fp32_step_s=best_s,
        floor_step_s=floor_s,
        host_bound=host_s > device_s,
        origin="predicted",
    )


def _backends(gpu: Gpu) -> list[Backend]:
    """Flags that change an FP32 step."""
    modes = (False, True) if "tf32" in gpu.rates_flops else (False,)
    return [Backend(tf32=tf32, channels_last=layout) for tf32 in modes for layout in (False, True)]


def _least_s(op: Op, trace: OpTrace, allowed: Mapping[str, Sequence[Precision]], pricers: Sequence[Pricer]) -> float:
    """Device seconds of an operation in the cheapest dtype that any assignment could give it."""
    dtypes = _dtypes(op, trace, allowed)
    return min(pricer.price(op, PlannedOp(dtype)).device_s for pricer in pricers for dtype in dtypes)


def _dtypes(op: Op, trace: OpTrace, allowed: Mapping[str, Sequence[Precision]]) -> set[Dtype]:
    """Dtypes an operation can have: pure layers compute everything in half, autocast leaves its float32 list alone."""
    choices = allowed.get(op.layer, ("fp32",))
    named = trace.ops[op.forward] if op.phase == "backward" and op.forward >= 0 else op
    float32_only = cast_rule(named.name) == "float32"
    found: set[Dtype] = {"fp32"}
    halves: tuple[tuple[Dtype, Precision, Precision], ...] = (("fp16", "fp16", "fp16_pure"), ("bf16", "bf16", "bf16_pure"))
    for dtype, ambient, pure in halves:
        if pure in choices or (ambient in choices and not float32_only):
            found.add(dtype)
    return found
