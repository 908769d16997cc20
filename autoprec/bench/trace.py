"""Finds the layers of a model by running it, and records the operations of one FP32 training step.

Nothing about a model is guessed from its classes: a layer is a module that itself issues floating-point operations while forward,
loss and backward of one real batch run under a dispatch mode and a module stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.bench.attribution import LOSS, LayerStack, created_nodes, float32_reference, layer_names, running_node
from autoprec.bench.ops import base_name, draws_random_numbers, flops_of, kind_of, tensors_in
from autoprec.bench.optrace import Op, OpTrace, Origin, Saved, Value, elements_in_memory
from autoprec.records import Edge, Layer
from autoprec.runtime.layers import layer_kind, own_shapes
from autoprec.runtime.tree import iter_tensors

_NO_STORAGE = (NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Traced:
    """What one traced step shows: layers in order of first use, idle modules, edges, operations and the loss."""

    layers: tuple[Layer, ...]
    idle: tuple[str, ...]
    edges: tuple[Edge, ...]
    op_trace: OpTrace
    loss: float


class _Memory:
    """Numbers tensors by the memory they live in, so that views are the same value, and remembers where values came from."""

    def __init__(self, model: nn.Module, data: Any) -> None:
        self._ids: dict[int, int] = {}
        self._next = 0
        self._origin: dict[int, Origin] = {}
        self._batched: dict[int, bool] = {}
        self.sources: dict[int, dict[str, int]] = {}
        for origin, tensors in (
            ("parameter", list(model.parameters())),
            ("buffer", list(model.buffers())),
            ("data", list(iter_tensors(data))),
        ):
            for tensor in tensors:
                number = self._number(tensor)
                self._origin.setdefault(number, origin)  # type: ignore[arg-type]
                self._batched.setdefault(number, origin == "data")

    @staticmethod
    def _key(tensor: Tensor) -> int:
        try:
            return int(tensor.untyped_storage()._cdata)
        except _NO_STORAGE:  # sparse tensors and some subclasses have no storage of their own
            return id(tensor)

    def _number(self, tensor: Tensor, *, fresh: bool = False) -> int:
        key = self._key(tensor)
        if fresh or key not in self._ids:
            self._ids[key] = self._next
            self._next += 1
        return self._ids[key]

    @property
    def count(self) -> int:
        """How many values have been numbered."""
        return self._next

    def key(self, tensor: Tensor) -> int:
        """Identifies the memory a tensor lives in, while it is alive."""
        return self._key(tensor)

    def value(self, tensor: Tensor, *, made: bool | None = None) -> Value:
        """The value of a tensor. ``made`` says whether an operation just made its memory, and if so whether it is batched."""
        number = self._number(tensor, fresh=made is not None)
        if made is not None:
            self._batched[number] = made
        shape = tuple(tensor.shape)
        strided = tensor.layout == torch.strided
        elements = elements_in_memory(shape, tensor.stride()) if strided else int(tensor.numel())
        origin = self._origin.get(number, "made")
        return Value(number, shape, str(tensor.dtype)[6:], elements, origin, self._batched.get(number, False))


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every dispatched operation with its layer; used inside a ``LayerStack``."""

    def __init__(self, stack: LayerStack, model: nn.Module, data: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = stack
        self._memory = _Memory(model, data)
        self._forward_of_node: dict[int, int] = {}
        self._kept: list[tuple[Value, int]] = []
        self._edges: dict[tuple[str, str], dict[int, int]] = {}
        self._parameter_sizes = {parameter.numel() for parameter in model.parameters()}
        self.ops: list[Op] = []
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        node = running_node()
        read = tensors_in(args) + tensors_in(kwargs)
        inputs = tuple(self._memory.value(tensor) for tensor in read)
        keys = {self._memory.key(tensor) for tensor in read}
        out = func(*args, **kwargs)
        backward = self.in_backward or node is not None
        name = base_name(func)
        # What only looks at its input's memory in another way is a view, whatever the schema says (_unsafe_view, detach).
        is_view = not func._schema.is_mutable and all(self._memory.key(tensor) in keys for tensor in tensors_in(out))
        op = Op(
            layer=self._stack.current,
            name=name,
            kind=kind_of(name, is_view=is_view and bool(keys) and bool(tensors_in(out))),
            phase="backward" if backward else "forward",
            inputs=inputs,
            outputs=self._outputs(out, inputs, keys, backward),
            flops=flops_of(func, args, kwargs, out),
            forward=self._forward_of_node.get(node, -1) if node is not None else -1,
            recomputed=backward and self._stack.inside,
            draws=draws_random_numbers(func, args, kwargs),
        )
        if not backward:
            self._forward_of_node.setdefault(created_nodes() - 1, len(self.ops))
            self._follow(op)
        self.ops.append(op)
        return out

    def _outputs(self, out: Any, inputs: tuple[Value, ...], keys: set[int], backward: bool) -> tuple[Value, ...]:
        batched = any(value.batched for value in inputs)
        values = []
        for tensor in tensors_in(out):
            if self._memory.key(tensor) in keys:
                values.append(self._memory.value(tensor))
            else:
                of_parameter = backward and tensor.numel() in self._parameter_sizes
                values.append(self._memory.value(tensor, made=batched and not of_parameter))
        return tuple(values)

    def _follow(self, op: Op) -> None:
        """Keeps track of which layer made each value; copies and views pass their sources on.

        What the loss reads has left through the root, which casts it there where the two differ.
        """
        sources = self._memory.sources
        reader = "" if op.layer == LOSS else op.layer
        if op.is_work:
            for value in op.inputs:
                for producer, elements in sources.get(value.id, {}).items():
                    if producer not in (reader, LOSS):
                        seen = self._edges.setdefault((producer, reader), {})
                        seen[value.id] = max(seen.get(value.id, 0), min(elements, value.elements))
            for value in op.outputs:
                if value.floating:
                    sources[value.id] = {op.layer: value.elements}
        elif op.kind == "copy":
            merged: dict[str, int] = {}
            for value in op.inputs:
                for producer, elements in sources.get(value.id, {}).items():
                    merged[producer] = merged.get(producer, 0) + min(elements, value.elements)
            for value in op.outputs:
                sources[value.id] = merged

    def keep(self, tensor: Tensor) -> Tensor:
        """Pack hook of autograd's saved tensors: notes what is kept, changes nothing.

        What a recomputation keeps inside the backward pass lives for one checkpointed part only and is not counted.
        """
        if self.in_backward:
            return tensor
        value = self._memory.value(tensor)
        if value.origin == "made" or value.origin == "data":
            self._kept.append((value, created_nodes() - 1))
        return tensor

    def edges(self) -> tuple[Edge, ...]:
        """Producer-consumer pairs with the elements that flow between them, in order of first use."""
        return tuple(Edge(producer=a, consumer=b, elements=sum(seen.values())) for (a, b), seen in self._edges.items())

    def saved(self) -> tuple[Saved, ...]:
        """What autograd keeps, each piece of memory once per operation that needs it."""
        unique = {(value.id, node): value for value, node in self._kept}
        return tuple(Saved(value, self._forward_of_node.get(node, -1)) for (_, node), value in unique.items())


def trace_model(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], *, samples: int, optimizer_state_bytes: int = 0
) -> Traced:
    """Runs forward, loss and backward of one batch in FP32 and returns what ran.

    The model is left as it was: buffers, gradients, training mode, random state and hooks. Waits for the GPU once, to read the
    loss.

    Args:
        model: the model, on its device.
        batch: the batch, on the same device.
        loss: ``loss(model, batch)``, a scalar.
        samples: samples in the batch.
        optimizer_state_bytes: recorded in the trace.
    """
    names = {module: found for module, found in layer_names(model).items() if "parametrizations" not in found[0].split(".")}
    with untouched(model), float32_reference(), LayerStack(model) as stack:
        recorder = OpRecorder(stack, model, batch)
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor), torch.enable_grad():
            value = loss(model, batch)
            recorder.in_backward = True
            value.backward()  # type: ignore[no-untyped-call]
        figure = float(value.detach())
    own, ops = _own_work(recorder.ops, names, stack)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trace = OpTrace(
        ops=tuple(ops),
        saved=recorder.saved(),
        samples=samples,
        num_parameters=sum(parameter.numel() for parameter in trained),
        num_parameter_tensors=len(trained),
        optimizer_state_bytes=optimizer_state_bytes,
    )
    layers = tuple(_layer(module, names[module], own[names[module][0]], stack.calls) for module in _by_use(names, own))
    idle = tuple(
        sorted(n[0] for m, n in names.items() if n[0] not in own and next(m.parameters(recurse=False), None) is not None)
    )
    known = set(own)
    edges = tuple(edge for edge in recorder.edges() if edge.producer in known and edge.consumer in known)
    return Traced(layers, idle, edges, trace, figure)


def _by_use(names: dict[nn.Module, tuple[str, ...]], own: dict[str, list[Op]]) -> list[nn.Module]:
    module_of = {aliases[0]: module for module, aliases in names.items()}
    return [module_of[name] for name in own]


def _own_work(ops: list[Op], names: dict[nn.Module, tuple[str, ...]], stack: LayerStack) -> tuple[dict[str, list[Op]], list[Op]]:
    """Forward work by layer, in order of first use; recomputed operations make a layer of a module that ran nowhere else."""
    own: dict[str, list[Op]] = {}
    known = {aliases[0] for aliases in names.values()}
    for op in ops:
        if op.is_work and op.layer in known and (op.phase == "forward" or op.recomputed):
            own.setdefault(op.layer, []).append(op)
    # The order of first use is that of entering the modules; a container is entered before its children.
    order = {name: index for index, name in enumerate(stack.order)}
    ordered = dict(sorted(own.items(), key=lambda item: order.get(item[0], len(order))))
    return ordered, ops


def _layer(module: nn.Module, aliases: tuple[str, ...], ops: list[Op], calls: dict[str, int]) -> Layer:
    forward = [op for op in ops if op.phase == "forward"] or ops
    return Layer(
        name=aliases[0],
        aliases=aliases[1:],
        kind=layer_kind(module),
        parameters=dict(sorted(own_shapes(module).items())),
        ops=tuple(dict.fromkeys(op.name for op in ops)),
        calls=max(calls.get(aliases[0], 1), 1),
        flops=sum(op.flops for op in forward),
        moved_bytes=sum(op.moved_bytes for op in forward),
    )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts buffers, gradients, training modes and random states back at the end, in place."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
