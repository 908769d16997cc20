"""Precision of one module instance, by swapping its class for a cached subclass of the same name.

A swapped class keeps parameters, keys, hooks and ``isinstance`` as they were; deepcopy and pickle carry it along; nothing is held
in a closure over an instance, so a copy computes with its own weights. The precision is part of the class, not of the
surroundings, so a recompute in activation checkpointing and a call outside the training loop see it too.
"""

from __future__ import annotations

import copyreg
import functools
import itertools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from autoprec.policy import Precision
from autoprec.runtime.padding import padded_forward
from autoprec.runtime.pure import LOWERED, lower, restore
from autoprec.runtime.tree import iter_tensors, map_tensors

HALF_DTYPES: dict[Precision, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16_pure": torch.float16,
    "bf16_pure": torch.bfloat16,
}
# Where an instance's own replaced forward (another tool's wrapper) waits while the class's forward is ours.
HELD_FORWARD = "_autoprec_held_forward"

# Before 2.11 a copy cached by an earlier no_grad call of a submodule in the same block is not differentiable either, so that the
# model starts with an empty cache. Source: pytorch#165068.
_CACHE_KEEPS_NO_GRAD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11)

Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Island:
    """What a swapped class does around its original forward.

    Attributes:
        precision: computes in this precision; None keeps the surroundings'.
        outside: precision around it; None for the root. Where it is None or fp32, outputs come back in float32. Between two half
            types tensors are cast towards bf16 only, where nothing overflows: on entering a bf16 island from fp16, and on leaving
            an fp16 one for bf16. Autocast alone casts matmuls and convolutions, and the other operations of a bf16 island
            would run on its neighbours' fp16 tensors.
        cached: may use autocast's weight-cast cache. Off where another half type in the model could have filled it: the cache
            is keyed by the weight alone.
        multiple: sizes are padded up to multiples of this; 0 for none.
        slow_path: keeps nn.TransformerEncoder and nn.MultiheadAttention off their fused inference path, which reads the
            children's weights past any precision.
        held: the instance had a forward of its own.
    """

    precision: Precision | None = None
    outside: Precision | None = None
    cached: bool = True
    multiple: int = 0
    slow_path: bool = False
    held: bool = False


class IslandModule:
    """First base of every swapped class; ``autoprec_island`` and ``autoprec_original`` are set on each."""

    autoprec_island: ClassVar[Island]
    autoprec_original: ClassVar[type[nn.Module]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Ends here: registries that list their subclasses must not list these.
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        kind = type(self)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and reduced[1][0] is kind:  # type: ignore[attr-defined]
            original = getattr(kind, "autoprec_original", kind)
            return (_rebuild, (original, self.autoprec_island, *reduced[1][1:]), *reduced[2:])
        return reduced


def _rebuild(original: type[nn.Module], island: Island, *args: Any) -> nn.Module:
    kind = swapped_class(original, island)
    return kind.__new__(kind, *args)


_swapped: weakref.WeakKeyDictionary[type[nn.Module], weakref.WeakValueDictionary[Island, type[nn.Module]]]
# Weak on both sides: parametrized and FSDP classes are made per instance and would pile up.
_swapped = weakref.WeakKeyDictionary()


def swapped_class(original: type[nn.Module], island: Island) -> type[nn.Module]:
    """The subclass of ``original`` that computes as ``island`` says; the same one for the same arguments.

    A root gets a class of its own each time: torch.compile counts recompilations by code object and gives up after a few, and
    one shared by every applied model of the process would use them up.
    """
    if island.outside is None:
        return _make_class(original, island)
    known = _swapped.setdefault(original, weakref.WeakValueDictionary())
    kind = known.get(island)
    if kind is None:
        kind = known[island] = _make_class(original, island)
    return kind


def _make_class(original: type[nn.Module], island: Island) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "autoprec_island": island,
        "autoprec_original": original,
    }
    if island.precision in ("fp16_pure", "bf16_pure"):
        namespace |= _lowered_properties(original)
    metaclass: Any = type(original)
    kind: type[nn.Module] = metaclass(original.__name__, (IslandModule, original), namespace)
    kind.forward = _forward(kind, original, island)
    return kind


def _lowered_properties(original: type[nn.Module]) -> dict[str, Any]:
    """Parametrized weights as properties that follow the cast of the other parameters while forward runs."""
    if not original.__name__.removeprefix("FSDP").startswith("Parametrized"):
        return {}
    return {
        name: _lowered_property(attribute)
        for kind in original.__mro__
        for name, attribute in vars(kind).items()
        if isinstance(attribute, property) and kind.__name__.startswith("Parametrized")
    }


def _lowered_property(computed: property) -> property:
    def get(self: nn.Module) -> Any:
        value = cast(Any, computed.fget)(self)
        dtype = self.__dict__.get(LOWERED)
        return value if dtype is None else value.to(dtype)

    return property(get, computed.fset, computed.fdel)


def _forward(kind: type[nn.Module], original: type[nn.Module], island: Island) -> Callable[..., Any]:
    run = _with_precision(_innermost(original, island), island)
    if island.slow_path:
        run = _off_the_fast_path(run)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A tool that kept this bound method from before remove() must get the plain module.
        if not isinstance(self, kind):
            return original.forward(self, *args, **kwargs)
        return run(self, args, kwargs)

    # A code object of its own, for the reason given in swapped_class.
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


def _with_precision(inner: Run, island: Island) -> Run:
    precision = island.precision
    if precision is None:
        return inner
    if precision == "fp32":
        return _fp32(inner)
    dtype = HALF_DTYPES[precision]
    run = _pure(inner, dtype) if precision.endswith("_pure") else _autocast(inner, island, dtype)
    if island.outside in (None, "fp32"):
        return _rising(run)
    if HALF_DTYPES[island.outside] == dtype:
        return run
    return _widened(run, enters=dtype == torch.bfloat16)


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """A half or bfloat16 tensor in float32; any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _rising(run: Run) -> Run:
    def rising(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return map_tensors(run(self, args, kwargs), to_float32)

    return rising


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
        if not torch.is_autocast_enabled(device):
            return map_tensors(inner(self, args, kwargs), to_float32)
        with torch.autocast(device, enabled=False):
            return map_tensors(inner(self, args, kwargs), to_float32)

    return fp32


def _autocast(inner: Run, island: Island, dtype: torch.dtype) -> Run:
    def autocast(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = device_type_of(self, args, kwargs)
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


def _pure(inner: Run, dtype: torch.dtype) -> Run:
    def to_half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else tensor

    def run(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        undo = lower(self, dtype)
        try:
            return inner(self, args, kwargs)
        finally:
            restore(undo)

    def pure(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_tensors(args, to_half), map_tensors(kwargs, to_half)
        device = device_type_of(self, args, kwargs)
        recurrent = isinstance(self, nn.RNNBase)  # its flat weights are cast by autocast, see pure.py
        if recurrent or torch.is_autocast_enabled(device):
            with torch.autocast(device, dtype=dtype, enabled=recurrent, cache_enabled=False if recurrent else None):
                return run(self, args, kwargs)
        return run(self, args, kwargs)

    return pure


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


def device_type_of(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> str:
    """Where a call computes: the device type of the module's own parameters, else of its tensor arguments, else of any parameter.

    Asked at each call, because a model may be moved after a policy was applied. ``cpu`` where there is no tensor at all.
    """
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device.type
    if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
        return args[0].device.type
    # Floating arguments first: lengths and indices may stay on the CPU beside a model on a GPU.
    tensors = iter_tensors((args, kwargs or {}))
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor.device.type
    # One after the other, not all at once: the first parameter answers, and listing them all takes long in a large model.
    for tensor in itertools.chain(module.parameters(), tensors, module.buffers()):
        return tensor.device.type
    return "cpu"


def swap(module: nn.Module, island: Island) -> None:
    """Swaps the class of one instance, in place; a forward that was replaced on the instance keeps working inside."""
    held = "forward" in module.__dict__
    if held:
        module.__dict__[HELD_FORWARD] = module.__dict__.pop("forward")
        island = Island(**{**vars(island), "held": True})
    module.__class__ = swapped_class(type(module), island)


def is_swapped(module: nn.Module) -> bool:
    """Whether the module's class is a swapped one, or built on one by another tool."""
    return isinstance(module, IslandModule)


def unswap(module: nn.Module) -> None:
    """Gives a module its original class and forward back, in place."""
    if not is_swapped(module):
        return
    module.__class__ = _without_island(type(module))
    if HELD_FORWARD in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(HELD_FORWARD)


def _without_island(kind: type[Any]) -> type[Any]:
    if "autoprec_island" in vars(kind):
        return kind.autoprec_original  # type: ignore[no-any-return]
    # Another tool (FSDP2, a parametrization) built its class on ours: build the same one on the original.
    bases = tuple(_without_island(base) if issubclass(base, IslandModule) else base for base in kind.__bases__)
    namespace = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    metaclass: Any = type(kind)
    rebuilt: type[Any] = metaclass(kind.__name__, bases, namespace)
    return rebuilt


def remove_islands(model: nn.Module) -> None:
    """Takes every island out of a model, in place: for a copy or a loaded model that has no handle of its own."""
    for module in model.modules():
        unswap(module)
