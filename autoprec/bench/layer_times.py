"""Measures where the time of a training step goes, layer by layer, forward and backward, from the profiler's own records.

On CUDA the times are those of the kernels on the device, so a slow host or gaps between kernels do not count; on a CPU they are
the operations' own times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from autoprec.bench.attribution import LOSS, LayerStack, float32_reference
from autoprec.bench.ops import HEAVY, kind_of
from autoprec.bench.trace import untouched

_MARK = "autoprec layer "
_NODE = "autograd::engine::evaluate_function"
_NOT_WORK = (_MARK, "ProfilerStep")
_WARMUP_STEPS = 1
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
            return _sum_up(_raw(recorded), stack, device)


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


def _raw(recorded: profile) -> Sequence[Any]:
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    return results.events() if results is not None else []  # type: ignore[no-untyped-call]


def _sum_up(events: Sequence[Any], stack: LayerStack, device: str) -> StepTimes:
    """Adds the records up by layer.

    Args:
        events: the profiler's raw records. Its own list of events in Python says the same, but making that took 5 s of the 7 s
            that a step of a 48-block transformer cost here.
        stack: knows which layer made an autograd node.
        device: whose times count.
    """
    kernels = _kernels(events)
    by_layer: dict[str, float] = {}
    heavy = total = heavy_work = light_work = 0.0
    for host in _host_records(events, stack):
        took_s, launches = kernels.get(host.number, (0.0, 0)) if device == "cuda" else (host.self_s, 1)
        if not took_s:
            continue
        seconds = took_s / _TIMED_STEPS
        work = max(took_s - launches * _LEAST_US[device] * 1e-6, 0.0) / _TIMED_STEPS
        by_layer[host.layer] = by_layer.get(host.layer, 0.0) + seconds
        total += seconds
        if kind_of(host.name.rpartition("::")[2].rstrip("_")) in HEAVY:
            heavy += seconds
            heavy_work += work
        else:
            light_work += work
    return StepTimes(by_layer, heavy, total, heavy_work, light_work)


def _kernels(events: Sequence[Any]) -> dict[int, tuple[float, int]]:
    """Device seconds, and how many kernels those were, by the number of the operation that launched them."""
    found: dict[int, tuple[float, int]] = {}
    for event in events:
        if event.device_type() != DeviceType.CPU and not event.name().startswith(_NOT_WORK):
            number = event.linked_correlation_id()
            seconds, launches = found.get(number, (0.0, 0))
            found[number] = seconds + (event.end_ns() - event.start_ns()) * 1e-9, launches + 1
    found.pop(0, None)  # belongs to no operation
    return found


@dataclass
class _HostRecord:
    """One operation on the host: the layer it belongs to, and its seconds less those of what it calls (0 for what is no work)."""

    number: int
    name: str
    layer: str
    end_ns: int
    self_s: float


def _host_records(events: Sequence[Any], stack: LayerStack) -> Iterator[_HostRecord]:
    """Operations, each with the layer of the mark or autograd node around it, whichever is nearer."""
    host = [
        (event.start_thread_id(), event.start_ns(), -event.end_ns(), index)
        for index, event in enumerate(events)
        if event.device_type() == DeviceType.CPU
        and event.linked_correlation_id() == 0  # else a call into the driver
        and event.start_thread_id() == event.end_thread_id()
    ]
    around: list[_HostRecord] = []
    records: list[_HostRecord] = []
    thread: int | None = None
    for of_thread, start_ns, minus_end_ns, index in sorted(host):
        if of_thread != thread:
            thread, around = of_thread, []
        while around and around[-1].end_ns <= start_ns:
            around.pop()
        event, end_ns = events[index], -minus_end_ns
        name: str = event.name()
        layer = _layer_of(name, event.sequence_nr(), around, stack)
        seconds = (end_ns - start_ns) * 1e-9
        if around and around[-1].name.startswith("aten::"):
            around[-1].self_s -= seconds
        record = _HostRecord(event.correlation_id(), name, layer, end_ns, seconds if name.startswith("aten::") else 0.0)
        around.append(record)
        if not name.startswith(_NOT_WORK):
            records.append(record)
    return iter(records)


def _layer_of(name: str, node: int, around: Sequence[_HostRecord], stack: LayerStack) -> str:
    if name.startswith(_MARK):
        return name[len(_MARK) :]
    if name.startswith(_NODE):
        return stack.maker_of_number(node)
    return around[-1].layer if around else LOSS


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
    return sum(record.self_s for record in _host_records(_raw(recorded), LayerStack(nn.Module()))) / moved
