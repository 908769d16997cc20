"""Groups of layers that leave the front's choice: a study parameter moves them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.policy import Precision
from autoprec.records import Look, Profile
from autoprec.tune.assignment import harm_of
from autoprec.tune.space import OverrideChoice, SearchSpace

_PURE: dict[Precision, Precision] = {"fp16": "fp16_pure", "bf16": "bf16_pure", "fp32": "fp32"}


@dataclass(frozen=True)
class BoundOverride:
    """An override with the layers it really moves, each with what it may take."""

    name: str
    choices: tuple[OverrideChoice, ...]
    layers: dict[str, tuple[Precision, ...]]

    def applied(self, precisions: Mapping[str, Precision], dtype: Precision, choice: OverrideChoice) -> dict[str, Precision]:
        """The precisions with the group's layers moved, where each may go there."""
        wanted: dict[str, Precision] = {"fp32": "fp32", "half": dtype, "pure": _PURE[dtype]}
        changed = dict(precisions)
        if choice != "front":
            changed |= {name: wanted[choice] for name, allowed in self.layers.items() if wanted[choice] in allowed}
        return changed


def bound_overrides(
    space: SearchSpace,
    look: Look,
    profile: Profile,
    allowed: Mapping[str, Sequence[Precision]],
    dtypes: Sequence[Precision],
) -> tuple[BoundOverride, ...]:
    """The overrides of a search space for one model, each with the layers it moves; one that moves none is left out."""
    profiles = {item.layer: item for item in profile.layers}
    bound = []
    for override in space.overrides:
        layers = {
            layer.name: tuple(p for p in allowed[layer.name] if harm_of(profiles.get(layer.name), p) < float("inf"))
            for layer in look.layers
            if layer.name and override.matches(layer)
        }
        reachable = {p for options in layers.values() for p in options}
        wanted: dict[str, set[Precision]] = {
            "fp32": {"fp32"},
            "half": set(dtypes) - {"fp32"},
            "pure": {_PURE[d] for d in dtypes} - {"fp32"},
        }
        choices = tuple(c for c in override.choices if c == "front" or reachable & wanted[c])
        if "front" in choices and len(choices) > 1:
            bound.append(BoundOverride(override.name, ("front", *(c for c in choices if c != "front")), layers))
    return tuple(bound)
