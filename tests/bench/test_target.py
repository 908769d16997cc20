"""What --gpu means with and without a GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from autoprec.bench.gpus import find_gpu
from autoprec.bench.target import precisions_of, resolve_target, resolve_target_of, usable_bytes
from autoprec.errors import DeviceError
from autoprec.policy import Fingerprint

Cuda = Callable[[str | None, tuple[int, int]], None]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    def pretend(name: str | None, capability: tuple[int, int] = (0, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    return pretend


def test_without_cuda_and_without_a_name_both_ways_out_are_offered(cuda: Cuda) -> None:
    cuda(None, (0, 0))
    with pytest.raises(DeviceError) as error:
        resolve_target(None)
    assert "--gpu 4090d" in error.value.hint
    assert "--gpu cpu" in error.value.hint


def test_without_cuda_a_named_card_is_predicted_under_cuda_rules(cuda: Cuda) -> None:
    cuda(None, (0, 0))
    target = resolve_target("4090d")
    assert (target.device, target.timing, target.cuda_rules) == ("cpu", "predicted", True)
    assert target.gpu is find_gpu("4090d")
    assert target.memory_limit_bytes == usable_bytes(find_gpu("4090d"))
    assert target.family == "ada"
    assert target.stands_for_cuda
    assert target.device_name == "NVIDIA GeForce RTX 4090 D"
    assert "the CPU under CUDA's autocast rules, speed predicted for NVIDIA GeForce RTX 4090 D" in target.numerics
    assert pickle.loads(pickle.dumps(target)) == target
    assert "fp16_pure" in target.precisions


def test_cpu_measures_the_processor_even_where_a_gpu_is(cuda: Cuda) -> None:
    cuda("NVIDIA H200", (9, 0))
    target = resolve_target("CPU")
    assert (target.device, target.timing, target.cuda_rules, target.gpu) == ("cpu", "measured", False, None)
    assert target.family == "cpu"
    assert "fp16" not in target.precisions


def test_the_card_that_is_here_is_measured(cuda: Cuda) -> None:
    cuda("NVIDIA H200", (9, 0))
    for name in (None, "h200", "NVIDIA H200"):
        target = resolve_target(name)
        assert (target.name, target.device, target.timing, target.memory_limit_bytes) == ("NVIDIA H200", "cuda", "measured", None)
        assert target.capability == "9.0"
        assert target.device_name == "NVIDIA H200"
        assert target.numerics == "losses and speed measured on NVIDIA H200"


def test_a_card_that_is_not_in_the_table_is_measured_all_the_same(cuda: Cuda) -> None:
    cuda("NVIDIA GeForce RTX 3070", (8, 6))
    for name in (None, "3070"):
        target = resolve_target(name)
        assert (target.name, target.gpu, target.timing, target.family) == ("NVIDIA GeForce RTX 3070", None, "measured", "ampere")


def test_another_card_is_refused_without_predict(cuda: Cuda) -> None:
    cuda("NVIDIA GeForce RTX 4090", (8, 9))
    with pytest.raises(DeviceError) as error:
        resolve_target("4090d")
    assert "NVIDIA GeForce RTX 4090 D" in error.value.message
    assert "the GPU here is the NVIDIA GeForce RTX 4090;" in error.value.message
    assert "--predict" in error.value.hint


def test_another_card_with_predict_runs_numerics_here_within_its_memory(cuda: Cuda) -> None:
    cuda("NVIDIA H200", (9, 0))
    target = resolve_target("3090", predict=True)
    assert (target.device, target.timing, target.cuda_rules) == ("cuda", "predicted", False)
    assert target.memory_limit_bytes is not None
    assert 22 * 2**30 < target.memory_limit_bytes < 24 * 2**30


def test_precisions_follow_the_compute_capability() -> None:
    assert precisions_of("7.5") == ("fp32", "fp16", "fp16_pure")
    assert precisions_of("6.1") == ("fp32",)
    assert set(precisions_of("12.0")) == {"fp32", "fp16", "bf16", "fp16_pure", "bf16_pure"}


def test_an_unknown_card_is_refused(cuda: Cuda) -> None:
    cuda(None, (0, 0))
    with pytest.raises(DeviceError, match="No GPU named 'voodoo2'"):
        resolve_target("voodoo2")


def made_for(device: str, capability: str | None) -> Fingerprint:
    return Fingerprint.of({}, device=device, capability=capability, torch_version="2.9", workload_sha256="")


def test_without_cuda_a_policys_own_card_is_stood_in_for(cuda: Cuda) -> None:
    cuda(None)
    target = resolve_target_of(made_for("NVIDIA GeForce RTX 4090 D", "8.9"), None)
    assert (target.name, target.device, target.timing, target.cuda_rules) == (
        "NVIDIA GeForce RTX 4090 D",
        "cpu",
        "predicted",
        True,
    )


def test_a_policy_made_on_a_processor_is_looked_at_on_this_one(cuda: Cuda) -> None:
    cuda(None)
    target = resolve_target_of(made_for("some processor", None), None)
    assert (target.name, target.timing) == ("cpu", "measured")


def test_a_name_is_worth_more_than_the_policys_card(cuda: Cuda) -> None:
    cuda(None)
    assert resolve_target_of(made_for("NVIDIA GeForce RTX 4090 D", "8.9"), "h200").capability == "9.0"


def test_a_policy_of_a_card_that_is_not_in_the_table_needs_a_name(cuda: Cuda) -> None:
    cuda(None)
    with pytest.raises(DeviceError, match="Voodoo 2"):
        resolve_target_of(made_for("Voodoo 2", "8.9"), None)
