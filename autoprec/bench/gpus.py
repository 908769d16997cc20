"""The table of known GPUs (``gpus.toml``) and how a name finds its row: exactly, never by a part of it."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from autoprec.errors import DeviceError

RateMode = Literal["fp32", "tf32", "fp16", "bf16", "fp16_accumulate_fp16"]
_MODES: tuple[RateMode, ...] = ("fp32", "tf32", "fp16", "bf16", "fp16_accumulate_fp16")
# Words that people leave out or add when they name a card; what remains must match whole.
_NOISE = re.compile(r"nvidia|geforce|tesla|generation|rtx|[^a-z0-9]")


@dataclass(frozen=True)
class Gpu:
    """One row of the table.

    Attributes:
        key: short name, as listed to people and accepted by ``--gpu``.
        driver_names: exact names the driver gives this card.
        aliases: further names people use.
        architecture: family, the name of a packaged search space where there is one.
        capability: CUDA compute capability such as ``8.9``.
        num_sms: streaming multiprocessors.
        memory_bytes: memory on the card.
        bandwidth_bytes_per_s: peak memory bandwidth.
        rates_flops: peak dense floating-point operations per second by mode; a mode without tensor cores is absent.
        source: where the figures are published.
        checked: the day they were compared, ISO format.
    """

    key: str
    driver_names: tuple[str, ...]
    aliases: tuple[str, ...]
    architecture: str
    capability: str
    num_sms: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    rates_flops: dict[RateMode, float]
    source: str
    checked: str

    @property
    def name(self) -> str:
        """The name to show people."""
        return self.driver_names[0]

    def peak_flops(self, mode: RateMode) -> float:
        """Peak dense operations per second; a mode the card has no tensor cores for runs at its fp32 rate."""
        return self.rates_flops.get(mode, self.rates_flops["fp32"])


def _row(key: str, data: dict[str, Any]) -> Gpu:
    return Gpu(
        key=key,
        driver_names=tuple(data["driver_names"]),
        aliases=tuple(data.get("aliases", ())),
        architecture=data["architecture"],
        capability=data["capability"],
        num_sms=data["num_sms"],
        memory_bytes=data["memory_gib"] * 2**30,
        bandwidth_bytes_per_s=data["bandwidth_gb_s"] * 1e9,
        rates_flops={mode: data[f"{mode}_tflops"] * 1e12 for mode in _MODES if f"{mode}_tflops" in data},
        source=data["source"],
        checked=data["checked"].isoformat(),
    )


def _read_table() -> tuple[Gpu, ...]:
    text = resources.files("autoprec.bench").joinpath("gpus.toml").read_text(encoding="utf-8")
    return tuple(_row(key, data) for key, data in tomllib.loads(text).items())


GPUS: tuple[Gpu, ...] = _read_table()


def normalised(name: str) -> str:
    """A card's name without maker, series, case, spaces and dashes: ``"RTX 4090 D"`` and ``"4090d"`` are both ``4090d``."""
    return _NOISE.sub("", name.lower())


_BY_NAME = {normalised(name): gpu for gpu in GPUS for name in (gpu.key, *gpu.driver_names, *gpu.aliases)}
_BY_DRIVER_NAME = {name: gpu for gpu in GPUS for name in gpu.driver_names}


def find_gpu(name: str) -> Gpu:
    """The card a person named, in any case, with or without spaces, dashes, NVIDIA, GeForce and RTX.

    Raises:
        DeviceError: no card has this name; the known ones are listed, the near ones first.
    """
    wanted = normalised(name)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    near = [_BY_NAME[match].key for match in difflib.get_close_matches(wanted, _BY_NAME, n=6, cutoff=0.6)]
    near += [gpu.key for gpu in GPUS if wanted and normalised(gpu.key).startswith(wanted)]
    hint = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    raise DeviceError(
        f"No GPU named '{name}' in the table. Known: {', '.join(gpu.key for gpu in GPUS)}.",
        hint=f"{hint}Give one of these, 'cpu', or leave --gpu out on a machine with a GPU to measure on that one.",
    )


def gpu_of_device_name(driver_name: str) -> Gpu | None:
    """The row of a card by the exact name its driver gives; None for cards that are not in the table."""
    return _BY_DRIVER_NAME.get(driver_name)
