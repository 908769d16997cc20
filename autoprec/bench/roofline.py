"""Predicts step time and peak memory of a policy on a GPU that is not here, from the operations of one traced FP32 step.

Each operation takes the longer of its arithmetic and its memory traffic; the step takes the longer of the device's total and the
host's launches. What comes out is a ranking with sane proportions, never a measurement: callers mark it ``predicted``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoprec.bench.dtype_plan import BYTES, Dtype, PlannedOp, plan_dtypes
from autoprec.bench.gpus import Gpu, RateMode
from autoprec.bench.optrace import Op, OpTrace, Value
from autoprec.policy import Backend, Policy, Precision
from autoprec.records import Look

TENSOR_EFFICIENCY = 0.85
"""Share of a small card's dense tensor-core peak that a large matmul reaches. Assumption; GEMM benchmarks of GeForce cards."""

MATMUL_CEILING_FLOPS = 1.5e15
CONV_CEILING_FLOPS = 0.6e15
"""What feeding the tensor cores costs: 1/rate = 1/(efficiency x peak) + 1/ceiling, so that the largest cards reach a smaller
share.

Source: one H200 (989e12 peak), torch 2.11. MLP 1023-8191-8191-10 padded in fp16: 3.7e12 operations in 8.4 ms, all other
work included, are 0.44 of the peak. ResNet-50 in fp16 channels_last: 3.15e12 in 23 ms of which about 10 ms are norms and
activations.
"""

FP32_EFFICIENCY = 0.8
"""Share of the plain float32 peak that matmuls reach.

Source: one H200, torch 2.11: the same MLP in fp32, 72.3 ms are 0.76 of the peak.
"""

FP32_CONV_EFFICIENCY = 0.45
"""The same for convolutions.

Source: one H200, torch 2.11: ResNet-50 in fp32, 126.8 ms with about 20 ms of norms and activations.
"""

BANDWIDTH_EFFICIENCY = 0.75
"""Share of the datasheet's bandwidth that elementwise and norm kernels reach. Assumption; stream benchmarks reach 0.8 to 0.9."""

NCHW_SLOWDOWN = 2.3
"""How much longer the arithmetic of a tensor-core convolution takes on NCHW tensors, besides converting its operands to NHWC.

Source: one H200, torch 2.11: ResNet-50, 43.0 ms in fp16 NCHW against 23.0 ms in NHWC. Converting inputs and outputs of all
convolutions at full bandwidth explains 8 of these 20 ms; the same factor gives 65 ms for TF32, measured 59.9 ms.
"""

ODD_SIZE_PENALTY = 4.0
"""How much longer a 16-bit or TF32 matmul takes whose features are not a multiple of 8.

Source: one H200, torch 2.11: MLP 1023-8191-8191-10 in fp16: 27.0 ms unpadded, 8.4 ms padded, 2 ms of each are other work.
"""

KERNEL_S = 3e-6
"""Least time of one kernel on the device. Assumption: typical of small kernels on current cards."""

HOST_OP_S = 12e-6
"""Host time of one dispatched operation in eager training, autograd included.

Assumption for a desktop processor. Host-bound nets on one H200 machine (MobileNetV3, 25 ms for about 540 operations) give 46e-6
on a slower server core.
"""

HOST_VIEW_S = 3e-6
"""Host time of a view, which launches nothing. Assumption."""

HOST_STEP_S = 0.3e-3
"""Host time of a step outside the model: batch, zero_grad, the optimizer's Python. Assumption."""

SCALER_HOST_S = 0.2e-3
"""Host time of GradScaler: unscale, the wait for found_inf, update. Source: one H200, torch 2.11: small MLP, AMP over FP32."""

OPTIMIZER_TENSORS_PER_KERNEL = 30
"""Tensors one multi-tensor optimizer kernel takes. Assumption: foreach kernels take up to about 30 to 110 at once."""

OPTIMIZER_OPS = 10
"""Multi-tensor operations in a foreach optimizer step. Assumption: AdamW without ``fused``."""

FUSED_SHARE = 0.4
"""Share of elementwise kernels and of their traffic that is left after torch.compile's fusion.

Source: one H200, torch 2.11: GroupNorm UNet 22.2 -> 13.2 ms and ResNet-50 43 -> 20 ms under compile; set between the two.
"""

COMPILED_HOST_SHARE = 0.5
"""Host time of a launch from compiled code against eager. Source: one H200, torch 2.11: ResNet-18 and LSTM under compile."""

GRAPH_LAUNCH_S = 50e-6
"""Host time of replaying a CUDA graph. Assumption."""


@dataclass(frozen=True)
class Setting:
    """What besides precision changes an operation's time."""

    backend: Backend = field(default_factory=Backend)
    padded: frozenset[str] = frozenset()
    compiled: bool = False


@dataclass(frozen=True)
class OpCost:
    """Device and host seconds of one operation with its casts; ``launches`` kernels, backward casts included."""

    device_s: float
    host_s: float
    launches: int


class Pricer:
    """Prices the operations of one trace on one GPU; a micro-batch may be smaller or larger than the traced one."""

    def __init__(self, trace: OpTrace, gpu: Gpu, setting: Setting, micro: int) -> None:
        self._gpu = gpu
        self._setting = setting
        self._scale = micro / max(trace.samples, 1)
        self._odd = _odd_layers(trace)

    def price(self, op: Op, planned: PlannedOp) -> OpCost:
        if op.kind == "view":
            return OpCost(0.0, HOST_VIEW_S, 0)
        fused = self._setting.compiled and op.kind in ("elementwise", "reduction", "norm", "copy", "gather")
        moved = sum(self._bytes(value, planned.dtype) for value in (*op.inputs, *op.outputs))
        memory_s = self._memory_s(moved) * (FUSED_SHARE if fused else 1.0)
        compute_s = self._compute_s(op, planned.dtype) if op.flops else self._norm_layout_s(op, planned.dtype)
        device_s = max(memory_s, compute_s, 0.0 if fused else KERNEL_S)
        device_s += self._padding_s(op, planned.dtype)
        cast_share = FUSED_SHARE if self._setting.compiled else 1.0
        casts = 2 * planned.casts
        cast_s = (
            max(self._memory_s(2 * (planned.cast_bytes * self._scale + planned.weight_cast_bytes)), casts * KERNEL_S) * cast_share
        )
        launches = 1 + casts
        return OpCost(device_s + cast_s, launches * HOST_OP_S * (FUSED_SHARE if fused else 1.0), launches)

    def _bytes(self, value: Value, dtype: Dtype) -> float:
        item = BYTES[dtype] if value.floating and value.origin != "buffer" else value.item_bytes
        return value.elements * item * (self._scale if value.batched else 1.0)

    def _memory_s(self, moved: float) -> float:
        return moved / (self._gpu.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)

    def _compute_s(self, op: Op, dtype: Dtype) -> float:
        """Arithmetic and layout conversion; a library takes the plain float32 units where TF32 would be slower."""
        if dtype != "fp32":
            return self._tensor_core_s(op, dtype)
        plain = (
            op.flops
            * self._scale
            / (self._gpu.peak_flops("fp32") * (FP32_CONV_EFFICIENCY if op.kind == "conv" else FP32_EFFICIENCY))
        )
        return min(plain, self._tensor_core_s(op, "tf32")) if self._setting.backend.tf32 else plain

    def _tensor_core_s(self, op: Op, mode: RateMode) -> float:
        if mode == "fp16" and self._setting.backend.fp16_accumulation and op.kind == "matmul":
            mode = "fp16_accumulate_fp16"
        ceiling = CONV_CEILING_FLOPS if op.kind == "conv" else MATMUL_CEILING_FLOPS
        rate = 1 / (1 / (self._gpu.peak_flops(mode) * TENSOR_EFFICIENCY) + 1 / ceiling)
        odd = op.layer in self._odd and not self._setting.compiled and op.layer not in self._setting.padded
        layout_s = 0.0
        if op.kind == "conv" and not self._setting.backend.channels_last and not self._setting.compiled:
            layout_s = self._transpose_s(op, "fp32" if mode == "tf32" else "fp16")
            rate /= NCHW_SLOWDOWN
        return op.flops * self._scale / rate * (ODD_SIZE_PENALTY if odd else 1.0) + layout_s

    def _transpose_s(self, op: Op, dtype: Dtype) -> float:
        """Every image-shaped operand read and written once."""
        images = [value for value in (*op.inputs, *op.outputs) if len(value.shape) >= 4 and value.batched]
        return self._memory_s(2 * sum(self._bytes(value, dtype) for value in images))

    def _norm_layout_s(self, op: Op, dtype: Dtype) -> float:
        """GroupNorm and InstanceNorm have NCHW kernels only. Source: one H200, torch 2.11: channels_last is 1.4x slower on the
        UNet."""
        nchw_only = "group_norm" in op.name or "instance_norm" in op.name
        converts = self._setting.backend.channels_last and not self._setting.compiled and nchw_only
        return self._transpose_s(op, dtype) if converts else 0.0

    def _padding_s(self, op: Op, dtype: Dtype) -> float:
        """Padding on the fly writes the padded operands once and slices the result."""
        if op.layer not in self._setting.padded or not op.is_heavy or op.layer not in self._odd:
            return 0.0
        return self._memory_s(2 * sum(self._bytes(value, dtype) for value in (*op.inputs, *op.outputs)))


def _odd_layers(trace: OpTrace) -> frozenset[str]:
    """Layers with a matrix operand whose features are not a multiple of 8; up to 4 input channels count as an image's."""
    odd = set()
    for op in trace.ops:
        if op.phase == "forward" and op.is_heavy:
            for value in op.inputs:
                if value.origin == "parameter" and len(value.shape) >= 2:
                    first, second = value.shape[:2]
                    if first % 8 or (second % 8 and second > 4):
                        odd.add(op.layer)
    return frozenset(odd)


def predict_step_s(trace: OpTrace, policy: Policy, gpu: Gpu) -> float:
    """Seconds of one optimizer step of ``policy`` on ``gpu``: all its micro-steps, casts, launches and the optimizer."""
    return max(predict_device_and_host_s(trace, policy, gpu))


def predict_device_and_host_s(trace: OpTrace, policy: Policy, gpu: Gpu) -> tuple[float, float]:
    """Seconds that the device and the host are busy with one optimizer step; the longer one is the step."""
    compiled = policy.execution != "eager"
    setting = Setting(policy.backend, frozenset(policy.padding.layers), compiled)
    pricer = Pricer(trace, gpu, setting, policy.batch.micro)
    plan = plan_dtypes(trace, policy.precision_of)
    costs = [pricer.price(op, planned) for op, planned in zip(trace.ops, plan, strict=True)]
    device_s = sum(cost.device_s for cost in costs)
    host_s = sum(cost.host_s for cost in costs)
    if compiled:
        host_s *= COMPILED_HOST_SHARE
    if policy.execution == "compile_cudagraphs":
        host_s = GRAPH_LAUNCH_S
    steps = policy.batch.accumulation_steps
    optimizer_device_s, optimizer_host_s = predict_optimizer_s(trace, gpu, scaler=policy.needs_loss_scale)
    return steps * device_s + optimizer_device_s, steps * host_s + optimizer_host_s


def predict_optimizer_s(trace: OpTrace, gpu: Gpu, *, scaler: bool) -> tuple[float, float]:
    """Device and host seconds of the optimizer: parameters and state read and written, gradients read (twice with a scaler)."""
    moved = trace.num_parameters * 4 * 3 + 2 * trace.optimizer_state_bytes
    kernels = OPTIMIZER_OPS * (1 + trace.num_parameter_tensors // OPTIMIZER_TENSORS_PER_KERNEL)
    if scaler:
        moved += trace.num_parameters * 4 * 2
        kernels += 1 + trace.num_parameter_tensors // OPTIMIZER_TENSORS_PER_KERNEL
    device_s = max(moved / (gpu.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY), kernels * KERNEL_S)
    return device_s, HOST_STEP_S + kernels * HOST_OP_S + (SCALER_HOST_S if scaler else 0.0)


def predict_peak_bytes(trace: OpTrace, policy: Policy) -> int:
    """Peak memory of a step: parameters, gradients, optimizer state, kept activations and the largest operation's own tensors.

    Activations are counted in the dtype of the operation that keeps them, parameters' half copies once. The allocator's
    fragmentation, workspaces and the CUDA context are not in it.
    """
    scale = policy.batch.micro / max(trace.samples, 1)
    plan = plan_dtypes(trace, policy.precision_of)
    kept: dict[tuple[int, int], float] = {}
    for saved in trace.saved:
        dtype = plan[saved.op].dtype if saved.op >= 0 else "fp32"
        item = BYTES[dtype] if saved.value.floating else saved.value.item_bytes
        size = saved.value.elements * item * (scale if saved.value.batched else 1.0)
        kept[saved.value.id, item] = max(kept.get((saved.value.id, item), 0.0), size)
    copies = {
        value.id: value.elements * BYTES[planned.dtype]
        for op, planned in zip(trace.ops, plan, strict=True)
        if planned.dtype != "fp32" and planned.casts
        for value in op.inputs
        if value.origin == "parameter"
    }
    largest = max((_op_bytes(op, planned.dtype, scale) for op, planned in zip(trace.ops, plan, strict=True)), default=0.0)
    fixed = trace.num_parameters * 4 * 2 + trace.optimizer_state_bytes
    return int(fixed + sum(kept.values()) + sum(copies.values()) + largest)


def _op_bytes(op: Op, dtype: Dtype, scale: float) -> float:
    if op.kind == "view":
        return 0.0
    return sum(
        value.elements * (BYTES[dtype] if value.floating else value.item_bytes) * (scale if value.batched else 1.0)
        for value in op.outputs
    )


def predict_layer_times(trace: OpTrace, gpu: Gpu, precisions: Sequence[Precision]) -> dict[str, dict[Precision, float]]:
    """Seconds of forward and backward by layer and precision, each under a uniform policy; launches count where they dominate.

    A step of which the host is the bottleneck is charged by launches, since casts then cost a launch each.
    """
    times: dict[str, dict[Precision, float]] = {}
    for precision in precisions:
        for layer, seconds in _uniform_times(trace, gpu, precision).items():
            times.setdefault(layer, {})[precision] = seconds
    return times


def _uniform_times(trace: OpTrace, gpu: Gpu, precision: Precision) -> dict[str, float]:
    pricer = Pricer(trace, gpu, Setting(Backend(channels_last=True)), trace.samples)
    plan = plan_dtypes(trace, lambda _name: precision)
    costs = [pricer.price(op, planned) for op, planned in zip(trace.ops, plan, strict=True)]
    host_bound = sum(cost.host_s for cost in costs) > sum(cost.device_s for cost in costs)
    seconds: dict[str, float] = {}
    for op, cost in zip(trace.ops, costs, strict=True):
        seconds[op.layer] = seconds.get(op.layer, 0.0) + (cost.host_s if host_bound else cost.device_s)
    return seconds


def predict_matmul_share(trace: OpTrace, gpu: Gpu) -> float:
    """Share of the FP32 step's device time in matmuls, convolutions, attention and RNNs, 0 to 1."""
    pricer = Pricer(trace, gpu, Setting(), trace.samples)
    costs = [(op, pricer.price(op, PlannedOp("fp32")).device_s) for op in trace.ops]
    total = sum(seconds for _, seconds in costs)
    return sum(seconds for op, seconds in costs if op.is_heavy) / total if total else 0.0


def predict_cast_s_per_byte(gpu: Gpu) -> float:
    """Seconds to move one byte through a cast (read plus write counted)."""
    return 1.0 / (gpu.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)


class RooflineSpeed:
    """Speed and memory of policies on one GPU, predicted from one trace; remembers what it has predicted."""

    def __init__(self, trace: OpTrace, gpu: Gpu | None, look: Look | None = None) -> None:
        """Keeps the trace.

        Args:
            trace: one traced FP32 step.
            gpu: the card to predict; None where only memory is asked for (a CPU that measures its own time).
            look: what the trace was taken from; its loss and layers are not needed to predict.
        """
        self._trace = trace
        self._gpu = gpu
        self._steps: dict[str, float] = {}

    def step_s(self, policy: Policy) -> float:
        """Predicted seconds of one optimizer step.

        Raises:
            ValueError: no GPU was given.
        """
        key = policy.setup_hash()
        if key not in self._steps:
            self._steps[key] = predict_step_s(self._trace, policy, self._card())
        return self._steps[key]

    def host_bound(self, policy: Policy) -> bool:
        """Whether the device is predicted to wait for the host."""
        device_s, host_s = predict_device_and_host_s(self._trace, policy, self._card())
        return host_s > device_s

    def peak_bytes(self, policy: Policy) -> int:
        """Predicted peak bytes of one step."""
        return predict_peak_bytes(self._trace, policy)

    def _card(self) -> Gpu:
        if self._gpu is None:
            raise ValueError("No GPU was given: there is no step time to predict.")
        return self._gpu
