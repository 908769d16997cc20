"""Precision of one module instance, by swapping its class for a cached subclass of the same name.

A swapped class keeps parameters, keys, hooks and ``isinstance`` as they were; deepcopy and pickle carry it along; nothing is held
in a closure over an instance, so a copy computes with its own weights. The precision is part of the class, not of the
surroundings, so a recompute in activation checkpointing and a call outside the training loop see it too.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import weakref
from typing import Any, NoReturn, cast

from torch import nn

from autoprec.errors import PolicyError
from autoprec.runtime.islands import HELD_FORWARD, Island, forward_of
from autoprec.runtime.pure import LoweredProperty
from autoprec.runtime.source_reading import assigned_names


@functools.cache
def _island_base(layout: type) -> type:
    """The first base of swapped classes whose originals have their memory layout from ``layout``.

    An instance's class can be exchanged only for one of the same layout, and that is inherited from the first base: a plain class
    for most modules; built on ``abc.ABC`` or ``Generic`` for those that name it before ``nn.Module``.
    """

    class IslandModule(layout):  # type: ignore[misc]
        __orig_bases__ = ()  # else typing.Generic, as a layout, takes this for an incomplete use of itself

        def __init_subclass__(cls, **kwargs: Any) -> None:
            # Ends here: registries that list their subclasses must not list these.
            pass

        def __reduce_ex__(self, protocol: Any) -> Any:
            reduced = super().__reduce_ex__(protocol)
            kind: Any = type(self)
            if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__ and reduced[1][0] is kind:  # type: ignore[attr-defined]
                return (_rebuild, (kind.autoprec_original, kind.autoprec_island, *reduced[1][1:]), *reduced[2:])
            return reduced

        def __prepare_scriptable__(self) -> NoReturn:
            raise PolicyError(
                f"TorchScript cannot compile this {type(self).__name__}: a policy is applied, and scripts know no swapped class.",
                hint="Call remove() on the policy's handle first; torch.compile, torch.export and torch.jit.trace work as it is.",
            )

    return IslandModule


def _layout_of(kind: type) -> type:
    while kind.__base__ is not None and kind.__base__.__dictoffset__:
        kind = kind.__base__
    return kind.__base__ or object


def _rebuild(original: type[nn.Module], island: Island, *args: Any) -> nn.Module:
    kind = swapped_class(original, island)
    return kind.__new__(kind, *args)


_PURE = ("fp16_pure", "bf16_pure")

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
    if is_parametrized_class(original):
        return _on_swapped_base(original, island)
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "autoprec_island": island,
        "autoprec_original": original,
    }
    if island.precision in _PURE:
        namespace["autoprec_assigned"] = assigned_names(original)
    kind: type[nn.Module] = _new_class(
        type(original), original.__name__, (_island_base(_layout_of(original)), original), namespace
    )
    kind.forward = forward_of(kind, original, island)
    return kind


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    # Past a metaclass's own __new__ and __init__, which may register classes, count them or refuse a second one of a name.
    # ABCMeta's is needed: without it isinstance would answer from the original's cache.
    make = abc.ABCMeta.__new__ if issubclass(metaclass, abc.ABCMeta) else type.__new__
    return make(cast(Any, metaclass), name, bases, namespace)


def is_parametrized_class(kind: type) -> bool:
    """Whether torch's parametrization made this class for one instance: a single base, and properties for the computed weights."""
    return kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}" and bool(_properties(kind))


def _properties(kind: type) -> set[str]:
    return {name for name, attribute in vars(kind).items() if isinstance(attribute, property)}


def _on_swapped_base(original: type[nn.Module], island: Island) -> type[nn.Module]:
    """The parametrized class built again on the swapped plain one.

    The order that registering a parametrization after the swap gives too. torch takes a parametrization off by deleting the
    property from the instance's class and going back to that class's first base, which is then the swapped plain class.
    """
    base = swapped_class(cast(Any, original.__bases__[0]), island)
    namespace = _own_namespace(original)
    if island.precision in _PURE:
        for name in _properties(original):
            namespace[name] = LoweredProperty.of(namespace[name])
    namespace |= {"autoprec_island": island, "autoprec_original": original}
    return cast(type[nn.Module], _new_class(type(original), original.__name__, (base,), namespace))


def _own_namespace(kind: type) -> dict[str, Any]:
    return {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__", "_abc_impl")}


def swap(module: nn.Module, island: Island) -> None:
    """Swaps the class of one instance, in place; a forward that was replaced on the instance keeps working inside."""
    held = "forward" in module.__dict__
    if held:
        module.__dict__[HELD_FORWARD] = module.__dict__.pop("forward")
        island = Island(**{**vars(island), "held": True})
    module.__class__ = swapped_class(type(module), island)


def is_swapped(module: nn.Module) -> bool:
    """Whether the module's class is a swapped one, or built on one by another tool."""
    return hasattr(type(module), "autoprec_island")


def unswap(module: nn.Module) -> None:
    """Gives a module its original class and forward back, in place."""
    if not is_swapped(module):
        return
    module.__class__ = _without_island(type(module))
    if HELD_FORWARD in module.__dict__:
        module.__dict__["forward"] = module.__dict__.pop(HELD_FORWARD)


def _without_island(kind: type[Any]) -> type[Any]:
    if "autoprec_island" in vars(kind):
        original: type[Any] = kind.autoprec_original
        # Parametrizations may have come and gone since the swap; the class made for them then no longer fits.
        if not is_parametrized_class(original) or _properties(original) == _properties(kind):
            return original
    # Another tool (FSDP2, a parametrization) built its class on ours: build the same one on the original.
    bases = tuple(_without_island(base) if hasattr(base, "autoprec_island") else base for base in kind.__bases__)
    namespace = {key: value for key, value in _own_namespace(kind).items() if not key.startswith("autoprec_")}
    rebuilt: type[Any] = _new_class(type(kind), kind.__name__, bases, namespace)
    return rebuilt


def remove_policy(model: nn.Module) -> None:
    """Takes a policy off a model, in place: for a copy or a loaded model, which has no handle of its own.

    Process-wide flags and the memory layout stay as they are: those belong to the handle of the model that set them.
    """
    for module in model.modules():
        unswap(module)
