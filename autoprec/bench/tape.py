"""Records a float32 pass: inputs, outputs and their gradients of every call of every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.attribution import running_node
from autoprec.bench.magnitudes import norm, read, serves_float32
from autoprec.runtime.tree import map_tensors

LOST = 2.0**-6
"""Share of a tensor that rounding may take before it counts as lost (flushed or overflowed); rounding alone takes 2^-8 at most.

A lost tensor is handed on in float32, as from a producer that was lifted for it: the loss is the producer's fault, not the
consumer's.
"""

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One recorded call of a layer: its floating tensors in order, and their gradients (None where none arrived)."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_grads: dict[int, Tensor] = field(default_factory=dict)
    output_grads: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """Sum of the squares of a tensor's finite values, whether all are finite, and how many there are."""

    squares: float
    is_finite: bool
    elements: int

    def sums_in(self, dtype: torch.dtype, scale: float = 1.0) -> torch.dtype:
        """The type in which sums of squares of the tensor (times a scale) and of errors in it serve; ``dtype`` is the tensor's."""
        serves = self.is_finite and serves_float32(math.sqrt(self.squares) * scale, self.elements)
        return torch.float32 if serves and dtype != torch.float64 else torch.float64


@dataclass
class Tape:
    """A recorded float32 pass: calls by layer, gradients of the parameters, and the loss.

    ``inner_gradients`` says that the forward pass took gradients itself (a penalty, forces): gradients then reach layers by ways that
    are not recorded, and gradient errors mean nothing. ``in_forward`` is True until the backward pass begins.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    parameter_grads: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    inner_gradients: bool = False
    in_forward: bool = True
    _sizes: dict[int, Size] = field(default_factory=dict)
    _held: dict[torch.dtype, dict[int, bool]] = field(default_factory=dict)

    def seal(self) -> None:
        """Says that the pass is over: sizes are taken, of everything at once, since each look waits for the device."""
        grads = (grad for call in self._all_calls() for grad in call.input_grads.values())
        weights = (grad for grad in self.parameter_grads.values() if grad.layout == torch.strided)
        tensors = list({id(tensor): tensor for tensor in (*self._values(), *grads, *weights)}.values())
        norms = list(read([norm(dense(tensor)) for tensor in tensors]))
        self._sizes = {
            id(tensor): Size(found * found, is_finite=True, elements=tensor.numel())
            for tensor, found in zip(tensors, norms, strict=True)
        }
        odd = [
            tensor
            for tensor, found in zip(tensors, norms, strict=True)
            if tensor.dtype != torch.float64 and not serves_float32(found, tensor.numel())
        ]
        looks = [look for tensor in odd for look in (norm(_finite(tensor).double()), dense(tensor).isfinite().all())]
        found_again = read(looks)
        for tensor in odd:
            found, is_finite = next(found_again), bool(next(found_again))
            self._sizes[id(tensor)] = Size(found * found, is_finite, tensor.numel())

    def size(self, tensor: Tensor) -> Size:
        """How large a recorded value or gradient is."""
        return self._sizes[id(tensor)]

    def most_elements(self) -> int:
        """Elements of the largest recorded value or gradient."""
        return max((size.elements for size in self._sizes.values()), default=0)

    def keeps(self, dtype: torch.dtype, exact: Tensor) -> bool:
        """Whether a type keeps the value of a recorded input or output. The first question for a half type may wait for the device."""
        if dtype not in HALF:
            return True
        if dtype not in self._held:
            values = self._values()
            self._held[dtype] = {id(tensor): True for tensor in values}
            doubtful = [tensor for tensor in values if not _surely_keeps(dtype, self.size(tensor))]
            lost = read([norm((_finite(tensor).to(dtype).float() - _finite(tensor)).double()) for tensor in doubtful])
            for tensor in doubtful:
                self._held[dtype][id(tensor)] = next(lost) <= LOST * math.sqrt(self.size(tensor).squares)
        return self._held[dtype][id(exact)]

    def _values(self) -> list[Tensor]:
        values = (tensor for call in self._all_calls() for tensor in (*call.inputs, *call.outputs))
        return list({id(tensor): tensor for tensor in values}.values())

    def _all_calls(self) -> Iterator[Call]:
        return (call for calls in self.calls.values() for call in calls)


class _Tap(torch.autograd.Function):
    """The identity; notes the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: Callable[[Tensor], None], copy: bool) -> Tensor:
        ctx.note = note
        return tensor.clone() if copy else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.note(grad)
        return grad, None, None


class LayerHooks:
    """Hooks of its own on every layer; a subclass says what to do with the floating tensors of a call."""

    def __init__(self, layers: dict[str, nn.Module], *, copy: bool) -> None:
        self._layers = layers
        self._copy = copy
        self._seen: dict[str, int] = {}
        self._again: dict[str, int] = {}
        self._open: list[tuple[str, int]] = []
        self.in_forward = True  # gradients taken inside the forward pass (penalties, forces) are left alone

    def begin_backward(self) -> None:
        """Says that the forward pass is over: gradients from now on are those of the loss."""
        self.in_forward = False

    @contextmanager
    def active(self) -> Iterator[None]:
        handles = []
        for name, module in self._layers.items():
            handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name), with_kwargs=True, prepend=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            index = self._call_index(name)
            self._open.append((name, index))
            place = iter(range(1 << 30))

            def visit(tensor: Tensor) -> Tensor:
                return self.on_input(name, index, next(place), tensor) if tensor.is_floating_point() else tensor

            return map_tensors(args, visit), map_tensors(kwargs, visit)

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
            index = self._close(name)
            place = iter(range(1 << 30))

            def visit(tensor: Tensor) -> Tensor:
                return self.on_output(name, index, next(place), tensor) if tensor.is_floating_point() else tensor

            return map_tensors(output, visit)

        return hook

    def _close(self, name: str) -> int:
        """The call that ends; calls inside it that ended by an exception (checkpointing's early stop) are dropped."""
        while self._open:
            opened, index = self._open.pop()
            if opened == name:
                return index
        return 0

    def _call_index(self, name: str) -> int:
        """Counts calls; a recomputation in the backward pass (checkpointing) goes over them again from the last one."""
        if running_node() is None:
            self._seen[name] = self._seen.get(name, 0) + 1
            return self._seen[name] - 1
        self._again[name] = self._again.get(name, 0) + 1
        return max(self._seen.get(name, 1) - self._again[name], 0)

    def on_input(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def on_output(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        raise NotImplementedError


class Recorder(LayerHooks):
    """Fills a tape during a float32 pass."""

    def __init__(self, layers: dict[str, nn.Module], *, copy: bool) -> None:
        super().__init__(layers, copy=copy)
        self.tape = Tape()
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def on_input(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        entry = self._entry(name, call)
        if running_node() is None:
            entry.inputs.append(self._keep(tensor))
        return self._tapped(tensor, entry.input_grads, place)

    def on_output(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        entry = self._entry(name, call)
        if running_node() is None:
            entry.outputs.append(self._keep(tensor))
        return self._tapped(tensor, entry.output_grads, place)

    def begin_backward(self) -> None:
        """Says that the forward pass is over, and lets go of what only it needed."""
        super().begin_backward()
        self.tape.in_forward = False
        self._kept.clear()

    def _entry(self, name: str, call: int) -> Call:
        calls = self.tape.calls.setdefault(name, [])
        while len(calls) <= call:
            calls.append(Call())
        return calls[call]

    def _keep(self, tensor: Tensor) -> Tensor:
        """Copies where the model changes tensors in place; one copy for one version of a tensor."""
        if not self._copy:
            return tensor.detach()
        key = (id(tensor), tensor._version)
        if key not in self._kept:
            self._kept[key] = (tensor, tensor.detach().clone())
        return self._kept[key][1]

    def _tapped(self, tensor: Tensor, grads: dict[int, Tensor], place: int) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor

        # Holds the tape and not the recorder: a way from the graph back to ``_kept``, which holds the graph, would be a cycle through
        # autograd's own nodes, which Python's collector cannot see, and every recording would stay in memory for ever.
        tape = self.tape

        def note(grad: Tensor) -> None:
            if tape.in_forward:
                tape.inner_gradients = True
            else:
                grads[place] = grad.detach()

        tapped: Tensor = _Tap.apply(tensor, note, self._copy)
        kept = self._kept.get((id(tensor), tensor._version))
        if kept is not None:  # the same value goes on: whoever reads it next shares the copy
            self._kept[id(tapped), tapped._version] = (tapped, kept[1])
        return tapped


def _surely_keeps(dtype: torch.dtype, size: Size) -> bool:
    """Whether the size alone says that a half type keeps a value; where it does not, the value has to be rounded to see.

    Source: a type rounds by half a unit in the last place at most, ``eps / 2`` of a normal value and ``tiny * eps / 2`` of a smaller
    one; nothing overflows where the root of all squares fits.
    """
    limits = torch.finfo(dtype)
    rounding = (limits.eps / 2) ** 2 * size.squares + (limits.tiny * limits.eps / 2) ** 2 * size.elements
    return size.is_finite and math.sqrt(size.squares) < limits.max and rounding <= LOST**2 * size.squares


def dense(tensor: Tensor) -> Tensor:
    """The tensor with its zeros written out."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _finite(tensor: Tensor) -> Tensor:
    values = dense(tensor)
    return torch.where(values.isfinite(), values, 0.0)
