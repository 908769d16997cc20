"""A made-up model with its look and profile, and windows that need no tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from autoprec.policy import PRECISIONS, Policy, Precision
from autoprec.records import (
    Edge,
    Environment,
    Failure,
    Layer,
    LayerProfile,
    Look,
    Measurement,
    Outcome,
    Profile,
    Risk,
    Window,
)
from autoprec.tune.assignment import assess
from autoprec.tune.space import load_search_space
from autoprec.tune.study_space import StudySpace

WINDOW = Window(steps=20, warmup_steps=2)
REFERENCE = tuple(2.0 - 0.05 * step for step in range(20))
ENVIRONMENT = Environment(
    device="fake", capability="8.9", driver=None, torch_version="2.14.1", python_version="3.11", platform="test"
)


def layer(name: str, kind: str = "Linear", **fields: object) -> Layer:
    return Layer.model_validate({"name": name, "kind": kind, "parameters": {"weight": (8, 8)}, **fields})


def look_of(layers: Sequence[Layer], **fields: object) -> Look:
    names = [item.name for item in layers]
    data = {
        "layers": tuple(layers),
        "idle": (),
        "edges": tuple(Edge(producer=a, consumer=b, elements=1000) for a, b in itertools.pairwise(names)),
        "matmul_share": 0.8,
        "num_parameters": 1000,
        "effective_batch": 64,
        "micro_batches": (64, 32, 16),
        "loss": 2.0,
        "workload_sha256": "0" * 64,
        "device_name": "Fake GPU",
        "capability": "8.9",
        "torch_version": "2.14.1",
    }
    return Look.model_validate(data | fields)


def layer_profile(
    name: str,
    *,
    fp32_s: float = 1e-3,
    half: float = 0.5,
    pure: float = 0.5,
    harm: float = 1e-4,
    risks: Sequence[Risk] = (),
    sensitivity: Mapping[Precision, float] | None = None,
) -> LayerProfile:
    times: dict[Precision, float] = {"fp32": fp32_s}
    times |= dict.fromkeys(("fp16", "bf16"), fp32_s * half) | dict.fromkeys(("fp16_pure", "bf16_pure"), fp32_s * pure)
    harms: dict[Precision, float] = {"fp32": 0.0, "fp16": harm, "bf16": 2 * harm, "fp16_pure": 1.5 * harm, "bf16_pure": 3 * harm}
    return LayerProfile(
        layer=name,
        time_s=times,
        time_origin="measured",
        max_output=10.0,
        max_grad=0.1,
        underflow_share=0.0,
        sensitivity=dict(sensitivity or harms),
        risks=tuple(risks),
    )


def profile_of(items: Sequence[LayerProfile]) -> Profile:
    base = sum(item.time_s["fp32"] for item in items)
    return Profile(layers=tuple(items), cast_s_per_byte=1e-12, base_step_s=base, cost_s=1.0, precisions=PRECISIONS)


def hard(precision: Precision, text: str = "max |output| is 91200, over 65504") -> Risk:
    return Risk(precision=precision, kind="range", hard=True, text=text)


def small_model(**look_fields: object) -> tuple[Look, Profile]:
    """A root, four convolutions with norms (pure half pays), and a head that overflows in fp16."""
    layers, profiles = [layer("", "Net")], [layer_profile("", fp32_s=1e-6, half=1.0, pure=1.0, harm=0.0)]
    for i in range(4):
        layers += [layer(f"body.{i}.conv", "Conv2d"), layer(f"body.{i}.norm", "GroupNorm")]
        profiles.append(layer_profile(f"body.{i}.conv", fp32_s=4e-3, half=0.3, pure=0.3, harm=1e-4 * (i + 1)))
        profiles.append(layer_profile(f"body.{i}.norm", fp32_s=2e-3, half=1.0, pure=0.5, harm=2e-4))
    layers.append(layer("head", parameters={"weight": (1001, 64)}))
    profiles.append(layer_profile("head", fp32_s=1e-3, harm=1e-3, risks=[hard("fp16"), hard("fp16_pure")]))
    fields = {"has_conv": True, "odd_layers": ("head",)} | look_fields
    return look_of(layers, **fields), profile_of(profiles)


def bound(look: Look, profile: Profile, **options: object) -> StudySpace:
    chosen = {"precisions": PRECISIONS, "cuda": True, "capability": "8.9"} | options
    return StudySpace.bind(load_search_space("ada"), look, profile, **chosen)  # type: ignore[arg-type]


def measured(
    losses: Sequence[float] = REFERENCE, *, step_s: float = 0.01, peak_bytes: int = 10**9, skipped_steps: int = 0
) -> Measurement:
    return Measurement(
        losses=tuple(losses),
        step_times_s=(step_s,) * 18,
        speed_origin="measured",
        batch_samples=64,
        peak_bytes=peak_bytes,
        skipped_steps=skipped_steps,
        environment=ENVIRONMENT,
    )


def fake_evaluate(look: Look, profile: Profile) -> Callable[[Policy, Window], Outcome]:
    """Speed from the profile and the flags, loss from the harm; hard risks diverge."""

    def evaluate(policy: Policy, window: Window) -> Outcome:
        plan = assess(policy.precisions(), policy.default, look, profile)
        if math.isinf(plan.harm):
            return Failure(kind="diverged", message="the loss is NaN", layer="head", step=3)
        step_s = plan.time_s * (0.7 if policy.backend.channels_last and policy.default != "fp32" else 1.0)
        step_s *= 0.95 if policy.backend.cudnn_benchmark else 1.0
        step_s *= 1 + 0.1 * (policy.batch.accumulation_steps - 1)
        gap = plan.harm * (0.5 if policy.padding.layers else 1.0)
        return measured([value * (1 + gap) for value in REFERENCE], step_s=step_s)

    return evaluate
