"""Repair: the smallest set of layers to lift so that a policy that diverges trains again.

A search that lifts one layer at a time and looks at the loss sees nothing where two distant layers are at fault. So it starts
from a set that passes (the most suspicious 1, 2, 4, ... layers, all of them at the end) and lowers segments that still pass,
halving those that do not: every layer left was needed when it was tried. Costs about ``2 k log2(n)`` evaluations for k layers of
n at fault (segment splitting; Zeller and Hildebrandt 2002, delta debugging, doi:10.1109/32.988498).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.policy import Precision

Passes = Callable[[frozenset[str]], bool]


@dataclass(frozen=True)
class Lift:
    """What a repair found.

    Attributes:
        lifted: layers to lift, in order of suspicion; passes as it stands.
        evaluations: how often ``passes`` was really called.
        minimal: whether every layer was shown to be needed; False where the evaluations ran out first.
    """

    lifted: tuple[str, ...]
    evaluations: int
    minimal: bool


class _Budget(Exception):
    """The evaluations ran out; never leaves this module."""


class _Memo:
    """Calls ``passes`` once a set, at most ``most`` times and not after ``is_spent`` has said so."""

    def __init__(self, passes: Passes, most: int, is_spent: Callable[[], bool]) -> None:
        self._passes = passes
        self._known: dict[frozenset[str], bool] = {}
        self._most = most
        self._is_spent = is_spent

    @property
    def evaluations(self) -> int:
        return len(self._known)

    @property
    def left(self) -> int:
        return 0 if self._is_spent() else self._most - len(self._known)

    def __call__(self, lifted: frozenset[str]) -> bool:
        if lifted not in self._known:
            if self.left <= 0:
                raise _Budget
            self._known[lifted] = self._passes(lifted)
        return self._known[lifted]


def smallest_lift(
    items: Sequence[str], passes: Passes, *, max_evaluations: int = 64, is_spent: Callable[[], bool] = lambda: False
) -> Lift | None:
    """Finds a smallest set of layers whose lifting makes ``passes`` true.

    Deterministic. Where lifting more never hurts, no layer of the result can be left out.

    Args:
        items: layers that may be lifted, the most suspicious first.
        passes: whether the policy trains like FP32 with these layers lifted; it is not asked twice about one set, and not about
            the empty set first: the caller has seen that fail.
        max_evaluations: most calls of ``passes``.
        is_spent: whether what the calls may cost together is used up; they need not all cost the same.

    Returns:
        The set found, or None where even lifting everything does not pass.
    """
    order = list(dict.fromkeys(items))
    memo = _Memo(passes, max_evaluations, is_spent)
    kept = _passing_prefix(order, memo)
    if kept is None:
        return None
    try:
        kept, minimal = _lowered(kept, order, memo), True
    except _Interrupted as stopped:
        kept, minimal = stopped.kept, False
    return Lift(tuple(name for name in order if name in kept), memo.evaluations, minimal)


def _passing_prefix(order: Sequence[str], memo: _Memo) -> frozenset[str] | None:
    """The first of the 1, 2, 4, ... most suspicious layers that passes; None where all of them do not."""
    size = 1
    while size < len(order) and memo.left > 1:
        if memo(frozenset(order[:size])):
            return frozenset(order[:size])
        size *= 2
    everything = frozenset(order)
    return everything if order and memo.left > 0 and memo(everything) else None


class _Interrupted(Exception):
    """Carries the set that passed when the evaluations ran out; never leaves this module."""

    def __init__(self, kept: frozenset[str]) -> None:
        super().__init__()
        self.kept = kept


def _lowered(kept: frozenset[str], order: Sequence[str], memo: _Memo) -> frozenset[str]:
    """Lowers segments of ``kept``, the least suspicious first, as long as the rest passes."""
    pending = [[name for name in reversed(order) if name in kept]]
    while pending:
        segment = pending.pop()
        try:
            if memo(kept - frozenset(segment)):
                kept = kept - frozenset(segment)
                continue
        except _Budget:
            raise _Interrupted(kept) from None
        if len(segment) > 1:
            middle = len(segment) // 2
            pending += [segment[middle:], segment[:middle]]
    return kept


def smallest_repair(
    items: Sequence[str],
    passes: Callable[[Mapping[str, Precision]], bool],
    *,
    allowed: Mapping[str, Sequence[Precision]] | None = None,
    soft: Precision | None = "bf16",
    max_evaluations: int = 64,
    is_spent: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Precision], Lift] | None:
    """Finds the layers to lift to fp32, then takes back to bf16 those it cures as well.

    Args:
        items: layers that may be lifted, the most suspicious first.
        passes: whether the policy trains like FP32 with these layers in these precisions.
        allowed: precisions by layer; a layer without bf16 goes to fp32. None allows all.
        soft: the precision tried after fp32 has been shown to cure; None keeps fp32.
        max_evaluations: most calls of ``passes`` for both parts together.
        is_spent: whether what the calls may cost together is used up.

    Returns:
        Precision of every lifted layer and the lift, or None where fp32 everywhere among ``items`` does not pass.
    """
    found = smallest_lift(
        items,
        lambda lifted: passes(dict.fromkeys(sorted(lifted), "fp32")),
        max_evaluations=max_evaluations,
        is_spent=is_spent,
    )
    if found is None:
        return None
    precisions: dict[str, Precision] = dict.fromkeys(found.lifted, "fp32")
    softer = [name for name in found.lifted if soft is not None and (allowed is None or soft in allowed.get(name, ()))]
    if soft is None or not softer or found.evaluations >= max_evaluations:
        return precisions, found
    chosen: Precision = soft

    def passes_hard(hard: frozenset[str]) -> bool:
        return passes(precisions | {name: chosen for name in softer if name not in hard})

    memo = _Memo(passes_hard, max_evaluations - found.evaluations, is_spent)
    try:
        hard = _lowered(frozenset(softer), softer, memo)
    except _Interrupted as stopped:
        hard = stopped.kept
    softened = precisions | {name: chosen for name in softer if name not in hard}
    return softened, Lift(found.lifted, found.evaluations + memo.evaluations, found.minimal)
