"""One model in training under a policy, through the same calls a user makes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.bench.batch import split_batch, to_device
from autoprec.bench.cuda_rules import cuda_autocast_rules
from autoprec.bench.data import Start
from autoprec.bench.failures import nonfinite_buffers
from autoprec.bench.seeding import seed_everything, untouched_random_state
from autoprec.bench.target import Target
from autoprec.bench.workload import Workload, steps_with_closure
from autoprec.policy import Policy
from autoprec.records import Window
from autoprec.runtime import apply_policy


class Readings:
    """A number a step that stays on the device until somebody asks; each is fetched once, however long the run."""

    def __init__(self) -> None:
        self._fetched: list[float] = []
        self._waiting: list[Tensor] = []

    def append(self, value: Tensor) -> None:
        """Takes the next scalar; waits for nothing."""
        self._waiting.append(value)

    def values(self) -> list[float]:
        """All of them so far; waits for the device."""
        if self._waiting:
            self._fetched += torch.stack(self._waiting).double().tolist()
            self._waiting = []
        return self._fetched


class Training:
    """A fresh model with its optimizer and scaler; ``step`` trains one effective batch.

    Attributes:
        policy: the policy it trains under.
        model: the model, on the target's device.
        losses: loss of every step.
        infinite_at_start: buffers that hold infinities on purpose, such as masks.
        scales: loss scale after every step; empty without a scaler.
    """

    def __init__(self, workload: Workload, target: Target, policy: Policy, window: Window, start: Start) -> None:
        self.policy = policy
        self._workload, self._device, self._batches = workload, target.device, start.batches
        self.model: nn.Module = start.model().to(target.device)
        self.model.train()
        if window.perturbation:
            perturb(self.model, window.perturbation, window.seed)
        self._applied = apply_policy(self.model, policy)
        try:
            self._optimizer = workload.build_optimizer(self.model)
            self._scaler = self._applied.grad_scaler()
            self._call: Callable[..., Any] = self._applied.compiled()
        except BaseException:
            self._applied.remove()
            raise
        self._needs_closure = steps_with_closure(workload, self._optimizer)
        self.infinite_at_start = nonfinite_buffers(self.model)
        self.losses, self.scales = Readings(), Readings()
        # Again, so that dropout draws the same whatever building and compiling drew.
        seed_everything(window.seed)

    def prepare(self, index: int) -> list[Any]:
        """The micro-batches of a step, on the device; copying them is not part of the step."""
        batch = to_device(self._batches[index], self._device, channels_last=self.policy.backend.channels_last)
        return [batch] if self.policy.batch.accumulation_steps == 1 else split_batch(batch, self.policy.batch.micro)

    def step(self, parts: list[Any]) -> None:
        """One optimizer step over prepared micro-batches; waits for nothing."""
        if self._needs_closure and not self._scaler.is_enabled():  # else the scaler says that it cannot
            self._optimizer.step(lambda: self._clipped(parts))  # type: ignore[arg-type,return-value]
            self.losses.append(self._last_loss)
            return
        loss = self._backward(parts)
        if self._workload.grad_clip is not None:
            self._scaler.unscale_(self._optimizer)
            self._clip()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)
        if self._scaler.is_enabled():
            self.scales.append(self._scaler.scale_on_device())

    def _clipped(self, parts: list[Any]) -> Tensor:
        """What a closure does: fresh gradients, clipped."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._backward(parts)
        self._clip()
        return loss

    def _clip(self) -> None:
        if self._workload.grad_clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._workload.grad_clip)

    def _backward(self, parts: list[Any]) -> Tensor:
        total: Tensor | None = None
        for part in parts:
            with self._applied.autocast():
                loss = self._workload.loss(self._call, part)  # type: ignore[arg-type]  # compiled models are called as modules
                if len(parts) > 1:
                    loss = loss / len(parts)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            detached = loss.detach().float()
            # A clone, because CUDA graphs use the memory of a step's outputs again.
            total = detached.clone() if total is None else total + detached
        assert total is not None
        self._last_loss = total
        return total

    def close(self) -> None:
        """Undoes the policy (flags included) and lets go of the model."""
        self._applied.remove()
        self._optimizer.state.clear()
        self.losses, self.scales = Readings(), Readings()


def perturb(model: nn.Module, size: float, seed: int) -> None:
    """Moves every floating parameter by a random relative change of ``size``, in place; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + size * noise)


@contextmanager
def undisturbed(target: Target) -> Iterator[None]:
    """Runs training so that nothing process-wide stays changed: random states, grad mode, default dtype, memory.

    On a CPU that stands in for a GPU, CUDA's autocast rules hold inside.
    """
    default_dtype = torch.get_default_dtype()
    with untouched_random_state(), torch.enable_grad(), warnings.catch_warnings():
        # A policy for another card is the point here, and its warning is for people who load one.
        warnings.filterwarnings("ignore", message=".*policy was (made|tuned).*")
        try:
            if target.cuda_rules:
                with cuda_autocast_rules():
                    yield
            else:
                yield
        finally:
            torch.set_default_dtype(default_dtype)


def free_memory(target: Target, *, compiled: bool) -> None:
    """Lets go of what a finished window left: compiled code, cycles, cached device memory."""
    if compiled:
        torch._dynamo.reset()
    gc.collect()
    if target.device == "cuda":
        torch.cuda.empty_cache()
