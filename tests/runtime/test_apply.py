"""The handle: the documented loop, the price of applying, and what importing loads."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_policies import Net, policy_for
from torch import nn

import autoprec
from autoprec.errors import PolicyError
from autoprec.policy import Batch
from autoprec.runtime import apply_policy, remove_policy

X = torch.linspace(-1, 1, 28).reshape(4, 7)


def test_the_documented_loop_trains_with_accumulation_like_fp32() -> None:
    losses = []
    for default in ("fp32", "fp16"):
        torch.manual_seed(0)
        model = Net()
        policy = policy_for(model, default, batch=Batch(effective=4, micro=2, accumulation_steps=2))
        applied = apply_policy(model, policy)
        scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.05)
        train_model = applied.compiled()
        history = []
        for _ in range(5):
            total = 0.0
            for x in X.split(policy.batch.micro):
                with applied.autocast():
                    loss = train_model(x).square().mean() / policy.batch.accumulation_steps
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append(total)
        applied.remove()
        losses.append(history)
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize(("default", "enabled"), [("fp32", False), ("bf16", True), ("bf16_pure", True)])
def test_the_ambient_autocast_is_on_only_where_the_default_is_half(default: str, enabled: bool) -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, default))
    for _ in range(2):
        with applied.autocast():
            assert torch.is_autocast_enabled("cpu") is enabled
            assert not enabled or torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert applied.model is model
    applied.remove()


def test_the_loss_sees_float32_outputs_whose_sum_passes_the_half_range() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(20.0)
    applied = apply_policy(model, policy_for(model, "fp16"))
    with applied.autocast():
        p = torch.sigmoid(model(torch.randn(1, 1, 300, 300)))
        t = torch.ones_like(p)
        dice = 1 - 2 * (p * t).sum() / (p.sum() + t.sum() + 1e-7)
    assert dice.item() == pytest.approx(0.0, abs=1e-5)
    applied.remove()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
        return (self.q(x) @ self.k(x).transpose(1, 2)).masked_fill(causal, -1e9).softmax(-1)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "bf16_pure"])
def test_a_mask_constant_that_fp16_refuses_works_with_its_owner_elsewhere(precision: str) -> None:
    model = nn.Sequential(Masked())
    x = torch.randn(2, 4, 8)
    applied = apply_policy(model, policy_for(model, "fp16"))
    with applied.autocast(), pytest.raises(RuntimeError, match="without overflow"):
        model(x)
    applied.remove()
    applied = apply_policy(model, policy_for(model, "fp16", {"0": precision}))  # type: ignore[dict-item]
    with applied.autocast():
        assert model(x).isfinite().all()
    applied.remove()


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-9) * self.w


def test_a_hand_written_norm_in_an_fp32_island_equals_fp32() -> None:
    model = nn.Sequential(nn.Linear(16, 16), RootMeanSquare())
    with torch.no_grad():
        model[0].weight.mul_(2000)
    x = torch.randn(4, 16)
    expected = model(x)
    applied = apply_policy(model, policy_for(model, "fp16", {"1": "fp32"}))
    with applied.autocast():
        torch.testing.assert_close(model(x), expected, rtol=0.01, atol=0.01)
    applied.remove()


class Covariance(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.logdet(h.t() @ h / 20 + torch.eye(6, dtype=h.dtype)) + torch.fft.rfft(h.repeat(1, 32)).abs().mean()


def test_operations_without_a_half_kernel_work_in_an_fp32_island() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Covariance())
    applied = apply_policy(model, policy_for(model, "fp16", {"1": "fp32"}))
    with applied.autocast():
        assert model(torch.randn(20, 6)).isfinite()
    applied.remove()


def test_an_optimizer_built_before_apply_still_holds_the_parameters() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = apply_policy(model, policy_for(model, "fp16", {"first": "fp32"}, pad={"head": 8}))
    scaler = applied.grad_scaler()
    before = model.head.weight.detach().clone()
    scaler.scale(model(X).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.head.weight, before)
    applied.remove()


def test_applying_to_a_thousand_layers_takes_well_under_a_second() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    policy = policy_for(model, "bf16", {str(i): "fp32" for i in range(0, 1000, 2)})
    start = time.perf_counter()
    applied = apply_policy(model, policy)
    took_s = time.perf_counter() - start
    applied.remove()
    # Far over the 100 ms that benchmarks/applier_import.py measures, so that only a quadratic slip fails here.
    assert took_s < 2.0


def test_importing_and_loading_a_policy_loads_neither_torch_nor_the_search(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    autoprec.save_policy(policy_for(Net()), path)
    heavy = ["torch", "optuna", "pandas", "scipy", "click", "rich", "jinja2"]
    code = (
        f"import sys, autoprec; autoprec.load_policy({str(path)!r}); "
        f"loaded = [name for name in {heavy!r} if name in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_runtime_loads_nothing_of_the_search() -> None:
    heavy = ["optuna", "pandas", "click", "rich", "jinja2", "torchvision", "sklearn"]
    code = (
        f"import sys, autoprec.runtime; loaded = [name for name in {heavy!r} if name in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_modules_replaced_after_apply_are_named_in_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    applied = apply_policy(model, policy_for(model, "bf16", {"1": "fp32"}))
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.warns(UserWarning, match=r"without their setting: 1\. Convert"):
        applied.grad_scaler()
    applied.remove()


def test_importing_the_runtime_does_not_load_the_compiler() -> None:
    code = "import sys, autoprec.runtime; assert 'torch._inductor' not in sys.modules and 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("policy", ["policy.json", {"default": "bf16"}, None])
def test_what_is_no_policy_is_refused_with_what_to_do(policy: Any) -> None:
    with pytest.raises(PolicyError, match="load_policy"):
        apply_policy(Net(), policy)


def test_model_and_policy_in_the_wrong_order_are_refused() -> None:
    model = Net()
    with pytest.raises(PolicyError, match="in this order"):
        apply_policy(policy_for(model), model)  # type: ignore[arg-type]


def test_a_policy_comes_off_a_copy_that_has_no_handle_and_another_goes_on() -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16"))
    twin = copy.deepcopy(model)
    applied.remove()
    with pytest.raises(PolicyError, match=r"autoprec\.remove_policy\(model\)"):
        apply_policy(twin, policy_for(model, "bf16"))
    remove_policy(twin)
    assert type(twin) is Net and type(twin.stem) is nn.Linear
    apply_policy(twin, policy_for(model, "fp16")).remove()
