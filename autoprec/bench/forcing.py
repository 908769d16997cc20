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
from autoprec.bench.cuda_rules import own_arithmetic
from autoprec.bench.magnitudes import Scratch, norm
from autoprec.bench.ops import DRAWING, base_name
from autoprec.bench.tape import HALF, Call, LayerHooks, Tape, dense
from autoprec.runtime.tree import map_tensors


@dataclass
class LayerErrors:
    """Errors of one layer, as scalars on the device so that nothing waits; norms are roots of sums of squares.

    Attributes:
        outputs: norm of an output's error, and the sum of the squares of the recorded output.
        input_grads: norm of the error of an input's gradient and sum of (error times exact), both times the loss scale, and the sum
            of the squares of the recorded gradient.
        harms: norm and sum of (output's error times its gradient).
        extremes: figures that are finite where an output is.
    """

    outputs: list[tuple[Tensor, float]] = field(default_factory=list)
    input_grads: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    harms: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    extremes: list[Tensor] = field(default_factory=list)

    def scalars(self) -> list[Tensor]:
        """Everything on the device, in the order of the attributes."""
        outputs = [error for error, _ in self.outputs]
        gradients = [part for error, product, _ in self.input_grads for part in (error, product)]
        return [*outputs, *gradients, *(part for pair in self.harms for part in pair), *self.extremes]


class _Force(torch.autograd.Function):
    """Replaces a tensor by ``exact`` in a dtype; the gradient that comes back is noted and replaced likewise."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exact: Tensor, dtype: torch.dtype, grad: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.grad, ctx.dtype = grad, tensor.dtype
        return exact.to(dtype=dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grad(grad).to(ctx.dtype), None, None, None


class _Noise:
    """Random factors around 1, drawn once: drawing them anew for every tensor costs a CPU more than the pass itself.

    Each tensor takes them from another place, so that no two of a layer's tensors share theirs.
    """

    _SHIFT, _PLACES = 1021, 64

    def __init__(self, device: torch.device, most_elements: int, perturbation: float) -> None:
        # A generator of its own: the model's random draws must stay those of the recorded pass.
        generator = torch.Generator(device).manual_seed(0)
        noise = torch.randn(most_elements + self._SHIFT * self._PLACES, generator=generator, device=device)
        self._factors = noise.mul_(perturbation).add_(1)
        self._taken = 0

    def factors(self, shape: torch.Size) -> Tensor:
        """The next factors, in a shape of at most as many elements as were announced."""
        self._taken += 1
        start = self._SHIFT * (self._taken % self._PLACES)
        return self._factors[start : start + shape.numel()].view(shape)


class Forcer(LayerHooks):
    """Forces a tape's inputs, outputs and gradients upon a low pass and measures what each layer adds of its own."""

    def __init__(self, layers: dict[str, nn.Module], tape: Tape, *, scale: float, perturbation: float = 0.0) -> None:
        super().__init__(layers, copy=True)
        self._tape = tape
        self._scale = scale
        self._perturbation = perturbation
        self._noise: _Noise | None = None
        self._scratch = Scratch()
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
            with own_arithmetic():
                sayable = self._scratch.times(recorded, self._scale, low.dtype)
                self._compare_gradient(name, low, sayable, recorded)
                return self._scaled(recorded, low) if self._perturbation else sayable

        return self._forced(tensor, exact, self._perturbed(exact), grad)

    def on_output(self, name: str, call: int, place: int, tensor: Tensor) -> Tensor:
        entry = self._entry(name, call)
        if entry is None or place >= len(entry.outputs) or entry.outputs[place].shape != tensor.shape:
            return tensor
        exact, recorded = entry.outputs[place], entry.output_grads.get(place)
        if running_node() is None:
            with own_arithmetic():
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
        return self._scratch.times(self._perturbed(recorded), self._scale, low.dtype)

    def _perturbed(self, exact: Tensor) -> Tensor:
        if not self._perturbation:
            return exact
        if self._noise is None:
            self._noise = _Noise(exact.device, self._tape.most_elements(), self._perturbation)
        return exact * self._noise.factors(exact.shape)

    def _compare_gradient(self, name: str, low: Tensor, sayable: Tensor, recorded: Tensor) -> None:
        size = self._tape.size(recorded)
        error = self._scratch.minus(dense(low), dense(sayable), size.sums_in(recorded.dtype, self._scale))
        self._of(name).input_grads.append((norm(error), error.mul_(dense(recorded)).sum(), size.squares))

    def _compare(self, name: str, low: Tensor, exact: Tensor, grad: Tensor | None) -> None:
        errors, size = self._of(name), self._tape.size(exact)
        low, exact, grad = dense(low), dense(exact), None if grad is None else dense(grad)
        difference = self._scratch.minus(low, exact, size.sums_in(exact.dtype))
        if not size.is_finite:
            finite = exact.isfinite()
            difference = torch.where(finite, difference, 0.0)
            grad = None if grad is None else torch.where(finite, grad, 0.0)
        error = norm(difference)
        # What fp16 holds is so small that the norm is finite where all values are; other types may overflow in the sum alone.
        found = (error,) if low.dtype == torch.float16 else torch.aminmax(difference) if difference.numel() else ()
        errors.extremes.extend(found)
        errors.outputs.append((error, size.squares))
        if grad is not None:
            weighted = difference.mul_(grad)
            errors.harms.append((norm(weighted), weighted.sum()))


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations on half tensors draw in float32, so that a low pass drops what the float32 pass dropped.

    Fused attention draws inside its kernel, another stream for another dtype; its dropout is switched off in both passes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: dict[Any, str | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._names:  # asked for every operation of a pass, so the answer is kept
            name = base_name(func)
            self._names[func] = name if name in DRAWING or "attention" in name else None
        if self._names[func] is None:
            return func(*args, **(kwargs or {}))
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
