"""How much each layer would suffer in each precision, in one low pass per precision whatever the number of layers.

The score of a layer is

    harm^2 / loss^2  +  output error^2  +  gradient error^2,        each part at most 1

* harm^2 is the larger of sum (g d)^2 and (sum g d)^2, for the layer's own error d of its output and the float32 gradient g that
  arrives there: first-order change of the loss. Source: NVIDIA ModelOpt's gradient scoring of AutoQuantize uses sum (g d)^2.
* output error is |d| / |y| over all its outputs.
* gradient error is the largest relative error of its parameters' gradients and loss of its inputs' gradients. Adam divides by the
  size of the gradient, so a gradient that flushes to zero is a whole error, however small it was.

Relative errors of quantities that mean nothing in float32 either (the gradient of a bias before a normalisation is zero but for
rounding) are left out: a twin pass in float32 with inputs and gradients perturbed by ``TWIN`` shows them. Scores are sums of
squares of independent errors, so they may be added over layers, and an fp32 layer has 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.attribution import LayerStack, float32_reference, layer_names
from autoprec.bench.cuda_rules import cuda_autocast_rules
from autoprec.bench.forcing import Forcer, LayerErrors, SameDraws
from autoprec.bench.magnitudes import Scratch, norm, read
from autoprec.bench.memory import is_out_of_memory
from autoprec.bench.seeding import seeded
from autoprec.bench.source import describe, raised_at
from autoprec.bench.tape import Recorder, Tape
from autoprec.bench.timing import seconds_of
from autoprec.bench.trace import untouched
from autoprec.policy import Policy
from autoprec.runtime import AppliedPolicy, apply_policy

TWIN = 2.0**-20
"""Relative perturbation of the twin pass: some units in the last place of float32 (2^-24), far under half precision (2^-11)."""

MEANINGLESS = 0.05
"""A quantity that the twin's perturbation moves by more than this share of itself is rounding noise. Assumption: sound gradients
move by about 1e-5, those that are zero but for rounding by about 1."""

MOST_LIFTS = 16
"""Layers that may raise in one precision before the pass gives up. Assumption: a model of one kind of block raises in each."""

EVERYWHERE = "*"
"""Stands for the layer where an error came from no layer's forward (the backward pass, the loss): the whole precision is out."""

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Scene:
    """What a sensitivity pass runs: the model on its device, one batch, its loss, and which rules hold.

    ``random`` says whether the model draws random numbers, ``in_place`` whether it changes tensors in place.
    """

    model: nn.Module
    batch: Any
    loss: Loss
    layers: tuple[str, ...]
    cuda_rules: bool
    random: bool
    in_place: bool
    seed: int = 0

    def modules(self) -> dict[str, nn.Module]:
        """The layers' modules by name."""
        by_name = {names[0]: module for module, names in layer_names(self.model).items()}
        return {name: by_name[name] for name in self.layers}

    def rules(self) -> AbstractContextManager[None]:
        """CUDA's autocast rules where the CPU stands in for a GPU."""
        return cuda_autocast_rules() if self.cuda_rules else nullcontext()


@dataclass(frozen=True)
class Score:
    """One layer in one precision: the combined score and its parts, all squared and relative; ``bad`` where not finite."""

    total: float = 0.0
    harm: float = 0.0
    output: float = 0.0
    gradient: float = 0.0
    bad: bool = False


@dataclass(frozen=True)
class Raised:
    """A layer that raised in a precision (or ``EVERYWHERE``), and what it said."""

    layer: str
    text: str


@dataclass
class _Errors:
    """Errors of a pass as plain numbers: relative, squared; None where the reference is zero."""

    output: float = 0.0
    harm: float = 0.0
    inputs: list[float | None] = field(default_factory=list)
    parameters: list[float | None] = field(default_factory=list)
    bad: bool = False


def record(scene: Scene) -> Tape:
    """The float32 pass: exact inputs, outputs and gradients of every call of every layer. Memory: about twice the activations."""
    recorder = Recorder(scene.modules(), copy=scene.in_place)
    with untouched(scene.model), float32_reference(), seeded(scene.seed), _draws(scene), recorder.active():
        value = scene.loss(scene.model, scene.batch)
        recorder.begin_backward()
        value.backward()  # type: ignore[no-untyped-call]
        recorder.tape.loss = float(value.detach())
        for parameter in scene.model.parameters():
            if parameter.grad is not None:
                recorder.tape.parameter_grads[parameter] = parameter.grad.detach().clone()
        recorder.tape.seal()
    return recorder.tape


def run_plain(scene: Scene) -> float:
    """Seconds of a float32 forward and backward pass over the scene's batch with nothing recorded; waits for the device.

    The faster of two: the first may still choose kernels and take memory.
    """
    return min(_plain_s(scene) for _ in range(2))


def _plain_s(scene: Scene) -> float:
    with untouched(scene.model), float32_reference(), seeded(scene.seed):
        return seconds_of(lambda: scene.loss(scene.model, scene.batch).backward())[1]  # type: ignore[no-untyped-call]


def _draws(scene: Scene) -> AbstractContextManager[Any]:
    return SameDraws() if scene.random else nullcontext()


def score(
    scene: Scene,
    tape: Tape,
    twin: dict[str, _Errors],
    policy_of: Callable[[Sequence[str]], Policy],
    *,
    scale: float,
) -> tuple[dict[str, Score], list[Raised]]:
    """One low pass, repeated with a layer lifted to fp32 each time one raises.

    Args:
        scene: what to run.
        tape: its float32 recording.
        twin: errors of the twin pass, see ``twin_errors``.
        policy_of: the policy to run, given the layers to lift to fp32.
        scale: loss scale.

    Returns:
        Scores of the layers that ran, and those that raised.
    """
    raised: list[Raised] = []
    while True:
        errors, failure = _try_pass(scene, tape, policy_of([entry.layer for entry in raised]), scale)
        if failure is None:
            break
        if failure.layer == EVERYWHERE or failure.layer in {entry.layer for entry in raised} or len(raised) >= MOST_LIFTS:
            return {}, [*raised, Raised(EVERYWHERE, failure.text)]
        raised.append(failure)
    lifted = {entry.layer for entry in raised}
    quiet = _Errors()
    scores = {name: _combine(found, twin.get(name, quiet), tape) for name, found in errors.items() if name not in lifted}
    return scores, raised


def _try_pass(scene: Scene, tape: Tape, policy: Policy, scale: float) -> tuple[dict[str, _Errors], Raised | None]:
    stack = LayerStack(scene.model)
    failure: Raised | None = None
    try:
        return _forced_pass(scene, tape, policy, scale, stack=stack), None
    except Exception as error:  # whatever a kernel or a user's module raises in half precision is a finding, not a crash
        if is_out_of_memory(error):
            raise
        layer = EVERYWHERE if stack.raised_in is None else _nearest_layer(stack.raised_in, scene.layers)
        failure = Raised(layer if layer in scene.layers else EVERYWHERE, f"{describe(error)}{raised_at(error)}")
    return {}, failure


def _nearest_layer(name: str, layers: Sequence[str]) -> str:
    known = set(layers)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def twin_errors(scene: Scene, tape: Tape, fp32_policy: Policy) -> dict[str, _Errors]:
    """How far a harmless perturbation of each layer's inputs and gradients moves its results and gradients, in float32."""
    return _forced_pass(scene, tape, fp32_policy, 1.0, perturbation=TWIN)


def _forced_pass(
    scene: Scene, tape: Tape, policy: Policy, scale: float, *, perturbation: float = 0.0, stack: LayerStack | None = None
) -> dict[str, _Errors]:
    modules = scene.modules()
    forcer = Forcer(modules, tape, scale=scale, perturbation=perturbation)
    with ExitStack() as contexts:
        for around in (untouched(scene.model), float32_reference(), seeded(scene.seed), scene.rules()):
            contexts.enter_context(around)
        applied = _apply_quietly(scene.model, policy)
        contexts.callback(applied.remove)
        contexts.enter_context(_draws(scene))
        contexts.enter_context(forcer.active())
        contexts.enter_context(stack or nullcontext())
        with applied.autocast():
            value = scene.loss(scene.model, scene.batch)
        forcer.begin_backward()
        (value.float() * scale).backward()  # type: ignore[no-untyped-call]
        grads = {parameter: parameter.grad for parameter in scene.model.parameters() if parameter.grad is not None}
        return _read(forcer.errors, _parameter_errors(scene, tape, grads, scale), scale)


def _apply_quietly(model: nn.Module, policy: Policy) -> AppliedPolicy:
    """Without the warning that another card than the policy's is here: numerics are what is asked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return apply_policy(model, policy)


def _parameter_errors(
    scene: Scene, tape: Tape, grads: dict[nn.Parameter, Tensor], scale: float
) -> dict[str, list[tuple[Tensor, float]]]:
    """Norm of the error of each parameter's gradient, times the scale, and the sum of the squares of the exact one.

    By the layer that uses the parameter: its owner, or its owner's nearest layer.
    """
    found: dict[str, list[tuple[Tensor, float]]] = {}
    scratch = Scratch()
    for module, names in layer_names(scene.model).items():
        layer = _nearest_layer(names[0].partition(".parametrizations")[0], scene.layers)
        for parameter in module.parameters(recurse=False):
            exact = tape.parameter_grads.get(parameter)
            if exact is None or not exact.is_floating_point() or exact.layout != torch.strided:
                continue
            size = tape.size(exact)
            low = grads.get(parameter)
            low = torch.zeros_like(exact) if low is None else low
            error = norm(scratch.minus(low, exact, size.sums_in(exact.dtype, scale), factor=scale))
            found.setdefault(layer, []).append((error, size.squares))
    return found


def _read(errors: dict[str, LayerErrors], parameters: dict[str, list[tuple[Tensor, float]]], scale: float) -> dict[str, _Errors]:
    """Everything from the device in one transfer."""
    values = read(
        [
            scalar
            for name, found in errors.items()
            for scalar in (*found.scalars(), *(error for error, _ in parameters.get(name, ())))
        ]
    )
    read_errors: dict[str, _Errors] = {}
    for name, found in errors.items():
        outputs = [(_square(next(values)), size) for _, size in found.outputs]
        inputs = [_astray(_square(next(values) / scale), size, size + next(values) / scale) for *_, size in found.input_grads]
        # Rounding errors add up like random ones (the first); a bias adds up straight (the second).
        harm = sum(_largest(_square(next(values)), _square(next(values))) for _ in found.harms)
        extremes = [next(values) for _ in found.extremes]
        weights = [_relative(_square(next(values) / scale), size) for _, size in parameters.get(name, ())]
        error, size = sum(pair[0] for pair in outputs), sum(pair[1] for pair in outputs)
        read_errors[name] = _Errors(_relative(error, size) or 0.0, harm, inputs, weights, not all(map(math.isfinite, extremes)))
    return read_errors


def _square(value: float) -> float:
    """Infinite where it overflows, where ``**`` raises."""
    return value * value


def _largest(*values: float) -> float:
    """The largest, or NaN where one is."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _relative(error: float, size: float) -> float | None:
    if size == 0.0:
        return None
    return error / size if math.isfinite(error) else math.inf


def _astray(error: float, size: float, product: float) -> float | None:
    """How much of an input's gradient is lost, squared: the part that no longer points its way, and noise as large as itself.

    A max-pool whose rounded maximum lies elsewhere sends gradients elsewhere; such noise averages out in the parameters' gradients
    it reaches and is not held against the layer, where a gradient that flushed to zero is.
    """
    if size == 0.0:
        return None
    if not math.isfinite(error):
        return math.inf
    return (1.0 - product / size) ** 2 + (error / size) ** 2


def _combine(found: _Errors, twin: _Errors, tape: Tape) -> Score:
    harm = found.harm / max(tape.loss**2, 1e-24)
    gradients = [*_meaningful(found.inputs, twin.inputs), *_meaningful(found.parameters, twin.parameters)]
    gradient = 0.0 if tape.inner_gradients else max(gradients, default=0.0)
    output = found.output if twin.output < MEANINGLESS**2 else 0.0
    harm, output, gradient = (min(part, 1.0) if math.isfinite(part) else 1.0 for part in (harm, output, gradient))
    return Score(harm + output + gradient, harm, output, gradient, bad=found.bad)


def _meaningful(errors: list[float | None], twin: list[float | None]) -> list[float]:
    """Squared relative errors of what a float32 perturbation leaves standing."""
    if len(errors) != len(twin):  # a value met fewer gradients in one of the passes
        twin = [None] * len(errors)
    return [
        error
        for error, shaken in zip(errors, twin, strict=True)
        if error is not None and (shaken is None or shaken < MEANINGLESS**2)
    ]
