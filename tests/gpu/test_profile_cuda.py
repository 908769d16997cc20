"""Tracing, layer times and the profile on a CUDA device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from autoprec.bench.layer_times import measure_cast, measure_step
from autoprec.bench.look import trace_workload
from autoprec.bench.profile import profile
from autoprec.bench.target import resolve_target
from autoprec.bench.workload import load_workload
from autoprec.policy import PRECISIONS


def images(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 3, 128, 128, generator=generator), torch.randint(10, (batch_size,), generator=generator)


def workload_of(build_model, batches=images, batch_size=64, **more):
    return load_workload(SimpleNamespace(build_model=build_model, batches=batches, BATCH_SIZE=batch_size, **more))


def test_every_layer_of_a_convnet_has_device_times_and_half_precision_is_faster():
    workload, target = workload_of(lambda: torchvision.models.resnet50(num_classes=10)), resolve_target(None)
    look, trace = trace_workload(workload, target)
    assert 0.3 < look.matmul_share < 1
    found = profile(workload, target, look, PRECISIONS, trace=trace)
    assert all(layer.time_origin == "measured" for layer in found.layers)
    assert all(layer.time_s["fp32"] > 0 for layer in found.layers if layer.layer != "")
    total = {precision: sum(layer.time_s[precision] for layer in found.layers) for precision in PRECISIONS}
    assert total["fp16"] < 0.7 * total["fp32"] and total["bf16"] < 0.7 * total["fp32"]
    assert not any(risk.hard for layer in found.layers for risk in layer.risks)
    assert found.cost_s < 60


def test_backward_kernels_count_for_the_layer_that_made_them():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8)).cuda()
    x = torch.randn(4096, 4096, device="cuda")
    times = measure_step(model, lambda: model(x).square().mean(), "cuda")
    assert times.by_layer["0"] > 5 * max(times.by_layer["1"], times.by_layer["2"])
    assert 0.5 < times.heavy_s / times.total_s <= 1


def test_a_cast_moves_bytes_at_a_plausible_rate():
    assert 1e-14 < measure_cast("cuda") < 1e-11


def test_fused_attention_is_counted_and_profiled():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.head = nn.Embedding(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)
            self.qkv = nn.Linear(128, 384)

        def forward(self, index):
            x = self.tokens(index)
            q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
            return self.head(self.norm(x + mixed.transpose(1, 2).flatten(2))).flatten(0, 1)

    def batches(batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            index = torch.randint(64, (batch_size, 65), generator=generator)
            yield index[:, :-1].contiguous(), index[:, 1:].contiguous()

    workload = workload_of(Net, batches, 16, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1].flatten()))
    target = resolve_target(None)
    look, trace = trace_workload(workload, target)
    root = next(layer for layer in look.layers if layer.name == "")
    assert root.flops == 2 * 2 * 16 * 4 * 64 * 64 * 32
    found = {layer.layer: layer for layer in profile(workload, target, look, PRECISIONS, trace=trace).layers}
    assert found[""].sensitivity["fp16"] < 1e-3
    assert not any(risk.hard for layer in found.values() for risk in layer.risks)


def test_a_planted_overflow_is_pinned_in_fp16_and_not_in_bf16():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.wide, self.norm, self.head = (
                nn.Linear(16, 16),
                nn.Linear(16, 16),
                nn.LayerNorm(16),
                nn.Linear(16, 1),
            )
            with torch.no_grad():
                self.wide.weight.mul_(3e6)

        def forward(self, x):
            return self.head(self.norm(self.wide(self.stem(x))))

    def batches(batch_size, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(batch_size, 16, generator=generator)
            yield x, x.sum(1, keepdim=True)

    workload = workload_of(Wide, batches, 32, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    target = resolve_target(None)
    look, trace = trace_workload(workload, target)
    found = profile(workload, target, look, PRECISIONS, trace=trace)
    pinned = {(layer.layer, risk.precision) for layer in found.layers for risk in layer.risks if risk.hard}
    assert ("wide", "fp16") in pinned
    assert {name for name, precision in pinned if precision == "fp16"} == {"wide"}
    assert not any(precision.startswith("bf16") for _, precision in pinned)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_attributes_the_recomputed_work(use_reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 1)

        def forward(self, x):
            return self.head(torch.utils.checkpoint.checkpoint(self.block, x.requires_grad_(), use_reentrant=use_reentrant))

    def batches(batch_size, seed):
        while True:
            yield torch.randn(batch_size, 64, generator=torch.Generator().manual_seed(seed)), torch.zeros(batch_size, 1)

    workload = workload_of(Net, batches, 32, loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    _, trace = trace_workload(workload, resolve_target(None))
    work = {
        phase: sum(op.flops for op in trace.ops if op.layer == "block.0" and op.phase == phase)
        for phase in ("forward", "backward")
    }
    assert work["backward"] == 3 * work["forward"] > 0
