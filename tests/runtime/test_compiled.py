"""Execution modes: no graph break, eager's losses, and a clear line where a mode cannot be had."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime_policies import Net, policy_for
from torch import nn
from torch.nn.utils import parametrizations

from autoprec.policy import PRECISIONS, Precision
from autoprec.runtime import apply_policy
from autoprec.runtime.compiled import GraphedModel

X = torch.linspace(-1, 1, 28).reshape(4, 7)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_newer_compiler = pytest.mark.skipif(TORCH < (2, 9), reason="torch.compile before 2.9 cannot follow this whole")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ISLANDS: list[dict[str, Precision]] = [
    {},
    {"first": "fp32", "first.fc": "bf16"},
    {"first": "bf16_pure", "second.norm": "fp16_pure", "head": "fp32"},
]


@pytest.mark.parametrize("default", PRECISIONS)
@pytest.mark.parametrize("layers", ISLANDS, ids=str)
def test_an_applied_model_compiles_whole_and_gives_eagers_loss_and_gradients(default: Precision, layers: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    applied = apply_policy(model, policy_for(model, default, layers, pad={"stem": 8, "head": 8}))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        with applied.autocast():
            loss = run(X).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=0.02, atol=5e-3)
    assert all(p is not None and p.isfinite().all() for p in results[1])
    assert torch._dynamo.explain(model)(X).graph_break_count == 0
    assert all(p.dtype == torch.float32 for p in model.parameters())
    applied.remove()


def test_inductor_gives_eagers_loss() -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", {"first": "fp32", "second.norm": "bf16_pure"}, pad={"head": 8}))
    with applied.autocast(), torch.no_grad():
        expected = model(X)
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(X), expected, rtol=0.02, atol=0.02)
    applied.remove()


@needs_newer_compiler
@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_parametrized_layers_compile_whole(make: Any, precision: Precision) -> None:
    model = nn.Sequential(make(nn.Linear(4, 4))).eval()
    applied = apply_policy(model, policy_for(model, "fp32", {"0": precision}))
    x = torch.ones(2, 4)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected, rtol=0.02, atol=0.02)
    applied.remove()


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, batch: dict[str, Any]) -> Any:
        y = self.fc(batch["x"])
        return Output(y, {"twice": (y * 2, [y])})


@needs_newer_compiler
def test_a_dataclass_output_keeps_its_type_under_fullgraph() -> None:
    model = Structured()
    applied = apply_policy(model, policy_for(model, "bf16"))
    out = torch.compile(model, fullgraph=True, backend="aot_eager")({"x": X})
    assert type(out) is Output
    assert out.logits.dtype == out.extra["twice"][1][0].dtype == torch.float32
    applied.remove()


def test_a_policy_applied_after_compile_takes_effect() -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(X)
    applied = apply_policy(compiled, policy_for(model, "bf16"))
    torch.testing.assert_close(compiled(X), model(X), rtol=0.02, atol=0.02)
    assert compiled(X).dtype == torch.float32
    low = model(X)
    applied.remove()
    assert not torch.equal(model(X), low)


def test_many_applied_models_of_one_class_all_compile() -> None:
    counted: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counted.append(1)
        return graph.forward

    for _ in range(12):
        model = Net()
        applied = apply_policy(model, policy_for(model, "bf16"))
        torch.compile(model, backend=backend)(X)
        applied.remove()
    assert len(counted) == 12, "torch.compile gave up and ran eager"


@pytest.mark.parametrize(("execution", "kind"), [("eager", Net), ("compile", nn.Module), ("compile_cudagraphs", GraphedModel)])
def test_compiled_gives_the_model_to_call(execution: Any, kind: type) -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", execution=execution))
    assert isinstance(applied.compiled(), kind)
    assert (applied.compiled() is model) is (execution == "eager")
    wrapper = nn.Sequential(model)
    assert execution != "eager" or applied.compiled(wrapper) is wrapper
    applied.remove()


def graphed(model: nn.Module, run: Any = None) -> GraphedModel:
    """A graphed model whose compilations are replaced by plain calls, so that only the handling around them is tested."""
    instance = GraphedModel(model)
    instance._graphed = instance._dynamic = instance._ungraphed = run or model
    return instance


def test_cudagraphs_on_a_cpu_say_so_in_one_line_and_train_like_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_whole = torch.compile
    # Inductor would take a minute for all these shapes; what is tested is the handling around it.
    monkeypatch.setattr(torch, "compile", lambda m, mode="", dynamic=None: compile_whole(m, backend="aot_eager", dynamic=dynamic))
    torch.manual_seed(0)
    model = Net()
    applied = apply_policy(model, policy_for(model, "bf16", {"first": "fp32"}, execution="compile_cudagraphs"))
    train_model = applied.compiled()
    batches = [X, X[:3], X, X[:2], X[:1]]  # short and changing last batches
    losses: list[list[float]] = []
    for run in (model, train_model):
        twin_losses = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x in batches:
                model.zero_grad()
                with applied.autocast():
                    loss = run(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    run(x)
                twin_losses.append(loss.item())
        losses.append(twin_losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert [str(w.message) for w in caught if "compile_cudagraphs" in str(w.message)] == [
        "execution 'compile_cudagraphs': CUDA graphs need a CUDA device; the model runs compiled without them."
    ]
    applied.remove()


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_model_that_cannot_be_compiled_falls_back_to_eager_with_one_line() -> None:
    model = Refusing()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise torch._dynamo.exc.InternalTorchDynamoError("no such thing\nsecond line")

    run = graphed(model, refuse)
    with pytest.warns(
        UserWarning, match=r"could not be compiled \(InternalTorchDynamoError: no such thing\); it runs eager"
    ) as caught:
        results = [run(X) for _ in range(3)]
    assert len(caught) == 1
    assert all(torch.equal(y, model(X)) for y in results)


def test_a_mistake_in_the_model_raises_as_itself_and_out_of_memory_is_not_hidden() -> None:
    run = graphed(Refusing())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(torch.ones(2, 3))

    def exhausted(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run._graphed = exhausted
    with pytest.raises(torch.OutOfMemoryError):
        run(X)
    assert run.captured


def test_gradients_are_moved_out_of_graph_memory_once_a_window_and_accumulate() -> None:
    model = Refusing()
    run = graphed(model)
    addresses, sums = [], []
    for _ in range(3):
        run(X).sum().backward()
        addresses.append(model.fc.bias.grad.data_ptr())
        sums.append(model.fc.bias.grad[0].item())
    assert sums == [4.0, 8.0, 12.0]
    # The first backward's memory is the graph's; the second found a copy; the third the same copy.
    assert addresses[0] != addresses[1] == addresses[2]


def test_small_outputs_are_copied_out_of_graph_memory() -> None:
    kept: list[torch.Tensor] = []

    def replay(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 1)
        return kept[-1]

    run = graphed(Refusing(), replay)
    with torch.no_grad():
        y = run(X)
    kept[0].zero_()
    assert torch.equal(y, X)


def test_a_forward_beside_one_that_waits_for_its_backward_runs_without_a_graph() -> None:
    model = Refusing()
    run = graphed(model)
    calls: list[str] = []
    run._graphed = lambda x: (calls.append("graph"), model(x) * 1)[1]  # type: ignore[func-returns-value]
    run._ungraphed = lambda x: (calls.append("plain"), model(x))[1]  # type: ignore[func-returns-value]
    first, second = run(X), run(X)
    (first.sum() + second.sum()).backward()
    del first, second
    run(X).sum().backward()
    run(X)  # dropped without a backward
    losses = [run(X).sum() for _ in range(2)]  # outputs dropped, graphs kept
    sum(losses).backward()
    run(X)
    assert calls == ["graph", "plain", "graph", "graph", "graph", "plain", "graph"]


class Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 3)

    def forward(self, *, batch: Any) -> Any:
        y = self.fc(batch["x"].logits)
        return collections.OrderedDict(y=y, more=collections.defaultdict(list, z=[Output(y, {})]))


@needs_newer_compiler
@pytest.mark.parametrize("default", PRECISIONS)
def test_ordered_and_default_dicts_and_dataclasses_inside_compile_whole(default: Precision) -> None:
    model = nn.ModuleDict({"inner": Mapping()})
    model.forward = lambda **batch: model["inner"](batch=batch)  # type: ignore[method-assign]
    applied = apply_policy(model, policy_for(model, "bf16" if default == "fp32" else "fp32", {"inner": default}))
    out = torch.compile(model["inner"], fullgraph=True, backend="aot_eager")(batch={"x": Output(X, {})})
    assert type(out) is collections.OrderedDict
    assert type(out["more"]) is collections.defaultdict
    assert type(out["more"]["z"][0]) is Output
    torch.testing.assert_close(out["y"], model(x=Output(X, {}))["y"], rtol=0.02, atol=0.02)
    applied.remove()
