from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from hypothesis import given
from hypothesis import strategies as st

from autoprec.policy import Precision
from autoprec.tune.repair import smallest_lift, smallest_repair

LAYERS = [f"layer{i:02d}" for i in range(64)]


def _cured_by(guilty: set[str], calls: list[frozenset[str]] | None = None) -> Callable[[frozenset[str]], bool]:
    def passes(lifted: frozenset[str]) -> bool:
        if calls is not None:
            calls.append(lifted)
        return guilty <= lifted

    return passes


def test_two_distant_layers_are_found_although_curing_one_shows_nothing() -> None:
    lift = smallest_lift(LAYERS, _cured_by({"layer03", "layer60"}))
    assert lift is not None
    assert (lift.lifted, lift.minimal) == (("layer03", "layer60"), True)
    assert lift.evaluations <= 30


def test_the_prime_suspect_is_found_in_two_evaluations() -> None:
    calls: list[frozenset[str]] = []
    lift = smallest_lift(LAYERS, _cured_by({"layer00"}, calls))
    assert lift is not None and lift.lifted == ("layer00",)
    assert calls == [frozenset({"layer00"}), frozenset()]


@given(st.sets(st.sampled_from(LAYERS), min_size=1, max_size=4))
def test_exactly_the_guilty_layers_are_lifted_in_few_evaluations(guilty: set[str]) -> None:
    calls: list[frozenset[str]] = []
    lift = smallest_lift(LAYERS, _cured_by(guilty, calls), max_evaluations=200)
    assert lift is not None
    assert set(lift.lifted) == guilty and lift.minimal
    assert len(calls) == len(set(calls)) == lift.evaluations, "nothing is evaluated twice"
    assert lift.evaluations <= 8 + 2 * len(guilty) * math.log2(len(LAYERS)) + 1


def test_either_of_two_cures_is_as_good() -> None:
    lift = smallest_lift(LAYERS, lambda lifted: bool({"layer10", "layer40"} & lifted))
    assert lift is not None and lift.lifted == ("layer10",)


def test_where_lifting_everything_does_not_help_there_is_no_repair() -> None:
    assert smallest_lift(LAYERS, lambda lifted: False) is None
    assert smallest_lift([], lambda lifted: True) is None
    assert smallest_repair(LAYERS, lambda lifted: False) is None


@given(st.sets(st.sampled_from(LAYERS), min_size=1, max_size=6), st.integers(1, 40))
def test_what_is_returned_passes_and_the_bound_holds(guilty: set[str], most: int) -> None:
    calls: list[frozenset[str]] = []
    lift = smallest_lift(LAYERS, _cured_by(guilty, calls), max_evaluations=most)
    assert len(calls) <= most
    assert lift is not None, "the last evaluation is kept for everything lifted"
    assert guilty <= set(lift.lifted)
    assert set(lift.lifted) == guilty or not lift.minimal


def test_the_same_question_gets_the_same_answer() -> None:
    assert smallest_lift(LAYERS, _cured_by({"layer05", "layer33"})) == smallest_lift(LAYERS, _cured_by({"layer05", "layer33"}))


def _precise(needs: Mapping[str, set[Precision]]) -> Callable[[Mapping[str, Precision]], bool]:
    return lambda lifted: all(lifted.get(name) in cures for name, cures in needs.items())


def test_bf16_is_used_where_it_cures_and_fp32_where_it_does_not() -> None:
    passes = _precise({"layer03": {"fp32"}, "layer20": {"bf16", "fp32"}, "layer60": {"bf16", "fp32"}})
    found = smallest_repair(LAYERS, passes)
    assert found is not None
    precisions, lift = found
    assert precisions == {"layer03": "fp32", "layer20": "bf16", "layer60": "bf16"}
    assert lift.lifted == ("layer03", "layer20", "layer60")


def test_a_layer_that_may_not_be_bf16_stays_fp32() -> None:
    passes = _precise({"layer03": {"fp32", "bf16"}, "layer20": {"bf16", "fp32"}})
    found = smallest_repair(LAYERS, passes, allowed=dict.fromkeys(LAYERS, ("fp32", "fp16")) | {"layer20": ("fp32", "bf16")})
    assert found is not None and found[0] == {"layer03": "fp32", "layer20": "bf16"}
    assert smallest_repair(LAYERS, passes, soft=None)[0] == {"layer03": "fp32", "layer20": "fp32"}  # type: ignore[index]


@given(st.integers(1, 30))
def test_both_parts_of_a_repair_share_the_bound_and_the_result_passes(most: int) -> None:
    calls: list[dict[str, Precision]] = []
    passes = _precise({"layer03": {"fp32"}, "layer20": {"bf16", "fp32"}})

    def counted(lifted: Mapping[str, Precision]) -> bool:
        calls.append(dict(lifted))
        return passes(lifted)

    found = smallest_repair(LAYERS, counted, max_evaluations=most)
    assert len(calls) <= most
    assert found is not None and passes(found[0]) and found[1].evaluations == len(calls)


def test_what_the_calls_cost_together_bounds_them_too_and_what_is_returned_still_passes() -> None:
    guilty = {"layer03", "layer20", "layer41"}
    costs: list[int] = []

    def passes(lifted: frozenset[str]) -> bool:
        costs.append(5 if guilty <= lifted else 1)
        return guilty <= lifted

    lift = smallest_lift(LAYERS, passes, is_spent=lambda: sum(costs) >= 20)
    assert lift is not None and guilty <= set(lift.lifted) and not lift.minimal
    assert 20 <= sum(costs) < 20 + 5
    cheap = smallest_lift(LAYERS, _cured_by(guilty), is_spent=lambda: False)
    assert cheap is not None and set(cheap.lifted) == guilty
