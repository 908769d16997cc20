"""Measures every layer's own error in one pass: all layers run low, and each is handed exact float32 inputs and gradients.

A float32 pass is recorded first: inputs, outputs and their gradients of every call of every layer (the tape). In the low pass
each layer's inputs are replaced by the recorded ones in the dtype in which they arrived, and what it returns is compared with
the recorded output and replaced by it, so that no layer sees another's error; backward does the same with gradients. A container
is thereby judged by its own operations, between the exact results of its children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.bench.attribution import running_node
from autoprec.bench.ops import DRAWING, base_name
from autoprec.runtime.tree import map_tensors

LOST = 2.0**-6
"""Share of a tensor that rounding may take before it counts as lost (flushed or overflowed); rounding alone takes 2^-8 at most.

A lost tensor is handed on in float32, as from a producer that was lifted for it: the loss is the producer's fault, not the
consumer's.
"""

_HALF = (torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One recorded call of a layer: its floating tensors in order, and their gradients (None where none arrived)."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    input_grads: dict[int, Tensor] = field(default_factory=dict)
    output_grads: dict[int, Tensor] = field(default_factory=dict)


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
    _sizes: dict[int, tuple[float, bool]] = field(default_factory=dict)
    _held: dict[torch.dtype, dict[int, bool]] = field(default_factory=dict)

    def seal(self) -> None:
        """Says that the pass is over: sizes are taken, of everything at once, since each look waits for the GPU."""
        tensors = [*self._values(), *(grad for call in self._all_calls() for grad in call.input_grads.values())]
        found = [torch.stack((_square(_finite(tensor)), _is_finite(tensor).double())) for tensor in tensors]
        for tensor, (size, finite) in zip(tensors, torch.stack(found).tolist() if found else [], strict=True):
            self._sizes[id(tensor)] = (size, bool(finite))

    def size(self, tensor: Tensor) -> float:
        """Sum of the squares of the finite values of a recorded tensor."""
        return self._sizes[id(tensor)][0]

    def is_finite(self, tensor: Tensor) -> bool:
        """Whether a recorded tensor has no NaN and no infinity."""
        return self._sizes[id(tensor)][1]

    def keeps(self, dtype: torch.dtype, exact: Tensor) -> bool:
        """Whether a type keeps the value of a recorded input or output. The first question for a half type waits for the GPU."""
        if dtype not in _HALF:
            return True
        if dtype not in self._held:
            tensors = self._values()
            lost = [_square(_finite(tensor).to(dtype).float() - _finite(tensor)) for tensor in tensors]
            rounding = zip(tensors, torch.stack(lost).tolist() if lost else [], strict=True)
            self._held[dtype] = {id(tensor): error <= LOST**2 * self.size(tensor) for tensor, error in rounding}
        return self._held[dtype][id(exact)]

    def _values(self) -> list[Tensor]:
        return [tensor for call in self._all_calls() for tensor in (*call.inputs, *call.outputs)]

    def _all_calls(self) -> Iterator[Call]:
        return (call for calls in self.calls.values() for call in calls)


@dataclass
class LayerErrors:
    """Squared errors and squared sizes of one layer, as tensors on the device so that nothing waits.

    Attributes:
        outputs: pairs (error, reference) of the outputs.
        input_grads: triples (error, reference, product of error and exact) of the inputs' gradients.
        harms: outputs' errors times their gradients.
        bad: how many values are not finite where the recorded ones are.
    """

    outputs: list[tuple[Tensor, float]] = field(default_factory=list)
    input_grads: list[tuple[Tensor, float, Tensor]] = field(default_factory=list)
    harms: list[Tensor] = field(default_factory=list)
    bad: list[Tensor] = field(default_factory=list)


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


class _Force(torch.autograd.Function):
    """Replaces a tensor by ``exact`` in a dtype; the gradient that comes back is noted and replaced likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exact: Tensor, dtype: torch.dtype, grad: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.grad, ctx.dtype = grad, tensor.dtype
        return exact.detach().to(dtype=dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grad(grad).to(ctx.dtype), None, None, None


class _Hooks:
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


class Recorder(_Hooks):
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
        return tapped


class Forcer(_Hooks):
    """Forces a tape's inputs, outputs and gradients upon a low pass and measures what each layer adds of its own."""

    def __init__(self, layers: dict[str, nn.Module], tape: Tape, *, scale: float, perturbation: float = 0.0) -> None:
        super().__init__(layers, copy=True)
        self._tape = tape
        self._scale = scale
        self._perturbation = perturbation
        self._generator: torch.Generator | None = None
        self.errors: dict[str, LayerErrors] = {}

    def on_input(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        entry = self._entry(name, call)
        if entry is None or place >= len(entry.inputs) or entry.inputs[place].shape != tensor.shape:
            return tensor
        exact, recorded = entry.inputs[place], entry.input_grads.get(place)

        def grad(low: Tensor) -> Tensor:
            if recorded is None or self.in_forward:
                return low
            # Held against what this dtype can say at this scale: rounding the gradient itself is the scale's business, and shows
            # in the gradients of the parameters it reaches.
            sayable = (recorded * self._scale).to(low.dtype)
            error = (low.detach().double() - sayable) / self._scale
            self._of(name).input_grads.append((error.square().sum(), self._tape.size(recorded), (error * recorded).sum()))
            return self._scaled(recorded, low) if self._perturbation else sayable

        return self._forced(tensor, exact, self._perturbed(exact), grad)

    def on_output(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        entry = self._entry(name, call)
        if entry is None or place >= len(entry.outputs) or entry.outputs[place].shape != tensor.shape:
            return tensor
        exact, recorded = entry.outputs[place], entry.output_grads.get(place)
        if running_node() is None:
            self._compare(name, tensor.detach(), exact, recorded)

        def grad(low: Tensor) -> Tensor:
            return low if recorded is None or self.in_forward else self._scaled(recorded, low)

        return self._forced(tensor, exact, exact, grad)

    def _forced(self, tensor: Tensor, exact: Tensor, value: Tensor, grad: Callable[[Tensor], Tensor]) -> Tensor:
        dtype = tensor.dtype if self._tape.keeps(tensor.dtype, exact) else exact.dtype
        forced: Tensor = _Force.apply(tensor, value, dtype, grad)
        return forced

    def _entry(self, name: str, call: int) -> Call | None:
        calls = self._tape.calls.get(name, [])
        return calls[call] if call < len(calls) else None

    def _of(self, name: str) -> LayerErrors:
        return self.errors.setdefault(name, LayerErrors())

    def _scaled(self, recorded: Tensor, low: Tensor) -> Tensor:
        return (self._perturbed(recorded) * self._scale).to(low.dtype)

    def _perturbed(self, exact: Tensor) -> Tensor:
        if not self._perturbation:
            return exact
        # A generator of its own: the model's random draws must stay those of the recorded pass.
        if self._generator is None:
            self._generator = torch.Generator(exact.device).manual_seed(0)
        noise = torch.randn(exact.shape, generator=self._generator, device=exact.device, dtype=exact.dtype)
        return exact * (1 + self._perturbation * noise)

    def _compare(self, name: str, low: Tensor, exact: Tensor, grad: Tensor | None) -> None:
        errors = self._of(name)
        difference = low.to(exact.dtype) - exact
        if not self._tape.is_finite(exact):
            finite = exact.isfinite()
            difference = torch.where(finite, difference, 0.0)
            grad = None if grad is None else torch.where(finite, grad, 0.0)
        errors.bad.append(difference.isfinite().logical_not().sum())
        errors.outputs.append((_square(difference), self._tape.size(exact)))
        if grad is not None:
            weighted = (grad * difference).double()
            # Rounding errors add up like random ones (the first); a bias adds up straight (the second).
            errors.harms.append(torch.maximum(weighted.square().sum(), weighted.sum().square()))


def _finite(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.where(dense.isfinite(), dense, 0.0)


def _is_finite(tensor: Tensor) -> Tensor:
    # A sum is NaN or infinite where a value is (or where it overflows itself, which costs a closer look later and no more).
    return tensor.sum().isfinite()


def _square(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations on half tensors draw in float32, so that a low pass drops what the float32 pass dropped.

    Fused attention draws inside its kernel, another stream for another dtype; its dropout is switched off in both passes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = list(args)
        name = base_name(func)
        if "attention" in name:
            _without_dropout(func, args, kwargs)
        if name not in DRAWING:
            return func(*args, **kwargs)
        asked = kwargs.get("dtype")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        low = asked if asked in _HALF else first.dtype if first is not None and first.dtype in _HALF else None
        if low is None:
            return func(*args, **kwargs)
        if asked is not None:
            kwargs["dtype"] = torch.float32
        if first is not None:
            args[0] = first.float()
        out = func(*args, **kwargs)
        if func._schema.is_mutable and first is not None:
            return first.copy_(args[0])
        return map_tensors(out, lambda tensor: tensor.to(low) if tensor.dtype == torch.float32 else tensor)


def _without_dropout(func: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            if index < len(args):
                args[index] = 0.0
            else:
                kwargs["dropout_p"] = 0.0
