"""Baselines: what people run today, always first in the study, so that the answer is never worse than the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoprec.policy import Backend, Batch, Fingerprint, LossScale, Padding, Policy, Precision, Weights
from autoprec.records import Look
from autoprec.tune.assignment import exceptions_of
from autoprec.tune.study_space import fingerprint_of, has_tf32

# Source: torch.amp.GradScaler's own defaults (init_scale=65536.0, growth_interval=2000).
STOCK_LOSS_SCALE = LossScale(init=65536.0, growth_interval=2000, growth_factor=2.0, backoff_factor=0.5, floor=1.0)
# In the middle of the search spaces' range (2^12 to 2^14), for set-ups that run without a search.
PURE_LOSS_SCALE = LossScale(init=8192.0)
STOCK_AMP = ("amp_fp16", "amp_bf16")


def baseline_policies(
    look: Look,
    precisions: Sequence[Precision],
    *,
    cuda: bool,
    capability: str | None = None,
    fingerprint: Fingerprint | None = None,
    fp32_micro: int = 0,
) -> dict[str, Policy]:
    """The policies of stage 3 by role: fp32, fp32_tf32, amp_fp16, amp_bf16, then each with ``_channels_last``.

    Args:
        look: the model; fp16 is left out where it forbids it, channels_last where it has no convolution.
        precisions: what the target runs.
        cuda: whether the target is a CUDA device.
        capability: the target's compute capability; TF32 needs 8.0.
        fingerprint: goes into every policy; made from the look where it is None.
        fp32_micro: the micro-batch with which FP32 fits into memory; 0 is the largest.

    Returns:
        Policies by role in the order they are to run. cudnn.benchmark stays off, as stock training leaves it.
    """
    made = fingerprint or fingerprint_of(look, capability=capability)
    policies: dict[str, Policy] = {}
    for channels_last in (False, True) if look.has_conv else (False,):
        for role, default, tf32 in _kinds(look, precisions, has_tf32(cuda, capability)):
            policies[f"{role}_channels_last" if channels_last else role] = Policy(
                default=default,
                loss_scale=STOCK_LOSS_SCALE if default == "fp16" else LossScale(),
                batch=_batch(look, fp32_micro if default == "fp32" else 0),
                outputs="fp32" if default == "fp32" else "computed",  # stock autocast leaves them as they are
                backend=Backend(tf32=tf32, channels_last=channels_last),
                fingerprint=made,
            )
    return policies


def pure_policies(
    look: Look, allowed: Mapping[str, Sequence[Precision]], *, fingerprint: Fingerprint, weights: Weights = "fp32"
) -> dict[str, Policy]:
    """Every layer in pure half precision where it may be, by role: ``pure_fp16``, ``pure_bf16``, each also with ``_channels_last``.

    They save the casts and the float32 traffic of stock AMP, so they show what a uniform assignment can give. Nothing says yet that
    they train: only a verdict does.

    Args:
        look: the model; channels_last is left out where it has no convolution.
        allowed: precisions by layer; a layer that may not be pure takes the ambient half type, or fp32.
        fingerprint: goes into every policy.
        weights: who makes the half copies of the parameters.
    """
    policies: dict[str, Policy] = {}
    orders: tuple[tuple[str, tuple[Precision, ...]], ...] = (
        ("pure_fp16", ("fp16_pure", "fp16", "fp32")),
        ("pure_bf16", ("bf16_pure", "bf16", "fp32")),
    )
    for role, order in orders:
        chosen: dict[str, Precision] = {
            name: next((precision for precision in order if precision in choices), "fp32") for name, choices in allowed.items()
        }
        if order[0] not in chosen.values():
            continue
        default = chosen.get("", order[0])
        for channels_last in (False, True) if look.has_conv else (False,):
            policies[f"{role}_channels_last" if channels_last else role] = Policy(
                default=default,
                layers=exceptions_of(chosen, default),
                loss_scale=PURE_LOSS_SCALE if order[0] == "fp16_pure" else LossScale(),
                batch=_batch(look, 0),
                outputs=look.outputs,
                weights=weights,
                padding=Padding(layers=dict.fromkeys(look.odd_layers, 8)),
                backend=Backend(channels_last=channels_last),
                fingerprint=fingerprint,
            )
    return policies


def _kinds(look: Look, precisions: Sequence[Precision], tf32: bool) -> Iterator[tuple[str, Precision, bool]]:
    yield "fp32", "fp32", False
    if tf32:
        yield "fp32_tf32", "fp32", True
    if "fp16" in precisions and not look.forbids_fp16:
        yield "amp_fp16", "fp16", False
    if "bf16" in precisions:
        yield "amp_bf16", "bf16", False


def _batch(look: Look, micro: int) -> Batch:
    micro = micro or max(look.micro_batches, default=look.effective_batch)
    return Batch(effective=look.effective_batch, micro=micro, accumulation_steps=look.effective_batch // micro)
