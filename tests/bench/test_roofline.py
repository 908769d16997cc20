"""Predicted speed and memory: sane orders and proportions, and the effect of every knob."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autoprec.bench.dtype_plan import plan_dtypes
from autoprec.bench.gpus import find_gpu
from autoprec.bench.roofline import (
    RooflineSpeed,
    predict_cast_s_per_byte,
    predict_layer_times,
    predict_matmul_share,
    predict_peak_bytes,
    predict_step_s,
)
from autoprec.bench.trace import trace_model
from autoprec.policy import Backend, Batch, Fingerprint, LayerSetting, Padding, Policy

ADA, HOPPER = find_gpu("4090d"), find_gpu("h200")


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@cache
def resnet50():
    torch.manual_seed(0)
    return trace_model(torchvision.models.resnet50(), (torch.randn(2, 3, 64, 64), torch.tensor([1, 2])), cross_entropy, samples=2)


@cache
def mlp(width, samples=512):
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 8))
    batch = (torch.randn(samples, width), torch.zeros(samples, dtype=torch.long))
    return trace_model(model, batch, cross_entropy, samples=samples)


def policy_for(found, default="fp32", *, effective=1024, micro=None, layers=(), padded=(), execution="eager", **backend):
    micro = micro or effective
    return Policy(
        default=default,
        layers={name: LayerSetting(precision=precision) for name, precision in layers},
        batch=Batch(effective=effective, micro=micro, accumulation_steps=effective // micro),
        padding=Padding(layers=dict.fromkeys(padded, 8)),
        backend=Backend(**backend),
        execution=execution,
        fingerprint=Fingerprint.of(
            {layer.name: layer.signature for layer in found.layers},
            idle=found.idle,
            device="any",
            capability=None,
            torch_version="2.11",
            workload_sha256="0" * 64,
        ),
    )


def seconds(found, gpu, default="fp32", **knobs):
    return predict_step_s(found.op_trace, policy_for(found, default, **knobs), gpu)


def test_a_convnet_on_a_4090d_is_fastest_in_fp16_channels_last_then_fp16_then_tf32():
    found = resnet50()
    best = seconds(found, ADA, "fp16", channels_last=True)
    stock = seconds(found, ADA, "fp16")
    tf32, fp32 = seconds(found, ADA, tf32=True), seconds(found, ADA)
    assert best < stock < fp32 and stock < tf32 <= fp32
    assert 1.4 < fp32 / best < 3.5


def test_resnet50_on_an_h200_comes_out_near_what_was_measured_there():
    # 126.8 ms in fp32 and 23.0 ms in fp16 channels_last for 128 images of 224x224, 12.25 times the pixels of 64x64.
    found = resnet50()
    effective = 1568
    assert seconds(found, HOPPER, effective=effective) == pytest.approx(0.1268, rel=0.3)
    assert seconds(found, HOPPER, "fp16", effective=effective, channels_last=True) == pytest.approx(0.023, rel=0.4)


def test_half_precision_halves_the_activations_but_not_the_parameters():
    found = resnet50()
    full, half = (predict_peak_bytes(found.op_trace, policy_for(found, default)) for default in ("fp32", "fp16"))
    fixed = 2 * 4 * found.op_trace.num_parameters
    assert 0.45 < (half - fixed) / (full - fixed) < 0.65


def test_smaller_micro_batches_need_less_memory_and_more_launches():
    found = mlp(256)
    whole, parts = policy_for(found, effective=512), policy_for(found, effective=512, micro=64)
    assert predict_peak_bytes(found.op_trace, parts) < predict_peak_bytes(found.op_trace, whole)
    assert predict_step_s(found.op_trace, parts, ADA) > predict_step_s(found.op_trace, whole, ADA)


def test_odd_sizes_cost_tensor_core_speed_until_they_are_padded():
    even, odd = mlp(2048), mlp(2047)
    effective = 16384
    padded = seconds(odd, HOPPER, "fp16", effective=effective, padded=("0", "3"))
    plain = seconds(odd, HOPPER, "fp16", effective=effective)
    assert seconds(even, HOPPER, "fp16", effective=effective) < padded < plain
    assert seconds(odd, HOPPER, effective=effective) == pytest.approx(seconds(even, HOPPER, effective=effective), rel=0.05)


def test_a_small_model_is_bound_by_the_host_and_gains_nothing_from_half_precision():
    found = mlp(16)
    assert seconds(found, ADA, "fp16", effective=32) > seconds(found, ADA, effective=32)
    assert seconds(found, ADA, effective=32) == seconds(found, HOPPER, effective=32)
    assert seconds(found, ADA, "fp16", effective=32, execution="compile_cudagraphs") < seconds(found, ADA, effective=32)


def test_fp16_accumulation_speeds_up_matmuls_where_the_card_has_a_faster_rate():
    found = mlp(2048)
    slow, fast = (seconds(found, ADA, "fp16", effective=8192, fp16_accumulation=on) for on in (False, True))
    assert fast < 0.9 * slow


def test_norms_in_pure_half_move_half_the_bytes():
    found = mlp(2048)
    autocast, pure = seconds(found, HOPPER, "fp16", effective=65536), seconds(found, HOPPER, "fp16_pure", effective=65536)
    assert pure < autocast


def test_a_cast_on_each_border_costs_time():
    found = mlp(2048)
    all_low = predict_step_s(found.op_trace, policy_for(found, "fp16_pure", effective=65536), HOPPER)
    mixed = policy_for(found, "fp16_pure", effective=65536, layers=(("2", "fp32"),))
    assert predict_step_s(found.op_trace, mixed, HOPPER) > all_low


def test_dtypes_follow_cudas_autocast_lists():
    found = mlp(16, 4)
    plan = plan_dtypes(found.op_trace, lambda _name: "fp16")
    by_op = {(op.name, op.phase): planned.dtype for op, planned in zip(found.op_trace.ops, plan, strict=True)}
    assert by_op["addmm", "forward"] == "fp16"
    assert by_op["native_layer_norm", "forward"] == "fp32"
    assert by_op["relu", "forward"] == "fp32"  # its input comes from the norm
    assert by_op["native_layer_norm_backward", "backward"] == "fp32"
    assert by_op["nll_loss_forward", "forward"] == "fp32"
    pure = plan_dtypes(found.op_trace, lambda _name: "bf16_pure")
    assert {planned.dtype for op, planned in zip(found.op_trace.ops, pure, strict=True) if op.name == "native_layer_norm"} == {
        "bf16"
    }


def test_weights_are_cast_once_a_forward_and_activations_at_every_use():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            x = self.norm(x)
            return self.fc(x) + self.fc(x)

    found = trace_model(Net(), (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)), cross_entropy, samples=4)
    plan = plan_dtypes(found.op_trace, lambda _name: "bf16")
    casts = [planned.casts for op, planned in zip(found.op_trace.ops, plan, strict=True) if op.name == "mm"][:2]
    assert casts == [2, 1]


def test_layer_times_cover_every_layer_and_precision_and_add_up_to_the_device_time():
    found = resnet50()
    times = predict_layer_times(found.op_trace, HOPPER, ("fp32", "fp16"))
    assert {layer.name for layer in found.layers} <= set(times)
    assert all(set(by_precision) == {"fp32", "fp16"} and min(by_precision.values()) > 0 for by_precision in times.values())


def test_the_matmul_share_of_a_large_mlp_is_most_of_it_and_of_a_relu_stack_near_zero():
    relus = nn.Sequential(nn.Linear(8, 8), *[nn.ReLU() for _ in range(40)])
    stack = trace_model(relus, (torch.randn(64, 8), torch.zeros(64, dtype=torch.long)), cross_entropy, samples=64)
    assert predict_matmul_share(mlp(2048).op_trace, ADA) > 0.6
    assert predict_matmul_share(stack.op_trace, ADA) < 0.1


def test_a_cast_takes_as_long_as_its_bytes_take_on_the_card():
    assert predict_cast_s_per_byte(HOPPER) < predict_cast_s_per_byte(ADA) < 2 / ADA.bandwidth_bytes_per_s


def test_a_speed_model_without_a_gpu_predicts_memory_and_refuses_time():
    found = mlp(16)
    speed = RooflineSpeed(found.op_trace, None)
    assert speed.peak_bytes(policy_for(found)) > 0
    with pytest.raises(ValueError, match="No GPU was given"):
        speed.step_s(policy_for(found))


def test_a_speed_model_gives_what_the_functions_give():
    found = mlp(256)
    speed, policy = RooflineSpeed(found.op_trace, ADA), policy_for(found, "bf16")
    assert speed.step_s(policy) == speed.step_s(policy) == predict_step_s(found.op_trace, policy, ADA)
