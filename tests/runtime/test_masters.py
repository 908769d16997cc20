"""Half copies of all weights made in one pass: the same numbers, and nothing else about the model changes."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from runtime_policies import Block, Net, policy_for
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.policy import PRECISIONS, Precision
from autoprec.runtime import apply_policy

LOW: tuple[Precision, ...] = ("fp16", "bf16", "fp16_pure", "bf16_pure")


class Seen(nn.Module):
    """Notes the dtype of its Linear's weight while forward runs; shares the weight with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.dtypes: list[torch.dtype] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.dtypes += [self.head.weight.dtype, self.norm.weight.dtype, self.embed.weight.dtype]
        return self.head(self.norm(self.embed(ids)))


class Mixed(nn.Module):
    """Convolution, batch norm, attention, LSTM, a spectral norm and a Linear that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.tight = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.frozen(self.tight(self.lstm(x)[0])))


def trained(build: Any, batch: torch.Tensor, default: Precision, weights: str, **settings: Any) -> list[torch.Tensor]:
    """Loss and gradients of two micro-batches, the weights after a step, and the loss then."""
    torch.manual_seed(0)
    model = build()
    applied = apply_policy(model, policy_for(model, default, weights=weights, **settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with applied.autocast():
            losses.append(model(batch).float().square().mean())
        losses[-1].backward()
        if step == 1:
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
    applied.remove()
    return [torch.stack(losses).detach(), *gradients, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("default", LOW)
@pytest.mark.parametrize(
    ("build", "shape", "idle"), [(Net, (4, 7), ()), (Mixed, (4, 3, 6), ("attention.out_proj",))], ids=["net", "mixed"]
)
def test_losses_gradients_and_weights_are_those_of_layers_that_cast_their_own(
    build: Any, shape: tuple[int, ...], idle: tuple[str, ...], default: Precision
) -> None:
    batch = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
    own = trained(build, batch, default, "fp32", idle=idle)
    once = trained(build, batch, default, "half_with_masters", idle=idle)
    assert len(own) == len(once) > 3
    assert all(torch.equal(a, b) for a, b in zip(own, once, strict=True))


@pytest.mark.parametrize(
    ("default", "exceptions", "head", "norm"),
    [
        ("bf16", {}, torch.bfloat16, torch.float32),
        ("bf16_pure", {}, torch.bfloat16, torch.bfloat16),
        ("fp16", {"head": "fp32"}, torch.float32, torch.float32),
        ("fp16", {"head": "bf16", "norm": "fp16_pure"}, torch.bfloat16, torch.float16),
        ("fp32", {"head": "bf16"}, torch.bfloat16, torch.float32),
        ("fp32", {}, torch.float32, torch.float32),
    ],
)
def test_what_autocast_or_the_island_would_cast_is_half_while_forward_runs(
    default: Precision, exceptions: dict[str, Precision], head: torch.dtype, norm: torch.dtype
) -> None:
    model = Seen()
    applied = apply_policy(model, policy_for(model, default, exceptions, weights="half_with_masters"))
    before = list(model.parameters())
    with applied.autocast():
        model(torch.arange(4))
    embed = head if default == "bf16_pure" else torch.float32
    applied.remove()
    assert model.dtypes == [head, norm, embed]
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(before, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight


def test_a_layer_with_a_hook_keeps_its_master() -> None:
    model = Net()
    seen: list[torch.dtype] = []
    model.stem.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    applied = apply_policy(model, policy_for(model, "bf16", weights="half_with_masters"))
    model(torch.ones(2, 7))
    applied.remove()
    assert seen == [torch.float32]


def test_masters_are_back_after_an_exception() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(str(self.fc.weight.dtype))

    model = Breaks()
    weight = model.fc.weight
    applied = apply_policy(model, policy_for(model, "bf16", weights="half_with_masters"))
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        model(torch.ones(2, 4))
    applied.remove()
    assert model.fc.weight is weight


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), Block()
        self.mode = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.mode == "none":
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.mode == "reentrant")


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("default", LOW)
def test_a_recompute_after_forward_finds_the_masters_and_gives_the_same_gradients(mode: str, default: Precision) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    applied = apply_policy(model, policy_for(model, default, weights="half_with_masters"))
    gradients = []
    for model.mode in ("none", mode):
        model.zero_grad()
        with applied.autocast():
            loss = model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    applied.remove()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_second_derivative_goes_through_the_copies() -> None:
    def penalty(weights: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        applied = apply_policy(model, policy_for(model, "bf16", weights=weights))
        with applied.autocast():
            loss = model(torch.linspace(0, 1, 8).reshape(2, 4)).mean()
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in first).backward()
        applied.remove()
        return [p.grad for p in model.parameters() if p.grad is not None]

    own, once = penalty("fp32"), penalty("half_with_masters")
    assert len(own) == len(once) >= 3
    assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-6) for a, b in zip(own, once, strict=True))
    assert any(grad.abs().max() > 0 for grad in once)


def test_functional_calls_use_the_parameters_they_are_given() -> None:
    model = Seen()
    applied = apply_policy(model, policy_for(model, "bf16", weights="half_with_masters"))
    replaced = {name: parameter.detach() * 0 for name, parameter in model.named_parameters()}
    assert torch.func.functional_call(model, replaced, (torch.arange(4),)).abs().max() == 0

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (torch.arange(4),)).square().mean()

    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert torch.func.grad(loss)(values)["embed.weight"].abs().max() > 0
    applied.remove()


def test_a_copy_and_a_loaded_model_compute_with_their_own_weights() -> None:
    torch.manual_seed(0)
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", weights="half_with_masters"))
    x = torch.ones(2, 7)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(twin(x), expected) and torch.equal(loaded(x), expected)
    assert model(x).abs().max() == 0
    applied.remove()
    assert type(model) is Net


@pytest.mark.parametrize("precision", PRECISIONS)
def test_outputs_come_back_as_computed_or_in_float32_as_the_policy_says(precision: Precision) -> None:
    low = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision.removesuffix("_pure")]
    for outputs, expected in (("fp32", torch.float32), ("computed", low)):
        model = Net()
        applied = apply_policy(model, policy_for(model, precision, outputs=outputs))
        assert model(torch.ones(2, 7)).dtype == expected
        applied.remove()


class Renormed(nn.Module):
    """Writes its own weight in forward, and holds an embedding that renormalises its rows and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.sparse = nn.Embedding(6, 4, max_norm=0.5), nn.Embedding(6, 4, sparse=True)
        self.scale, self.head = nn.Parameter(torch.full((4,), 1.0001)), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale[0] = 2.0
        return self.head((self.rows(ids) + self.sparse(ids)) * self.scale)


def test_what_forward_writes_into_a_weight_reaches_the_master() -> None:
    torch.manual_seed(0)
    model = Renormed()
    applied = apply_policy(model, policy_for(model, "bf16_pure", weights="half_with_masters"))
    before = model.scale.detach().clone()
    model(torch.arange(6)).sum().backward()
    applied.remove()
    assert model.scale[0] == 2.0
    assert torch.equal(model.scale[1:], before[1:])  # not rounded to bf16 and back
    assert model.rows.weight.norm(dim=1).max() <= 0.5 + 1e-3
    assert model.sparse.weight.grad is not None and model.sparse.weight.grad.is_sparse
