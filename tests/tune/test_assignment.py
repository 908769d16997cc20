from __future__ import annotations

import math

import pytest
from decision_fakes import hard, layer, layer_profile, look_of, profile_of
from hypothesis import given
from hypothesis import strategies as st

from autoprec.policy import PRECISIONS, Batch, Fingerprint, Policy, Precision
from autoprec.records import Risk
from autoprec.tune.assignment import ISLAND_S, SOFT_RISK_FACTOR, assess, exceptions_of, harm_of, parents_of

_NAMES = st.lists(st.sampled_from("ab0"), min_size=1, max_size=4).map(".".join)


@st.composite
def assigned_trees(draw: st.DrawFn) -> tuple[dict[str, Precision], Precision]:
    names = draw(st.sets(_NAMES, min_size=1, max_size=14))
    default = draw(st.sampled_from(PRECISIONS))
    precisions = {name: draw(st.sampled_from(PRECISIONS)) for name in sorted(names)}
    if draw(st.booleans()):
        precisions[""] = default
    return precisions, default


def _policy(precisions: dict[str, Precision], default: Precision, kept: dict[str, object] | None = None) -> Policy:
    settings = exceptions_of(precisions, default) if kept is None else kept
    layers = dict.fromkeys(precisions, "Linear")
    fingerprint = Fingerprint.of(layers, device="d", capability=None, torch_version="2", workload_sha256="0")
    return Policy(default=default, layers=settings, batch=Batch(effective=1, micro=1), fingerprint=fingerprint)  # type: ignore[arg-type]


@given(assigned_trees())
def test_the_exceptions_give_every_layer_exactly_its_precision(tree: tuple[dict[str, Precision], Precision]) -> None:
    precisions, default = tree
    policy = _policy(precisions, default)
    assert {name: policy.precision_of(name) for name in precisions} == precisions


@given(assigned_trees())
def test_no_exception_can_be_left_out(tree: tuple[dict[str, Precision], Precision]) -> None:
    precisions, default = tree
    settings = exceptions_of(precisions, default)
    for name in settings:
        policy = _policy(precisions, default, {key: value for key, value in settings.items() if key != name})
        assert policy.precision_of(name) != precisions[name]


def test_a_block_in_one_precision_needs_its_container_only() -> None:
    precisions: dict[str, Precision] = {"": "fp16", "body": "fp32", "body.a": "fp32", "body.b.c": "fp32", "head": "fp16"}
    assert list(exceptions_of(precisions, "fp16")) == ["body"]


def test_the_roots_precision_must_be_the_default() -> None:
    with pytest.raises(ValueError, match="the root runs in fp32, so the default cannot be fp16"):
        exceptions_of({"": "fp32", "a": "fp16"}, "fp16")


def test_the_parent_of_a_layer_is_its_nearest_ancestor_among_the_layers() -> None:
    assert parents_of(["", "a", "a.b.c", "a.b.c.d", "e.f"]) == {
        "": None,
        "a": None,
        "a.b.c": "a",
        "a.b.c.d": "a.b.c",
        "e.f": None,
    }


def test_time_adds_layers_casts_between_types_and_wrapped_layers() -> None:
    look = look_of([layer("a"), layer("b", calls=3), layer("c")])
    profile = profile_of([layer_profile(name, fp32_s=1.0, half=0.5) for name in "abc"])
    plain = assess({"a": "fp16", "b": "fp16", "c": "fp16"}, "fp16", look, profile)
    assert plain.time_s == pytest.approx(1.5)
    lifted = assess({"a": "fp16", "b": "fp32", "c": "fp16"}, "fp16", look, profile)
    assert lifted.time_s == pytest.approx(2.0 + 3 * ISLAND_S + 2 * 1000 * 12e-12)
    pure = assess({"a": "fp16", "b": "fp16_pure", "c": "fp16"}, "fp16", look, profile)
    assert pure.time_s == pytest.approx(1.5 + 3 * ISLAND_S), "fp16 beside fp16_pure needs no cast"


def test_a_hard_risk_is_infinitely_harmful_and_a_soft_one_raises_the_sensitivity() -> None:
    soft = Risk(precision="fp16", kind="range", hard=False, text="max |output| is 900")
    assert math.isinf(harm_of(layer_profile("a", risks=[hard("fp16")]), "fp16"))
    assert math.isinf(harm_of(layer_profile("a", sensitivity={"fp16": math.nan}), "fp16"))
    assert harm_of(layer_profile("a", harm=0.1, risks=[soft]), "fp16") == pytest.approx(0.1 * SOFT_RISK_FACTOR)
    assert harm_of(layer_profile("a", harm=0.1, risks=[soft]), "fp32") == 0.0


@pytest.mark.parametrize(
    ("item", "own", "kind", "text"),
    [
        (layer_profile("b", risks=[hard("fp16")]), "fp32", "range", "max |output| is 91200, over 65504"),
        (
            layer_profile("b", harm=0.25),
            "fp32",
            "sensitivity",
            "estimated harm 0.25 in fp16, 0 in fp32; 1 ms in fp32 against 0.5 ms in fp16",
        ),
        (layer_profile("b", pure=0.25), "fp16_pure", "speed", "0.25 ms in fp16_pure against 0.5 ms in fp16"),
        (
            layer_profile("b", half=1.0, pure=1.0),
            "fp16_pure",
            "cast_cost",
            "2,000 elements pass to and from its neighbours without a cast; 1 ms in fp16_pure against 1 ms in fp16",
        ),
    ],
)
def test_each_exception_says_why_with_its_figures(item: object, own: Precision, kind: str, text: str) -> None:
    look = look_of([layer("a"), layer("b"), layer("c")])
    precisions: dict[str, Precision] = {"a": "fp16", "b": own, "c": "fp16"}
    reason = exceptions_of(precisions, "fp16", profile=profile_of([item]), look=look)["b"].reason  # type: ignore[list-item]
    assert reason is not None
    assert (reason.kind, reason.text) == (kind, text)


def test_a_pinned_layer_says_who_pinned_it() -> None:
    settings = exceptions_of({"a": "fp32"}, "fp16", profile=profile_of([layer_profile("a")]), pinned={"a": "losses: float32"})
    assert settings["a"].reason is not None
    assert (settings["a"].reason.kind, settings["a"].reason.text) == ("pinned", "losses: float32")
