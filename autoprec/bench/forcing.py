"""Measures every layer's own error in one pass: all layers run low, and each is handed exact float32 inputs and gradients.

A float32 pass is recorded first (the tape). In the low pass each layer's inputs are replaced by the recorded ones in the dtype in which
they arrived, and what it returns is compared with the recorded output and replaced by it, so that no layer sees another's error;
backward does the same with gradients. A container is thereby judged by its own operations, between the exact results of its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.bench.attribution import running_node
from autoprec.bench.ops import DRAWING, base_name
from autoprec.bench.tape import HALF, Call, LayerHooks, Tape, sum_of_squares
from autoprec.runtime.tree import map_tensors


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


class _Force(torch.autograd.Function):
    """Replaces a tensor by ``exact`` in a dtype; the gradient that comes back is noted and replaced likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exact: Tensor, dtype: torch.dtype, grad: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.grad, ctx.dtype = grad, tensor.dtype
        return exact.detach().to(dtype=dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grad(grad).to(ctx.dtype), None, None, None


class Forcer(LayerHooks):
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
        errors.outputs.append((sum_of_squares(difference), self._tape.size(exact)))
        if grad is not None:
            weighted = (grad * difference).double()
            # Rounding errors add up like random ones (the first); a bias adds up straight (the second).
            errors.harms.append(torch.maximum(weighted.square().sum(), weighted.sum().square()))


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
        low = asked if asked in HALF else first.dtype if first is not None and first.dtype in HALF else None
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
