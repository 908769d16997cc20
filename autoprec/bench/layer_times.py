"""Measures where the time of a training step goes, layer by layer, forward and backward, from the profiler's own records.

On CUDA the times are those of the kernels on the device, so a slow host or gaps between kernels do not count; on a CPU they are
the operations' own times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from autoprec.bench.attribution import LOSS, LayerStack, float32_reference
from autoprec.bench.ops import HEAVY, kind_of
from autoprec.bench.trace import untouched

_MARK = "autoprec layer "
_NODE = "autograd::engine::evaluate_function"
_WARMUP_STEPS = 2
_TIMED_STEPS = 2
# The least an operation takes however little it computes: a lower precision cannot shorten that. Source: assumptions; kernels on
# current cards take 1.5 to 3 us at least, dispatching an operation on an x86 core 1 to 3 us.
_LEAST_US = {"cuda": 1.5, "cpu": 1.5}
# Large enough to leave every cache and small enough for every card (assumption).
_CAST_ELEMENTS = 1 << 24
_CAST_REPEATS = 10


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one forward and backward pass.

    Attributes:
        by_layer: own time by layer; ``<loss>`` for work outside every module.
        heavy_s: time in matmuls, convolutions, attention and RNNs.
        total_s: all of it; 0 where the profiler saw nothing (no permission to read the device's counters).
        heavy_work_s: of ``heavy_s`` what operations take beyond their least time.
        light_work_s: the same of all other operations.
    """

    by_layer: dict[str, float]
    heavy_s: float
    total_s: float
    heavy_work_s: float = 0.0
    light_work_s: float = 0.0


class _MarkingStack(LayerStack):
    """Writes a mark into the profiler's record around every module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._open: list[Any] = []

    def entered(self, name: str) -> None:
        mark = record_function(_MARK + name)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(mark)

    def left(self, name: str) -> None:
        self._open.pop().__exit__(None, None, None)


def measure_step(
    model: nn.Module, forward: Callable[[], Tensor], device: str, *, reference: bool = True, scale: float = 1.0
) -> StepTimes:
    """Times forward, loss and backward of one micro-batch. Waits for the GPU.

    Args:
        model: the model ``forward`` runs, with whatever policy is applied to it; left as it was.
        forward: returns the scalar loss.
        device: ``cuda`` or ``cpu``.
        reference: TF32 off.
        scale: loss scale, so that half gradients do not vanish.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with untouched(model), _reference(reference):
        for _ in range(_WARMUP_STEPS):
            _step(model, forward, scale)
        with _MarkingStack(model) as stack:
            with profile(activities=activities) as recorded:
                for _ in range(_TIMED_STEPS):
                    _step(model, forward, scale)
                if device == "cuda":
                    torch.cuda.synchronize()
            return _sum_up(recorded.events() or [], stack, device)


@contextmanager
def _reference(on: bool) -> Iterator[None]:
    if on:
        with float32_reference():
            yield
    else:
        yield


def _step(model: nn.Module, forward: Callable[[], Tensor], scale: float) -> None:
    (forward() * scale).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad = None


def _sum_up(events: Any, stack: LayerStack, device: str) -> StepTimes:
    by_layer: dict[str, float] = {}
    heavy = total = heavy_work = light_work = 0.0
    for event in events:
        if event.device_type.name != "CPU" or event.name.startswith((_MARK, "ProfilerStep")):
            continue
        microseconds = _device_us(event) if device == "cuda" else _cpu_us(event)
        if not microseconds:
            continue
        seconds = microseconds * 1e-6 / _TIMED_STEPS
        layer = _layer_of(event, stack)
        by_layer[layer] = by_layer.get(layer, 0.0) + seconds
        total += seconds
        launches = len(event.kernels) if device == "cuda" else 1
        work = max(microseconds - launches * _LEAST_US[device], 0.0) * 1e-6 / _TIMED_STEPS
        if kind_of(event.name.rpartition("::")[2].rstrip("_")) in HEAVY:
            heavy += seconds
            heavy_work += work
        else:
            light_work += work
    return StepTimes(by_layer, heavy, total, heavy_work, light_work)


def _device_us(event: Any) -> float:
    return float(sum(kernel.duration for kernel in event.kernels))


def _cpu_us(event: Any) -> float:
    return float(event.self_cpu_time_total) if event.name.startswith("aten::") else 0.0


def _layer_of(event: Any, stack: LayerStack) -> str:
    """The mark or autograd node around an event, whichever is nearer."""
    parent = event
    while parent is not None:
        if parent.name.startswith(_MARK):
            return str(parent.name[len(_MARK) :])
        if parent.name.startswith(_NODE):
            return stack.maker_of_number(parent.sequence_nr)
        parent = parent.cpu_parent
    return LOSS


def measure_cast(device: str) -> float:
    """Seconds to move one byte through a cast from float32 to a 16-bit type (bytes read plus bytes written). Waits for the
    GPU."""
    source = torch.ones(_CAST_ELEMENTS, device=device)
    source.to(torch.bfloat16)
    moved = _CAST_ELEMENTS * (4 + 2) * _CAST_REPEATS
    if device == "cuda":
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        start.record()
        for _ in range(_CAST_REPEATS):
            source.to(torch.bfloat16)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / moved
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(_CAST_REPEATS):
            source.to(torch.bfloat16)
    return sum(_cpu_us(event) for event in recorded.events() or []) * 1e-6 / moved
