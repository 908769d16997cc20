"""The arms of ``compare_arms.py``: FP32 and stock AMP as people write them, and a policy as a user writes it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import autoprec
from autoprec.bench.memory import free_memory, is_out_of_memory
from autoprec.bench.seeding import seed_everything
from autoprec.bench.timing import StepClock
from autoprec.bench.workload import Workload
from autoprec.errors import UserError, WorkloadError
from autoprec.policy import Backend, Policy
from autoprec.runtime.backend import set_flags
from autoprec.runtime.scaler import needs_closure

# Batches kept on the device and used in turn. Own choice: enough that the loss shows training and not one batch learnt by heart.
DEVICE_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Setup:
    """What one arm is: its name, flags, and the policy where it has one."""

    key: str
    label: str
    tf32: bool = False
    policy: Policy | None = None
    policy_path: str = ""

    @property
    def channels_last(self) -> bool:
        return self.policy is not None and self.policy.backend.channels_last

    @contextmanager
    def flags(self) -> Iterator[None]:
        """The arm's process-wide flags; the ones before are back on exit."""
        undo = set_flags(self.policy.backend if self.policy else Backend(tf32=self.tf32))
        try:
            if self.key.startswith("amp_"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch recommends its newer name for the flag
                    # Source: torch.backends.cudnn.allow_tf32 is True by default, unlike the matmuls' flag.
                    torch.backends.cudnn.allow_tf32 = True
            yield
        finally:
            undo()


class Training(Protocol):
    """A model in training; a step takes micro-batches on the device, returns the loss there, and waits for nothing."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...

    def step(self, parts: Sequence[Any]) -> Tensor: ...

    def close(self) -> None: ...


class StockTraining:
    """FP32 or stock AMP as people write it; one batch a step."""

    def __init__(self, workload: Workload, model: nn.Module, device: str, dtype: torch.dtype | None) -> None:
        self.workload, self.model, self.device, self.dtype = workload, model, device, dtype
        self.optimizer = build_optimizer(workload, model)
        self.scaler: torch.amp.GradScaler | None = torch.amp.GradScaler(device) if dtype == torch.float16 else None
        self.step = self._fp32_step if dtype is None else self._bf16_step if self.scaler is None else self._fp16_step

    def _fp32_step(self, parts: Sequence[Any]) -> Tensor:
        loss = self.workload.loss(self.model, parts[0])
        return self._plain_update(loss)

    def _bf16_step(self, parts: Sequence[Any]) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.workload.loss(self.model, parts[0])
        return self._plain_update(loss)

    def _plain_update(self, loss: Tensor) -> Tensor:
        loss.backward()
        if self.workload.grad_clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().float().clone()

    def _fp16_step(self, parts: Sequence[Any]) -> Tensor:
        assert self.scaler is not None
        with torch.autocast(self.device, dtype=torch.float16):
            loss = self.workload.loss(self.model, parts[0])
        self.scaler.scale(loss).backward()
        if self.workload.grad_clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach().float().clone()

    def close(self) -> None:
        """Nothing process-wide to undo."""


class TunedTraining:
    """A policy as a user writes it."""

    def __init__(self, workload: Workload, model: nn.Module, policy: Policy) -> None:
        self.workload, self.model, self.policy = workload, model, policy
        self.applied = autoprec.apply_policy(model, policy)
        try:
            self.optimizer = build_optimizer(workload, model)
            self.scaler = self.applied.grad_scaler()
            self.train_model: Any = self.applied.compiled()
        except BaseException:
            self.applied.remove()
            raise

    def step(self, parts: Sequence[Any]) -> Tensor:
        total: Tensor | None = None
        for micro in parts:
            with self.applied.autocast():
                loss = self.workload.loss(self.train_model, micro) / self.policy.batch.accumulation_steps
            self.scaler.scale(loss).backward()
            # A clone: the next replay of a CUDA graph writes over this step's outputs.
            part = loss.detach().float().clone()
            total = part if total is None else total + part
        assert total is not None
        if self.workload.grad_clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return total

    def close(self) -> None:
        """Removes the policy from model and process."""
        self.applied.remove()


def build_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """The workload's optimizer.

    Raises:
        WorkloadError: its step takes a closure, so that a step is no fixed piece of work.
    """
    optimizer = workload.build_optimizer(model)
    if needs_closure(optimizer):
        raise WorkloadError(
            f"{type(optimizer).__name__} steps with a closure, which evaluates the loss a varying number of times.",
            hint="Compare with an optimizer whose step takes no closure.",
        )
    return optimizer


def build_training(setup: Setup, workload: Workload, device: str, seed: int) -> Training:
    """A fresh training; all arms start from the same weights."""
    seed_everything(seed)
    model = workload.build_model().to(device)
    model.train()
    if setup.policy is not None:
        training: Training = TunedTraining(workload, model, setup.policy)
    else:
        dtypes = {"amp_fp16": torch.float16, "amp_bf16": torch.bfloat16}
        training = StockTraining(workload, model, device, dtypes.get(setup.key))
    seed_everything(seed)
    return training


@dataclasses.dataclass
class Arm:
    """One arm: its training, what was recorded, and what ended it."""

    setup: Setup
    parts: Sequence[Sequence[Any]]
    training: Training | None = None
    clock: StepClock | None = None
    failure: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    losses_on_device: list[Tensor] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    scales: list[float] = dataclasses.field(default_factory=list)
    step_times_s: tuple[float, ...] = ()
    block_steps: list[int] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    throttled_blocks: int = 0

    def guard(self, action: Callable[[], None]) -> None:
        """Runs a part of the arm's work under its flags; what it raises ends this arm only, save a user's mistake."""
        if self.failure:
            return
        with self.setup.flags(), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("ignore")
            for kind in (UserWarning, RuntimeWarning):  # not the deprecations inside torch
                warnings.simplefilter("default", kind)
            try:
                action()
            except UserError:
                raise
            except Exception as error:
                memory = "out of memory: " if is_out_of_memory(error) else ""
                self.failure = f"{memory}{type(error).__name__}: {first_line(error)}"
        texts = [first_line(warning.message) for warning in seen]
        self.notes += [text for text in dict.fromkeys(texts) if text not in self.notes]
        if self.failure:
            self.close()

    def step(self) -> None:
        """One recorded step."""
        assert self.training is not None
        self.losses_on_device.append(self.training.step(self.parts[len(self.losses_on_device) % len(self.parts)]))

    def read_scale(self) -> None:
        """Notes the loss scale where there is one; waits for the device."""
        scaler = self.training.scaler if self.training is not None else None
        if scaler is not None and scaler.is_enabled():
            self.scales.append(float(scaler.get_scale()))

    def close(self) -> None:
        """Lets go of the model and its memory; what was recorded stays."""
        training, self.training, self.losses_on_device = self.training, None, []
        if training is not None:
            with self.setup.flags():
                training.close()
        del training
        try:
            free_memory()
        except RuntimeError as error:  # a dead CUDA context cannot free; the other arms say so themselves
            self.notes.append(f"memory was not freed: {first_line(error)}")


def first_line(problem: object) -> str:
    return (str(problem).strip().splitlines() or [""])[0]
