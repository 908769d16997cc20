"""The roofline's bound: no policy is predicted faster than it, and small models have nothing to gain."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from autoprec.bench import roofline
from autoprec.bench.bench import Bench
from autoprec.bench.roofline import predict_step_s
from autoprec.bench.target import resolve_target
from autoprec.policy import PRECISIONS
from autoprec.tune.baselines import baseline_policies, pure_policies


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def workload(model, shape, batch=8):
    class Workload:
        BATCH_SIZE = batch

        @staticmethod
        def build_model():
            return model()

        @staticmethod
        def batches(batch_size, seed):
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield torch.randn(batch_size, *shape, generator=generator), torch.zeros(batch_size, dtype=torch.long)

    return Workload


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def convs():
    body = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 32, 3), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))


def elementwise():
    return nn.Sequential(nn.GELU(), nn.LayerNorm(4096), nn.Tanh(), nn.GELU(), nn.LayerNorm(4096))


def policies(bench, target):
    look = bench.look()
    allowed = {layer.name: target.precisions for layer in look.layers}
    stock = baseline_policies(look, target.precisions, cuda=True, capability=target.capability)
    pure = pure_policies(look, allowed, fingerprint=stock["fp32"].fingerprint)
    return allowed, stock, {**stock, **pure}


def of(model, shape, gpu, batch=8):
    target = resolve_target(gpu)
    bench = Bench(workload(model, shape, batch), target)
    allowed, stock, everything = policies(bench, target)
    return bench, target, bench.ceiling(allowed, stock["fp32"]), everything, allowed, stock["fp32"]


CASES = [(mlp, (784,)), (convs, (3, 24, 24)), (elementwise, (4096,))]


@pytest.mark.parametrize(("model", "shape"), CASES)
@pytest.mark.parametrize("gpu", ["h200", "t4"])
@pytest.mark.parametrize("busy", [False, True])
def test_no_policy_is_predicted_faster_than_the_floor(model, shape, gpu, busy, monkeypatch):
    if busy:
        for name in ("HOST_OP_S", "HOST_VIEW_S", "HOST_STEP_S", "SCALER_HOST_S", "KERNEL_S"):
            monkeypatch.setattr(roofline, name, 1e-12)
    bench, target, ceiling, everything, _, _ = of(model, shape, gpu)
    bench.look()
    for (role, policy), padded in itertools.product(everything.items(), (False, True)):
        changed = policy if padded else policy.model_copy(update={"padding": policy.padding.model_copy(update={"layers": {}})})
        assert predict_step_s(bench._trace, changed, target.gpu) >= ceiling.floor_step_s * (1 - 1e-9), role
    assert ceiling.origin == "predicted" and ceiling.gain >= 1.0


def test_a_host_bound_mlp_has_nothing_to_gain():
    _, _, ceiling, *_ = of(mlp, (784,), "h200", batch=128)
    assert ceiling.gain == 1.0 and ceiling.host_bound


def test_elementwise_work_gains_where_it_may_be_pure_and_not_where_autocast_leaves_it_in_float32(monkeypatch):
    for name in ("HOST_OP_S", "HOST_VIEW_S", "HOST_STEP_S", "SCALER_HOST_S", "KERNEL_S"):
        monkeypatch.setattr(roofline, name, 1e-12)
    bench, _, pure, _, allowed, fp32 = of(elementwise, (4096,), "h200", batch=256)
    assert pure.gain > 1.5
    assert bench.ceiling(dict.fromkeys(allowed, ("fp32",)), fp32).gain == pytest.approx(1.0)


def test_a_card_that_is_not_in_the_table_has_no_predicted_ceiling():
    bench = Bench(workload(mlp, (784,)), resolve_target("cpu"))
    look = bench.look()
    fp32 = baseline_policies(look, PRECISIONS, cuda=False)["fp32"]
    with pytest.raises(ValueError, match="not in the GPU table"):
        bench.ceiling({}, fp32)
