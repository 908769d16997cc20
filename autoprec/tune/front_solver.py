"""The front of whole assignments: a mixed-integer programme per time budget.

One-hot choices per unit (a tied group, or a single layer) minimise summed harm under a time budget; an edge between units of
different types costs a cast. Sweeping the budget gives the front, so that the study sees one integer instead of a hundred
categoricals. Solved with HiGHS through ``scipy.optimize.milp``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from autoprec.policy import Precision
from autoprec.records import Layer, LayerProfile, Look, Profile
from autoprec.tune.assignment import (
    CAST_BYTES_PER_ELEMENT,
    ISLAND_S,
    Assignment,
    assess,
    harm_of,
    layer_time,
    same_dtype,
)

# Own bounds: 256 units solve in well under a second a budget on one core; the most sensitive layers always stay single.
MAX_UNITS = 256
MAX_SINGLES = 64
# A measured gain of pure half under 3% of the layer's time is noise. Source: DESIGN, spread of eager windows.
PURE_GAIN = 0.03
# Harm past this many times the median counts as equally bad: HiGHS cannot tell 1 from 1e9 in one objective.
HARM_CLIP = 1e4
# Optimal to this share is enough: times and harms are measured to a percent or so. Source: on the profile of a 48-block transformer
# (291 layers) the fronts at 1e-4 and 1e-3 differ by 0.3% in time at equal harm, and the second takes 0.7 of the time.
GAP = 1e-3
# Solves that run at once; more gain nothing where the longest one decides.
MAX_THREADS = 8
CHOICES: dict[Precision, tuple[Precision, ...]] = {
    "fp32": ("fp32",),
    "fp16": ("fp32", "bf16", "fp16", "fp16_pure"),
    "bf16": ("fp32", "bf16", "bf16_pure"),
}


@dataclass(frozen=True)
class _Unit:
    """Layers that take one precision together; ``time_s`` and ``harm`` are their sums by option."""

    names: tuple[str, ...]
    options: tuple[Precision, ...]
    time_s: tuple[float, ...]
    harm: tuple[float, ...]


@dataclass(frozen=True)
class _Problem:
    units: tuple[_Unit, ...]
    casts: tuple[tuple[int, int, float], ...]
    columns: tuple[tuple[int, Precision], ...]
    time_s: NDArray[np.float64]
    harm: NDArray[np.float64]
    rows: LinearConstraint
    ambient: Precision


def solve_front(
    look: Look,
    profile: Profile,
    allowed: Mapping[str, Sequence[Precision]],
    groups: Sequence[Sequence[str]] = (),
    *,
    dtype: Precision = "fp16",
    size: int = 12,
    time_limit_s: float = 30.0,
) -> tuple[Assignment, ...]:
    """Whole assignments from the safest to the fastest, none slower and more harmful than another.

    Args:
        look: layers and edges.
        profile: times, sensitivities and risks; a layer without one costs nothing.
        allowed: precisions by layer name, as ``space.allowed_precisions`` gives them.
        groups: layers that move together.
        dtype: the compute type of the front: ``fp16`` (with bf16 islands where allowed), ``bf16`` or ``fp32``.
        size: most points of the front.
        time_limit_s: seconds for all budgets together; a budget that runs out keeps the best found.

    Returns:
        At least one assignment, ordered by falling time; the last one is the fastest.
    """
    problem = _prepare(look, profile, allowed, groups, dtype)
    limit = time_limit_s / (size + 3)
    harm = problem.harm + 1e-4 * problem.time_s
    # HiGHS lets go of Python's lock while it solves.
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        fastest, safest = pool.map(lambda objective: _solve(problem, objective, None, limit), (problem.time_s, harm))
        budgets = (
            []
            if fastest is None or safest is None
            else _budgets(float(problem.time_s @ fastest), float(problem.time_s @ safest), size)
        )
        between = list(pool.map(lambda budget: _solve(problem, harm, budget, limit), budgets))
    solutions = [safest, *between, fastest]
    found = [_decode(problem, solution, look, profile, allowed) for solution in solutions if solution is not None]
    return _front(found, size) or (_lowest_harm(look, profile, problem),)


def _budgets(least: float, most: float, size: int) -> list[float]:
    """Times to allow, from the safest assignment's down to the fastest's, denser towards the fast end."""
    if most <= least:
        return []
    return [float(least + (most - least) * share) * (1 + 1e-4) for share in np.linspace(1.0, 0.0, max(size, 2)) ** 2]


def _prepare(
    look: Look, profile: Profile, allowed: Mapping[str, Sequence[Precision]], groups: Sequence[Sequence[str]], dtype: Precision
) -> _Problem:
    profiles = {item.layer: item for item in profile.layers}
    options = {layer.name: _options(layer, profiles.get(layer.name), allowed, dtype) for layer in look.layers}
    ambient: Precision = dtype if dtype in options.get("", (dtype,)) else "fp32"
    units = _units(look, profiles, options, groups, ambient)
    home = {name: index for index, unit in enumerate(units) for name in unit.names}
    casts: dict[tuple[int, int], float] = {}
    for edge in look.edges:
        if edge.producer in home and edge.consumer in home and home[edge.producer] != home[edge.consumer]:
            pair = (home[edge.producer], home[edge.consumer])
            casts[pair] = casts.get(pair, 0.0) + edge.elements * CAST_BYTES_PER_ELEMENT * profile.cast_s_per_byte
    edges = tuple((left, right, cost) for (left, right), cost in casts.items() if cost > 0)
    columns = tuple((index, option) for index, unit in enumerate(units) for option in unit.options)
    time_s = np.array([t for unit in units for t in unit.time_s] + [cost for _, _, cost in edges])
    harm = np.array([h for unit in units for h in unit.harm] + [0.0] * len(edges))
    return _Problem(units, edges, columns, _scaled(time_s, None), _scaled(harm, HARM_CLIP), _rows(units, edges, columns), ambient)


def _scaled(values: NDArray[np.float64], clip: float | None) -> NDArray[np.float64]:
    """Divides by the largest value, after cutting values far over the median, so that coefficients lie in 0 to 1."""
    positive = values[values > 0]
    if not len(positive):
        return values
    top = float(positive.max()) if clip is None else min(float(positive.max()), clip * float(np.median(positive)))
    scaled: NDArray[np.float64] = np.minimum(values, top) / top
    return scaled


def _options(
    layer: Layer, profile: LayerProfile | None, allowed: Mapping[str, Sequence[Precision]], dtype: Precision
) -> tuple[Precision, ...]:
    """What a layer may take in this front: allowed, profiled, without a hard risk, and pure only where it gains."""
    known = tuple(allowed.get(layer.name, ("fp32",)))
    options = [p for p in CHOICES[dtype] if p in known and harm_of(profile, p) < float("inf")]
    if profile is not None:
        options = [p for p in options if p in profile.time_s or p == "fp32"]
        margin = 1 - PURE_GAIN if profile.time_origin == "measured" else 1.0
        for pure, plain in (("fp16_pure", "fp16"), ("bf16_pure", "bf16")):
            if pure in options and plain in options and layer_time(profile, pure) >= margin * layer_time(profile, plain):
                options.remove(pure)
    if not layer.name:  # a root in pure half would cast every input of the model; its children take pure one by one
        options = [p for p in options if not p.endswith("_pure")]
    return tuple(options) or (("fp32",) if "fp32" in known else known[:1])


def _units(
    look: Look,
    profiles: Mapping[str, LayerProfile],
    options: Mapping[str, tuple[Precision, ...]],
    groups: Sequence[Sequence[str]],
    ambient: Precision,
) -> tuple[_Unit, ...]:
    layers = {layer.name: layer for layer in look.layers}
    units = []
    for names in _partition(look, profiles, options, groups):
        shared = tuple(p for p in options[names[0]] if all(p in options[name] for name in names))
        for members in [names] if shared else [(name,) for name in names]:
            usable = shared or options[members[0]]
            islands = ISLAND_S * sum(layers[name].calls for name in members)
            time_s = tuple(
                sum(layer_time(profiles.get(name), p) for name in members) + (islands if p != ambient else 0.0) for p in usable
            )
            harm = tuple(sum(harm_of(profiles.get(name), p) for name in members) for p in usable)
            units.append(_Unit(members, usable, time_s, harm))
    return tuple(units)


def _partition(
    look: Look,
    profiles: Mapping[str, LayerProfile],
    options: Mapping[str, tuple[Precision, ...]],
    groups: Sequence[Sequence[str]],
) -> list[tuple[str, ...]]:
    """Tied groups and single layers; past MAX_UNITS, layers of one kind and one set of options merge block by block."""
    tied = {name: tuple(group) for group in groups for name in group if name in options}
    parts = list(dict.fromkeys(tied.get(layer.name, (layer.name,)) for layer in look.layers))
    if len(parts) <= MAX_UNITS:
        return parts
    worst = {part: max(_worst(profiles.get(name), options[name]) for name in part) for part in parts}
    singles = set(sorted(parts, key=lambda part: -worst[part])[:MAX_SINGLES]) | {("",)}
    kinds = {layer.name: layer.kind for layer in look.layers}
    depth = max(len(name.split(".")) for part in parts for name in part)
    while True:
        merged: dict[object, list[str]] = {}
        for part in parts:
            block = ".".join(part[0].split(".")[:depth])
            key: object = part if part in singles else (block, kinds[part[0]], options[part[0]])
            merged.setdefault(key, []).extend(part)
        if len(merged) <= MAX_UNITS or depth == 0:
            return [tuple(names) for names in merged.values()]
        depth -= 1


def _worst(profile: LayerProfile | None, options: Sequence[Precision]) -> float:
    return max(harm_of(profile, p) for p in options)


def _rows(
    units: Sequence[_Unit], casts: Sequence[tuple[int, int, float]], columns: Sequence[tuple[int, Precision]]
) -> LinearConstraint:
    """One choice a unit; a cast variable is at least ``is(type, producer) - is(type, consumer)`` for every type."""
    entries: list[tuple[int, int, float]] = [(unit, column, 1.0) for column, (unit, _) in enumerate(columns)]
    lower, upper = [1.0] * len(units), [1.0] * len(units)
    by_unit: list[list[tuple[int, Precision]]] = [[] for _ in units]
    for column, (unit, option) in enumerate(columns):
        by_unit[unit].append((column, option))
    kinds: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
    for index, (left, right, _) in enumerate(casts):
        for kind in kinds:
            mine = [column for column, option in by_unit[left] if same_dtype(option, kind)]
            if not mine:
                continue
            row = len(lower)
            entries += [(row, column, -1.0) for column in mine] + [(row, len(columns) + index, 1.0)]
            entries += [(row, column, 1.0) for column, option in by_unit[right] if same_dtype(option, kind)]
            lower.append(0.0)
            upper.append(np.inf)
    where = np.array([(row, column) for row, column, _ in entries])
    data = np.array([value for _, _, value in entries])
    matrix = coo_array((data, (where[:, 0], where[:, 1])), shape=(len(lower), len(columns) + len(casts)))
    return LinearConstraint(matrix.tocsr(), np.array(lower), np.array(upper))


def _solve(
    problem: _Problem, objective: NDArray[np.float64], budget: float | None, time_limit_s: float
) -> NDArray[np.float64] | None:
    constraints = [problem.rows]
    if budget is not None:
        constraints.append(LinearConstraint(problem.time_s[np.newaxis, :], -np.inf, budget))
    result = milp(
        objective,
        # Casts come out whole by themselves; declared so, HiGHS has no half-fixed problem to solve again and to report on stdout.
        integrality=np.ones(len(objective), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
    )
    if result.x is None:
        return None
    solution: NDArray[np.float64] = np.asarray(result.x, dtype=np.float64)
    return solution


def _decode(
    problem: _Problem,
    solution: NDArray[np.float64],
    look: Look,
    profile: Profile,
    allowed: Mapping[str, Sequence[Precision]],
) -> Assignment:
    """Reads the choices and prices them; the root goes to fp32 where that saves more wrapped layers than it costs."""
    best: dict[int, tuple[float, Precision]] = {}
    for column, (unit, option) in enumerate(problem.columns):
        if unit not in best or solution[column] > best[unit][0]:
            best[unit] = (float(solution[column]), option)
    precisions: dict[str, Precision] = {name: best[index][1] for index, unit in enumerate(problem.units) for name in unit.names}
    default = precisions.get("", problem.ambient)
    given = assess(precisions, default, look, profile)
    if default == "fp32" or "fp32" not in allowed.get("", ("fp32",)):
        return given
    rooted = assess(precisions | {"": "fp32"} if "" in precisions else precisions, "fp32", look, profile)
    return rooted if (rooted.time_s, rooted.harm) < (given.time_s, given.harm) and rooted.harm <= given.harm else given


def _front(found: Sequence[Assignment], size: int) -> tuple[Assignment, ...]:
    """Drops duplicates and dominated assignments; keeps both ends where there are more than ``size``."""
    kept: list[Assignment] = []
    for item in sorted({item.key(): item for item in found}.values(), key=lambda item: (item.time_s, item.harm)):
        if not kept or item.harm < kept[-1].harm:
            kept.append(item)
    kept.reverse()
    if len(kept) <= size:
        return tuple(kept)
    picked = sorted({round(i * (len(kept) - 1) / (size - 1)) for i in range(size)})
    return tuple(kept[i] for i in picked)


def _lowest_harm(look: Look, profile: Profile, problem: _Problem) -> Assignment:
    """What to fall back on where HiGHS finds nothing in its time: the least harmful option of every unit."""
    precisions = {
        name: unit.options[min(range(len(unit.options)), key=lambda i: (unit.harm[i], unit.time_s[i]))]
        for unit in problem.units
        for name in unit.names
    }
    return assess(precisions, precisions.get("", problem.ambient), look, profile)
