"""The profile of a workload: what every layer costs in each precision, and what it risks.

A few FP32 training steps under the range screen; then, at the initial weights and after those steps, one recorded FP32 pass, one
perturbed twin and one low pass for each precision (see ``forcing``); then the time of every layer in each precision, measured on
the device or predicted by the roofline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoprec.bench.batch import to_device
from autoprec.bench.layer_times import StepTimes, measure_cast, measure_step
from autoprec.bench.look import part_of
from autoprec.bench.memory import free_memory, is_out_of_memory
from autoprec.bench.optrace import OpTrace
from autoprec.bench.ranges import StepRanges, record_step, screen
from autoprec.bench.roofline import predict_cast_s_per_byte, predict_layer_times
from autoprec.bench.seeding import seed_everything, untouched_random_state
from autoprec.bench.sensitivity import EVERYWHERE, Raised, Scene, Score, record, run_plain, score, twin_errors
from autoprec.bench.target import Target
from autoprec.bench.timing import seconds_of
from autoprec.bench.workload import Workload, steps_with_closure
from autoprec.policy import Backend, Batch, Fingerprint, LayerSetting, Policy, Precision
from autoprec.records import LayerProfile, Look, Profile, Risk
from autoprec.runtime import apply_policy

_T = TypeVar("_T")

SCREEN_STEPS = 3
"""FP32 steps the range screen trains. Assumption: ranges of the first steps show planted and structural hazards, not late
drift."""

MOST_SAMPLES = 64
"""Most samples of a sensitivity pass. Assumption: enough rows to meet rare ones, cheap enough to leave the budget alone; the range
screen sees whole batches."""

# A score that is not finite: worse than any combination of finite parts, and still a number a solver can add.
_BROKEN = 10.0


@dataclass(frozen=True)
class _Subject:
    """What is being profiled: a model that trains along the way, its first batches on the device, and where it runs.

    ``samples`` are those of a batch that fit into memory in FP32; ``draws`` says whether a step draws random numbers.
    """

    workload: Workload
    target: Target
    look: Look
    model: nn.Module
    batches: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    samples: int
    draws: bool

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.look.layers]

    def part(self, index: int, samples: int) -> Any:
        """The first samples of a batch."""
        return part_of(self.batches[index], samples, self.workload.batch_size)


def profile(
    workload: Workload,
    target: Target,
    look: Look,
    precisions: Sequence[Precision],
    *,
    trace: OpTrace,
    seed: int = 0,
    steps: int = SCREEN_STEPS,
) -> Profile:
    """Profiles every layer of a workload. Waits for the GPU; process-wide state is restored.

    Args:
        workload: what to profile; a fresh model is built and trained for ``steps`` FP32 steps.
        target: where numerics run, and whether times are measured or predicted.
        look: its layers.
        precisions: which to profile; fp32 is always among the times.
        trace: its traced operations, for the roofline.
        seed: of weights, data and dropout.
        steps: FP32 steps of the range screen.
    """
    began = time.perf_counter()
    wanted: tuple[Precision, ...] = tuple(dict.fromkeys(("fp32", *precisions)))
    low = tuple(precision for precision in wanted if precision != "fp32")
    with untouched_random_state():
        subject = _subject(workload, target, look, trace, seed, steps)
        recorded = [_record(subject, 0)]
        scorings = [_sensitivity(subject, 0, low, recorded)]
        for index in range(1, steps):
            _update(subject)
            recorded.append(_record(subject, index))
        _update(subject)
        scorings.append(_sensitivity(subject, steps, low, recorded))
        times, origin_measured, cast_s = _times(subject, trace, wanted, scorings[-1].raised)
    layers = _layer_profiles(look, recorded, scorings, times, wanted, measured=origin_measured)
    base_s = sum(seconds.get("fp32", 0.0) for seconds in times.values())
    return Profile(
        layers=layers,
        cast_s_per_byte=cast_s,
        base_step_s=base_s,
        cost_s=time.perf_counter() - began,
        precisions=wanted,
        sensitivity_passes={precision: max(scoring.passes[precision] for scoring in scorings) for precision in low},
    )


def _subject(workload: Workload, target: Target, look: Look, trace: OpTrace, seed: int, steps: int) -> _Subject:
    seed_everything(seed)
    model = workload.build_model().to(target.device).train()
    stream = iter(workload.batches(workload.batch_size, seed))
    batches = tuple(to_device(next(stream), target.device) for _ in range(steps + 1))
    draws = any(op.draws for op in trace.ops)
    return _Subject(workload, target, look, model, batches, workload.build_optimizer(model), trace.samples, draws)


def _record(subject: _Subject, index: int) -> StepRanges:
    """Forward and backward of a batch under the range screen; its gradients stay for ``_update``."""
    return record_step(subject.model, subject.part(index, subject.samples), subject.workload.loss, subject.names)


def _update(subject: _Subject) -> None:
    """The FP32 update: the weights move, so that later passes see other values than the first."""
    if subject.workload.grad_clip is not None:
        nn.utils.clip_grad_norm_(subject.model.parameters(), subject.workload.grad_clip)
    if not steps_with_closure(subject.workload, subject.optimizer):
        subject.optimizer.step()
    subject.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Scoring:
    """Scores by precision and layer from one batch, layers that raised by precision, and what scoring took.

    ``passes`` is the wall time of scoring a precision in FP32 forward and backward passes over the same samples: its low pass (again
    for each layer that raised) and its share of the recorded pass and the twin, which all precisions use.
    """

    scores: Mapping[Precision, Mapping[str, Score]]
    raised: Mapping[Precision, Sequence[Raised]]
    passes: Mapping[Precision, float]


def _sensitivity(subject: _Subject, index: int, precisions: Sequence[Precision], recorded: Sequence[StepRanges]) -> Scoring:
    """Scores one batch, or the largest part of it whose recording fits into memory."""
    return _with_what_fits(subject, index, lambda part: _score_part(subject, part, precisions, recorded))


def _with_what_fits(subject: _Subject, index: int, run: Callable[[Any], _T]) -> _T:
    """Runs over a batch, or over the largest part of it that fits into memory."""
    sizes = tuple(size for size in subject.look.micro_batches if size <= MOST_SAMPLES) or subject.look.micro_batches[-1:]
    for size in sizes[:-1]:
        try:
            return run(subject.part(index, size))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
    return run(subject.part(index, sizes[-1]))


def _score_part(subject: _Subject, part: Any, precisions: Sequence[Precision], recorded: Sequence[StepRanges]) -> Scoring:
    look = subject.look
    scene = _scene(subject, part)
    tape, record_s = seconds_of(lambda: record(scene))
    twin, twin_s = seconds_of(lambda: twin_errors(scene, tape, uniform_policy(look, "fp32")))
    fp16_scale = screen(recorded, subject.names).scale
    scores: dict[Precision, Mapping[str, Score]] = {}
    raised: dict[Precision, Sequence[Raised]] = {}
    passes: dict[Precision, float] = {}
    plain_s = run_plain(scene)
    for precision in precisions:
        scale = fp16_scale if precision.startswith("fp16") else 1.0
        found, low_s = seconds_of(partial(score, scene, tape, twin, _policies(look, precision), scale=scale))
        scores[precision], raised[precision] = found
        passes[precision] = (low_s + (record_s + twin_s) / len(precisions)) / plain_s
    return Scoring(scores, raised, passes)


def _policies(look: Look, precision: Precision) -> Callable[[Sequence[str]], Policy]:
    def policy_of(lifted: Sequence[str]) -> Policy:
        return uniform_policy(look, precision, lifted=lifted)

    return policy_of


def _scene(subject: _Subject, part: Any) -> Scene:
    return Scene(
        model=subject.model,
        batch=part,
        loss=subject.workload.loss,
        layers=tuple(subject.names),
        cuda_rules=subject.target.cuda_rules,
        random=subject.draws,
        in_place=True,
    )


def rescore(
    workload: Workload,
    target: Target,
    look: Look,
    policy: Policy,
    *,
    trace: OpTrace,
    scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Score]:
    """Scores every layer in the precision a policy gives it, with the policy's other layers around it active.

    Inputs are exact but arrive in the dtypes of the policy, so what an assignment changes for its neighbours is seen.
    """
    plain = policy.model_copy(update={"execution": "eager", "backend": Backend()})

    def scored(subject: _Subject, part: Any) -> dict[str, Score]:
        scene = _scene(subject, part)
        tape = record(scene)
        twin = twin_errors(scene, tape, uniform_policy(look, "fp32"))
        return score(scene, tape, twin, lambda _lifted: plain, scale=scale)[0]

    with untouched_random_state():
        subject = _subject(workload, target, look, trace, seed, 0)
        return _with_what_fits(subject, 0, lambda part: scored(subject, part))


def uniform_policy(look: Look, precision: Precision, *, lifted: Sequence[str] = (), backend: Backend | None = None) -> Policy:
    """Every layer in one precision, but those in ``lifted`` in fp32 (their descendants keep the precision)."""
    names = [layer.name for layer in look.layers]
    wanted: dict[str, Precision] = {name: "fp32" if name in set(lifted) else precision for name in names}
    default: Precision = wanted.get("", precision)
    settings: dict[str, LayerSetting] = {}
    for name in sorted(filter(None, names), key=lambda name: name.count(".")):
        if wanted[name] != _inherited(name, settings, default):
            settings[name] = LayerSetting(precision=wanted[name])
    micro = look.micro_batches[0]
    return Policy(
        default=default,
        layers=settings,
        batch=Batch(effective=look.effective_batch, micro=micro, accumulation_steps=look.effective_batch // micro),
        outputs="fp32" if default == "fp32" else look.outputs,
        backend=backend or Backend(),
        fingerprint=Fingerprint.of(
            {layer.name: layer.signature for layer in look.layers},
            idle=look.idle,
            device=look.device_name,
            capability=look.capability,
            torch_version=look.torch_version,
            workload_sha256=look.workload_sha256,
        ),
    )


def _inherited(name: str, settings: Mapping[str, LayerSetting], default: Precision) -> Precision:
    while name:
        name = name.rpartition(".")[0]
        if name in settings:
            return settings[name].precision
    return default


def _times(
    subject: _Subject, trace: OpTrace, precisions: Sequence[Precision], raised: Mapping[Precision, Sequence[Raised]]
) -> tuple[dict[str, dict[Precision, float]], bool, float]:
    """Seconds by layer and precision, whether they were measured, and seconds per byte of a cast."""
    target = subject.target
    if target.timing == "measured":
        times = _measured_times(subject, precisions, raised)
        if times:
            return times, True, measure_cast(target.device)
    if target.gpu is None:
        raise ValueError(f"{target.name} is not in the GPU table and the profiler saw no device times: no layer times to be had.")
    return predict_layer_times(trace, target.gpu, precisions), False, predict_cast_s_per_byte(target.gpu)


def _measured_times(
    subject: _Subject, precisions: Sequence[Precision], raised: Mapping[Precision, Sequence[Raised]]
) -> dict[str, dict[Precision, float]]:
    """One instrumented run per precision; empty where the profiler saw no device times."""
    times: dict[str, dict[Precision, float]] = {}
    backend = Backend(channels_last=subject.look.has_conv)
    for precision in precisions:
        lifted = [entry.layer for entry in raised.get(precision, ())]
        if EVERYWHERE in lifted:
            continue  # nothing to time: the model does not run in it, and the risks say so
        found = _timed(subject, uniform_policy(subject.look, precision, lifted=lifted, backend=backend))
        if not found.total_s:
            return {}
        for layer, seconds in found.by_layer.items():
            times.setdefault(layer, {})[precision] = seconds
    return times


def _timed(subject: _Subject, policy: Policy) -> StepTimes:
    applied = apply_policy(subject.model, policy)
    try:
        part = subject.part(0, subject.samples)
        batch = to_device(part, subject.target.device, channels_last=policy.backend.channels_last)

        def forward() -> Tensor:
            with applied.autocast():
                return subject.workload.loss(subject.model, batch)

        return measure_step(subject.model, forward, subject.target.device, reference=False)
    finally:
        applied.remove()


def _layer_profiles(
    look: Look,
    recorded: Sequence[StepRanges],
    scorings: Sequence[Scoring],
    times: Mapping[str, Mapping[Precision, float]],
    precisions: Sequence[Precision],
    *,
    measured: bool,
) -> tuple[LayerProfile, ...]:
    names = [layer.name for layer in look.layers]
    seen = screen(recorded, names)
    profiles = []
    for name in names:
        risks = [*seen.risks[name], *_found_risks(name, scorings, precisions)]
        ranges = seen.layers[name]
        profiles.append(
            LayerProfile(
                layer=name,
                time_s={precision: times.get(name, {}).get(precision, 0.0) for precision in precisions},
                time_origin="measured" if measured else "predicted",
                max_output=ranges.max_output,
                max_grad=ranges.max_grad,
                underflow_share=ranges.underflow_share(2.0**13),
                sensitivity={precision: _sensitivity_of(name, precision, scorings) for precision in precisions},
                risks=tuple(risk for risk in _merged(risks) if risk.precision in precisions),
            )
        )
    return tuple(profiles)


def _sensitivity_of(name: str, precision: Precision, scorings: Sequence[Scoring]) -> float:
    """The worse of the scorings: a hazard that shows on one batch is one."""
    if precision == "fp32":
        return 0.0
    found = [scoring.scores[precision].get(name) for scoring in scorings]
    if any(_raised_text(name, precision, scoring) for scoring in scorings):
        return _BROKEN
    return max((_BROKEN if entry.bad else entry.total for entry in found if entry is not None), default=0.0)


def _raised_text(name: str, precision: Precision, scoring: Scoring) -> str:
    return next((entry.text for entry in scoring.raised.get(precision, ()) if entry.layer in (name, EVERYWHERE)), "")


def _found_risks(name: str, scorings: Sequence[Scoring], precisions: Sequence[Precision]) -> list[Risk]:
    risks = []
    for precision in precisions:
        for scoring in scorings:
            text = _raised_text(name, precision, scoring)
            if text:
                risks.append(Risk(precision=precision, kind="unsupported", hard=True, text=f"raised in {precision}: {text}"))
            found = scoring.scores.get(precision, {}).get(name)
            if found is not None and found.bad:
                text = f"its own results are not finite in {precision}, though its inputs and FP32 results are"
                risks.append(Risk(precision=precision, kind="range", hard=True, text=text))
    return risks


def _merged(risks: Sequence[Risk]) -> list[Risk]:
    """One risk of each precision, kind and hardness: the first found."""
    unique: dict[tuple[Precision, str, bool], Risk] = {}
    for risk in risks:
        unique.setdefault((risk.precision, risk.kind, risk.hard), risk)
    return list(unique.values())
