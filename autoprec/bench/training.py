"""One training under one policy, step by step: what windows and interleaved arms are made of.

It trains as a user would: through ``apply_policy``, its scaler and its compiled model.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autoprec.bench.batch import split_batch, to_device
from autoprec.bench.cuda_rules import cuda_autocast_rules
from autoprec.bench.environment import environment_of
from autoprec.bench.memory import process_peak_bytes
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.seeding import RandomState, seed_everything
from autoprec.bench.target import Target
from autoprec.bench.workload import Workload
from autoprec.errors import WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Window
from autoprec.runtime import AppliedPolicy, apply_policy, pad_batch
from autoprec.runtime.backend import set_flags
from autoprec.runtime.scaler import needs_closure

# Losses, buffers and the scale are looked at so often; each look waits for the GPU, between steps.
CHECK_EVERY_STEPS = 10
# A window in which the scaler skips more than this share of its steps does not train. Source: DESIGN, windows; half.
_MOST_SKIPPED = 0.5
# Steps that are run behind a sleeping GPU to tell device time from host time.
_PROBE_STEPS = 3
# The highest clock of the cards in the table is about 2.7 GHz; a longer sleep only costs time.
_CYCLES_PER_S = 2.7e9
_LONGEST_SLEEP_S = 0.5
_WORTH_NOTING = ("execution '", "torch ")


class SpeedModel(Protocol):
    """Predicts what cannot be measured here."""

    def step_s(self, policy: Policy) -> float:
        """Seconds of one optimizer step."""

    def peak_bytes(self, policy: Policy) -> int:
        """Peak memory of one step."""


class TrainingRun:
    """A model in training under a policy. Use its methods inside ``active()``; ``close()`` when done.

    Every run of the same seed has the same initial weights, data order and random state, whatever ran before or in between.
    """

    def __init__(
        self,
        workload: Workload,
        target: Target,
        policy: Policy,
        window: Window,
        *,
        data: DataCache,
        models: ModelCache,
        speed: SpeedModel | None = None,
    ) -> None:
        self.workload, self.target, self.policy, self.window = workload, target, policy, window
        self._data, self._models, self._speed = data, models, speed
        self._random: RandomState | None = None
        self._applied: AppliedPolicy | None = None
        self._batches: list[Any] = []
        self._buffers: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._events: list[tuple[Any, Any]] = []
        self._times_s: list[float] = []
        self._device_times_s: list[float] = []
        self._throttled: set[int] = set()
        self._warned: list[str] = []
        self._entered_bytes = 0
        self._resident_bytes = 0
        self._peak = 0
        self.model: nn.Module | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether tensors live on a CUDA device."""
        return self.target.device == "cuda"

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken so far."""
        return len(self._losses)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """This run's flags, random state and autocast rules inside; everything process-wide as before outside."""
        outside = RandomState.now()
        default_dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
        undo_flags = set_flags(self.policy.backend)
        rules = cuda_autocast_rules() if self.target.cuda_rules else contextlib.nullcontext()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self._entered_bytes = torch.cuda.memory_allocated()
        if self._random is None:
            seed_everything(self.window.seed)
        else:
            self._random.restore()
        torch.set_grad_enabled(True)
        try:
            with warnings.catch_warnings(record=True) as caught, rules:
                warnings.simplefilter("always")
                yield
                self._random = RandomState.now()
        finally:
            self._warned.extend(str(warning.message) for warning in caught)
            self._note_memory()
            undo_flags()
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(default_dtype)
            outside.restore()

    def _note_memory(self) -> None:
        """Memory of this run alone: what it holds from before, and what its turn allocated on top."""
        if self.on_gpu:
            self._peak = self._peak_bytes()
            self._resident_bytes += torch.cuda.memory_allocated() - self._entered_bytes

    def build(self) -> None:
        """Makes the model, applies the policy, makes optimizer and scaler, and draws the data."""
        self._batches = self._data.take(self.window.seed, self.window.warmup_steps + self.window.steps)
        model = self._models.fresh(self.window.seed, self.window.perturbation).to(self.target.device)
        self.model = model
        self._applied = apply_policy(model, self.policy)
        self._call = self._applied.compiled()
        self._optimizer = self.workload.build_optimizer(model)
        self._scaler = self._applied.grad_scaler()
        self._needs_closure = needs_closure(self._optimizer)
        self._clipped = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        # Masks of minus infinity are no sign of trouble: only buffers that start finite are watched.
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point() and bool(buffer.isfinite().all())]

    def batch(self, index: int) -> list[Any]:
        """The micro-batches of a step, on the device."""
        if index >= len(self._batches):
            self._batches = self._data.take(self.window.seed, index + 1)
        batch = self._batches[index]
        if self.policy.padding.data_axis_multiple is not None:
            batch = pad_batch(batch, self.policy.padding.data_axis_multiple)
        return split_batch(to_device(batch, self.target.device, self.policy.backend.channels_last), self.policy.batch.micro)

    def step(self, *, timed: bool) -> None:
        """Takes the next optimizer step and keeps its loss and scale on the device; nothing here waits for the GPU."""
        parts = self.batch(self.num_steps)
        if not timed:
            loss = self._train(parts)
        elif self.on_gpu:
            start, end = _event(), _event()
            start.record()
            loss = self._train(parts)
            end.record()
            self._events.append((start, end))
        else:
            began = time.perf_counter()
            loss = self._train(parts)
            self._times_s.append(time.perf_counter() - began)
        self._losses.append(loss)
        if self._scaler.is_enabled():
            self._scales.append(_scale_of(self._scaler))

    def _train(self, parts: list[Any]) -> Tensor:
        if self._needs_closure and not self._scaler.is_enabled():
            seen: list[Tensor] = []

            def closure() -> Tensor:
                seen.append(self._forward_backward(parts))
                return seen[-1]

            self._optimizer.step(closure)  # type: ignore[arg-type]
            return seen[0]
        loss = self._forward_backward(parts)
        if self.workload.grad_clip is not None:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._clipped, self.workload.grad_clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss

    def _forward_backward(self, parts: list[Any]) -> Tensor:
        assert self._applied is not None
        self._optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for part in parts:
            with self._applied.autocast():
                loss = self.workload.loss(self._call, part)  # type: ignore[arg-type]
                loss = loss / len(parts) if len(parts) > 1 else loss
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            share = loss.detach().float().reshape(())
            total = share if total is None else total + share
        if total is None:
            raise WorkloadError("A batch had no samples.", hint="batches(batch_size, seed) must give batch_size samples.")
        return total

    def forward_only(self, index: int) -> Tensor:
        """The loss of a step's first micro-batch, without training; for finding out where something goes wrong."""
        assert self._applied is not None
        with self._applied.autocast():
            return self.workload.loss(self._call, self.batch(index)[0])  # type: ignore[arg-type]

    def drop_last_times(self, count: int) -> None:
        """Sets the last timed steps aside, because the clocks were held down; their losses stay."""
        timed = len(self._events) or len(self._times_s)
        self._throttled.update(range(max(0, timed - count), timed))

    def check(self) -> Failure | None:
        """Whether training still goes on; waits for the GPU."""
        losses = torch.stack(self._losses)
        finite = losses.isfinite()
        if not bool(finite.all()):
            step = int((~finite).nonzero()[0].item())
            return Failure(kind="diverged", message=f"The loss is {float(losses[step])} at step {step}.", step=step)
        if any(not bool(buffer.isfinite().all()) for buffer in self._buffers):
            message = f"A buffer of the model (running statistics) is no longer finite after step {self.num_steps - 1}."
            return Failure(kind="diverged", message=message, step=self.num_steps - 1)
        scales = self._scale_values()
        floor = self.policy.loss_scale.floor
        if scales and scales[-1] < floor:
            step = next(index for index, scale in enumerate(scales) if scale < floor)
            message = f"The loss scale fell to {scales[step]:g}, under its floor of {floor:g}, at step {step}."
            return Failure(kind="scale_collapsed", message=message, step=step)
        return None

    def final_check(self) -> Failure | None:
        """The same at the end, and whether enough steps were taken rather than skipped."""
        failure = self.check()
        skipped = self._skipped()
        if failure is None and skipped > _MOST_SKIPPED * self.num_steps:
            message = f"The loss scaler skipped {skipped} of {self.num_steps} steps."
            return Failure(kind="scale_collapsed", message=message, step=self.num_steps - 1)
        return failure

    def _scale_values(self) -> list[float]:
        return torch.stack(self._scales).tolist() if self._scales else []

    def _skipped(self) -> int:
        """Every skipped step, and nothing else, lowers the scale."""
        scales = [self.policy.loss_scale.init, *self._scale_values()]
        return sum(after < before for before, after in itertools.pairwise(scales))

    def probe_device_time(self) -> None:
        """Times some further steps behind a sleeping GPU: the host runs ahead, so the events show the device's own work.

        Where an optimizer waits for the GPU inside the step (a loss scaler without a fused optimizer does), the part after that
        is seen with the host's delays, and device time is an upper bound.
        """
        if not self.on_gpu or not self._events or self.target.timing == "predicted":
            return
        torch.cuda.synchronize()
        step_s = max(start.elapsed_time(end) / 1e3 for start, end in self._events[-5:])
        sleep_s = min(1.5 * step_s + 1e-3, _LONGEST_SLEEP_S)
        parts = self.batch(self.num_steps - 1)
        pairs = []
        for _ in range(_PROBE_STEPS):
            start, end = _event(), _event()
            torch.cuda.synchronize()
            torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
            start.record()
            self._train(parts)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        self._device_times_s = [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def measurement(self) -> Measurement:
        """The samples. Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()
        predicted = self.target.timing == "predicted"
        if predicted:
            if self._speed is None:
                raise ValueError(f"{self.target.name} is predicted, and no speed model was given.")
            times = [self._speed.step_s(self.policy)] * self.window.steps
        else:
            times = self._kept_times_s()
        scales = self._scale_values()
        return Measurement(
            losses=tuple(torch.stack(self._losses).tolist()),
            step_times_s=tuple(times),
            device_times_s=tuple(self._device_times_s),
            speed_origin=self.target.timing,
            batch_samples=self.policy.batch.effective,
            peak_bytes=self._peak_bytes(),
            skipped_steps=self._skipped(),
            final_scale=scales[-1] if scales else None,
            environment=environment_of(self.target),
            note=self._note(),
        )

    def _kept_times_s(self) -> list[float]:
        times = [start.elapsed_time(end) / 1e3 for start, end in self._events] or self._times_s
        kept = [time_s for index, time_s in enumerate(times) if index not in self._throttled]
        return kept or times  # held down all the way: slow samples with a note are better than none

    def _peak_bytes(self) -> int:
        if self.on_gpu:
            return max(self._peak, torch.cuda.max_memory_allocated() - self._entered_bytes + self._resident_bytes)
        return self._speed.peak_bytes(self.policy) if self._speed is not None else process_peak_bytes()

    def _note(self) -> str:
        notes = [text for text in dict.fromkeys(self._warned) if text.startswith(_WORTH_NOTING)]
        timed = len(self._events) or len(self._times_s)
        if self._throttled and len(self._throttled) < timed:
            notes.append(f"{len(self._throttled)} samples were dropped because the GPU's clocks were held down.")
        elif self._throttled:
            notes.append("The GPU's clocks were held down during every sample.")
        kept = self._data.capacity(self.window.seed)
        if kept < self.num_steps:
            notes.append(f"The data repeats after {kept} batches, which is what fits into memory.")
        return " ".join(notes)

    def close(self) -> None:
        """Undoes the policy and lets go of model, optimizer and samples."""
        if self._applied is not None:
            self._applied.remove()
        for name in ("_applied", "model", "_call", "_optimizer", "_scaler", "_clipped"):
            setattr(self, name, None)
        self._buffers, self._losses, self._scales, self._events, self._batches = [], [], [], [], []


def _event() -> Any:
    make: Any = torch.cuda.Event
    return make(enable_timing=True)


def _scale_of(scaler: torch.amp.GradScaler) -> Tensor:
    """A copy of the scale where it lives; ``get_scale()`` would wait for the GPU."""
    scale: Tensor | None = scaler._scale
    return scale.detach().clone().reshape(()) if scale is not None else torch.tensor(scaler.get_scale())
