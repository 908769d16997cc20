"""Floating buffers in pure half precision: read in half, written in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runtime_policies import HALF, policy_for
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.policy import Precision
from autoprec.runtime import apply_policy
from autoprec.runtime.source_reading import assigned_names, attribute_chains, may_write_in_place

PURE: list[Precision] = ["fp16_pure", "bf16_pure"]
X = torch.linspace(-1, 1, 12).reshape(3, 4)
SLOW = 1 - 1e-5  # rounds to 1 in both half types


class Buffered(nn.Module):
    """A Linear, and a buffer that ``step`` does something with."""

    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.step = nn.Linear(4, 4), step
        self.register_buffer("state", torch.linspace(0.5, 2, 16).reshape(4, 4))
        self.register_buffer("count", torch.tensor(4096.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, self.fc(x))


def multiply(self: Any, y: torch.Tensor) -> torch.Tensor:
    return F.linear(y, self.state) @ self.state.t() + self.state[0].view(4) * torch.cat([self.state[:1], y])[0]


def average(self: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.state.mul_(SLOW)
    self.count += 1
    return y @ self.state


def average_by_data(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.state.data.mul_(SLOW).add_(y.detach().mean() * 0)
    self.count.add_(1)
    return y @ self.state


def interpolate(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.state.lerp_(torch.zeros_like(y[:1]).expand(4, 4), 1e-5)
    self.count[...] = self.count.item() + 1
    return y @ self.state


def cache(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.state[1:, :2].mul_(SLOW)
    self.state[0], self.state[1:, 2:] = self.state[0].float() * SLOW, self.state[1:, 2:].to(torch.float32) * SLOW
    torch.add(self.count, 1, out=self.count)
    return y @ self.state


class Replacing(Buffered):
    def __init__(self) -> None:
        super().__init__(lambda self, y: y)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state * SLOW
        self.count += 1
        return self.fc(x) * self.state[0]


def apply(model: nn.Module, precision: Precision, where: str) -> Any:
    # Among layers of its own half type: on leaving fp16 for bf16 a tensor is rounded once more.
    default, layers = (precision, {}) if where == "default" else (precision.removesuffix("_pure"), {"0": precision})
    return apply_policy(model, policy_for(model, default, layers))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["default", "exception"])
@pytest.mark.parametrize("precision", PURE)
def test_a_float_buffer_is_read_in_half_as_the_parameters_are(precision: Precision, where: str) -> None:
    model = nn.Sequential(Buffered(multiply))
    by_hand = copy.deepcopy(model).to(HALF[precision])
    before = model[0].state.clone()
    applied = apply(model, precision, where)
    with applied.autocast():
        y = model(X)
    assert torch.equal(y, by_hand(X.to(HALF[precision])).float())
    y.sum().backward()
    assert model[0].fc.weight.grad is not None
    assert type(model[0].state) is torch.Tensor
    assert torch.equal(model[0].state, before)
    assert model[0].state.dtype == torch.float32
    applied.remove()


@pytest.mark.parametrize("make", [average, average_by_data, interpolate, cache, None])
@pytest.mark.parametrize("precision", PURE)
def test_what_forward_writes_into_a_buffer_is_kept_in_float32(precision: Precision, make: Any) -> None:
    model = nn.Sequential(Replacing() if make is None else Buffered(make))
    before = model[0].state.clone()
    keys = list(model.state_dict())
    applied = apply(model, precision, "default")
    for _ in range(3):
        model(X).sum().backward()
    torch.testing.assert_close(model[0].state, before * SLOW**3, rtol=2e-7, atol=0)
    assert model[0].state.dtype == torch.float32
    assert model[0].count.item() == 4099.0, "float16 would count 4096, 4096, 4096"
    assert list(model.state_dict()) == keys
    copy.deepcopy(model)(X)
    applied.remove()


class OwnBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.var, self.weight, self.bias, training=self.training)


@pytest.mark.parametrize("precision", PURE)
def test_running_statistics_of_a_norm_written_by_hand_stay_float32(precision: Precision) -> None:
    model, reference = nn.Sequential(OwnBatchNorm()), nn.Sequential(OwnBatchNorm())
    applied = apply(model, precision, "default")
    model(X).sum().backward()
    reference(X)
    torch.testing.assert_close(model[0].var, reference[0].var, rtol=1e-2, atol=1e-3)
    assert model[0].var.dtype == torch.float32
    applied.remove()


class Table(nn.Module):
    """A rotary table's kind: nothing but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.cos()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table, self.reentrant = nn.Linear(4, 4), Table(), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return self.table(y) if self.reentrant is None else checkpoint(self.table, y, use_reentrant=self.reentrant)


@pytest.mark.parametrize("precision", PURE)
def test_a_module_of_buffers_alone_recomputes_in_half(precision: Precision) -> None:
    model = Checkpointed()
    applied = apply_policy(model, policy_for(model, precision))
    seen: list[torch.dtype] = []
    model.table.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    grads = []
    for model.reentrant in (None, False, True):
        model.zero_grad()
        model(X).square().mean().backward()
        grads.append(model.fc.weight.grad.clone())
    assert set(seen) == {HALF[precision]}
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    applied.remove()


class ReadOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), Table()
        self.register_buffer("projection", torch.linspace(0, 1, 16).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(self.fc(x) @ self.projection)


class Counting(ReadOnly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.projection.mul_(SLOW)
        return self.fc(x) * self.projection[0]


class Delegating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.updater = Updater()
        self.register_buffer("projection", torch.linspace(0.5, 2, 16).reshape(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.updater(self.projection, x)


class Updater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.mul_(SLOW)
        return self.fc(x) * state[0]


@pytest.mark.parametrize("kind", [ReadOnly, Counting, Delegating])
@pytest.mark.parametrize("precision", PURE)
def test_buffers_compile_whole_and_a_written_one_stays_exact(precision: Precision, kind: Any) -> None:
    torch._dynamo.reset()
    model = kind()
    before = model.projection.clone()
    applied = apply_policy(model, policy_for(model, precision))
    expected = model(X)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(X)
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(model.projection, before * (1 if kind is ReadOnly else SLOW**2), rtol=2e-7, atol=0)
    applied.remove()
    torch._dynamo.reset()


@pytest.mark.parametrize("precision", PURE)
def test_buffers_work_under_inference_mode_fake_tensors_and_torch_func(precision: Precision) -> None:
    model = ReadOnly()
    applied = apply_policy(model, policy_for(model, precision))
    expected = model(X)
    with torch.inference_mode():
        assert torch.equal(model(X), expected)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    stacked = {name: torch.stack([value, value]) for name, value in state.items()}
    both = torch.func.vmap(lambda values: torch.func.functional_call(model, values, (X,)))(stacked)
    torch.testing.assert_close(both[1], expected, rtol=0.02, atol=0.02)
    assert torch.func.jacrev(model)(X).shape == (3, 4, 3, 4)
    applied.remove()


@pytest.mark.parametrize("precision", PURE)
def test_a_child_that_is_given_a_buffer_writes_the_buffer_itself(precision: Precision) -> None:
    model = Delegating()
    before = model.projection.clone()
    applied = apply_policy(model, policy_for(model, precision))
    model(X)
    torch.testing.assert_close(model.projection, before * SLOW, rtol=1e-7, atol=0)
    applied.remove()


def slow_down(state: torch.Tensor) -> None:
    state.mul_(SLOW)


class Helped(ReadOnly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow_down(self.projection)
        return self.fc(x) * self.projection[0]


def test_writes_are_found_in_functions_that_a_method_calls_and_reading_alone_is_none() -> None:
    assert may_write_in_place(Helped)
    assert may_write_in_place(Counting)
    assert not may_write_in_place(ReadOnly)
    assert not may_write_in_place(nn.Linear)
    assert assigned_names(Replacing) == {"state"}
    assert ("fc", "weight") in attribute_chains(Reading)


class Reading(ReadOnly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.fc.weight.t())
