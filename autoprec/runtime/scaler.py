"""The loss scaler of a policy: torch's own, with clear errors and the answer whether a step was skipped."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from autoprec.errors import PolicyError
from autoprec.policy import LossScale

# Updates between two looks at the scale where no skip is known without asking the device: each look waits for the GPU.
# Source: a look costs one synchronisation; one in 100 steps is under 1% even where a step is only as long as the wait itself.
_LOOK_EVERY_UPDATES = 100
# The scale never grows past this (where the policy starts higher: past one growth of its start): with tiny losses and a short growth
# interval torch's scaler doubles on until the scaled loss or the scale itself overflows float32 (pytorch#98828). At 2^24 the
# smallest gradient that fp16 can hold, 2^-24, stands for a true gradient of 2^-48; more scale rescues nothing a float32 optimizer
# step would feel. Source: max_loss_scale=2.**24, the default of NVIDIA Apex's dynamic LossScaler.
MAX_SCALE = 2.0**24


@dataclass(frozen=True)
class _Habits:
    """How an optimizer's ``step`` is called, read off its signature once.

    Attributes:
        needs_closure: it cannot be called without one.
        takes_scaler: the old way of optimizers that skip by themselves: the scaler is handed to ``step``.
    """

    needs_closure: bool
    takes_scaler: bool

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> _Habits:
        parameters = inspect.signature(optimizer.step).parameters
        return _Habits(needs_closure(optimizer), "grad_scaler" in parameters)


class PolicyScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` with a policy's numbers.

    Disabled (every call passes through) where the policy has no fp16 layer. Enabled, it refuses optimizers that need a closure,
    warns once when the scale falls under the policy's floor, never grows it past ``MAX_SCALE``, and knows whether the last step
    was skipped.
    """

    def __init__(self, device: str, settings: LossScale, *, enabled: bool) -> None:
        super().__init__(
            device,
            init_scale=settings.init,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=enabled,
        )
        self._floor = settings.floor
        # One growth short of the limit: at most one lies between two looks in update().
        self._ceiling = max(MAX_SCALE / settings.growth_factor, settings.init)
        self._warned = False
        self._updates = 0
        self._outcome: bool | torch.Tensor = False
        self._met: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Habits] = weakref.WeakKeyDictionary()
        # The optimizer of the last step where it needs no closure: asked in every step, and a look into ``_met`` takes longer.
        self._usual: weakref.ref[torch.optim.Optimizer] | None = None
        self._stepped: list[bool | torch.Tensor] = []
        self._skipped = self._unchecked = False
        self._last: list[bool | torch.Tensor] = []

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales, checks for infinities and steps, as torch's scaler does.

        Raises:
            PolicyError: the optimizer needs a closure, or one was given, while scaling is on.
        """
        result: float | None
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            return result
        usual = self._usual is not None and self._usual() is optimizer
        if (not usual and self._meet(optimizer)) or "closure" in kwargs or (args and any(callable(arg) for arg in args)):
            raise PolicyError(
                f"{type(optimizer).__name__} steps with a closure, and loss scaling cannot: it would evaluate the loss several "
                "times with scaled gradients.",
                hint="Use a policy without fp16 layers (bf16 needs no scaling), or an optimizer whose step takes no closure.",
            )
        if not _has_gradients(optimizer):
            # An empty batch or a frozen branch: torch's scaler calls it an error, plain FP32 training goes on.
            self._stepped.append(True)
            self._unchecked = True
            result = optimizer.step(*args, **kwargs)
            return result
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not self._met[optimizer].takes_scaler:
            return self._step_fused(optimizer, args, kwargs)
        self._outcome = False
        result = super().step(optimizer, *args, **kwargs)
        self._stepped.append(self._outcome)
        self._skipped |= self._outcome is False
        return result

    def _step_fused(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """A step of an optimizer whose kernel unscales and skips by itself, as torch's scaler makes it.

        Less what torch does anew in each step and a small model feels: reading the signature of ``optimizer.step`` (20 us on the
        host), and two kernels that add 0 to found_inf and multiply the scale by 1.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)  # which says that update() is missing
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        scale = cast(torch.Tensor, self._get_scale_async())
        first, *others = state["found_inf_per_device"].values()
        found_inf = sum((entry.to(first.device, non_blocking=True) for entry in others), first)
        factor = getattr(optimizer, "grad_scale", None)  # set by the user, who unscales by more
        if state["stage"] is OptState.READY:
            factor = scale if factor is None else scale * factor
        optimizer.grad_scale, optimizer.found_inf = factor, found_inf
        result: float | None = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        del optimizer.grad_scale, optimizer.found_inf
        self._stepped.append(found_inf)
        return result

    def _meet(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer needs a closure; at the first meeting a hook is left that notes whether it really steps."""
        known = self._met.get(optimizer)
        if known is None:
            known = self._met[optimizer] = _Habits.of(optimizer)
            this = weakref.ref(self)

            def before(*_: Any) -> None:
                scaler = this()
                if scaler is not None:
                    scaler._outcome = True

            optimizer.register_step_pre_hook(before)
        self._usual = None if known.needs_closure else weakref.ref(optimizer)
        return known.needs_closure

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_met": None, "_usual": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._met = weakref.WeakKeyDictionary()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale, as torch's scaler does, and warns once if it is under the policy's floor.

        After steps without any gradient the scale stays as it is: they say nothing about it.
        """
        if not self._enabled:
            return
        if self._unchecked and new_scale is None and not self._has_checked():
            self._per_optimizer_states.clear()
        else:
            super().update(new_scale)
        self._last, self._stepped = self._stepped, []
        known_skip, self._skipped, self._unchecked = self._skipped, False, False
        self._updates += 1
        if self._updates % self._growth_interval == 0 and new_scale is None:
            _at_most(self._scale, self._ceiling)
        if not self._warned and (known_skip or self._updates % _LOOK_EVERY_UPDATES == 0):
            self._alarm(self.get_scale())

    def _has_checked(self) -> bool:
        """Whether any gradient was looked at since the last update."""
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())

    def _alarm(self, scale: float) -> None:
        if scale < self._floor:
            self._warned = True
            warnings.warn(
                f"The loss scale fell to {scale:g}, under the policy's floor of {self._floor:g}: steps are being skipped and "
                "training is stuck. A layer overflows in fp16 whatever the scale; tune again, or set that layer to bf16 or fp32.",
                stacklevel=3,
            )

    @property
    def step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was skipped because of infinite or NaN gradients.

        Free for ordinary optimizers; with a fused one, reading it waits for the GPU.
        """
        return any(entry is False or (isinstance(entry, torch.Tensor) and entry.item() > 0) for entry in self._last)

    def scale_on_device(self) -> torch.Tensor:
        """A copy of the current scale, shape (), on its device; reading it later waits, taking it does not."""
        if self._scale is None:
            return torch.tensor(self._init_scale)
        return self._scale.detach().clone().reshape(())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores scale and growth tracker. A disabled scaler ignores the state, as torch's does.

        Raises:
            PolicyError: the state comes from a disabled scaler and this one is enabled.
        """
        if self.is_enabled() and not state_dict:
            raise PolicyError(
                "The saved scaler state is empty: it comes from a run without loss scaling, and this policy has fp16 layers.",
                hint="Start with the policy's initial scale: skip load_state_dict for the scaler when resuming.",
            )
        super().load_state_dict(state_dict)


def _at_most(scale: torch.Tensor | None, most: float) -> None:
    if scale is not None:
        scale.clamp_(max=most)  # on the device, without waiting for it


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's ``step`` cannot be called without a closure (LBFGS, SAM)."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter has a gradient; ordinarily the first one answers."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def check_scalable(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuses trainable parameters that a loss scaler cannot unscale.

    Raises:
        PolicyError: a trainable parameter is float16, bfloat16 or complex.
    """
    for name, parameter in named_parameters:
        half = parameter.dtype in (torch.float16, torch.bfloat16)
        if parameter.requires_grad and (half or parameter.is_complex()):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise PolicyError(
                f"Parameter '{name}' is {kind} and trainable; loss scaling for fp16 layers needs float32 parameters.",
                hint="Keep the parameters in float32: the policy casts them where it should."
                if half
                else "Use a policy without fp16 layers: complex gradients have no loss scaling; bf16 and fp32 layers work.",
            )
