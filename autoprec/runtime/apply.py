"""``apply_policy``: a policy put onto a model in place, and the handle that goes around the training loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autoprec.errors import PolicyError
from autoprec.policy import Policy
from autoprec.runtime.backend import Undo, set_channels_last, set_flags
from autoprec.runtime.classes import is_swapped, remove_policy, swap
from autoprec.runtime.compiled import compiled_model
from autoprec.runtime.dtypes import HALF_DTYPES
from autoprec.runtime.islands import device_type_of, type_of_device
from autoprec.runtime.layers import aliases, compare_layers, mismatch_error, named_layers, unwrap
from autoprec.runtime.plan import plan_islands
from autoprec.runtime.scaler import PolicyScaler, check_scalable


class AppliedPolicy:
    """A policy in effect on a model: what a training loop needs, and ``remove()`` to undo it.

    Attributes:
        policy: the policy.
        model: the model it was applied to, the same object.
    """

    def __init__(self, policy: Policy, model: nn.Module, undos: list[Undo], swapped: Mapping[str, nn.Module]) -> None:
        self.policy = policy
        self.model = model
        self._undos = undos
        self._swapped = dict(swapped)
        self._scaler: PolicyScaler | None = None
        self._half = HALF_DTYPES.get(policy.default)
        self._anchor = _first_parameter(unwrap(model))

    @property
    def device_type(self) -> str:
        """Where the model's parameters are now: ``cuda``, ``cpu`` and so on."""
        entries, name = self._anchor
        parameter = entries.get(name)
        # Asked in every step: the first parameter answers at once unless it was replaced by something else.
        return type_of_device(parameter) if parameter is not None else device_type_of(unwrap(self.model))

    def autocast(self, *, cache_enabled: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        """A fresh ambient autocast of the policy's default precision, for the forward pass and the loss.

        It spans forward and loss so that each weight is cast once a step. With an fp32 default it does nothing.

        Args:
            cache_enabled: False turns autocast's weight cache off, which selective activation checkpointing needs.
        """
        if self._half is None:
            return contextlib.nullcontext()
        device = self.device_type
        if device == "meta":
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=self._half, cache_enabled=cache_enabled)

    def grad_scaler(self) -> PolicyScaler:
        """A new ``torch.amp.GradScaler`` with the policy's numbers, disabled where no layer is fp16.

        Raises:
            PolicyError: scaling is needed and a trainable parameter is half or complex.
        """
        self._check_still_there()
        enabled = self.policy.needs_loss_scale
        if enabled:
            check_scalable(unwrap(self.model).named_parameters())
        self._scaler = PolicyScaler(self.device_type, self.policy.loss_scale, enabled=enabled)
        return self._scaler

    def compiled(self, model: nn.Module | None = None) -> Callable[..., Any]:
        """The model to call in training: itself, or compiled as the policy's execution says.

        Args:
            model: the model in its wrapper, where it was wrapped (DDP) after the policy was applied.
        """
        self._check_still_there()
        return compiled_model(model if model is not None else self.model, self.policy.execution)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the scaler skipped the last step, asked after ``scaler.update()``; for learning-rate schedulers.

        Free for ordinary optimizers; with a fused one, reading it waits for the GPU.
        """
        return self._scaler is not None and self._scaler.step_was_skipped

    def _check_still_there(self) -> None:
        if not self._undos:
            return
        present = set(unwrap(self.model).modules())
        gone = [name or "the model itself" for name, module in self._swapped.items() if module not in present]
        if gone:
            warnings.warn(
                f"Modules were replaced after the policy was applied and run without their setting: {', '.join(gone)}. Convert "
                "(SyncBatchNorm, adapters) first, then apply.",
                stacklevel=3,
            )

    def remove(self) -> None:
        """Undoes everything: classes, memory layout and process-wide flags are as before. A second call does nothing."""
        while self._undos:
            self._undos.pop()()


def _first_parameter(model: nn.Module) -> tuple[dict[str, Any], str]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                return module._parameters, name
    return {}, ""


def apply_policy(model: nn.Module, policy: Policy, *, strict: bool = True) -> AppliedPolicy:
    """Applies a policy to a model, in place.

    Classes of single module instances are swapped and process-wide flags set; parameters, buffers, keys and hooks stay. Apply
    after loading weights and converting SyncBatchNorm, and before EMA copies, DDP, FSDP2 and ``torch.compile``. Do not give FSDP2
    a ``MixedPrecisionPolicy`` of its own beside a policy: both would cast, at different borders.

    Before TorchScript or eager quantization, call ``remove()``: those look at a module's exact class. Parameters stay float32: to
    convert the model with ``half()`` or ``to(torch.bfloat16)`` as well is to take the policy's masters away.

    Args:
        model: the model, possibly wrapped.
        policy: what to apply.
        strict: False applies what matches and warns about the rest, as long as something matches.

    Raises:
        PolicyMismatch: the model's layers are not those the policy was made for.
        PolicyError: a policy is already applied, a padded layer cannot be padded, or a module is lazy or TorchScript.
    """
    _check_types(model, policy)
    root = unwrap(model)
    if any(is_swapped(module) for module in root.modules()):
        raise PolicyError(
            f"A policy is already applied to this {type(root).__name__}.",
            hint="Call remove() on its handle first; for a copy or a loaded model, autoprec.remove_policy(model).",
        )
    names = _matched_names(model, policy, strict=strict)
    _warn_about_environment(policy, root)
    islands = plan_islands(root, policy, names)
    undos: list[Undo] = [set_flags(policy.backend)]
    if policy.backend.channels_last:
        undos.append(set_channels_last(root))
    for _, module, island in islands:
        swap(module, island)
    undos.append(lambda: remove_policy(root))
    return AppliedPolicy(policy, model, undos, {name: module for name, module, _ in islands})


def _check_types(model: object, policy: object) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyError(
            f"apply_policy was given a {type(model).__name__} as its model.",
            hint="Call apply_policy(model, policy), in this order.",
        )
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"apply_policy was given a {type(policy).__name__} as its policy.",
            hint="Read the file first: apply_policy(model, autoprec.load_policy('policy.json')).",
        )


def _matched_names(model: nn.Module, policy: Policy, *, strict: bool) -> dict[str, str]:
    """First name of every name in the policy's layers that the model has."""
    difference = compare_layers(model, policy.fingerprint)
    if not difference.matched or (difference and strict):
        raise mismatch_error(model, difference)
    if difference:
        warnings.warn(
            f"The policy was made for another list of layers; what matches is applied.\n{difference.text(named_layers(model))}",
            stacklevel=3,
        )
    names = aliases(model)
    return {name: names[name] for name in policy.fingerprint.layers if name in names}


def _warn_about_environment(policy: Policy, root: nn.Module) -> None:
    made_for = policy.fingerprint
    here = torch.cuda.get_device_name() if device_type_of(root) == "cuda" else None
    if here is not None and here != made_for.device:
        warnings.warn(f"The policy was tuned on {made_for.device}; this is {here}. Tune again for the best speed.", stacklevel=4)
    if _release(made_for.torch_version) != _release(torch.__version__):
        warnings.warn(f"The policy was tuned with torch {made_for.torch_version}; this is {torch.__version__}.", stacklevel=4)


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
