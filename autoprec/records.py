"""The values that travel between measuring and deciding; no torch here.

Everything is frozen and round-trips through JSON, because raw samples are appended to ``candidates.jsonl`` as they happen.
Times are in seconds, memory in bytes, throughput in samples per second; a step is one optimizer step over the effective batch.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autoprec.policy import Origin, Outputs, Policy, Precision, ReasonKind

FailureKind = Literal["out_of_memory", "diverged", "scale_collapsed", "unsupported", "timeout", "crashed", "disturbed"]
# A process that died or hung, or a card that was never quiet, says nothing about the policy.
UNDECIDED_FAILURES: tuple[FailureKind, ...] = ("crashed", "timeout", "disturbed")
VerdictStatus = Literal["passed", "rejected", "inconclusive"]


class Record(BaseModel):
    """Base of every record: frozen, unknown keys refused, infinities and NaN kept in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Layer(Record):
    """A module that itself issues floating-point operations when the model runs.

    Attributes:
        name: exact dotted name (the first one under which the module is registered); the root is ``""``.
        aliases: further names of the same module.
        kind: class name.
        parameters: shapes of the parameters the module owns directly, by name.
        ops: names of the aten operations it issued itself in one forward pass, without repeats.
        calls: how often it ran in one forward pass.
        flops: floating-point operations of its own matmuls and convolutions in one forward pass over one sample batch.
        moved_bytes: bytes its own operations read and wrote in that pass, in float32.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: str
    parameters: dict[str, tuple[int, ...]] = {}
    ops: tuple[str, ...] = ()
    calls: int = 1
    flops: int = 0
    moved_bytes: int = 0

    @property
    def signature(self) -> str:
        """Kind and own parameter shapes, as the policy's fingerprint holds it: ``Conv2d weight=64x3x7x7``."""
        shapes = (f"{name}={'x'.join(map(str, shape)) or 'scalar'}" for name, shape in sorted(self.parameters.items()))
        return " ".join((self.kind, *shapes))


class Edge(Record):
    """Elements that flow from one layer's output into another layer's operation; a cast sits here when precisions differ."""

    producer: str
    consumer: str
    elements: int


class Look(Record):
    """What one traced FP32 step of a workload shows before anything is searched.

    Attributes:
        layers: every layer, in order of first use.
        idle: modules that own parameters but ran no operation themselves.
        edges: producer-consumer pairs between layers.
        matmul_share: share of the FP32 step's time spent in matmuls and convolutions, 0 to 1.
        heavy_s: seconds of one step's matmuls and convolutions that a lower precision could shorten: what they take beyond the least
            time of an operation. 0 where nothing was measured.
        light_s: the same for all other operations of forward and backward.
        num_parameters: parameters of the model.
        effective_batch: samples of one optimizer step.
        micro_batches: the micro-batches that divide it and into which a batch can really be split, largest first.
        unsplittable: why the batch cannot be split, or an empty string.
        odd_layers: layers with a feature or channel count that is not a multiple of 8 and that can be padded to one.
        has_conv: whether any layer runs a convolution over images (channels_last has a meaning).
        outputs: whether the loss needs the model's outputs in float32, or casts what it must itself (``computed``).
        loss: the FP32 loss of the first batch.
        grad_clip: the workload's gradient clipping; None where it does not clip.
        notes: what the user should know of the workload's check (a batch made smaller).
        forbids_fp16: why no layer may be fp16 (complex parameters, an optimizer that needs a closure), or an empty string.
        workload_sha256: hash of the user's source and batch settings.
        device_name: the name the driver gives, or the processor's.
        capability: CUDA compute capability such as ``9.0``; None on a CPU.
        torch_version: version of torch that ran.
    """

    layers: tuple[Layer, ...]
    idle: tuple[str, ...]
    edges: tuple[Edge, ...]
    matmul_share: float
    heavy_s: float = 0.0
    light_s: float = 0.0
    num_parameters: int
    effective_batch: int
    micro_batches: tuple[int, ...]
    unsplittable: str = ""
    odd_layers: tuple[str, ...] = ()
    has_conv: bool = False
    outputs: Outputs = "fp32"
    loss: float
    grad_clip: float | None = None
    notes: tuple[str, ...] = ()
    forbids_fp16: str = ""
    workload_sha256: str
    device_name: str
    capability: str | None
    torch_version: str


class Ceiling(Record):
    """The most that low precision could give, whatever the assignment.

    Attributes:
        fp32_step_s: seconds of an FP32 step, TF32 off.
        best_fp32_step_s: the same with TF32 or another memory layout, where that is faster and known.
        floor_step_s: seconds that no assignment of precisions can fall below.
        host_bound: whether the device waits for the host in FP32.
        origin: whether the step was measured or predicted.
    """

    fp32_step_s: float
    best_fp32_step_s: float
    floor_step_s: float
    host_bound: bool
    origin: Origin

    @property
    def gain(self) -> float:
        """How many times faster than FP32 (with TF32, if that is faster) a step could become at most."""
        return self.best_fp32_step_s / self.floor_step_s


class Risk(Record):
    """A reason to keep a layer out of a precision. A hard one pins it; a soft one is a prior the study may overrule."""

    precision: Precision
    kind: ReasonKind
    hard: bool
    text: str


class LayerProfile(Record):
    """What one layer costs and risks.

    Attributes:
        layer: the layer's name.
        time_s: forward and backward seconds of one step by precision; measured with device events or predicted by the roofline.
        time_origin: where ``time_s`` comes from.
        max_output: largest |x| over its outputs and own intermediate results in FP32.
        max_grad: largest |gradient| of its outputs in FP32, unscaled.
        underflow_share: share of its outputs' non-zero gradients that fall under 2^-24 at the search space's middle loss scale.
        sensitivity: estimated harm to the loss and to the weight updates by precision; 0 for fp32, comparable across layers.
        risks: reasons to keep it out of a precision.
    """

    layer: str
    time_s: dict[Precision, float]
    time_origin: Origin
    max_output: float
    max_grad: float
    underflow_share: float
    sensitivity: dict[Precision, float]
    risks: tuple[Risk, ...] = ()


class Profile(Record):
    """The profile of a workload on a target: layers, what a cast costs, and how long profiling took.

    ``cast_s_per_byte`` is the time of moving one byte through a cast (read plus write counted), forward and backward alike.
    ``sensitivity_passes`` is what scoring every layer in one precision took, in FP32 forward and backward passes over the same samples,
    with its share of the two passes that all precisions need.
    """

    layers: tuple[LayerProfile, ...]
    cast_s_per_byte: float
    base_step_s: float
    cost_s: float
    precisions: tuple[Precision, ...]
    sensitivity_passes: dict[Precision, float] = {}


class Window(Record):
    """The recipe of a short training run.

    Attributes:
        steps: optimizer steps whose losses count.
        warmup_steps: steps at the start whose times are dropped (their losses are kept: they are part of the training).
        seed: seeds initial weights, data order and dropout.
        perturbation: relative size of a random change of the initial weights; 2^-24 makes a harmless twin of an FP32 run.
        timeout_s: after this many seconds the worker is ended.
        purpose: what it is for, as shown to people.
    """

    steps: Annotated[int, Field(ge=1)]
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    seed: int = 0
    perturbation: Annotated[float, Field(ge=0)] = 0.0
    timeout_s: float = 600.0
    purpose: str = "trial"


class Environment(Record):
    """Where samples were taken."""

    device: str
    capability: str | None
    driver: str | None
    torch_version: str
    python_version: str
    platform: str
    cuda_version: str | None = None


class Measurement(Record):
    """Raw samples of one window.

    Attributes:
        losses: loss of every step, warm-up included, in float32.
        step_times_s: time of every step after the warm-up that counts; one equal value each where the speed is predicted. Steps that
            the loss scaler skipped do not count, and none that were disturbed.
        speed_origin: whether ``step_times_s`` was measured or predicted.
        batch_samples: samples of one step (the effective batch).
        peak_bytes: peak memory; measured by the allocator on CUDA, otherwise predicted or the process's own.
        skipped_steps: optimizer steps the loss scaler skipped, warm-up included.
        late_skipped_steps: those of them in the second half of the window, when the scale has had time to settle.
        final_scale: loss scale at the end; None without a scaler.
        host_bound: whether the device waited for the host: it was done almost as soon as the host had issued a step.
        block_steps: how many of ``step_times_s`` each block of interleaved timing gave, in order; empty where there were no blocks.
        throttled_steps: timed steps dropped because heat or a power brake held the clocks down.
        shared_steps: timed steps dropped because another process computed on the card.
        note: anything a person should know about these samples (disturbed samples dropped, batches gone through again).
    """

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    speed_origin: Origin
    batch_samples: int
    peak_bytes: int
    skipped_steps: int = 0
    late_skipped_steps: int = 0
    final_scale: float | None = None
    host_bound: bool = False
    block_steps: tuple[int, ...] = ()
    throttled_steps: int = 0
    shared_steps: int = 0
    environment: Environment
    note: str = ""

    @property
    def step_s(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.step_times_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of useful work: skipped steps took the time of a step and do not count as done."""
        done = 1.0 - self.skipped_steps / max(len(self.losses), 1)
        return self.batch_samples * done / self.step_s

    @property
    def disturbed(self) -> bool:
        """Whether samples were dropped because something slowed the card."""
        return self.throttled_steps + self.shared_steps > 0

    @property
    def dropped(self) -> str:
        """How many samples were dropped and why, in words; empty where none were."""
        total = len(self.step_times_s) + self.throttled_steps + self.shared_steps
        return dropped_words(self.throttled_steps, self.shared_steps, total)


def dropped_words(throttled_steps: int, shared_steps: int, total_steps: int) -> str:
    """What was dropped of the timed steps, in words: ``12 of 60 steps dropped: another process used the card``."""
    causes = ((shared_steps, "another process used the card"), (throttled_steps, "heat or power held the clocks down"))
    return "; ".join(f"{steps} of {total_steps} steps dropped: {cause}" for steps, cause in causes if steps)


class Failure(Record):
    """Why a window gave no samples; a value, never raised past the bench.

    ``layer`` names the module that raised or first went non-finite, where that is known; ``step`` the step it happened in;
    ``losses`` are those of the steps before, as far as they are finite.
    """

    kind: FailureKind
    message: str
    layer: str | None = None
    step: int | None = None
    traceback: str = ""
    losses: tuple[float, ...] = ()


Outcome = Measurement | Failure


class Candidate(Record):
    """One evaluated policy: its number and role in the run, the window, and what came of it."""

    number: int
    role: str
    policy: Policy
    window: Window
    outcome: Outcome
    trial: int | None = None


class Verdict(Record):
    """Whether a policy trains like FP32, with the numbers compared.

    ``loss_gap`` is relative; ``low`` and ``high`` bound it; ``noise_floor`` is what two FP32 runs differ by.
    """

    status: VerdictStatus
    loss_gap: float
    low: float
    high: float
    tolerance: float
    noise_floor: float
    seeds: int
    text: str


def evaluation_key(policy: Policy, window: Window) -> str:
    """Identifies an evaluation: same set-up and same window give the same key, whatever the evidence or purpose says."""
    data = [policy.setup_hash(), window.model_dump(mode="json", exclude={"purpose", "timeout_s"})]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
