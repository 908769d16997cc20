"""The loss scaler: torch's own, with clear errors and an answer to whether a step was skipped."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime_policies import policy_for
from torch import nn

import autoprec.runtime
from autoprec.errors import PolicyError
from autoprec.policy import LossScale, Policy
from autoprec.runtime import AppliedPolicy, PolicyScaler

_applied: list[AppliedPolicy] = []


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    yield
    while _applied:
        _applied.pop().remove()


def apply_policy(model: nn.Module, policy: Policy) -> AppliedPolicy:
    _applied.append(autoprec.runtime.apply_policy(model, policy))
    return _applied[-1]


def setup(default: str = "fp16", model: nn.Module | None = None, **scale: Any) -> tuple[nn.Module, AppliedPolicy]:
    model = model or nn.Sequential(nn.Linear(4, 1))
    policy = policy_for(model, default, loss_scale=LossScale(**scale))
    return model, apply_policy(model, policy)


def step(model: nn.Module, scaler: PolicyScaler, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_the_scaler_is_torchs_own_with_the_policys_numbers() -> None:
    _, applied = setup(init=4096.0, growth_interval=7, growth_factor=3.0, backoff_factor=0.25)
    scaler = applied.grad_scaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    numbers = (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor())
    assert numbers == (4096.0, 7, 3.0, 0.25)


@pytest.mark.parametrize(
    ("default", "layers", "enabled"), [("bf16", {}, False), ("fp32", {"0": "fp16_pure"}, True), ("fp32", {}, False)]
)
def test_it_is_enabled_as_soon_as_one_layer_is_fp16(default: Any, layers: Any, enabled: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    assert apply_policy(model, policy_for(model, default, layers)).grad_scaler().is_enabled() is enabled


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_is_known_after_update(fused: bool) -> None:
    model, applied = setup()
    scaler, optimizer = applied.grad_scaler(), torch.optim.AdamW(model.parameters(), fused=fused)
    assert not applied.step_was_skipped
    answers, before = [], copy.deepcopy(model.state_dict())
    for factor in (float("inf"), 1.0, float("nan"), 1.0):
        step(model, scaler, optimizer, factor)
        answers.append(applied.step_was_skipped)
        if factor == float("inf"):
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert answers == [True, False, True, False]
    assert scaler.get_scale() == 8192.0 / 4


def test_a_scheduler_moves_only_on_real_steps_and_a_disabled_scaler_never_skips() -> None:
    model, applied = setup("bf16")
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, scaler, optimizer)
    assert not applied.step_was_skipped
    assert model[0].weight.grad.abs().max() <= 2.0


def test_one_skip_among_two_optimizers_counts() -> None:
    model, applied = setup(model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    scaler = applied.grad_scaler()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    model[0].weight.grad[0, 0] = float("inf")
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert applied.step_was_skipped


@pytest.mark.parametrize("unscale", [True, False])
def test_a_step_without_any_gradient_is_a_plain_step_and_leaves_the_scale_alone(unscale: bool) -> None:
    """Frozen branch or empty batch: torch's scaler says "No inf checks were recorded" (huggingface/accelerate#328)."""
    model, applied = setup(init=4096.0, growth_interval=2, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    scaler = applied.grad_scaler()
    idle, busy = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    for optimizers in ((idle,), (idle, busy), (idle,), (busy, idle)):
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        for optimizer in optimizers:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        assert not applied.step_was_skipped
        busy.zero_grad()
    assert scaler.get_scale() == 8192.0, "two steps with gradients, and only those, count for the growth interval"
    assert torch.equal(model[0].weight, before)


def test_clipping_after_unscale_clips_true_gradients() -> None:
    model, applied = setup(model=nn.Sequential(nn.Linear(4, 1, bias=False)))
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert (before - model[0].weight).norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_a_closure_is_refused_by_the_optimizers_name(positional: bool, kind: Any) -> None:
    model, applied = setup()
    scaler, optimizer = applied.grad_scaler(), kind(model.parameters(), lr=0.1)
    with pytest.raises(PolicyError, match=f"{kind.__name__} steps with a closure") as caught:
        scaler.step(optimizer, lambda: 0.0) if positional else scaler.step(optimizer, closure=lambda: 0.0)
    assert "without fp16 layers" in caught.value.hint


def test_an_optimizer_that_needs_a_closure_is_refused_without_one_and_works_where_scaling_is_off() -> None:
    model, applied = setup()
    with pytest.raises(PolicyError, match="LBFGS steps with a closure"):
        applied.grad_scaler().step(torch.optim.LBFGS(model.parameters()))
    applied.remove()
    model, applied = setup("bf16")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    before = closure().item()
    applied.grad_scaler().step(optimizer, closure)
    assert closure().item() < before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_half_and_complex_trainable_parameters_are_refused_where_scaling_is_on(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    model[0].odd = nn.Parameter(torch.ones(2, dtype=dtype))
    applied = apply_policy(model, policy_for(model, "fp16"))
    with pytest.raises(PolicyError, match=rf"Parameter '0\.odd' is {str(dtype)[6:]} and trainable"):
        applied.grad_scaler()
    model[0].odd.requires_grad_(False)
    assert applied.grad_scaler().is_enabled()
    applied.remove()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.w = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,io->bo", torch.fft.fft(self.fc(x).float()), self.w).abs()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_with_complex_parameters_trains_in_bf16_and_fp32(precision: Any) -> None:
    model = nn.Sequential(Spectral())
    applied = apply_policy(model, policy_for(model, precision))
    scaler, optimizer = applied.grad_scaler(), torch.optim.Adam(model.parameters())
    with applied.autocast():
        step(model, scaler, optimizer)
    assert model[0].w.dtype == torch.complex64
    assert model[0].w.grad is not None
    applied.remove()


def test_sparse_gradients_are_unscaled() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    applied = apply_policy(model, policy_for(model, "fp16"))
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=1.0)
    before = model[0].weight.detach().clone()
    scaler.scale(model(torch.tensor([1, 1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not applied.step_was_skipped
    torch.testing.assert_close(before[1] - model[0].weight.detach()[1], torch.full((2,), 2.0))
    applied.remove()


def test_state_is_saved_and_restored_on_resume() -> None:
    model, applied = setup()
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, scaler, optimizer, float("inf"))
    step(model, scaler, optimizer)
    resumed = applied.grad_scaler()
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.state_dict() == scaler.state_dict()
    assert resumed.get_scale() == 4096.0
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 4096.0


def test_the_state_of_a_disabled_scaler_is_refused_by_an_enabled_one_and_the_other_way_ignored() -> None:
    _, fp16 = setup()
    _, bf16 = setup("bf16")
    with pytest.raises(PolicyError, match="saved scaler state is empty") as caught:
        fp16.grad_scaler().load_state_dict(bf16.grad_scaler().state_dict())
    assert "initial scale" in caught.value.hint
    bf16.grad_scaler().load_state_dict(fp16.grad_scaler().state_dict())


def test_the_floor_alarm_sounds_once() -> None:
    model, applied = setup(init=8.0, floor=4.0)
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, scaler, optimizer, float("inf"))
    with pytest.warns(UserWarning, match="fell to 2, under the policy's floor of 4") as caught:
        for _ in range(3):
            step(model, scaler, optimizer, float("inf"))
    assert len(caught) == 1


def test_accumulation_gives_the_gradient_of_the_whole_batch() -> None:
    model, applied = setup("fp32", model=nn.Sequential(nn.Linear(4, 1)))
    x = torch.randn(8, 4)
    model(x).square().mean().backward()
    whole = model[0].weight.grad.clone()
    model.zero_grad()
    scaler = applied.grad_scaler()
    for part in x.chunk(4):
        scaler.scale(model(part).square().mean() / 4).backward()
    torch.testing.assert_close(model[0].weight.grad, whole)


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_the_scale_stops_growing_at_two_to_the_24_however_long_training_goes_well(interval: int) -> None:
    model, applied = setup(init=2.0**20, growth_interval=interval)
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.0)
    scales = []
    for _ in range(12 * interval):
        step(model, scaler, optimizer, 1e-30)
        scales.append(scaler.get_scale())
    assert max(scales) == 2.0**23
    assert scales[-1] == 2.0**23
    step(model, scaler, optimizer, float("inf"))
    assert scaler.get_scale() == 2.0**22


def test_a_policy_that_starts_above_the_limit_keeps_its_start() -> None:
    model, applied = setup(init=2.0**26, growth_interval=1)
    scaler, optimizer = applied.grad_scaler(), torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        step(model, scaler, optimizer, 1e-30)
        assert scaler.get_scale() == 2.0**26


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("own_factor", [None, 4.0])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_fused_optimizer_steps_bit_for_bit_as_under_torchs_scaler(kind: Any, own_factor: float | None, unscale: bool) -> None:
    def train(scaler: torch.amp.GradScaler, model: nn.Module) -> tuple[list[torch.Tensor], list[float]]:
        optimizer, scales = kind(model.parameters(), lr=0.1, fused=True), []
        for factor in (1.0, 0.5, float("inf"), 2.0, float("nan"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().sum() * factor).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if own_factor is not None:
                optimizer.grad_scale = torch.tensor(own_factor)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
        return [parameter.detach().clone() for parameter in model.parameters()], scales

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    twin = copy.deepcopy(model)
    settings = {"init_scale": 1024.0, "growth_interval": 2}
    expected, expected_scales = train(torch.amp.GradScaler("cpu", **settings), twin)
    ours = PolicyScaler("cpu", LossScale(init=1024.0, growth_interval=2, floor=1.0), enabled=True)
    weights, scales = train(ours, model)
    assert scales == expected_scales and scales[0] == 1024.0 and min(scales) == 512.0
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_a_second_step_of_a_fused_optimizer_before_update_is_torchs_error() -> None:
    model, applied = setup()
    scaler, optimizer = applied.grad_scaler(), torch.optim.AdamW(model.parameters(), fused=True)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
