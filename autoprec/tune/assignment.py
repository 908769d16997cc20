"""Assignment: one precision for every layer, what it costs and risks, and the fewest named exceptions that state it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoprec.policy import LayerSetting, Precision, Reason
from autoprec.records import LayerProfile, Look, Profile, Risk

# A cast between float32 and a half reads 4 and writes 2 bytes of an element forward, and the reverse backward.
CAST_BYTES_PER_ELEMENT = 12
# Entering a wrapped layer costs the host this much a call (24 against 17 us for a Linear under autocast, CPU).
# Source: own measurement, torch 2.14.1; it decides only between choices whose own times are equal.
ISLAND_S = 7e-6
# A layer with a soft risk counts as this many times as sensitive. Own choice: it moves the layer up the order of
# suspicion without shutting it out, because the study may overrule a soft risk.
SOFT_RISK_FACTOR = 4.0
_CLASS = {"fp32": "fp32", "fp16": "fp16", "fp16_pure": "fp16", "bf16": "bf16", "bf16_pure": "bf16"}


@dataclass(frozen=True)
class Assignment:
    """A precision for every layer.

    Attributes:
        precisions: by layer name, in the look's order; the root, where it is a layer, has the name ``""``.
        default: the precision the policy's root gets.
        time_s: seconds of one step by the profile, casts and wrapped layers included.
        harm: summed sensitivity; infinite where a layer breaks a hard risk.
    """

    precisions: dict[str, Precision]
    default: Precision
    time_s: float
    harm: float

    def key(self) -> tuple[Precision, ...]:
        """Identifies the assignment among those of one model."""
        return (self.default, *self.precisions.values())

    def summary(self) -> str:
        """``41 fp16, 2 fp32``: how many layers run in each precision, most first."""
        return summarize(self.precisions.values())


def summarize(precisions: Iterable[Precision]) -> str:
    """``41 fp16, 2 fp32``: how often each precision occurs, most first."""
    counts: dict[str, int] = {}
    for precision in precisions:
        counts[precision] = counts.get(precision, 0) + 1
    return ", ".join(f"{n} {p}" for p, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def same_dtype(left: Precision, right: Precision) -> bool:
    """True where a tensor passes between the two without a cast: fp16 beside fp16_pure needs none."""
    return _CLASS[left] == _CLASS[right]


def harm_of(profile: LayerProfile | None, precision: Precision) -> float:
    """Sensitivity of a layer in a precision, raised by its soft risks and infinite under a hard one; 0 where unknown."""
    if profile is None:
        return 0.0
    harm = profile.sensitivity.get(precision, 0.0)
    risks = [risk for risk in profile.risks if risk.precision == precision]
    if any(risk.hard for risk in risks) or not math.isfinite(harm):
        return math.inf
    return max(harm, 0.0) * (SOFT_RISK_FACTOR if risks else 1.0)


def assess(precisions: Mapping[str, Precision], default: Precision, look: Look, profile: Profile) -> Assignment:
    """Prices a set of precisions: layer times, casts on edges, wrapped layers, and harm.

    Args:
        precisions: of every layer of ``look``.
        default: the root's precision; where the root is a layer, its own.
        look: layers and edges.
        profile: what each layer costs and risks.
    """
    profiles = {item.layer: item for item in profile.layers}
    time_s, harm = 0.0, 0.0
    for layer in look.layers:
        chosen, known = precisions[layer.name], profiles.get(layer.name)
        time_s += layer_time(known, chosen) + (ISLAND_S * layer.calls if chosen != default else 0.0)
        harm += harm_of(known, chosen)
    for edge in look.edges:
        ends = precisions.get(edge.producer), precisions.get(edge.consumer)
        if ends[0] is not None and ends[1] is not None and not same_dtype(ends[0], ends[1]):
            time_s += edge.elements * CAST_BYTES_PER_ELEMENT * profile.cast_s_per_byte
    return Assignment({layer.name: precisions[layer.name] for layer in look.layers}, default, time_s, harm)


def layer_time(profile: LayerProfile | None, precision: Precision) -> float:
    """Seconds of a layer in a precision; an unprofiled precision of a layer takes its fp32 time, an unknown layer none."""
    if profile is None:
        return 0.0
    return profile.time_s.get(precision, profile.time_s.get("fp32", 0.0))


def parents_of(names: Iterable[str]) -> dict[str, str | None]:
    """The nearest ancestor of each name that is itself among the names; None where there is none (the default rules)."""
    known = set(names)
    parents: dict[str, str | None] = {}
    for name in known:
        ancestor = name.rpartition(".")[0]
        while ancestor and ancestor not in known:
            ancestor = ancestor.rpartition(".")[0]
        parents[name] = ancestor or None
    return parents


def exceptions_of(
    precisions: Mapping[str, Precision],
    default: Precision,
    *,
    profile: Profile | None = None,
    look: Look | None = None,
    pinned: Mapping[str, str] | None = None,
) -> dict[str, LayerSetting]:
    """The fewest named exceptions that give every layer its precision by inheritance.

    A layer inherits what its nearest ancestor among the layers runs in, so exactly the layers that differ from that ancestor
    need a name; no smaller set exists.

    Args:
        precisions: of every layer; the root's own, where it is a layer, must be ``default``.
        default: the policy's default precision.
        profile: gives each exception its reason with figures; no reasons without it.
        look: gives the casts an exception saves.
        pinned: reasons of rules and users by layer name; they come before any other reason.

    Returns:
        Settings by layer name, sorted.

    Raises:
        ValueError: the root is a layer and its precision is not the default.
    """
    if precisions.get("", default) != default:
        raise ValueError(f"the root runs in {precisions['']}, so the default cannot be {default}")
    parents = parents_of(precisions)
    profiles = {item.layer: item for item in profile.layers} if profile else {}
    uncast = _uncast_elements(precisions, look)
    settings: dict[str, LayerSetting] = {}
    for name in sorted(name for name in precisions if name):
        parent = parents[name]
        inherited = default if parent is None else precisions[parent]
        own = precisions[name]
        if own != inherited:
            reason = _reason(name, own, inherited, profiles.get(name), pinned or {}, uncast.get(name, 0))
            settings[name] = LayerSetting(precision=own, reason=reason if profile else None)
    return settings


def _uncast_elements(precisions: Mapping[str, Precision], look: Look | None) -> dict[str, int]:
    """Elements, by layer, that pass to and from its neighbours without a cast."""
    elements: dict[str, int] = {}
    for edge in look.edges if look else ():
        ends = precisions.get(edge.producer), precisions.get(edge.consumer)
        if edge.producer != edge.consumer and ends[0] is not None and ends[1] is not None and same_dtype(ends[0], ends[1]):
            for name in (edge.producer, edge.consumer):
                elements[name] = elements.get(name, 0) + edge.elements
    return elements


def _reason(
    name: str,
    own: Precision,
    inherited: Precision,
    profile: LayerProfile | None,
    pinned: Mapping[str, str],
    uncast_elements: int,
) -> Reason:
    if name in pinned:
        return Reason(kind="pinned", text=pinned[name])
    risk = _risk(profile, inherited)
    if risk is not None and risk.hard:
        return Reason(kind=risk.kind, text=risk.text)
    harm_own, harm_inherited = harm_of(profile, own), harm_of(profile, inherited)
    time_own, time_inherited = layer_time(profile, own), layer_time(profile, inherited)
    times = f"{_ms(time_own)} in {own} against {_ms(time_inherited)} in {inherited}"
    if harm_own < harm_inherited:
        text = f"estimated harm {harm_inherited:.2g} in {inherited}, {harm_own:.2g} in {own}; {times}"
        return Reason(kind="sensitivity", text=f"{text}; {risk.text}" if risk else text)
    if time_own < time_inherited or not uncast_elements:
        return Reason(kind="speed", text=times)
    return Reason(kind="cast_cost", text=f"{uncast_elements:,} elements pass to and from its neighbours without a cast; {times}")


def _risk(profile: LayerProfile | None, precision: Precision) -> Risk | None:
    risks = [risk for risk in profile.risks if risk.precision == precision] if profile else []
    return min(risks, key=lambda risk: not risk.hard, default=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
