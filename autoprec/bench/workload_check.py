"""Checks a workload before any search: it builds, its batches repeat, and it trains one step in FP32."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.batch import batch_length, equal_batches, split_batch, to_device, why_unsplittable
from autoprec.bench.memory import is_out_of_memory
from autoprec.bench.seeding import seed_everything, untouched_random_state
from autoprec.bench.source import call_user
from autoprec.bench.workload import Workload, steps_with_closure
from autoprec.errors import WorkloadError

# The check's own step runs on at most so many samples of a batch on a CPU, where a whole batch may take minutes.
_CHECK_SAMPLES_ON_CPU = 32
_DATA_HINT = "batches(batch_size, seed) must give an endless stream of CPU batches of batch_size samples, the same for one seed."


def check_workload(workload: Workload, device: str) -> Workload:
    """Proves that the workload can be searched, or says what to change. Random states are left as they were.

    Returns:
        The workload; with a smaller batch and a note where the batches turn out smaller than asked, and knowing whether the
        optimizer wants a closure.

    Raises:
        WorkloadError: build_model gives no module, the batches are not reproducible or end early, the loss is no finite scalar
            in FP32 or has no gradient, or the optimizer holds none of the model's parameters.
    """
    with untouched_random_state():
        workload, batch = _check_batches(workload)
        seed_everything(0)
        model = build_checked(workload).to(device).train()
        closure = _check_step(workload, model, batch, device)
    return dataclasses.replace(workload, step_needs_closure=True) if closure and not workload.step_needs_closure else workload


def build_checked(workload: Workload) -> nn.Module:
    """A fresh model.

    Raises:
        WorkloadError: build_model raised, or returned something else.
    """
    model = call_user("build_model()", workload.build_model, hint="It must return a torch.nn.Module and take no arguments.")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise WorkloadError(f"build_model() returned {what}; it must return a torch.nn.Module.", hint="Return the model itself.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("The model has no trainable parameter.", hint="build_model() must return a model to train.")
    return model


def take_batches(workload: Workload, seed: int, needed: int) -> list[Any]:
    """The first ``needed`` batches.

    Raises:
        WorkloadError: fewer came.
    """
    stream = call_user("batches()", workload.batches, workload.batch_size, seed, hint=_DATA_HINT)
    taken: list[Any] = call_user("batches()", lambda: list(itertools.islice(stream, needed)), hint=_DATA_HINT)
    if len(taken) < needed:
        raise WorkloadError(
            f"batches({workload.batch_size}, seed={seed}) ended after {len(taken)} batches; {needed} are needed.",
            hint="Make it endless: wrap its body in 'while True:', or return something that can be iterated again.",
        )
    return taken


def _check_batches(workload: Workload) -> tuple[Workload, Any]:
    workload = _fit_dataset(workload)
    first, again = take_batches(workload, 0, 2), take_batches(workload, 0, 2)
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        if not equal_batches(one, other):
            raise WorkloadError(
                f"batches({workload.batch_size}, seed=0) is not reproducible: batch {number} differs between two calls.",
                hint="Draw everything random from a generator made from seed, such as torch.Generator().manual_seed(seed).",
            )
    length = batch_length(first[0])
    if length is None or length == workload.batch_size:
        return workload, first[0]
    if length > workload.batch_size:
        raise WorkloadError(
            f"batches({workload.batch_size}, seed) gave a batch of {length} samples.",
            hint="Let batches() use its batch_size argument: the search asks for the size it needs.",
        )
    note = f"batches() was asked for {workload.batch_size} samples and gave {length}: the effective batch is {length}."
    return dataclasses.replace(workload, batch_size=length, notes=(*workload.notes, note)), first[0]


def _fit_dataset(workload: Workload) -> Workload:
    """Where nobody chose the batch size, a small dataset decides it."""
    size = workload.num_samples() if workload.num_samples is not None else None
    if size is None or size >= workload.batch_size or workload.batch_size_given or size < 1:
        return workload
    note = f"The dataset has {size} samples: the effective batch is {size} instead of {workload.batch_size}."
    return dataclasses.replace(workload, batch_size=size, notes=(*workload.notes, note))


def _check_step(workload: Workload, model: nn.Module, batch: Any, device: str) -> bool:
    """Trains one step; returns whether the optimizer wanted a closure."""
    optimizer = call_user(
        "build_optimizer(model)",
        workload.build_optimizer,
        model,
        hint="It must return a torch.optim.Optimizer over model.parameters().",
    )
    trained = _check_optimizer(optimizer, model)
    samples = workload.batch_size if device == "cuda" else min(workload.batch_size, _CHECK_SAMPLES_ON_CPU)
    while True:
        try:
            return _train_once(workload, model, optimizer, trained, _part(batch, samples, device))
        except WorkloadError as error:
            if error.__cause__ is None or not is_out_of_memory(error.__cause__) or samples == 1 or why_unsplittable(batch):
                raise
        optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        samples = max(1, samples // 2)


def _part(batch: Any, samples: int, device: str) -> Any:
    length = batch_length(batch)
    if length is None or why_unsplittable(batch):
        return to_device(batch, device)
    divisors = [size for size in range(1, min(samples, length) + 1) if length % size == 0]
    return to_device(split_batch(batch, divisors[-1])[0], device)


def _check_optimizer(optimizer: Any, model: nn.Module) -> list[Tensor]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"build_optimizer(model) returned a {type(optimizer).__name__}; it must return a torch.optim.Optimizer.",
            hint="Return the optimizer itself.",
        )
    own = {id(parameter): parameter for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = [parameter for parameter in held if id(parameter) in own]
    if not trained:
        raise WorkloadError(
            f"The optimizer holds {len(held)} parameters and none of them is the model's, so training would change nothing.",
            hint="build_optimizer(model) must use the parameters of the model it is given, not those of another one.",
        )
    return trained


def _train_once(
    workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, trained: list[Tensor], batch: Any
) -> bool:
    """One FP32 step; returns whether the optimizer had to be given a closure."""

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = check_loss(call_user("loss(model, batch)", workload.loss, model, batch, hint=_LOSS_HINT))
        call_user("loss.backward()", loss.backward, hint="The model must train in FP32 before precisions can be searched.")
        return loss

    closure()
    if all(parameter.grad is None for parameter in trained):
        raise WorkloadError(
            f"The loss of the first batch has no gradient path to any of the {len(trained)} parameters the optimizer trains.",
            hint="Compute the loss from the model's output without .item(), .detach() or torch.no_grad().",
        )
    hint = "The optimizer must work in FP32 before precisions can be searched."
    if steps_with_closure(workload, optimizer):
        call_user("optimizer.step(closure)", optimizer.step, closure, hint=hint)
        return True
    try:
        call_user("optimizer.step()", optimizer.step, hint=hint)
    except WorkloadError as error:
        if not _works_with(optimizer, closure, error.__cause__):
            raise
        return True
    return False


def _works_with(optimizer: torch.optim.Optimizer, closure: Callable[[], Tensor], error: BaseException | None) -> bool:
    """Whether a step that raised works with a closure: many of SAM's implementations give it a default and insist on one."""
    if "closure" not in inspect.signature(optimizer.step).parameters or (error is not None and is_out_of_memory(error)):
        return False
    try:
        optimizer.step(closure)  # type: ignore[arg-type]
    except Exception:  # then the first error is the one to show
        return False
    return True


_LOSS_HINT = "loss(model, batch) must return a scalar tensor, computed in plain FP32 training mode."


def check_loss(loss: Any) -> Tensor:
    """The loss, if it can be trained on.

    Raises:
        WorkloadError: it is no tensor, no scalar, not floating, not finite, or has no gradient.
    """
    if not isinstance(loss, Tensor):
        raise WorkloadError(f"loss(model, batch) returned a {type(loss).__name__}.", hint=_LOSS_HINT)
    if loss.numel() != 1:
        raise WorkloadError(
            f"loss(model, batch) returned a tensor of shape {list(loss.shape)}; it must be a scalar.",
            hint="Reduce it over the batch, for example with .mean().",
        )
    if not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise WorkloadError(f"loss(model, batch) returned {kind}; it must be floating point.", hint=_LOSS_HINT)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise WorkloadError(
            f"The loss of the first batch is {value} in plain FP32.",
            hint="Mend the model, the data or the loss first: precision cannot be the reason.",
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "The loss has no gradient: it does not depend on a trainable parameter.",
            hint="Compute it from the model's output without .item(), .detach() or torch.no_grad().",
        )
    return loss


def fp16_obstacle(workload: Workload) -> str:
    """Why no layer of the workload may be fp16 (gradients could not be scaled); an empty string where nothing forbids it."""
    with untouched_random_state():
        seed_everything(0)
        model = build_checked(workload)
        optimizer = workload.build_optimizer(model)
        return obstacle_of(model, optimizer, closure=steps_with_closure(workload, optimizer))


def obstacle_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, closure: bool) -> str:
    """Why gradients of this model and optimizer cannot be scaled; an empty string where they can."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            return f"parameter '{name}' is complex, and loss scaling has no complex path"
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            return f"parameter '{name}' is {str(parameter.dtype)[6:]}, and loss scaling needs float32 parameters"
    if closure:
        return f"{type(optimizer).__name__}.step needs a closure, which loss scaling does not support"
    return ""
