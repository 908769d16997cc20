"""The GPU table: names find their card and no other, figures are plausible and sourced."""

from __future__ import annotations

import pytest

from autoprec.bench.gpus import GPUS, find_gpu, gpu_of_device_name
from autoprec.errors import DeviceError


@pytest.mark.parametrize(
    "name", ["4090d", "4090 D", "RTX 4090 D", "rtx4090d", "rtx-4090-d", "NVIDIA GeForce RTX 4090 D", " 4090-d "]
)
def test_every_way_of_writing_4090_d_finds_the_4090_d(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == "NVIDIA GeForce RTX 4090 D"
    assert gpu.num_sms == 114


def test_a_4090_is_not_a_4090_d() -> None:
    assert find_gpu("4090").num_sms == 128
    plain, chinese = gpu_of_device_name("NVIDIA GeForce RTX 4090"), gpu_of_device_name("NVIDIA GeForce RTX 4090 D")
    assert plain is not None
    assert chinese is not None
    assert plain.key == "rtx-4090"
    assert chinese.key == "rtx-4090-d"


def test_driver_names_match_whole_only() -> None:
    assert gpu_of_device_name("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert gpu_of_device_name("nvidia geforce rtx 4090") is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.key)
def test_every_card_is_found_by_each_of_its_names(gpu: object) -> None:
    for name in (gpu.key, *gpu.driver_names, *gpu.aliases):  # type: ignore[attr-defined]
        assert find_gpu(name) is gpu


def test_no_two_cards_share_a_driver_name() -> None:
    names = [name for gpu in GPUS for name in gpu.driver_names]
    assert len(names) == len(set(names))


def test_an_unknown_name_lists_the_known_ones_and_the_near_ones() -> None:
    with pytest.raises(DeviceError) as error:
        find_gpu("4095")
    assert "No GPU named '4095'" in error.value.message
    assert "rtx-4090-d" in error.value.message
    assert "h200" in error.value.message
    assert "Did you mean" in error.value.hint
    assert "rtx-4090" in error.value.hint


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_a_name_that_fits_several_cards_is_refused_with_those(name: str) -> None:
    with pytest.raises(DeviceError) as error:
        find_gpu(name)
    assert f"{name}-" in error.value.hint


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.key)
def test_every_row_is_plausible_and_sourced(gpu: object) -> None:
    rates = gpu.rates_flops  # type: ignore[attr-defined]
    assert len(gpu.source) > 10  # type: ignore[attr-defined]
    assert gpu.checked.startswith("20")  # type: ignore[attr-defined]
    assert 5e12 < rates["fp32"] < 2e14
    assert rates["fp32"] < rates["fp16"] <= rates["fp16_accumulate_fp16"]
    assert ("bf16" in rates) == ("tf32" in rates) == (float(gpu.capability) >= 8.0)  # type: ignore[attr-defined]
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"]
        assert rates["tf32"] == pytest.approx(rates["fp16"] / 2, rel=0.02)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if "GeForce" in gpu.name], ids=lambda gpu: gpu.key)
def test_geforce_cards_halve_their_rate_for_float32_accumulation(gpu: object) -> None:
    rates = gpu.rates_flops  # type: ignore[attr-defined]
    assert rates["fp16"] == pytest.approx(rates["fp16_accumulate_fp16"] / 2, rel=0.01)


def test_known_figures() -> None:
    h200, ada = find_gpu("h200"), find_gpu("4090")
    assert (h200.bandwidth_bytes_per_s, h200.peak_flops("bf16"), h200.capability) == (4.8e12, 989.4e12, "9.0")
    assert (ada.memory_bytes, ada.peak_flops("fp16"), ada.peak_flops("tf32")) == (24 * 2**30, 165.2e12, 82.6e12)
    assert find_gpu("3090").memory_bytes == 24 * 2**30
    assert (find_gpu("5090").memory_bytes, find_gpu("5090").capability) == (32 * 2**30, "12.0")
    assert find_gpu("t4").peak_flops("bf16") == find_gpu("t4").peak_flops("fp32")
