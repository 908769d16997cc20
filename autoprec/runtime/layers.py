"""A model's layers by name: wrappers looked through, aliases resolved, and the list held against a policy's fingerprint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.swa_utils import AveragedModel

from autoprec.errors import PolicyError, PolicyMismatch, suggest
from autoprec.policy import Fingerprint

# Parts of a dotted name that wrappers put in and the user never wrote: torch.compile, checkpoint wrappers, FSDP1.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_WRAPPER_KINDS = frozenset({"OptimizedModule", "CheckpointWrapper", "FullyShardedDataParallel"})
_SHOWN = 8  # names listed of each kind of mismatch before "and N more"


def strip_prefixes(name: str) -> str:
    """Removes what wrappers put into a dotted name: leading ``module.`` and ``_orig_mod`` parts anywhere."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_PARTS]
    while parts and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP, DataParallel, an averaged copy, or ``torch.compile``."""
    while True:
        # By name: importing the class would load the whole compiler into jobs that never compile.
        if type(model).__name__ == "OptimizedModule":
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | AveragedModel):
            model = model.module
        else:
            return model


def _all_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        # A compiled or checkpointed child stands before the module it wraps under the same stripped name.
        if type(module).__name__ in _WRAPPER_KINDS:
            continue
        yield ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS), module


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of the model by its first dotted name, wrappers looked through; the root is ``""``."""
    seen: set[int] = set()
    named: dict[str, nn.Module] = {}
    for name, module in _all_names(model):
        if id(module) not in seen and name not in named:
            seen.add(id(module))
            named[name] = module
    return named


def aliases(model: nn.Module) -> dict[str, str]:
    """The first name of every name under which a module is registered, the first names included."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, module in _all_names(model):
        names.setdefault(name, first.setdefault(id(module), name))
    return names


def layer_kind(module: nn.Module) -> str:
    """The class name the user knows: without FSDP2's and parametrization's prefixes."""
    kind = type(module)
    name = kind.__name__
    if torch.nn.utils.parametrize.is_parametrized(module):
        name = name.removeprefix("FSDP").removeprefix("Parametrized")
    elif name.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        name = name.removeprefix("FSDP")
    return name


def own_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters a module owns directly, by name; a parametrized one counts under its plain name.

    Raises:
        PolicyError: a lazy module that has not seen its first batch.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module._parameters.items():
        if isinstance(parameter, UninitializedParameter):
            raise PolicyError(
                f"{type(module).__name__} is a lazy module whose shapes are not known yet; a policy needs them.",
                hint="Run one batch through the model, then apply the policy.",
            )
        if parameter is not None:
            shapes[name] = tuple(parameter.shape)
    if torch.nn.utils.parametrize.is_parametrized(module):
        # The original is read, not the computed weight: computing it would step spectral_norm's power iteration.
        for name, originals in module.parametrizations.items():  # type: ignore[operator,union-attr]
            shapes[name] = max((tuple(p.shape) for p in originals.parameters(recurse=False)), key=math.prod)
    return shapes


def layer_signature(module: nn.Module) -> str:
    """Kind and own parameter shapes, as ``records.Layer.signature`` writes them: ``Conv2d weight=64x3x7x7``."""
    shapes = sorted(own_shapes(module).items())
    return " ".join((layer_kind(module), *(f"{name}={'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes)))


@dataclass(frozen=True)
class LayerDifference:
    """How a model's layer list departs from a fingerprint's; all empty where they agree.

    Attributes:
        missing: in the fingerprint, not in the model.
        extra: own parameters in the model, unknown to the fingerprint.
        changed: name, expected and actual signature.
        matched: how many of the fingerprint's layers the model has unchanged.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    changed: tuple[tuple[str, str, str], ...]
    matched: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.changed)

    def text(self, known: Iterable[str]) -> str:
        """Lists what differs, one kind a line."""
        names = list(known)
        lines = []
        if self.missing:
            near = [f"{name}{suggest(name, names)}" for name in self.missing]
            lines.append(f"missing from the model ({len(near)}): {_listed(near)}")
        if self.extra:
            lines.append(f"extra in the model ({len(self.extra)}): {_listed(self.extra)}")
        if self.changed:
            pairs = [
                f"{name or 'the model itself'} (policy: {expected}; model: {actual})" for name, expected, actual in self.changed
            ]
            lines.append(f"changed ({len(pairs)}): {_listed(pairs)}")
        return "\n".join(f"  {line}" for line in lines)


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


def compare_layers(model: nn.Module, fingerprint: Fingerprint) -> LayerDifference:
    """Holds the model's modules against the fingerprint's layer list, by any name a module has."""
    named, names = named_layers(model), aliases(model)
    missing = tuple(name for name in (*fingerprint.layers, *fingerprint.idle) if name not in names)
    changed = []
    matched = 0
    for name, expected in fingerprint.layers.items():
        if name in names:
            actual = layer_signature(named[names[name]])
            matched += actual == expected
            if actual != expected:
                changed.append((name, expected, actual))
    expected_modules = {names[name] for name in (*fingerprint.layers, *fingerprint.idle) if name in names}
    extra = tuple(
        name
        for name, module in named.items()
        if name not in expected_modules and "parametrizations" not in name.split(".") and own_shapes(module)
    )
    return LayerDifference(missing, extra, tuple(changed), matched)


def mismatch_error(model: nn.Module, difference: LayerDifference) -> PolicyMismatch:
    """The error that lists missing, extra and changed layers and says what to do."""
    known = named_layers(model)
    if not difference.matched:
        head = f"The policy matches nothing in this {type(unwrap(model)).__name__}: none of its layers is there unchanged."
        hint = "Give the model the policy was tuned for, or run 'autoprec tune' on this one."
    else:
        head = f"The policy was made for another list of layers than this {type(unwrap(model)).__name__} has."
        hint = "Tune again, build the model as it was tuned, or pass strict=False to apply what matches."
    return PolicyMismatch(f"{head}\n{difference.text(known)}", hint=hint)
