"""The range screen: how large values and gradients get in float32, and what that forbids in fp16.

Runs a few real FP32 steps under the operation recorder and keeps the largest finite |x| of every operation's results. A forward
overflow is nobody's but the layer's: no loss scale helps. Gradients can be moved by the scale, all together: they forbid fp16
only to a layer whose gradients overflow at every scale that the other layers can live with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.attribution import LayerStack, float32_reference, layer_names
from autoprec.bench.dtype_plan import plan_dtypes
from autoprec.bench.ops import DEEP_SUMS, EXP_LIKE, RANDOM, base_name, no_half_kernel, tensors_in
from autoprec.bench.optrace import Op, OpTrace
from autoprec.bench.trace import OpRecorder
from autoprec.policy import Precision
from autoprec.records import Risk
from autoprec.runtime.tree import iter_tensors

FP16_MAX = 65504.0
"""The largest fp16 number. Source: IEEE 754 binary16."""

FP16_LEAST_EXPONENT = -24
"""The least positive fp16 number is 2^-24. Source: IEEE 754 binary16, subnormal."""

LARGE = 512.0
"""From here on fp16 numbers lie half a unit or more apart. Source: 11 bits of significand; the threshold itself is an
assumption."""

DEEP = 4096
"""A sum over this many elements of size 16 reaches fp16's limit."""

UNSERVED = 0.1
"""Share of a layer's non-zero gradients under 2^-24 from which a scale is too small for the layer. Assumption."""

LARGEST_EXPONENT, LEAST_EXPONENT = 64, -96
SCALE_EXPONENTS = range(25)
"""Loss scales worth having: GradScaler's floor of 1 up to 2^24."""

USUAL_SCALE = 2.0**13
"""The middle of the search space's initial scales, 2^12 to 2^14."""

HEADROOM = 2.0
"""How much larger than seen gradients may get. Assumption: other batches, and the rounding of the low pass itself."""

# Larger values are masks (finfo.min, -1e30 and the like), not results.
_MASK = 1e30


@dataclass
class LayerRange:
    """What the screen saw of one layer.

    Attributes:
        max_output: largest |x| of its outputs and intermediate results.
        max_grad: largest |gradient| of its outputs.
        max_inner_grad: the same over every gradient that its own operations read or write in fp16 under stock autocast,
            those of its parameters included; what only passes through a container does not count.
        grads: non-zero gradient elements of its outputs by binary exponent, from ``LEAST_EXPONENT`` up.
    """

    max_output: float = 0.0
    max_grad: float = 0.0
    max_inner_grad: float = 0.0
    grads: tuple[float, ...] = ()

    def underflow_share(self, scale: float) -> float:
        """Share of the non-zero gradients that a loss scale leaves under 2^-24."""
        total = sum(self.grads)
        if not total:
            return 0.0
        limit = FP16_LEAST_EXPONENT - _exponent(scale)
        return sum(count for index, count in enumerate(self.grads) if LEAST_EXPONENT + index < limit) / total


def _exponent(scale: float) -> int:
    return round(math.log2(scale))


@dataclass(frozen=True)
class Screen:
    """Ranges by layer, the best common loss scale, and the risks they mean."""

    layers: dict[str, LayerRange]
    scale: float
    risks: dict[str, tuple[Risk, ...]]


class RangeRecorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Also notes the largest finite |x| of every operation's inputs (where it multiplies matrices) and results."""

    def __init__(self, stack: LayerStack, model: nn.Module, data: Any) -> None:
        super().__init__(stack, model, data)
        self.largest: list[tuple[Tensor | None, Tensor | None]] = []
        self.grads: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._made_forward = 0
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        before = [tensor for tensor in (*tensors_in(args), *tensors_in(kwargs or {})) if tensor.is_floating_point()]
        if self.in_backward and not self._stack.inside:  # what was made before is a saved activation, not a gradient
            before = [tensor for tensor in before if self._memory.value(tensor).id >= self._made_forward]
        read = None if base_name(func) in RANDOM else _largest(before)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        op = self.ops[-1]
        quiet = op.kind == "view" or not op.is_work
        self.largest.append((None, None) if quiet else (read, _largest(tensors_in(out))))
        return out

    def backward_begins(self) -> None:
        """From here on new values are gradients."""
        self.in_backward = True
        self._made_forward = self._memory.count

    def note_grad(self, name: str, grad: Tensor) -> None:
        """Notes the largest |gradient| of a layer's output, and how its gradients are spread over the exponents."""
        self._paused = True
        size = grad.detach().abs().float()
        counts = torch.histc(size.log2(), LARGEST_EXPONENT - LEAST_EXPONENT, LEAST_EXPONENT, LARGEST_EXPONENT)
        self.grads.setdefault(name, []).append((size.amax(), counts))
        self._paused = False


def _largest(tensors: Iterable[Tensor]) -> Tensor | None:
    found = [_finite_max(tensor) for tensor in tensors if _is_dense(tensor)]
    return torch.stack(found).amax() if found else None


def _is_dense(tensor: Tensor) -> bool:
    """True for floating tensors with elements and a plain layout; sparse gradients are left out."""
    return tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel() > 0


def _finite_max(tensor: Tensor) -> Tensor:
    size = tensor.detach().abs()
    return torch.where(size < _MASK, size, 0.0).amax().float()


@dataclass(frozen=True)
class StepRanges:
    """One step's operations with the largest |x| they read and wrote, and gradients of the layers' outputs."""

    ops: tuple[Op, ...]
    read: tuple[float, ...]
    written: tuple[float, ...]
    grads: dict[str, tuple[float, tuple[float, ...]]]


def record_step(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], layers: Sequence[str]) -> StepRanges:
    """Runs forward, loss and backward in FP32 and notes ranges; leaves the gradients on the parameters. Waits for the GPU."""
    known = set(layers)
    handles: list[Any] = []
    try:
        with float32_reference(), LayerStack(model) as stack:
            recorder = RangeRecorder(stack, model, batch)
            for module, names in layer_names(model).items():
                if names[0] in known:
                    handles.append(module.register_forward_hook(_gradient_hook(names[0], recorder)))
            with recorder, torch.enable_grad():
                value = loss(model, batch)
                recorder.backward_begins()
                value.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    read = _numbers([pair[0] for pair in recorder.largest])
    written = _numbers([pair[1] for pair in recorder.largest])
    grads = {name: _merge_grads(found) for name, found in recorder.grads.items()}
    return StepRanges(tuple(recorder.ops), read, written, grads)


def _gradient_hook(name: str, recorder: RangeRecorder) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in iter_tensors(output):
            if tensor.requires_grad and _is_dense(tensor):
                tensor.register_hook(lambda grad: recorder.note_grad(name, grad))  # type: ignore[no-untyped-call]

    return hook


def _numbers(tensors: list[Tensor | None]) -> tuple[float, ...]:
    found = [tensor for tensor in tensors if tensor is not None]
    values = iter(torch.stack(found).tolist() if found else [])
    return tuple(0.0 if tensor is None else next(values) for tensor in tensors)


def _merge_grads(found: list[tuple[Tensor, Tensor]]) -> tuple[float, tuple[float, ...]]:
    largest = float(torch.stack([size for size, _ in found]).amax())
    return largest, tuple(torch.stack([counts for _, counts in found]).sum(0).tolist())


def screen(steps: Sequence[StepRanges], layers: Sequence[str]) -> Screen:
    """Puts the steps together: ranges, the common loss scale, and hard and soft risks for fp16."""
    ranges = {name: LayerRange() for name in layers}
    for step in steps:
        _add_step(ranges, step)
    scale = common_scale(list(ranges.values()))
    pinned: dict[Precision, dict[str, str]] = {"fp16": {}, "fp16_pure": {}}
    for step in steps:
        pinned["fp16"] |= {name: text for name, text in _autocast_overflow(step, layers).items() if name not in pinned["fp16"]}
        pinned["fp16_pure"] |= {
            name: text for name, text in _pure_overflow(step, layers).items() if name not in pinned["fp16_pure"]
        }
    ops = {name: {op.name: op for step in steps for op in step.ops if op.layer == name} for name in layers}
    return Screen(ranges, scale, {name: tuple(_risks(name, ranges[name], scale, pinned, ops[name])) for name in layers})


def _add_step(ranges: dict[str, LayerRange], step: StepRanges) -> None:
    plan = plan_dtypes(_trace_of(step), lambda _name: "fp16")
    for op, planned, read, written in zip(step.ops, plan, step.read, step.written, strict=True):
        seen = ranges.get(op.layer)
        if seen is None:
            continue
        if op.phase == "forward" or op.recomputed:
            seen.max_output = max(seen.max_output, written)
        elif planned.dtype == "fp16":
            seen.max_inner_grad = max(seen.max_inner_grad, read, written)
    for name, (largest, counts) in step.grads.items():
        seen = ranges[name]
        seen.max_grad = max(seen.max_grad, largest)
        seen.grads = tuple(a + b for a, b in zip(seen.grads, counts, strict=True)) if seen.grads else counts


def _trace_of(step: StepRanges) -> OpTrace:
    return OpTrace(step.ops, (), 1, 0, 0, 0)


def common_scale(ranges: Sequence[LayerRange]) -> float:
    """The power of two that serves the most layers: nothing overflows, few gradients underflow.

    Of equals the nearest to ``USUAL_SCALE``, where training starts and from where only an overflow moves it.
    """
    costs = {2.0**exponent: sum(_unserved(seen, 2.0**exponent) for seen in ranges) for exponent in SCALE_EXPONENTS}
    least = min(costs.values()) + 1e-9
    equals = [scale for scale, cost in costs.items() if cost <= least]
    return min(equals, key=lambda scale: abs(math.log2(scale / USUAL_SCALE)))


def _unserved(seen: LayerRange, scale: float) -> float:
    if seen.max_inner_grad * scale * HEADROOM > FP16_MAX:
        return 1.0
    share = seen.underflow_share(scale)
    return share if share > UNSERVED else 0.0


def _autocast_overflow(step: StepRanges, layers: Sequence[str]) -> dict[str, str]:
    """Layers to keep out of fp16 autocast, found in the order of the data flow.

    Once a layer is fp32 its result is too, and layers that only pass it on are then safe; so one is pinned at a time.
    """
    pinned: dict[str, str] = {}
    known = set(layers)
    trace = _trace_of(step)
    for _ in range(len(layers)):
        plan = plan_dtypes(trace, lambda name: "fp32" if name in pinned else "fp16")
        for op, planned, read, written in zip(step.ops, plan, step.read, step.written, strict=True):
            if op.layer not in known or op.layer in pinned or planned.dtype != "fp16" or op.phase == "backward":
                continue
            if max(read if op.is_heavy else 0.0, written) > FP16_MAX:
                pinned[op.layer] = _overflow_text(op, max(read if op.is_heavy else 0.0, written))
                break
        else:
            return pinned
    return pinned


def _pure_overflow(step: StepRanges, layers: Sequence[str]) -> dict[str, str]:
    """Layers with an input or result out of fp16's range, whatever autocast would have done."""
    pinned: dict[str, str] = {}
    known = set(layers)
    for op, read, written in zip(step.ops, step.read, step.written, strict=True):
        if op.layer in known and op.phase == "forward" and max(read, written) > FP16_MAX and op.layer not in pinned:
            pinned[op.layer] = _overflow_text(op, max(read, written))
    return pinned


def _overflow_text(op: Op, largest: float) -> str:
    return f"'{op.name}' reaches {largest:.3g} in FP32; fp16 ends at 65504"


def _risks(
    name: str, seen: LayerRange, scale: float, pinned: dict[Precision, dict[str, str]], ops: dict[str, Op]
) -> Iterable[Risk]:
    halves: tuple[Precision, ...] = ("fp16", "fp16_pure")
    for precision in halves:
        if name in pinned[precision]:
            yield Risk(precision=precision, kind="range", hard=True, text=pinned[precision][name])
        elif seen.max_output > LARGE:
            text = f"values up to {seen.max_output:.3g}, where fp16 numbers lie half a unit or more apart"
            yield Risk(precision=precision, kind="range", hard=False, text=text)
        if seen.max_inner_grad * scale > FP16_MAX:
            text = (
                f"its gradients reach {seen.max_inner_grad:.3g} and overflow at the loss scale of {scale:g} that the others need"
            )
            yield Risk(precision=precision, kind="range", hard=True, text=text)
        elif seen.underflow_share(scale) > UNSERVED:
            share = seen.underflow_share(scale)
            text = f"{share:.0%} of its gradients fall under 2^-24 at a loss scale of {scale:g}"
            yield Risk(precision=precision, kind="range", hard=False, text=text)
    yield from _kind_risks(ops)


def _kind_risks(ops: dict[str, Op]) -> Iterable[Risk]:
    """What the kind of an operation says, whatever the values seen: FFT and linear algebra; exponentials and deep sums in
    pure."""
    lacking = sorted(name for name in ops if no_half_kernel(name))
    if lacking:
        text = f"{', '.join(lacking)} has no half-precision kernel, or one for some sizes only"
        for precision in ("fp16", "bf16", "fp16_pure", "bf16_pure"):
            yield Risk(precision=precision, kind="unsupported", hard=True, text=text)
    steep = sorted(name for name in ops if name in EXP_LIKE)
    deep = sorted(name for name, op in ops.items() if name in DEEP_SUMS and _elements_per_result(op) >= DEEP)
    if steep or deep:
        text = f"{', '.join([*steep, *deep])} may leave fp16's range on other data"
        yield Risk(precision="fp16_pure", kind="range", hard=False, text=text)


def _elements_per_result(op: Op) -> int:
    read = max((value.elements for value in op.inputs), default=0)
    return read // max(op.outputs[0].elements if op.outputs else 1, 1)
