from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from decision_fakes import bound, layer, layer_profile, look_of, profile_of, small_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec.errors import SearchSpaceError
from autoprec.policy import Backend, LossScale, Padding, Policy
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.space import load_search_space
from autoprec.tune.study_space import FP16_ONLY, StudySpace

LOOK, PROFILE = small_model()
SPACE = bound(LOOK, PROFILE)
FAST = {
    "dtype": "fp16",
    "front_index": SPACE.params()["front_index"][-1],
    "norms": "front",
    "micro_batch": 64,
    "padding": 0,
    "weights": "fp32",
    "tf32": False,
    "channels_last": False,
    "cudnn_benchmark": False,
    "init_scale": 4096.0,
    "growth_interval": 500,
    "fp16_accumulation": False,
}


@st.composite
def params_of(draw: st.DrawFn, space: StudySpace) -> dict[str, Any]:
    choices = space.params()
    dtype = draw(st.sampled_from(choices["dtype"]))
    return {"dtype": dtype} | {n: draw(st.sampled_from(choices[n])) for n in space.active(dtype) if n != "dtype"}


def test_the_parameters_have_the_names_people_see_in_the_study() -> None:
    assert set(SPACE.params()) == set(FAST)
    assert len(SPACE.params()) <= 15
    assert SPACE.params()["init_scale"] == (4096.0, 8192.0, 16384.0)
    assert SPACE.params()["micro_batch"] == (64, 32, 16)
    assert SPACE.params()["padding"] == (0, 8, 16, 64)
    assert SPACE.params()["weights"] == ("fp32", "half_with_masters")


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(params_of(SPACE))
def test_parameters_to_policy_and_back_is_the_policy_again(params: dict[str, Any]) -> None:
    policy = SPACE.to_policy(params)
    back = SPACE.to_params(policy)
    assert SPACE.to_policy(back) == policy
    assert SPACE.canonical(back) == back == SPACE.canonical(params)
    outer = ("micro_batch", "padding", "tf32", "channels_last", "cudnn_benchmark")
    assert {name: back[name] for name in outer} == {name: params[name] for name in outer}
    if policy.needs_loss_scale:
        assert {name: back[name] for name in FP16_ONLY} == {name: params[name] for name in FP16_ONLY}


@pytest.mark.parametrize("name", sorted(FAST))
def test_every_parameter_with_every_choice_comes_back_as_it_was(name: str) -> None:
    for choice in SPACE.params()[name]:
        if name == "dtype" and choice != "fp16":
            continue
        params = FAST | {name: choice}
        if name in ("front_index", "norms"):  # several can mean one assignment: the first stands for them
            assert SPACE.to_policy(SPACE.to_params(SPACE.to_policy(params))) == SPACE.to_policy(params)
        else:
            assert SPACE.to_params(SPACE.to_policy(params))[name] == choice


@given(params_of(SPACE))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_every_policy_of_the_space_is_valid_and_survives_its_file(params: dict[str, Any]) -> None:
    policy = SPACE.to_policy(params)
    assert Policy.model_validate_json(policy.to_json()) == policy
    assert policy.batch.micro * policy.batch.accumulation_steps == LOOK.effective_batch


def test_a_policy_holds_what_the_parameters_say() -> None:
    params = FAST | {"micro_batch": 16, "padding": 64, "tf32": True, "channels_last": True, "init_scale": 16384.0}
    params |= {"weights": "half_with_masters"}
    policy = SPACE.to_policy(params | {"fp16_accumulation": True, "growth_interval": 2000})
    assert (policy.batch.micro, policy.batch.accumulation_steps, policy.batch.effective) == (16, 4, 64)
    assert policy.padding == Padding(layers={"head": 64})
    assert (policy.weights, policy.outputs) == ("half_with_masters", "fp32")
    assert policy.backend == Backend(tf32=True, channels_last=True, fp16_accumulation=True)
    assert policy.loss_scale == LossScale(init=16384.0, growth_interval=2000)
    assert policy.precision_of("head") == "bf16" and policy.layers["head"].reason.kind == "range"  # type: ignore[union-attr]


def test_the_loss_scale_is_no_parameter_of_bf16_and_means_nothing_in_an_fp32_plan() -> None:
    assert set(SPACE.active("fp16")) - set(SPACE.active("bf16")) == set(FP16_ONLY)
    policies = {SPACE.to_policy(FAST | {"front_index": 0, "init_scale": s}).setup_hash() for s in (4096.0, 16384.0)}
    assert len(policies) == 1


def test_index_0_is_fp32_everywhere_and_the_last_is_the_fastest_of_every_type() -> None:
    assert len({len(points) for points in SPACE.plans.values()}) == 1
    for points in SPACE.plans.values():
        assert set(points[0].precisions.values()) == {"fp32"}
        assert points[-1].time_s == min(point.time_s for point in points)


def test_stock_amp_is_on_the_front_and_a_plan_that_breaks_a_hard_risk_is_hopeless() -> None:
    policies = baseline_policies(LOOK, ("fp32", "fp16", "bf16"), cuda=True, capability="8.9")
    stock = SPACE.nearest_params(policies["amp_fp16"])
    assert (stock["dtype"], stock["norms"]) == ("fp16", "front")
    plan = SPACE.plans["fp16"][stock["front_index"]]
    assert set(plan.precisions.values()) == {"fp16"}
    assert "init_scale" not in stock, "65536 is not among the choices"
    assert SPACE.hopeless(FAST | stock), "the head overflows in fp16"
    assert not SPACE.hopeless(FAST)


def test_every_baseline_has_readable_parameters() -> None:
    for role, policy in baseline_policies(LOOK, ("fp32", "fp16", "bf16"), cuda=True, capability="8.9").items():
        params = SPACE.nearest_params(policy)
        assert params["channels_last"] == role.endswith("_channels_last")
        assert params["tf32"] == ("tf32" in role)
        assert params["front_index"] == 0 if role.startswith("fp32") else params["dtype"] == role.split("_")[1]
        assert all(value in SPACE.params()[name] for name, value in params.items())


def test_the_fp32_baselines_lie_in_the_space_exactly() -> None:
    policies = baseline_policies(LOOK, ("fp32", "fp16", "bf16"), cuda=True, capability="8.9")
    for role in ("fp32", "fp32_tf32"):
        assert SPACE.to_policy(SPACE.to_params(policies[role])).setup_hash() == policies[role].setup_hash()


def test_stock_amp_in_bf16_lies_in_the_space_where_the_loss_casts_the_outputs_itself() -> None:
    look, profile = small_model(outputs="computed")
    space = bound(look, profile)
    policies = baseline_policies(look, ("fp32", "fp16", "bf16"), cuda=True, capability="8.9")
    for role in ("amp_bf16", "amp_bf16_channels_last"):
        assert space.to_policy(space.to_params(policies[role])).setup_hash() == policies[role].setup_hash()


def test_an_override_moves_its_group_where_each_layer_may_go() -> None:
    stock_bf16 = next(i for i, plan in enumerate(SPACE.plans["bf16"]) if set(plan.precisions.values()) == {"bf16"})
    params = {k: v for k, v in FAST.items() if k not in FP16_ONLY} | {"dtype": "bf16", "front_index": stock_bf16, "norms": "pure"}
    precisions = SPACE.to_policy(params).precisions()
    assert {precisions[f"body.{i}.norm"] for i in range(4)} == {"bf16_pure"}
    assert {precisions[name] for name in ("", "head", "body.0.conv")} == {"bf16"}


def test_a_pinned_norm_stays_where_it_is_pinned() -> None:
    space = StudySpace.bind(
        load_search_space("ada", keep_fp32=["body.0.norm"]), LOOK, PROFILE, precisions=("fp32", "fp16", "fp16_pure"), cuda=True
    )
    params = FAST | {"norms": "pure", "front_index": space.params()["front_index"][-1]}
    policy = space.to_policy({n: v for n, v in params.items() if n in space.params()})
    assert policy.precision_of("body.0.norm") == "fp32"
    assert policy.layers["body.0.norm"].reason.kind == "pinned"  # type: ignore[union-attr]
    assert policy.precision_of("body.1.norm") == "fp16_pure"


@pytest.mark.parametrize(
    ("options", "fields", "absent"),
    [
        ({"cuda": False, "capability": None}, {}, {"weights", "tf32", "cudnn_benchmark", "fp16_accumulation"}),
        ({"measured": False}, {}, {"weights"}),
        ({"capability": "7.5"}, {}, {"tf32"}),
        ({}, {"has_conv": False}, {"channels_last", "cudnn_benchmark"}),
        ({}, {"odd_layers": ()}, {"padding"}),
        ({}, {"forbids_fp16": "complex parameters"}, set(FP16_ONLY)),
        ({"precisions": ("fp32", "bf16")}, {}, set(FP16_ONLY)),
        ({"precisions": ("fp32",)}, {}, {*FP16_ONLY, "norms", "weights"}),
    ],
)
def test_a_parameter_is_there_only_where_it_means_something(
    options: dict[str, Any], fields: dict[str, Any], absent: set[str]
) -> None:
    look, profile = small_model(**fields)
    space = bound(look, profile, **options)
    assert set(FAST) - set(space.params()) == absent
    first = {name: space.params()[name][0] for name in space.active(space.params()["dtype"][0])}
    assert set(space.to_policy(first).precisions().values()) == {"fp32"}


def test_the_batch_is_split_into_at_most_16_steps_and_5_choices() -> None:
    look = look_of([layer("a")], effective_batch=128, micro_batches=(128, 64, 32, 16, 8, 4, 2, 1))
    assert bound(look, profile_of([layer_profile("a")])).params()["micro_batch"] == (128, 64, 32, 16, 8)
    look = look_of([layer("a")], effective_batch=50, micro_batches=())
    assert bound(look, profile_of([layer_profile("a")])).params()["micro_batch"] == (50,)


def test_parameters_that_are_missing_or_not_allowed_are_named() -> None:
    with pytest.raises(SearchSpaceError, match="'micro_batch' is missing"):
        SPACE.to_policy({name: value for name, value in FAST.items() if name != "micro_batch"})
    with pytest.raises(SearchSpaceError, match=r"init_scale is 65536\.0; allowed are \(4096\.0, 8192\.0, 16384\.0\)"):
        SPACE.to_policy(FAST | {"init_scale": 65536.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_scale": LossScale(init=65536.0)}, "init_scale is 65536"),
        ({"loss_scale": LossScale(init=4096.0, growth_interval=500, backoff_factor=0.25)}, "loss_scale"),
        ({"execution": "compile"}, "execution"),
        ({"layers": {}}, "layers' precisions are on no plan|outside"),
        ({"padding": Padding(layers={"body.0.conv": 8})}, "padding"),
    ],
)
def test_a_policy_outside_the_space_is_refused_with_the_field_that_is(change: dict[str, Any], message: str) -> None:
    policy = SPACE.to_policy(FAST | {"norms": "pure"} if "layers" in change else FAST)
    outside = policy.model_copy(update=change if "layers" not in change else {"default": "fp16_pure"})
    with pytest.raises(SearchSpaceError, match=message):
        SPACE.to_params(outside)
    near = SPACE.nearest_params(outside)
    assert {"dtype", "front_index"} <= set(near)


def test_neighbours_differ_in_one_parameter_and_flags_come_first() -> None:
    steps = [
        (next(name for name in FAST if near[name] != FAST[name]), sum(near[n] != FAST[n] for n in FAST))
        for near in SPACE.neighbours(FAST)
    ]
    assert {count for _, count in steps} == {1}
    assert [name for name, _ in steps][:3] == ["tf32", "channels_last", "cudnn_benchmark"]
    assert {name for name, _ in steps} == set(FAST) - {"dtype"}


def test_starting_points_lie_in_the_space_with_both_layouts_and_types() -> None:
    points = SPACE.starts()
    assert {(p["dtype"], p["channels_last"]) for p in points} == {(d, c) for d in ("fp16", "bf16") for c in (True, False)}
    assert all(p["tf32"] and not p["cudnn_benchmark"] and p["padding"] == 64 for p in points)
    for point in points:
        SPACE.to_policy(point)


def test_the_fastest_plan_and_the_starting_points_break_no_hard_risk_even_where_stock_amp_is_faster_and_does() -> None:
    last = SPACE.plans["fp16"][-1]
    stock = dataclasses.replace(last, time_s=last.time_s / 2, harm=float("inf"))
    space = dataclasses.replace(SPACE, plans={**SPACE.plans, "fp16": (*SPACE.plans["fp16"][:-1], stock)})
    fastest = space.fastest("fp16")
    assert fastest == [plan for plan in SPACE.plans["fp16"][:-1] if plan.harm < float("inf")][-1]
    assert {point["dtype"] for point in space.starts()} == {"fp16", "bf16"}
    assert SPACE.fastest("bf16") == SPACE.plans["bf16"][-1]


def test_the_hash_tells_another_space_model_or_device_apart() -> None:
    same, other = bound(LOOK, PROFILE), bound(LOOK, PROFILE, device_name="Another GPU")
    assert SPACE.sha256() == same.sha256() != other.sha256()
    assert SPACE.sha256() != bound(LOOK, PROFILE, capability="7.5").sha256()


def test_a_small_size_is_padded_to_the_least_multiple_where_a_large_one_would_add_too_much() -> None:
    look, profile = small_model()
    odd = (*look.layers[:-1], look.layers[-1].model_copy(update={"parameters": {"weight": (10, 64)}}))
    space = bound(look.model_copy(update={"layers": odd}), profile)
    assert space.params()["padding"] == (0, 8)
    space = bound(look, profile)
    assert space.to_policy(FAST | {"padding": 64}).padding.layers == {"head": 64}
