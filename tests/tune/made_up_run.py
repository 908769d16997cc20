"""A made-up run of a small residual network: the values that the tests of the folder, the report and the notes work on."""

from __future__ import annotations

import math
import random

from autoprec.policy import (
    Backend,
    Batch,
    Evidence,
    Figures,
    Fingerprint,
    LayerSetting,
    LossScale,
    Padding,
    Policy,
    Reason,
)
from autoprec.records import (
    Candidate,
    Environment,
    Failure,
    Layer,
    LayerProfile,
    Look,
    Measurement,
    Profile,
    Verdict,
    Window,
)
from autoprec.tune.charts import Curve
from autoprec.tune.report_data import Rejected, ReportData, Stage
from autoprec.tune.rows import rows_of

WINDOW = Window(steps=60, warmup_steps=5, seed=0)
ENVIRONMENT = Environment(
    device="AMD EPYC 7B13", capability=None, driver=None, torch_version="2.14.1", python_version="3.11.7", platform="Linux x86-64"
)


def layers() -> tuple[Layer, ...]:
    """A stem, eight blocks of two convolutions with BatchNorm, and a head: 35 layers in order of use."""
    found = [Layer(name="stem", kind="Conv2d", parameters={"weight": (16, 1, 3, 3)}, flops=10**6)]
    for block in range(8):
        for part in (1, 2):
            shape = (16 * (1 + block // 3), 16, 3, 3)
            found.append(Layer(name=f"stages.{block}.conv{part}", kind="Conv2d", parameters={"weight": shape}, flops=10**7))
            found.append(Layer(name=f"stages.{block}.bn{part}", kind="BatchNorm2d", parameters={"weight": (16,), "bias": (16,)}))
    found += [Layer(name="pool", kind="AdaptiveAvgPool2d"), Layer(name="head", kind="Linear", parameters={"weight": (10, 64)})]
    return tuple(found)


def look() -> Look:
    return Look(
        layers=layers(),
        idle=(),
        edges=(),
        matmul_share=0.83,
        num_parameters=175_258,
        effective_batch=128,
        micro_batches=(128, 64, 32),
        has_conv=True,
        loss=2.31,
        workload_sha256="ab" * 32,
        device_name="NVIDIA GeForce RTX 4090 D",
        capability="8.9",
        torch_version="2.14.1",
    )


def fingerprint() -> Fingerprint:
    names = {layer.name: layer.signature for layer in layers()}
    return Fingerprint.of(
        names, device="NVIDIA GeForce RTX 4090 D", capability="8.9", torch_version="2.14.1", workload_sha256="ab" * 32
    )


def policy(**changes: object) -> Policy:
    """fp16 with the norms in fp16_pure, the head in fp32 and everything else a tune may set."""
    norm = Reason(kind="speed", text="its kernel adds up in float32 inside and moves half the bytes")
    fields: dict[str, object] = {
        "default": "fp16",
        "layers": {
            "head": LayerSetting(precision="fp32", reason=Reason(kind="range", text="outputs reach 81,920, over 65,504")),
            **{layer.name: LayerSetting(precision="fp16_pure", reason=norm) for layer in layers() if layer.kind == "BatchNorm2d"},
        },
        "loss_scale": LossScale(init=8192.0, growth_interval=200),
        "batch": Batch(effective=128, micro=64, accumulation_steps=2),
        "padding": Padding(layers={"head": 8}),
        "backend": Backend(tf32=True, channels_last=True, cudnn_benchmark=True),
        "fingerprint": fingerprint(),
    }
    return Policy(**{**fields, **changes})  # type: ignore[arg-type]


ARMS = (
    Figures(name="fp32", samples_per_s=1010.0, peak_bytes=11_460_000_000, loss_gap=0.0, speed_origin="predicted"),
    Figures(name="fp32_tf32", samples_per_s=2137.0, peak_bytes=11_460_000_000, loss_gap=0.0009, speed_origin="predicted"),
    Figures(name="amp_fp16", samples_per_s=2976.0, peak_bytes=6_210_000_000, loss_gap=0.0021, speed_origin="predicted"),
    Figures(name="amp_bf16", samples_per_s=2349.0, peak_bytes=6_210_000_000, loss_gap=0.0048, speed_origin="predicted"),
    Figures(
        name="amp_fp16_channels_last", samples_per_s=5120.0, peak_bytes=6_050_000_000, loss_gap=0.0019, speed_origin="predicted"
    ),
    Figures(name="tuned", samples_per_s=6160.0, peak_bytes=5_370_000_000, loss_gap=0.0024, speed_origin="predicted"),
)


def evidence() -> Evidence:
    return Evidence(
        run="digits_cnn-4090d",
        verdict="passed",
        speed_origin="predicted",
        loss_gap=0.0024,
        tolerance=0.01,
        speedup_vs_fp32=6.1,
        speedup_vs_stock_amp=2.07,
        speedup_low=2.01,
        speedup_high=2.13,
        arms=ARMS,
    )


def measurement(step_s: float = 0.02, noise: float = 0.0, seed: int = 0, steps: int = 65) -> Measurement:
    """Losses that fall from 2.3 towards 0.2, off by ``noise``; one step time."""
    random_ = random.Random(seed)
    losses = tuple((0.2 + 2.1 * math.exp(-step / 18)) * (1 + random_.gauss(0, noise)) for step in range(steps))
    return Measurement(
        losses=losses,
        step_times_s=(step_s,) * (steps - 5),
        speed_origin="predicted",
        batch_samples=128,
        peak_bytes=6_000_000_000,
        skipped_steps=0,
        final_scale=8192.0,
        environment=ENVIRONMENT,
    )


OUT_OF_MEMORY = Failure(kind="out_of_memory", message="tried to allocate 2.1 GB with 0.4 GB free", layer="stages.3.conv1", step=0)
DIVERGED = Failure(kind="diverged", message="the loss is nan", layer="head", step=14)


def candidates() -> tuple[Candidate, ...]:
    """The baselines, then 30 trials: most fine, a few out of memory or diverged; the last one is the answer."""
    random_ = random.Random(1)
    made = []
    for arm in ARMS[:-1]:
        assert arm.samples_per_s is not None
        plain = Policy(default="fp32", batch=Batch(effective=128, micro=128), fingerprint=fingerprint())
        outcome = measurement(128 / arm.samples_per_s, noise=0.002)
        number = len(made)
        made.append(Candidate(number=number, role=arm.name, policy=plain, window=WINDOW, outcome=outcome, trial=number))
    for _ in range(29):
        number = len(made)
        outcome = (
            {0: OUT_OF_MEMORY, 1: DIVERGED}[number % 4]
            if number % 8 < 2
            else measurement(128 / random_.uniform(2300, 6000), 0.004)
        )
        made.append(Candidate(number=number, role="trial", policy=policy(), window=WINDOW, outcome=outcome, trial=number))
    number = len(made)
    best = measurement(128 / 6160, 0.003)
    made.append(Candidate(number=number, role="trial", policy=policy(), window=WINDOW, outcome=best, trial=number))
    return tuple(made)


def gaps() -> dict[int, float]:
    """A loss gap for every candidate that finished."""
    random_ = random.Random(2)
    found = {c.number: 10 ** random_.uniform(-3.2, -1.3) for c in candidates() if isinstance(c.outcome, Measurement)}
    named = {index: arm.loss_gap for index, arm in enumerate(ARMS[:-1]) if arm.loss_gap is not None}
    return {**found, **named, 34: 0.0024}


def profile() -> Profile:
    random_ = random.Random(3)
    items = []
    for layer in layers():
        base = random_.uniform(2e-4, 2e-3) if layer.kind == "Conv2d" else random_.uniform(2e-5, 3e-4)
        harm = 10 ** random_.uniform(-6, -3)
        items.append(
            LayerProfile(
                layer=layer.name,
                time_s={"fp32": base, "fp16": base * 0.4, "bf16": base * 0.42, "fp16_pure": base * 0.35},
                time_origin="predicted",
                max_output=81_920.0 if layer.name == "head" else 12.0,
                max_grad=0.01,
                underflow_share=0.001,
                sensitivity={"fp32": 0.0, "fp16": harm, "bf16": 8 * harm, "fp16_pure": 2 * harm},
            )
        )
    return Profile(layers=tuple(items), cast_s_per_byte=1e-12, base_step_s=0.127, cost_s=8.2, precisions=("fp32", "fp16", "bf16"))


def verdict() -> Verdict:
    return Verdict(
        status="passed",
        loss_gap=0.0024,
        low=0.0011,
        high=0.0038,
        tolerance=0.01,
        noise_floor=0.0016,
        seeds=3,
        text="Over 3 seeds the loss departs from FP32 by 0.24 % (0.11 % to 0.38 %), within the 1 % allowed.",
    )


def curves() -> tuple[Curve, ...]:
    return (
        Curve(name="fp32", losses=measurement().losses, style="reference"),
        Curve(name="fp32 again", losses=measurement(noise=0.004, seed=4).losses, style="twin"),
        Curve(name="fp32, other order", losses=measurement(noise=0.004, seed=5).losses, style="twin"),
        Curve(name="amp_fp16", losses=measurement(noise=0.006, seed=6).losses, style="stock"),
        Curve(name="tuned", losses=measurement(noise=0.005, seed=7).losses, style="tuned"),
    )


def report_data(**changes: object) -> ReportData:
    found = candidates()
    params = {c.number: {"front_index": c.number % 12, "init_scale": 8192, "micro_batch": 64} for c in found if c.role == "trial"}
    rows = rows_of(
        found,
        loss_gaps=gaps(),
        stock_samples_per_s=2976.0,
        verdicts={34: "passed", 30: "rejected"},
        params=params,
    )
    fields: dict[str, object] = {
        "name": "digits_cnn-4090d",
        "workload": "examples/digits_cnn.py",
        "target": "NVIDIA GeForce RTX 4090 D",
        "speed_origin": "predicted",
        "numerics": "losses measured on the CPU under CUDA's autocast rules, speed predicted for NVIDIA GeForce RTX 4090 D",
        "policy": policy(evidence=evidence()),
        "look": look(),
        "profile": profile(),
        "trials": rows,
        "chosen_number": 34,
        "arms": ARMS,
        "verdict": verdict(),
        "noise_floor": 0.0016,
        "tolerance": 0.01,
        "curves": curves(),
        "stages": (
            Stage(name="look", text="35 layers; 83% of the step is matmul or convolution", cost_s=2.1),
            Stage(name="noise floor", text="two FP32 runs differ by 0.16 %", cost_s=11.4),
            Stage(name="profile", text="head is pinned to fp32: its outputs reach 81,920", cost_s=8.2),
            Stage(name="study", text="35 trials, 8 failed, 12 within the tolerance", cost_s=141.0),
            Stage(name="verify", text="1 of 3 finalists passed on 3 seeds", cost_s=48.7),
        ),
        "rejected": (Rejected(what="head in fp16_pure", why="values out of range: 81,920 is over 65,504"),),
        "grad_clip": 1.0,
        "environment": ENVIRONMENT,
        "command": "autoprec tune examples/digits_cnn.py --gpu 4090d",
        "created": "2026-11-30",
        "autoprec_version": "0.1.0",
        "notes": ("No RTX 4090 D is here: speed and memory are predicted for it, losses are measured on this machine.",),
    }
    return ReportData(**{**fields, **changes})  # type: ignore[arg-type]
