"""What a module with a precision of its own does around its original forward: casts, autocast, padding.

How the module comes by it is in ``classes.py``: its class is swapped, so nothing here is held in a closure over an instance.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.policy import Precision
from autoprec.runtime.dtypes import HALF_DTYPES
from autoprec.runtime.masters import copies_pay, put_copies, take_copies
from autoprec.runtime.padding import padded_forward
from autoprec.runtime.pure import lower, restore
from autoprec.runtime.tree import iter_tensors, map_tensors

# Where an instance's own replaced forward (another tool's wrapper) waits while the class's forward is ours.
HELD_FORWARD = "_autoprec_held_forward"

# Before 2.11 a copy cached by an earlier no_grad call of a submodule in the same block is not differentiable either, so that the
# model starts with an empty cache. Source: pytorch#165068.
_CACHE_KEEPS_NO_GRAD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)

# Models on this device are for shapes alone; torch.autocast does not know it.
_WITHOUT_AUTOCAST = ("meta",)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Island:
    """What a swapped class does around its original forward.

    Attributes:
        precision: computes in this precision; None keeps the surroundings'.
        outside: precision around it; None for the root. Between two half types tensors are cast towards bf16 only, where nothing
            overflows: on entering a bf16 island from fp16, and on leaving an fp16 one for bf16. Autocast alone casts matmuls and
            convolutions, and the other operations of a bf16 island would run on its neighbours' fp16 tensors.
        rises: floating outputs come back in float32.
        cached: may use autocast's weight-cast cache. Off where another half type in the model could have filled it: the cache
            is keyed by the weight alone.
        multiple: sizes are padded up to multiples of this; 0 for none.
        slow_path: keeps nn.TransformerEncoder and nn.MultiheadAttention off their fused inference path, which reads the
            children's weights past any precision.
        held: the instance had a forward of its own.
        reads: paths below the module of parameters that its own code reads past their owner's forward; pure islands cast them.
        writes: code of the module or of what it calls may write a tensor in place; False only where that is known not to be so.
        masters: half copies of all weights below are made in one pass.
    """

    precision: Precision | None = None
    outside: Precision | None = None
    rises: bool = False
    cached: bool = True
    multiple: int = 0
    slow_path: bool = False
    held: bool = False
    reads: tuple[tuple[str, ...], ...] = ()
    writes: bool = True
    masters: bool = False


def forward_of(kind: type[nn.Module], original: type[nn.Module], island: Island) -> Callable[..., Any]:
    """The forward of ``kind``, a subclass of ``original``."""
    run = _with_precision(_innermost(original, island), original, island)
    if island.masters:
        run = _with_copies(run)
    if island.slow_path:
        run = _off_the_fast_path(run)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A tool that kept this bound method from before remove() must get the plain module.
        if not isinstance(self, kind):
            return original.forward(self, *args, **kwargs)
        return run(self, args, kwargs)

    # A code object of its own, for the reason given in classes.swapped_class.
    own = types.FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)
    return functools.wraps(original.forward)(own)


def _innermost(original: type[nn.Module], island: Island) -> Run:
    if island.held:

        def held(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.__dict__[HELD_FORWARD](*args, **kwargs)

        return held
    padded = padded_forward(original) if island.multiple else None
    if padded is not None:

        def pad(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return padded(self, island.multiple, *args, **kwargs)

        return pad

    def plain(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original.forward(self, *args, **kwargs)

    return plain


def _with_precision(inner: Run, original: type[nn.Module], island: Island) -> Run:
    precision = island.precision
    if precision is None:
        return inner
    if precision == "fp32":
        return _fp32(inner)
    dtype = HALF_DTYPES[precision]
    run = _pure(inner, original, island, dtype) if precision.endswith("_pure") else _autocast(inner, island, dtype)
    if island.rises:
        return _rising(run)
    if HALF_DTYPES.get(island.outside or precision) in (None, dtype):
        return run
    return _widened(run, enters=dtype == torch.bfloat16)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A half or bfloat16 tensor in float32; any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _rising(run: Run) -> Run:
    def rising(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(run(self, args, kwargs), to_float32)

    return rising


def _with_copies(run: Run) -> Run:
    def with_copies(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not copies_pay():
            return run(self, args, kwargs)
        replaced = put_copies(self)
        try:
            return run(self, args, kwargs)
        finally:
            take_copies(replaced)

    return with_copies


def to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """A half tensor in bfloat16; any other as it is."""
    return tensor.bfloat16() if tensor.dtype == torch.float16 else tensor


def _widened(run: Run, *, enters: bool) -> Run:
    """Casts fp16 to bf16 at the border of two half types: of what enters a bf16 island, or of what leaves an fp16 one."""

    def entering(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(self, map_tensors(args, to_bfloat16), map_tensors(kwargs, to_bfloat16))

    def leaving(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(run(self, args, kwargs), to_bfloat16)

    return entering if enters else leaving


def _fp32(inner: Run) -> Run:
    def fp32(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_tensors(args, to_float32), map_tensors(kwargs, to_float32)
        device = device_type_of(self, args, kwargs)
        if device in _WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device):
            return map_tensors(inner(self, args, kwargs), to_float32)
        with torch.autocast(device, enabled=False):
            return map_tensors(inner(self, args, kwargs), to_float32)

    return fp32


def _autocast(inner: Run, island: Island, dtype: torch.dtype) -> Run:
    def autocast(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = device_type_of(self, args, kwargs)
        if device in _WITHOUT_AUTOCAST:
            return inner(self, args, kwargs)
        # Without gradients the cache would keep weight copies that later forwards in the same block cannot differentiate.
        # Source: pytorch#65766, #112583.
        cached = island.cached and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
        if _CACHE_KEEPS_NO_GRAD and island.outside is None and not torch.compiler.is_compiling():
            torch.clear_autocast_cache()
        same = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
        if same and cached == torch.is_autocast_cache_enabled():
            return inner(self, args, kwargs)
        with torch.autocast(device, dtype=dtype, cache_enabled=cached):
            return inner(self, args, kwargs)

    return autocast


def _pure(inner: Run, original: type[nn.Module], island: Island, dtype: torch.dtype) -> Run:
    reads = island.reads

    def to_half(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor that is read in this type already stays itself, a buffer's stand-in too: the callee may write it.
        return tensor.to(dtype) if tensor.dtype != dtype and tensor.dtype in _FLOATS else tensor

    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        undo = lower(self, dtype, reads)
        try:
            return inner(self, args, kwargs)
        finally:
            restore(undo)

    def pure(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_tensors(args, to_half), map_tensors(kwargs, to_half)
        device = device_type_of(self, args, kwargs)
        recurrent = isinstance(self, nn.RNNBase)  # its flat weights are cast by autocast, see pure.py
        if device not in _WITHOUT_AUTOCAST and (recurrent or torch.is_autocast_enabled(device)):
            with torch.autocast(device, dtype=dtype, enabled=recurrent, cache_enabled=False if recurrent else None):
                return run(self, args, kwargs)
        return run(self, args, kwargs)

    if not issubclass(original, (nn.Embedding, nn.EmbeddingBag)):
        return pure
    looked_up = _fp32(inner)

    def lookup(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A sparse gradient cannot pass through a cast of the weight, and max_norm writes the weight: the rows are cast instead.
        if self.sparse or self.max_norm is not None:
            return map_tensors(looked_up(self, args, kwargs), to_half)
        return pure(self, args, kwargs)

    return lookup


def _off_the_fast_path(run: Run) -> Run:
    def slow(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.training or not torch.backends.mha.get_fastpath_enabled():
            return run(self, args, kwargs)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return run(self, args, kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    return slow


def type_of_device(tensor: torch.Tensor) -> str:
    """The same as ``tensor.device.type``, which makes two objects on the way: this is asked in every step."""
    if tensor.is_cuda:
        return "cuda"
    return "cpu" if tensor.is_cpu else tensor.device.type


def device_type_of(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str:
    """Where a call computes: the device type of the module's own parameters, else of its tensor arguments, else of any parameter.

    Asked at each call, because a model may be moved after a policy was applied. ``cpu`` where there is no tensor at all.
    """
    for parameter in module._parameters.values():
        if parameter is not None:
            return type_of_device(parameter)
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return type_of_device(args[0])
    # Floating arguments first: lengths and indices may stay on the CPU beside a model on a GPU.
    tensors = iter_tensors((args, kwargs or {}))
    for tensor in tensors:
        if tensor.is_floating_point():
            return type_of_device(tensor)
    # One after the other, not all at once: the first parameter answers, and listing them all takes long in a large model.
    for tensor in itertools.chain(module.parameters(), tensors, module.buffers()):
        return type_of_device(tensor)
    return "cpu"
