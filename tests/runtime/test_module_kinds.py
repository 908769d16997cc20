"""Modules of unusual kinds keep working with a precision of their own."""

from __future__ import annotations

import abc
import copy
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.nn.functional as F
from runtime_policies import HALF, Net, policy_for
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from autoprec.errors import PolicyError
from autoprec.policy import PRECISIONS, Precision
from autoprec.runtime import apply_policy

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated.*:FutureWarning")
PURE: list[Precision] = ["fp16_pure", "bf16_pure"]
X = torch.linspace(-1, 1, 28).reshape(4, 7)
Item = TypeVar("Item")


def other(precision: Precision) -> Precision:
    """A default beside which the precision is an exception."""
    return "bf16" if precision == "fp32" else "fp32"


class AbstractFirst(abc.ABC, nn.Module):
    @abc.abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Concrete(AbstractFirst):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class GenericFirst(Generic[Item], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


REGISTRY: dict[str, type] = {}


class Registering(type):
    def __new__(cls, name: str, bases: Any, namespace: Any) -> Any:
        if name in REGISTRY:
            raise TypeError(f"duplicate class {name}")
        REGISTRY[name] = super().__new__(cls, name, bases, namespace)
        return REGISTRY[name]


class Registered(nn.Module, metaclass=Registering):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", [Concrete, GenericFirst, Registered])
def test_bases_before_module_and_metaclasses_that_register_take_an_island(kind: Any, precision: Precision) -> None:
    model = nn.Sequential(kind())
    expected = model(X)
    applied = apply_policy(model, policy_for(model, other(precision), {"0": precision}))
    y = model(X)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    assert isinstance(model[0], kind)
    assert not isinstance(kind(), type(model[0]))
    assert torch.equal(copy.deepcopy(model)(X), y)
    assert list(REGISTRY.values()) == [Registered]
    applied.remove()
    assert type(model[0]) is kind


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parametrization_registered_after_the_policy_works_and_comes_off_before_or_after_remove(precision: Precision) -> None:
    for before in (True, False):
        model = Net()
        plain, classes = model(X), [type(module) for module in model.modules()]
        applied = apply_policy(model, policy_for(model, "fp32", {"first": precision}))
        for layer in (model.stem, model.first.fc):
            parametrize.register_parametrization(layer, "weight", Doubled())
        y = model(X)
        y.sum().backward()
        assert y.dtype == torch.float32
        assert not torch.allclose(y, plain, rtol=0.05, atol=0.05)
        if not before:
            applied.remove()
        for layer in (model.stem, model.first.fc):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        torch.testing.assert_close(model(X), plain, rtol=0.05, atol=0.05)
        applied.remove()
        assert [type(module) for module in model.modules()] == classes
        assert torch.equal(model(X), plain)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parametrization_from_before_the_policy_can_be_removed_under_it(precision: Precision) -> None:
    model = Net()
    parametrizations.weight_norm(model.first.fc)
    parametrizations.weight_norm(model.stem)
    plain = model(X)
    applied = apply_policy(model, policy_for(model, other(precision), {"first": precision, "stem": precision}))
    parametrize.remove_parametrizations(model.first.fc, "weight")
    torch.testing.assert_close(model(X), plain, rtol=0.05, atol=0.05)
    parametrized = type(model.stem)
    applied.remove()
    assert type(model.first.fc) is nn.Linear
    assert type(model.stem) is not parametrized
    torch.testing.assert_close(model(X), plain)
    parametrize.remove_parametrizations(model.stem, "weight")
    assert type(model.stem) is nn.Linear


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scripting_an_applied_model_says_to_remove_the_policy_first(precision: Precision) -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, precision))
    with pytest.raises(PolicyError, match="TorchScript cannot compile this Net") as caught:
        torch.jit.script(model)
    assert "remove()" in caught.value.hint
    traced = torch.jit.trace(model, X, check_trace=False)
    torch.testing.assert_close(traced(X), model(X), rtol=0.02, atol=0.02)
    applied.remove()
    assert torch.equal(torch.jit.script(nn.Sequential(nn.Linear(7, 2)))(X).isfinite(), torch.ones(4, 2).bool())


def test_a_scripted_child_runs_under_autocast_and_is_refused_by_name_where_it_would_need_more() -> None:
    model = nn.Sequential(nn.Linear(7, 7), torch.jit.script(nn.Linear(7, 7)))
    applied = apply_policy(model, policy_for(model, "bf16"))
    with applied.autocast():
        assert model(X).dtype == torch.float32
    applied.remove()
    for default, layers in (("bf16_pure", {}), ("fp32", {"1": "bf16"})):
        with pytest.raises(PolicyError, match="'1' is a TorchScript module and would need the precision bf16"):
            apply_policy(model, policy_for(model, default, layers))  # type: ignore[arg-type]
        assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("precision", PRECISIONS)
def test_shapes_can_be_found_on_the_meta_device(precision: Precision) -> None:
    with torch.device("meta"):
        model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", {"first": precision}))
    with applied.autocast():
        y = model(X.to("meta"))
    assert (y.shape, y.dtype) == ((4, 5), torch.float32)
    applied.remove()


IDS, OFFSETS = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sparse_gradients_of_embeddings_pass_through_every_precision(precision: Precision) -> None:
    model = nn.ModuleDict({"one": nn.Embedding(5, 4, sparse=True), "bag": nn.EmbeddingBag(5, 4, mode="sum", sparse=True)})
    model.forward = lambda: (model["one"](IDS), model["bag"](IDS, OFFSETS, per_sample_weights=torch.full((4,), 0.5)))  # type: ignore[method-assign]
    applied = apply_policy(model, policy_for(model, "fp32", {"one": precision, "bag": precision}))
    one, bag = model()
    (one.sum() + bag.sum()).backward()
    assert one.dtype == bag.dtype == torch.float32
    for layer, expected in (("one", 2.0), ("bag", 1.0)):
        grad = model[layer].weight.grad
        assert grad.is_sparse
        assert grad.dtype == torch.float32
        assert grad.to_dense()[2, 0].item() == expected
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    optimizer.step()
    applied.remove()


@pytest.mark.parametrize("precision", PURE)
def test_an_embedding_that_renorms_its_weight_does_so_in_float32(precision: Precision) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    plain = copy.deepcopy(model)
    applied = apply_policy(model, policy_for(model, precision))
    y = model(IDS)
    assert torch.equal(y, plain(IDS).to(HALF[precision]).float())
    assert torch.equal(model[0].weight, plain[0].weight)
    applied.remove()


class Normalising(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[0].copy_(F.normalize(self.weight[0], dim=0))
        return super().forward(x)


@pytest.mark.parametrize("precision", PURE)
def test_what_forward_writes_into_a_parameter_reaches_it_and_the_rest_keeps_its_bits(precision: Precision) -> None:
    model = nn.Sequential(Normalising(7, 4))
    before = model[0].weight.detach().clone()
    applied = apply_policy(model, policy_for(model, precision))
    model(X).sum().backward()
    assert model[0].weight[0].norm().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(model[0].weight[1:], before[1:])
    applied.remove()


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(self.embed(ids)), self.embed.weight)


@pytest.mark.parametrize("where", ["root", "container"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_head_that_reads_its_embeddings_weight_computes_in_the_precision_around_it(precision: Precision, where: str) -> None:
    model: nn.Module = TiedByHand() if where == "root" else nn.Sequential(TiedByHand())
    plain = copy.deepcopy(model)
    applied = apply_policy(model, policy_for(model, precision))
    with applied.autocast():
        y = model(IDS)
    y.square().mean().backward()
    plain(IDS).square().mean().backward()
    torch.testing.assert_close(y, plain(IDS), rtol=0.05, atol=0.05)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.05)
    assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    applied.remove()
