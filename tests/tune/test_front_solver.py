from __future__ import annotations

import itertools
import math
import time

import pytest
from decision_fakes import hard, layer, layer_profile, look_of, profile_of, small_model

from autoprec.policy import PRECISIONS, Precision
from autoprec.records import LayerProfile, Look, Profile
from autoprec.tune.assignment import assess, same_dtype
from autoprec.tune.front_solver import CHOICES, MAX_UNITS, solve_front

ALL: tuple[Precision, ...] = PRECISIONS


def _allowed(look: Look, options: tuple[Precision, ...] = ALL) -> dict[str, tuple[Precision, ...]]:
    return {item.name: options for item in look.layers}


def test_the_front_goes_from_safest_to_fastest_and_no_point_beats_another() -> None:
    look, profile = small_model()
    front = solve_front(look, profile, _allowed(look))
    assert 8 <= len(front) <= 12
    assert all(a.time_s > b.time_s and a.harm < b.harm for a, b in itertools.pairwise(front))
    assert front[0].harm == 0.0 and set(front[0].precisions.values()) == {"fp32"}


def test_the_fastest_point_has_the_convolutions_low_the_norms_pure_and_the_overflow_lifted() -> None:
    look, profile = small_model()
    fastest = solve_front(look, profile, _allowed(look))[-1]
    assert fastest.default == "fp16"
    assert all(fastest.precisions[f"body.{i}.conv"] == "fp16" for i in range(4))
    assert all(fastest.precisions[f"body.{i}.norm"] == "fp16_pure" for i in range(4))
    assert fastest.precisions["head"] == "bf16", "a hard risk in fp16 leaves bf16 as the fastest"


def test_without_bf16_an_overflowing_layer_goes_to_fp32() -> None:
    look, profile = small_model()
    front = solve_front(look, profile, _allowed(look, ("fp32", "fp16", "fp16_pure")))
    assert {plan.precisions["head"] for plan in front} == {"fp32"}


def test_every_front_keeps_to_its_types() -> None:
    look, profile = small_model()
    for dtype in ("fp16", "bf16", "fp32"):
        used = {p for plan in solve_front(look, profile, _allowed(look), dtype=dtype) for p in plan.precisions.values()}
        assert used <= set(CHOICES[dtype])


@pytest.mark.parametrize("seed", range(4))
def test_the_ends_of_the_front_are_those_of_trying_everything(seed: int) -> None:
    look = look_of([layer(name) for name in "abcde"])
    items = [
        layer_profile(
            n,
            fp32_s=1e-3 * (1 + (i * 7 + seed * 3) % 5),
            half=0.4 + 0.1 * ((i + seed) % 7),
            harm=10.0 ** -((i * 3 + seed) % 4 + 1),
        )
        for i, n in enumerate("abcde")
    ]
    profile = Profile.model_validate(profile_of(items).model_dump() | {"cast_s_per_byte": 2e-8})
    options = ("fp32", "bf16", "fp16")
    front = solve_front(look, profile, _allowed(look, options), size=16)
    every = [
        assess(dict(zip("abcde", choice, strict=True)), default, look, profile)  # type: ignore[arg-type]
        for choice in itertools.product(options, repeat=5)
        for default in ("fp16", "fp32")
    ]
    assert front[-1].time_s == pytest.approx(min(plan.time_s for plan in every), rel=2e-3)
    assert front[0].harm == pytest.approx(min(plan.harm for plan in every), abs=1e-12)
    for point in front:
        at_least = min(plan.harm for plan in every if plan.time_s <= point.time_s * (1 + 1e-9))
        assert point.harm <= at_least * 1.05 + 1e-9, "no assignment as fast is much less harmful"


def test_tied_layers_never_part() -> None:
    look = look_of([layer(f"b.{p}_proj") for p in "qkv"] + [layer("out")])
    harms = {"b.q_proj": 1e-6, "b.k_proj": 1e-1, "b.v_proj": 1e-3, "out": 1e-2}
    profile = profile_of([layer_profile(name, harm=harm) for name, harm in harms.items()])
    group = tuple(f"b.{p}_proj" for p in "qkv")
    tied = solve_front(look, profile, _allowed(look, ("fp32", "fp16")), [group])
    assert all(len({plan.precisions[name] for name in group}) == 1 for plan in tied)
    free = solve_front(look, profile, _allowed(look, ("fp32", "fp16")))
    assert any(len({plan.precisions[name] for name in group}) > 1 for plan in free)


def test_a_layer_alone_in_its_type_is_not_worth_two_casts() -> None:
    look = look_of([layer(name) for name in "abc"])

    def b_in(half: float) -> Precision:
        items = [layer_profile("a"), layer_profile("b", half=half, harm=0.0), layer_profile("c")]
        dear = Profile.model_validate(profile_of(items).model_dump() | {"cast_s_per_byte": 1e-8})
        return solve_front(look, dear, _allowed(look, ("fp32", "fp16")))[-1].precisions["b"]

    assert b_in(1.20) == "fp16", "0.2 ms gained in fp32, 0.24 ms lost in two casts"
    assert b_in(1.30) == "fp32"


def test_a_measured_gain_of_pure_half_inside_the_noise_is_no_gain() -> None:
    look = look_of([layer("a"), layer("norm", "LayerNorm")])

    def norm_in(pure: float, origin: str) -> Precision:
        norm = LayerProfile.model_validate(layer_profile("norm", half=1.0, pure=pure).model_dump() | {"time_origin": origin})
        return solve_front(look, profile_of([layer_profile("a"), norm]), _allowed(look, ("fp32", "fp16", "fp16_pure")))[
            -1
        ].precisions["norm"]

    assert norm_in(0.98, "measured") == "fp16"
    assert norm_in(0.90, "measured") == "fp16_pure"
    assert norm_in(0.98, "predicted") == "fp16_pure"


def test_a_model_that_is_fastest_in_fp32_gets_one_point() -> None:
    look = look_of([layer("a"), layer("b")])
    profile = profile_of([layer_profile(name, half=1.7, pure=1.7) for name in "ab"])
    front = solve_front(look, profile, _allowed(look))
    assert [plan.precisions for plan in front] == [{"a": "fp32", "b": "fp32"}]
    assert front[0].default == "fp32"


def test_one_low_layer_among_many_in_fp32_makes_fp32_the_default() -> None:
    names = [f"l{i}" for i in range(20)]
    look = look_of([layer("", "Net"), *(layer(name) for name in names)])
    items = [layer_profile("", fp32_s=1e-6, half=1.0, harm=0.0)]
    items += [layer_profile(name, fp32_s=1e-3, half=0.1 if name == "l7" else 2.0, pure=2.0) for name in names]
    fastest = solve_front(look, profile_of(items), _allowed(look, ("fp32", "fp16")))[-1]
    assert fastest.default == fastest.precisions[""] == "fp32"
    assert [name for name, precision in fastest.precisions.items() if precision == "fp16"] == ["l7"]


def test_a_profile_without_a_layer_or_with_infinite_sensitivity_does_not_break_it() -> None:
    look = look_of([layer("a"), layer("unknown"), layer("b")])
    profile = profile_of([layer_profile("a", sensitivity={"fp32": 0.0, "fp16": math.inf}), layer_profile("b")])
    fastest = solve_front(look, profile, _allowed(look, ("fp32", "fp16")))[-1]
    assert (fastest.precisions["a"], fastest.precisions["b"]) == ("fp32", "fp16")


def test_a_model_of_2000_layers_solves_in_seconds_and_its_worst_layer_stays_single() -> None:
    names = [f"blocks.{i}.{part}" for i in range(250) for part in ("n1", "q_proj", "k_proj", "v_proj", "o", "n2", "up", "down")]
    look = look_of([layer("", "Net"), *(layer(n, "LayerNorm" if n[-2:] in ("n1", "n2") else "Linear") for n in names)])
    items = [layer_profile(n, harm=1e-5 * (1 + i % 13), half=0.5, pure=0.4) for i, n in enumerate(names)]
    items[1234] = layer_profile(names[1234], risks=[hard("fp16"), hard("fp16_pure")])
    start = time.monotonic()
    front = solve_front(look, profile_of(items), _allowed(look, ("fp32", "fp16", "fp16_pure")), size=12)
    assert time.monotonic() - start < 60
    assert len(front) >= 8 and len(names) > MAX_UNITS
    lifted = [name for name in names if front[-1].precisions[name] == "fp32"]
    assert lifted == [names[1234]]
    assert all(same_dtype(front[-1].precisions[name], "fp16") for name in names if name != names[1234])


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        names = [f"l{i:02d}" for i in range(40)]
        look = look_of([layer(name) for name in names])
        items = [
            layer_profile(
                n, fp32_s=1e-3 * (1 + (i * 7 + seed) % 11), half=0.3 + 0.06 * ((i * 5 + seed) % 11), harm=10.0 ** -(i % 6)
            )
            for i, n in enumerate(names)
        ]
        profile = Profile.model_validate(profile_of(items).model_dump() | {"cast_s_per_byte": 1e-8})
        assert len(solve_front(look, profile, _allowed(look))) > 1
    assert capfd.readouterr() == ("", "")
