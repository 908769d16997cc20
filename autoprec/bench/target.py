"""Where a run measures, and for which GPU: what ``--gpu`` means on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoprec.bench.environment import processor_name
from autoprec.bench.gpus import Gpu, find_gpu, gpu_of_device_name, normalised
from autoprec.errors import DeviceError
from autoprec.policy import PRECISIONS, Fingerprint, Origin, Precision

# What a CUDA context and the libraries' own memory take off a card, and a margin for fragmentation, when a smaller card is
# stood in for. Source: assumption, about 0.5 to 0.8 GiB seen for a context with cuBLAS and cuDNN loaded.
_CONTEXT_BYTES = int(0.7 * 2**30)
_USABLE_SHARE = 0.97
# bf16 arithmetic from Ampere, fp16 tensor cores from Volta. Source: CUDA C++ Programming Guide, compute capabilities.
_BF16_FROM = (8, 0)
_FP16_FROM = (7, 0)
_FAMILIES = {(7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere", (8, 7): "ampere", (8, 9): "ada"}
_FAMILIES_BY_MAJOR = {9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
# The CPU's fp16 kernels are some twenty times slower than float32 and lack LSTM: a search over them measures nothing of use.
# Source: torch 2.14 on x86: Linear 512x512 forward and backward, 65 ms in fp16, 2.9 ms in fp32, 1.6 ms in bf16.
_CPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16_pure")


@dataclass(frozen=True)
class Target:
    """Where numerics run and what speed is about.

    Attributes:
        name: the card (or ``cpu``) as shown to people and stored in a policy.
        gpu: its row in the table; None for a CPU or for a measured card that is not in the table.
        device: where tensors live: ``cuda`` or ``cpu``.
        timing: whether speed is measured here or predicted.
        cuda_rules: whether the CPU stands in for a GPU and follows CUDA's autocast rules.
        memory_limit_bytes: what a training may use, where that is less than this machine has; None without a limit.
        precisions: what the card computes at a useful speed.
        capability: the compute capability; None for a CPU.
        notes: what a person should know about this choice.
    """

    name: str
    gpu: Gpu | None
    device: str
    timing: Origin
    cuda_rules: bool
    memory_limit_bytes: int | None
    precisions: tuple[Precision, ...]
    capability: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def stands_for_cuda(self) -> bool:
        """Whether the answer is about a CUDA card, here or not."""
        return self.capability is not None

    @property
    def device_name(self) -> str:
        """The device that policies are made for, as its driver names it."""
        if self.gpu is not None:
            return self.gpu.driver_names[0]
        return self.name if self.stands_for_cuda else processor_name()

    @property
    def numerics(self) -> str:
        """Where losses come from and what speed is worth, in a sentence."""
        if self.timing == "measured":
            return f"losses and speed measured on {self.device_name}"
        where = "the CPU under CUDA's autocast rules" if self.device == "cpu" else torch.cuda.get_device_name()
        return f"losses measured on {where}, speed predicted for {self.device_name}"

    @property
    def family(self) -> str:
        """The architecture family (``ada``, ``hopper`` ...), ``cpu``, or ``default`` where it is not known."""
        if self.gpu is not None:
            return self.gpu.architecture
        if self.capability is None:
            return "cpu"
        major, minor = _numbers(self.capability)
        return _FAMILIES.get((major, minor), _FAMILIES_BY_MAJOR.get(major, "default"))


def _numbers(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def precisions_of(capability: str) -> tuple[Precision, ...]:
    """The precisions that a compute capability runs at a useful speed."""
    version = _numbers(capability)
    if version >= _BF16_FROM:
        return PRECISIONS
    if version >= _FP16_FROM:
        return ("fp32", "fp16", "fp16_pure")
    return ("fp32",)


def usable_bytes(gpu: Gpu) -> int:
    """What a training can allocate on the card: its memory less a CUDA context and a small margin."""
    return int(gpu.memory_bytes * _USABLE_SHARE) - _CONTEXT_BYTES


def resolve_target(gpu: str | None, *, predict: bool = False) -> Target:
    """Decides where to measure and what to predict.

    Args:
        gpu: what the user named: a card, ``cpu``, or None for the GPU that is here.
        predict: with another card than the one that is here, predict its speed and measure numerics here.

    Raises:
        DeviceError: no GPU is here and none was named, the name is unknown, or another card is here and ``predict`` is off.
    """
    if gpu is not None and gpu.strip().lower() == "cpu":
        return Target("cpu", None, "cpu", "measured", False, None, _CPU_PRECISIONS)
    if torch.cuda.is_available():
        return _with_cuda(gpu, predict)
    if gpu is None:
        raise DeviceError(
            "No --gpu was given and torch finds no CUDA GPU here.",
            hint="Give a card's name to predict its speed (--gpu 4090d), or --gpu cpu to measure this processor.",
        )
    return _predicted(find_gpu(gpu), device="cpu", here="")


def resolve_target_of(made: Fingerprint, gpu: str | None, *, predict: bool = False) -> Target:
    """Decides where a policy that exists is looked at: as ``resolve_target`` does, but without a CUDA GPU and a name the CPU stands
    in for the card that the policy was made for.

    Args:
        made: what the policy was made for.
        gpu: what the user named, or None.
        predict: with another card than the one that is here, predict its speed and measure numerics here.

    Raises:
        DeviceError: as ``resolve_target``, or the policy's card is not in the table.
    """
    if gpu is not None or torch.cuda.is_available():
        return resolve_target(gpu, predict=predict)
    if made.capability is None:
        return resolve_target("cpu")
    card = gpu_of_device_name(made.device)
    if card is None:
        raise DeviceError(
            f"torch finds no CUDA GPU here, and the policy was made for the {made.device}, which is not in the table of cards.",
            hint="Name a card that is (--gpu 4090d; 'autoprec gpus' lists them): the CPU then stands in for it.",
        )
    return resolve_target(card.key)


def _with_cuda(gpu: str | None, predict: bool) -> Target:
    here = torch.cuda.get_device_name()
    present = gpu_of_device_name(here)
    if gpu is None or normalised(gpu) == normalised(here):
        return _measured(here, present)
    wanted = find_gpu(gpu)
    if wanted is present:
        return _measured(here, present)
    if not predict:
        raise DeviceError(
            f"--gpu {gpu} names the {wanted.name}, but the GPU here is the {here}; speed is only measured on the card itself.",
            hint="Leave --gpu out to tune for the card that is here, or add --predict: numerics run here, speed is predicted.",
        )
    return _predicted(wanted, device="cuda", here=here)


def _measured(here: str, present: Gpu | None) -> Target:
    major, minor = torch.cuda.get_device_capability()
    capability = f"{major}.{minor}"
    name = present.name if present is not None else here
    return Target(name, present, "cuda", "measured", False, None, precisions_of(capability), capability)


def _predicted(gpu: Gpu, *, device: str, here: str) -> Target:
    precisions = precisions_of(gpu.capability)
    notes = [f"No {gpu.name} is here: speed is predicted from its datasheet, numerics run on {here or 'the CPU'}."]
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        precisions = tuple(precision for precision in precisions if precision in precisions_of(f"{major}.{minor}"))
        notes.append(f"Memory is capped to what a {gpu.name} has.")
    return Target(
        gpu.name, gpu, device, "predicted", device == "cpu", usable_bytes(gpu), precisions, gpu.capability, tuple(notes)
    )


def cap_memory(target: Target) -> None:
    """Holds this process's CUDA allocator to the target's memory; changes it for the rest of the process.

    Only torch's allocator obeys: a context and other libraries come on top, which ``usable_bytes`` allows for.
    """
    if target.device == "cuda" and target.memory_limit_bytes is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, target.memory_limit_bytes / total))
