"""The model to call in each execution mode, so that the training loop stays the same.

CUDA graphs reuse the memory of a step's outputs in the next one. Three things make that safe here: outputs that a caller may
keep are copied out; gradients that the backward graph handed over are copied out before a further forward would overwrite them
(accumulation); and a forward that comes while an earlier one still waits for its backward runs compiled without a graph.
Source: pytorch#169545 (accumulation into gradients that a later replay overwrites).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoprec.policy import Execution
from autoprec.runtime.islands import device_type_of
from autoprec.runtime.tree import iter_tensors, map_tensors

# Input shapes that get a graph of their own; further ones share one compilation with dynamic shapes and no graph.
# Two: the full and the last batch. Source: torch._dynamo.config.recompile_limit is 8 for one model, and training and evaluation
# each compile the two graphed shapes, the dynamic variant and the one without graphs.
_GRAPHED_SHAPES = 2
# Training outputs up to this size are copied out of the graph's memory; larger ones (logits) are consumed by the loss.
# Source: 16 MiB take under 10 us to copy at 4 TB/s.
_COPIED_BYTES = 16 * 2**20


def compiled_model(model: nn.Module, execution: Execution) -> Callable[..., Any]:
    """The callable for an execution mode: the model itself, ``torch.compile`` of it, or a ``GraphedModel``."""
    if execution == "eager":
        return model
    if execution == "compile":
        return torch.compile(model)
    return GraphedModel(model)


class _Backward:
    """A forward's backward: whether it ran. Gone when the autograd graph is."""

    done = False


class GraphedModel:
    """Calls a model through ``torch.compile(mode="reduce-overhead")``, which replays CUDA graphs.

    Safe with gradient accumulation, evaluation in between, several forwards before their backwards, short batches and loaded
    checkpoints. Parameters, mode and state stay those of ``model``. Where the model cannot be captured it warns once and goes on
    compiled or, where it cannot be compiled either, eager.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.captured = True
        self._graphed: Callable[..., Any] = torch.compile(model, mode="reduce-overhead", dynamic=False)
        self._ungraphed: Callable[..., Any] = torch.compile(model, dynamic=False)
        self._dynamic: Callable[..., Any] = torch.compile(model, dynamic=True)
        self._shapes: set[tuple[Any, ...]] = set()
        self._pending: list[weakref.ref[_Backward]] = []
        self._own_grads: dict[int, weakref.ref[torch.Tensor]] = {}
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; tensors and structure of its output are as in eager."""
        if not self.captured:
            return self.model(*args, **kwargs)
        try:
            if self._waits_for_backward():
                # The earlier forward's activations lie in the graph's memory, and a replay would overwrite them.
                return self._ungraphed(*args, **kwargs)
            self._keep_gradients()
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            output = self._run(args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's compiler errors and those of a failed capture are all of this kind
            return self._fall_back(error, args, kwargs)
        return self._keep_output(output)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes = tuple(tuple(tensor.shape) for tensor in iter_tensors((args, kwargs)))
        if shapes in self._shapes:
            return self._graphed(*args, **kwargs)
        if len(self._shapes) >= _GRAPHED_SHAPES:
            return self._dynamic(*args, **kwargs)
        # Reached through torch, which loads its compiler when it is first asked for.
        counters = torch._dynamo.utils.counters
        skips = counters["inductor"]["cudagraph_skips"]
        output = self._graphed(*args, **kwargs)
        self._shapes.add(shapes)
        if device_type_of(self.model, args, kwargs) != "cuda":
            self._warn("CUDA graphs need a CUDA device; the model runs compiled without them.")
        elif counters["inductor"]["cudagraph_skips"] > skips:
            self._warn("torch.compile could not capture the model as a CUDA graph; it runs compiled without one.")
        return output

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"execution 'compile_cudagraphs': {text}", stacklevel=5)

    def _fall_back(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A mistake in the model or the batch raises here as well, as itself.
        output = self.model(*args, **kwargs)
        self.captured = False
        first_line = (str(error).strip().splitlines() or [""])[0]
        self._warn(f"the model could not be compiled ({type(error).__name__}: {first_line}); it runs eager.")
        return output

    def _keep_output(self, output: Any) -> Any:
        self._pending = []
        training = torch.is_grad_enabled()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if training and tensor.requires_grad:
                self._await_backward(tensor)
                if tensor.numel() * tensor.element_size() > _COPIED_BYTES:
                    return tensor
            return tensor.clone()

        return map_tensors(output, keep)

    def _await_backward(self, tensor: torch.Tensor) -> None:
        pending = _Backward()
        self._pending.append(weakref.ref(pending))

        def done(_: torch.Tensor) -> None:
            pending.done = True

        # The hook, and with it ``pending``, lives exactly as long as the autograd graph behind this output.
        tensor.register_hook(done)  # type: ignore[no-untyped-call]

    def _waits_for_backward(self) -> bool:
        return any((pending := reference()) is not None and not pending.done for reference in self._pending)

    def _keep_gradients(self) -> None:
        """Moves gradients that the backward graph owns into memory of their own, so that the next micro-batch adds to them."""
        foreign: list[nn.Parameter] = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                known = self._own_grads.get(id(parameter))
                if known is None or known() is not parameter.grad:
                    foreign.append(parameter)
        if not foreign:
            return
        grads = [parameter.grad for parameter in foreign if parameter.grad is not None]
        copies = [torch.empty_like(grad) for grad in grads]
        torch._foreach_copy_(copies, grads)
        for parameter, copy in zip(foreign, copies, strict=True):
            parameter.grad = copy
            self._own_grads[id(parameter)] = weakref.ref(copy)
