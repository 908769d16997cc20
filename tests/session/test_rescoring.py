"""What the profile learns from the fastest plan: pins and harms that only the plan's mix of precisions shows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.errors import WorkerError
from autoprec.policy import Batch, Fingerprint, Policy
from autoprec.records import Profile
from autoprec.session.rescoring import rescored
from autoprec.session.search import scoring_words
from autoprec.tune.assignment import Assignment, harm_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tune"))
from decision_fakes import layer_profile, profile_of

PROFILE = profile_of([layer_profile("calm", harm=1e-6), layer_profile("hurt", harm=1e-6), layer_profile("broken", harm=1e-6)])
NAMES = [layer.layer for layer in PROFILE.layers]
PLAN = Assignment(dict.fromkeys(NAMES, "fp16"), "fp16", 1.0, 0.0)
MADE_FOR = Fingerprint.of(
    dict.fromkeys(NAMES, "Linear"), device="cpu", capability=None, torch_version="2.9.0", workload_sha256="0" * 64
)


def context(rescore: Any, said: list[str]) -> Any:
    policy = Policy(default="fp16", batch=Batch(effective=8, micro=8), fingerprint=MADE_FOR)
    return SimpleNamespace(
        bench=SimpleNamespace(rescore=rescore),
        plain_fp32=lambda: policy.model_copy(update={"default": "fp32"}),
        progress=SimpleNamespace(found=said.append),
    )


def by_name(profile: Profile) -> dict[str, Any]:
    return {layer.layer: layer for layer in profile.layers}


def test_a_layer_that_breaks_beside_the_plans_neighbours_is_pinned_and_a_hurt_one_counts_as_much_more_harmful() -> None:
    said: list[str] = []
    seen = {"calm": 3e-6, "hurt": 0.02, "broken": float("inf")}
    found = by_name(rescored(context(lambda _policy: seen, said), PROFILE, {"fp16": PLAN}))
    assert found["calm"] == by_name(PROFILE)["calm"]
    assert found["hurt"].sensitivity["fp16"] == 0.02 and found["hurt"].sensitivity["bf16"] == 2e-6
    assert harm_of(found["broken"], "fp16") == float("inf") and harm_of(found["broken"], "fp16_pure") < 1e-3
    assert len(said) == 1 and "hurt, broken" in said[0]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_nothing_new_leaves_the_profile_as_it_is(dtype: Any) -> None:
    said: list[str] = []
    seen = dict.fromkeys(NAMES, 1e-6) if dtype == "fp16" else dict.fromkeys(NAMES, float("inf"))
    assert rescored(context(lambda _policy: seen, said), PROFILE, {dtype: PLAN}) is PROFILE
    assert said == []


def test_a_plan_that_ends_the_worker_is_said_and_the_profile_stays() -> None:
    def dies(_policy: Policy) -> dict[str, float]:
        raise WorkerError("the worker died", hint="look at worker.log")

    said: list[str] = []
    assert rescored(context(dies, said), PROFILE, {"fp16": PLAN}) is PROFILE
    assert "the worker died" in said[0]


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ({}, ""),
        ({"bf16": 1.94}, ", where scoring them took 1.9 (bf16) FP32 forward and backward passes"),
        (
            {"fp16": 2.12, "bf16": 1.94, "fp16_pure": 2.5},
            ", where scoring them took 2.1 (fp16), 1.9 (bf16) and 2.5 (fp16_pure) FP32 forward and backward passes",
        ),
    ],
)
def test_what_scoring_took_is_said_in_passes(passes: Any, words: str) -> None:
    assert scoring_words(PROFILE.model_copy(update={"sensitivity_passes": passes})) == words
