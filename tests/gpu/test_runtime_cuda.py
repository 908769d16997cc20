"""The runtime on a CUDA device: what a CPU cannot show."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.policy import Backend, Batch, LossScale, Precision
from autoprec.runtime import apply_policy

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from runtime_policies import Net, fingerprint_of, policy_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore:.*nested tensor.*"),
]

X = torch.linspace(-1, 1, 28).reshape(4, 7)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def cuda_policy(model: nn.Module, default: Precision, layers: dict[str, Precision] | None = None, **settings: Any) -> Any:
    made_for = fingerprint_of(model, settings.pop("idle", ()), device=torch.cuda.get_device_name())
    return policy_for(model, default, layers, fingerprint=made_for, **settings)


@pytest.mark.parametrize("default", ["fp32", "fp16", "bf16", "fp16_pure", "bf16_pure"])
def test_gradients_are_near_fp32_in_every_precision(default: Precision) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    reference = copy.deepcopy(model)
    applied = apply_policy(model, cuda_policy(model, default, {"first": "fp32", "second.norm": "fp16_pure"}, pad={"head": 8}))
    with applied.autocast():
        loss = model(X.cuda()).square().mean()
    loss.backward()
    reference(X.cuda()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.05 * float(theirs.grad.abs().max()) + 1e-4)
    applied.remove()


def test_a_model_moved_after_apply_enters_the_devices_autocast() -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", {"first": "fp32"}))
    model.cuda()
    seen: list[torch.dtype] = []
    model.stem.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    with applied.autocast():
        assert torch.is_autocast_enabled("cuda")
        model(X.cuda())
    assert seen == [torch.bfloat16]
    applied.remove()


@pytest.mark.parametrize("kind", [nn.LayerNorm(64), nn.GroupNorm(4, 64), nn.Softmax(-1)])
def test_pure_norms_and_softmax_stay_half_where_autocast_promotes(kind: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(64, 64), kind).cuda()
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    for layers in ({}, {"1": "fp16_pure"}):
        applied = apply_policy(model, cuda_policy(model, "fp16", layers))
        with applied.autocast():
            model(torch.randn(8, 64, device="cuda"))
        applied.remove()
    assert seen == [torch.float32, torch.float16]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "fp16_pure"])
def test_cudnn_recurrent_layers_train_in_every_precision(precision: Precision) -> None:
    model = nn.Sequential(nn.LSTM(8, 16, batch_first=True)).cuda()
    applied = apply_policy(model, cuda_policy(model, "bf16", {"0": precision}))
    out, state = model(torch.randn(2, 5, 8, device="cuda"))
    out.sum().backward()
    assert out.dtype == state[0].dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())
    applied.remove()


def test_eval_of_an_encoder_gives_trains_dtype_and_values() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), 2).cuda()
    idle = tuple(f"layers.{i}.self_attn.out_proj" for i in range(2))
    applied = apply_policy(model, cuda_policy(model, "fp32", {"layers.0.linear1": "bf16"}, idle=idle))
    x = torch.randn(2, 6, 64, device="cuda")
    with torch.no_grad():
        outputs = [model.train(training)(x) for training in (True, False)]
    assert torch.equal(*outputs)
    applied.remove()


def test_fused_optimizers_report_skips_and_clip_after_unscale() -> None:
    model = Net().cuda()
    applied = apply_policy(model, cuda_policy(model, "fp16"))
    scaler, optimizer = applied.grad_scaler(), torch.optim.AdamW(model.parameters(), fused=True)
    answers = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with applied.autocast():
            loss = model(X.cuda()).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        answers.append(applied.step_was_skipped)
    assert answers == [False, True, False]
    applied.remove()


def test_channels_last_and_flags_reach_cudnn_and_are_restored() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).cuda()
    backend = Backend(channels_last=True, tf32=True, cudnn_benchmark=True, fp16_accumulation=True)
    applied = apply_policy(model, cuda_policy(model, "fp16", pad={"0": 8}, backend=backend))
    assert torch.backends.cuda.matmul.allow_tf32
    y = model(torch.randn(2, 3, 8, 8, device="cuda"))
    assert y.is_contiguous(memory_format=torch.channels_last)
    applied.remove()
    assert model[0].weight.is_contiguous()


class Classifier(nn.Module):
    """Dropout-free, with BatchNorm, so that graphs must update running statistics too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).flatten(1))


def train_classifier(
    execution: str, *, steps: int = 6, accumulation: int = 2, late: bool = False
) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Classifier().cuda()
    batch = Batch(effective=16 * accumulation, micro=16, accumulation_steps=accumulation)
    applied = apply_policy(model, cuda_policy(model, "fp32", {"head": "bf16"}, execution=execution, batch=batch))
    train_model, optimizer = applied.compiled(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator, losses, kept = torch.Generator().manual_seed(1), [], []
    for step in range(steps):
        size = 5 if step == steps - 1 else 16  # a short last batch
        pending = []
        for _ in range(accumulation):
            x, y = torch.randn(size, 3, 8, 8, generator=generator).cuda(), torch.randint(10, (size,), generator=generator).cuda()
            with applied.autocast():
                loss = F.cross_entropy(train_model(x), y) / accumulation
            pending.append(loss)
            if not late:
                loss.backward()
            kept.append(loss.detach())
        if late:
            sum(pending).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            model.eval()
            with torch.no_grad(), applied.autocast():
                predictions = [train_model(torch.ones(16, 3, 8, 8, device="cuda") * i) for i in range(3)]
            losses += [float(p.abs().mean()) for p in predictions]
            model.train()
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses += [float(loss) for loss in kept]
    applied.remove()
    return losses, model


@pytest.mark.parametrize("late", [False, True], ids=["backward each", "one backward for all"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_cuda_graphs_give_eagers_losses_with_accumulation_evaluation_and_a_short_batch(accumulation: int, late: bool) -> None:
    eager, model = train_classifier("eager", accumulation=accumulation, late=late)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile_cudagraphs.*")
        graphed, twin = train_classifier("compile_cudagraphs", accumulation=accumulation, late=late)
    assert graphed == pytest.approx(eager, rel=0.03, abs=0.03)
    torch.testing.assert_close(twin.body[1].running_mean, model.body[1].running_mean, rtol=0.03, atol=0.03)


def test_compiling_whole_on_cuda_gives_finite_gradients_in_islands() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    islands: dict[str, Precision] = {"first": "fp32", "second": "fp16_pure", "second.norm": "bf16"}
    applied = apply_policy(model, cuda_policy(model, "fp16", islands, pad={"stem": 8, "head": 8}))
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        with applied.autocast():
            loss = run(X.cuda()).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(value.isfinite().all() for value in results[1])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0.01, atol=0.01)
    applied.remove()


@pytest.mark.parametrize("default", ["fp16", "bf16", "fp16_pure", "bf16_pure"])
def test_weights_cast_in_one_pass_give_the_numbers_of_layers_that_cast_their_own(default: Precision) -> None:
    def trained(weights: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net().cuda()
        applied = apply_policy(model, cuda_policy(model, default, {"first": "fp32"}, weights=weights))
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), applied.grad_scaler()
        losses = []
        for _ in range(4):
            with applied.autocast():
                losses.append(model(X.cuda()).float().square().mean())
            scaler.scale(losses[-1]).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        applied.remove()
        return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(trained("fp32"), trained("half_with_masters"), strict=True))


def test_a_graphed_model_casts_layer_by_layer_and_its_outputs_stay_half_where_the_policy_says_so() -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    eager = copy.deepcopy(model)
    settings: dict[str, Any] = {"weights": "half_with_masters", "outputs": "computed"}
    applied = apply_policy(model, cuda_policy(model, "bf16", execution="compile_cudagraphs", **settings))
    plain = apply_policy(eager, cuda_policy(eager, "bf16", **settings))
    call = applied.compiled()
    for _ in range(4):
        with applied.autocast():
            y = call(X.cuda())
        y.float().square().mean().backward()
    for _ in range(4):
        with plain.autocast():
            z = eager(X.cuda())
        z.float().square().mean().backward()
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y, z, rtol=0.03, atol=0.03)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.05 * float(theirs.grad.abs().max()) + 1e-4)
    plain.remove()
    applied.remove()


class Scaled(nn.Module):
    """Multiplies by a float buffer and keeps a running mean in another."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x) @ torch.diag(self.scale)
        with torch.no_grad():
            self.mean.mul_(0.999).add_(y.mean(0), alpha=0.001)
        return y


@pytest.mark.parametrize("default", ["fp16_pure", "bf16_pure"])
def test_a_float_buffer_is_read_in_half_and_written_in_float32(default: Precision) -> None:
    torch.manual_seed(0)
    model = Scaled().cuda()
    reference = copy.deepcopy(model)
    applied = apply_policy(model, cuda_policy(model, default))
    for _ in range(20):
        with applied.autocast():
            y = model(torch.ones(4, 8, device="cuda"))
        reference(torch.ones(4, 8, device="cuda"))
    y.sum().backward()
    assert model.mean.dtype == torch.float32
    torch.testing.assert_close(model.mean, reference.mean, rtol=0.02, atol=1e-5)
    applied.remove()


def test_the_loss_scale_stays_under_its_cap_on_the_device() -> None:
    model = nn.Linear(5, 1).cuda()
    applied = apply_policy(model, cuda_policy(model, "fp16", loss_scale=LossScale(init=2.0**20, growth_interval=1)))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-6), applied.grad_scaler()
    for _ in range(30):
        with applied.autocast():
            loss = model(torch.randn(2, 5, device="cuda")).square().mean() * 1e-9
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() <= 2.0**24
    applied.remove()
