"""Precision of single modules: what is cast, what comes out, and what stays as it was."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from typing import Any, NamedTuple, cast

import pytest
import torch
from runtime_policies import HALF, Block, Net, Spy, policy_for
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from autoprec.policy import PRECISIONS, Precision
from autoprec.runtime import apply_policy, remove_policy
from autoprec.runtime.classes import swap
from autoprec.runtime.islands import Island

X = torch.linspace(-1, 1, 28).reshape(4, 7)


class Batch(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


@dataclasses.dataclass
class Holder:
    x: torch.Tensor


def apply(model: nn.Module, default: Precision = "bf16", layers: dict[str, Precision] | None = None, **settings: Any) -> Any:
    return apply_policy(model, policy_for(model, default, layers, **settings))


def loss_and_grads(model: nn.Module, x: torch.Tensor = X) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_fp32_island_casts_half_inputs_wherever_they_are_and_leaves_other_types_alone() -> None:
    spy = Spy()
    swap(spy, Island(precision="fp32", outside="fp16"))
    half, brain = torch.ones(1, dtype=torch.half), torch.ones(1, dtype=torch.bfloat16)
    others = [torch.ones(1, dtype=t) for t in (torch.float64, torch.complex64, torch.int64, torch.bool)]
    out = spy(half, [Batch(half, [brain])], *others, mask={"a": half})
    assert out.dtype == torch.float32
    assert spy.seen == [torch.float32] * 3 + [torch.float64, torch.complex64, torch.int64, torch.bool] + [torch.float32]
    assert type(spy(Batch(half, [brain]))) is Batch
    assert spy(Holder(half)).x.dtype == torch.float32


@pytest.mark.parametrize("default", PRECISIONS)
def test_the_model_returns_float32_and_the_loss_is_near_fp32(default: Precision) -> None:
    torch.manual_seed(0)
    model = Net()
    expected, grads = loss_and_grads(model)
    applied = apply(model, default)
    with applied.autocast():
        loss, low = loss_and_grads(model)
    assert model(X).dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in low)
    # A product in bfloat16 (8 bits) or float16 (11 bits) is off by up to 2^-8 or 2^-11; a few add up.
    tolerance = {"fp32": 0.0, "fp16": 2**-8, "fp16_pure": 2**-8}.get(default, 2**-5)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    for mine, theirs in zip(low, grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
    applied.remove()


def test_an_all_fp32_policy_is_bitwise_the_plain_model_even_under_the_users_own_autocast() -> None:
    model = Net()
    loss, grads = loss_and_grads(model)
    applied = apply(model, "fp32")
    with applied.autocast():
        again, same = loss_and_grads(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(X), copy.deepcopy(model)(X))
        inside = model(X)
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))
    applied.remove()
    assert torch.equal(inside, model(X))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_pure", "bf16_pure"])
def test_an_island_computes_what_casting_by_hand_gives(precision: Precision) -> None:
    model = Net()
    applied = apply(model, "fp32", {"first": precision})
    reference = copy.deepcopy(model.first)
    remove_policy(reference)
    x = torch.randn(4, 8)
    if precision.endswith("_pure"):
        expected = reference.to(HALF[precision])(x.to(HALF[precision])).float()
    else:
        with torch.autocast("cpu", dtype=HALF[precision]):
            expected = reference(x).float()
    assert torch.equal(model.first(x), expected)
    applied.remove()


def test_pure_reads_and_writes_half_where_autocast_promotes() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Spy())
    applied = apply(model, "bf16", {"0": "bf16_pure"})
    with applied.autocast():
        model(torch.ones(2, 8))
    assert model[1].seen == [torch.bfloat16]
    assert model[0].weight.dtype == torch.float32
    applied.remove()


@pytest.mark.parametrize("ambient", [True, False])
def test_nested_exceptions_each_take_their_own_precision(ambient: bool) -> None:
    model = nn.Sequential(
        Spy(), nn.Sequential(nn.Linear(4, 4), Spy(), nn.Sequential(nn.Linear(4, 4), Spy()), nn.Linear(4, 4)), Spy()
    )
    applied = apply(model, "bf16", {"1": "fp32", "1.2": "bf16"})
    with applied.autocast() if ambient else torch.enable_grad():
        assert model(torch.ones(2, 4)).dtype == torch.float32
    assert model[1][1].seen == [torch.float32]
    assert model[1][2][1].seen == [torch.bfloat16]
    assert model[2].seen == [torch.float32]
    applied.remove()


def test_only_boundaries_are_swapped() -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": "fp32", "first.fc": "fp32", "head": "bf16"})
    assert [name for name, m in model.named_modules() if hasattr(type(m), "autoprec_island")] == ["", "first"]
    applied.remove()


def test_keys_identity_isinstance_and_signature_stay() -> None:
    model = Net()
    keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
    applied = apply(model, "fp16_pure", {"first": "fp32", "second.norm": "bf16_pure"}, pad={"head": 8})
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    assert isinstance(model.first.norm, nn.LayerNorm)
    assert type(model).__name__ == "Net"
    assert type(model.head).__qualname__ == "Linear"
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    Net().load_state_dict(model.state_dict())
    model.load_state_dict(Net().state_dict())
    applied.remove()


@pytest.mark.parametrize("default", PRECISIONS)
def test_a_deep_copy_computes_with_its_own_weights_and_keeps_the_policy(default: Precision) -> None:
    model = Net()
    applied = apply(model, default, {"first": "fp32", "second.norm": "bf16_pure"}, pad={"head": 8})
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(X).any()
    assert model(X).any()
    applied.remove()
    assert not twin(X).any(), "removing from the original leaves the copy alone"


def test_pickle_and_torch_save_carry_the_policy_and_own_weights() -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": "fp32", "second.norm": "bf16_pure"}, pad={"head": 8})
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(X), model(X))
        assert twin.first(torch.ones(1, 8).half()).dtype == torch.float32
        remove_policy(twin)
        assert type(twin) is Net
    applied.remove()


def test_an_averaged_copy_moves_and_computes_with_its_own_weights() -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": "fp32"})
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    before = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight.add_(1)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.head.weight.detach(), before + 0.5)
    assert not torch.equal(average(X), model(X))
    applied.remove()


@pytest.mark.parametrize("default", PRECISIONS)
def test_remove_is_exact_to_the_bit(default: Precision) -> None:
    model = Net()
    model.second.forward = lambda x: Block.forward(model.second, x) * 2  # a forward another tool put on the instance
    classes = [type(m) for m in model.modules()]
    state = [dict(m.__dict__) for m in model.modules()]
    output = model(X)
    applied = apply(model, default, {"first": "fp32", "first.norm": "bf16_pure", "second": "bf16"}, pad={"head": 8})
    model(X)
    applied.remove()
    applied.remove()
    assert [type(m) for m in model.modules()] == classes
    assert all(m.__dict__ == before for m, before in zip(model.modules(), state, strict=True))
    assert torch.equal(model(X), output)


def test_a_forward_wrapped_before_apply_runs_inside_the_island_and_comes_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen: list[torch.dtype] = []

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x

    model[0].forward = wrapped
    applied = apply(model, "bf16", {"0": "fp32"})
    model(torch.ones(1, 4).bfloat16())
    assert seen == [torch.float32]
    applied.remove()
    assert model[0].forward is wrapped


def test_a_bound_forward_kept_by_another_tool_is_plain_after_remove() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    applied = apply(model, "fp32", {"0": "bf16"})
    kept = model[0].forward
    model[0].forward = lambda x: kept(x)
    applied.remove()
    x = torch.randn(2, 4)
    assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


def test_the_users_hooks_run_as_before() -> None:
    model = Net()
    calls: list[Any] = []
    model.first.register_forward_pre_hook(lambda m, a: calls.append(("pre", a[0].dtype)))
    model.first.register_forward_hook(lambda m, a, out: calls.append(("post", out.dtype)))
    model.first.register_full_backward_hook(lambda m, g, h: calls.append(("back", h[0].dtype)))
    applied = apply(model, "bf16", {"first": "fp32"})
    with applied.autocast():
        loss_and_grads(model)
    assert calls == [("pre", torch.bfloat16), ("post", torch.float32), ("back", torch.float32)]
    applied.remove()


@pytest.mark.parametrize("norm", ["spectral", "weight", "old_spectral", "old_weight", "orthogonal"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_computed_weights_train_in_every_precision(norm: str, precision: Precision) -> None:
    make = {
        "spectral": parametrizations.spectral_norm,
        "weight": parametrizations.weight_norm,
        "orthogonal": parametrizations.orthogonal,
        "old_spectral": torch.nn.utils.spectral_norm,
        "old_weight": torch.nn.utils.weight_norm,
    }[norm]
    model = nn.Sequential(nn.Linear(6, 6), make(nn.Linear(6, 6)))
    x = torch.randn(3, 6)
    plain = copy.deepcopy(model) if not norm.startswith("old") else None
    applied = apply(model, "fp32", {"1": precision}, pad={"1": 8})
    y = model(x)
    y.square().sum().backward()
    assert y.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    if plain is not None:
        torch.testing.assert_close(y, plain(x), rtol=0.05, atol=0.05)
    applied.remove()
    assert model(x).dtype == torch.float32


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        assert grad.dtype == ctx.dtype
        return grad * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.fc(x))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_custom_autograd_function_gets_gradients_in_its_own_dtype(precision: Precision) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Custom(), nn.Linear(4, 4))
    applied = apply(model, "bf16", {"1": precision})
    with applied.autocast():
        _, grads = loss_and_grads(model, torch.ones(2, 4))
    assert len(grads) == 6
    applied.remove()


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("user's own")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_exception_in_forward_leaks_no_state(precision: Precision) -> None:
    model = nn.Sequential(Raises())
    weight = model[0].weight
    applied = apply(model, "bf16", {"0": precision})
    with pytest.raises(KeyError, match="user's own"):
        model(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")
    assert model[0].weight is weight
    applied.remove()


def test_no_grad_evaluation_and_training_in_one_autocast_block_give_every_gradient() -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": "fp32"})
    with applied.autocast():
        with torch.no_grad():
            model(X)
        loss = model(X).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    applied.remove()


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11),
    reason="the cache starts empty in each forward before torch 2.11",
)
def test_the_weight_cast_cache_serves_a_weight_used_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    applied = apply(model, "bf16")
    x = torch.ones(2, 4)

    def casts() -> int:
        with torch.profiler.profile() as profile, applied.autocast():
            model(x)
            model(x)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")

    # Two weights and two biases once; the input, and the output back to float32, twice.
    assert casts() == 4 + 2 * 2
    applied.remove()


def test_tied_weights_in_two_half_types_never_share_a_cached_cast() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["b"](model["a"](x))  # type: ignore[method-assign]
    applied = apply(model, "fp16", {"b": "bf16"})
    spy: list[torch.dtype] = []
    model["b"].register_forward_hook(lambda m, a, out: spy.append(out.dtype))
    with applied.autocast():
        model(torch.ones(1, 4))
    assert spy == [torch.bfloat16]
    applied.remove()


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tied_weights_stay_tied_and_float32_with_a_precision_for_each_user(precision: Precision) -> None:
    model = LanguageModel()
    count = len(list(model.parameters()))
    reference = copy.deepcopy(model)
    applied = apply(model, "bf16", {"embed": precision, "head": "fp32"}, pad={"head": 8})
    tokens = torch.tensor([1, 2, 3])
    with applied.autocast():
        y = model(tokens)
    y.square().mean().backward()
    reference(tokens).square().mean().backward()
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == count
    assert model.embed.weight.dtype == torch.float32
    torch.testing.assert_close(model.embed.weight.grad, reference.embed.weight.grad, rtol=0.05, atol=0.01)
    applied.remove()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_recurrent_layers_take_tensors_packed_sequences_and_carried_state(kind: Any, precision: Precision) -> None:
    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "rnn": kind(4, 8, batch_first=True)})
    rnn = model["rnn"]
    model.forward = lambda x, *state: rnn(model["fc"](x), *state)  # type: ignore[method-assign]
    applied = apply(model, "bf16", {"rnn": precision})
    x = torch.randn(2, 3, 4)
    with applied.autocast():
        out, state = model(x)
        half = torch.utils._pytree.tree_map(lambda t: t.bfloat16(), state)
        carried, _ = model(x, half)
        packed, _ = rnn(pack_padded_sequence(x.bfloat16(), [3, 2], batch_first=True))
    assert out.dtype == carried.dtype == torch.float32
    assert isinstance(packed, PackedSequence)
    assert precision != "fp32" or packed.data.dtype == torch.float32
    (out.sum() + carried.sum()).backward()
    assert all(p.grad is not None and p.dtype == torch.float32 for p in rnn.parameters())
    applied.remove()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_recurrent_cell_carries_its_state_from_step_to_step_beside_half_layers(kind: Any, precision: Precision) -> None:
    """pytorch/pytorch#42605: the cell checks the types of input and state itself."""
    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "cell": kind(4, 8)})

    def forward(x: torch.Tensor) -> torch.Tensor:
        state = None
        for part in x.unbind(1):
            state = model["cell"](model["fc"](part), state)
        return state[0] if isinstance(state, tuple) else cast(torch.Tensor, state)

    model.forward = forward  # type: ignore[method-assign]
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    expected = model(x)
    applied = apply(model, "bf16", {"cell": precision})
    with applied.autocast():
        y = model(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    applied.remove()


def test_carried_state_from_a_half_step_enters_an_fp32_island() -> None:
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 8, batch_first=True)})
    swap(model["rnn"], Island(precision="fp32", outside="bf16"))
    x, hidden = torch.randn(2, 3, 4).half(), torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    out, (h, c) = model["rnn"](x, (hidden, hidden))
    assert out.dtype == h.dtype == c.dtype == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("training", [True, False])
def test_attention_whose_projection_is_used_past_its_module(precision: Precision, training: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"attention": attention}).train(training)
    model.forward = lambda x: attention(x, x, x)[0]  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8)
    expected = model.forward(x)
    applied = apply(model, "fp32", {"attention": precision}, idle=("attention.out_proj",))
    out = model(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    assert attention.out_proj.weight.grad is not None
    applied.remove()


@pytest.mark.parametrize("default", PRECISIONS)
@pytest.mark.parametrize("width", [32, 28])  # heads of 8 and of 7: pytorch/pytorch#176559
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_encoder_gives_the_same_in_train_and_eval_with_a_padding_mask(default: Precision, width: int) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2)
    idle = tuple(f"layers.{i}.self_attn.out_proj" for i in range(2))
    x, mask = torch.randn(2, 5, width), torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    applied = apply(model, default, {"layers.0.linear1": "bf16" if default == "fp32" else "fp32"}, idle=idle)
    seen: list[torch.dtype] = []
    outputs = []
    for training in (True, False):
        model.train(training)
        spy = model.layers[0].linear1.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
        spy.remove()  # a hook left in place would switch the fast path off by itself
        with torch.no_grad(), applied.autocast():
            outputs.append(model(x, src_key_padding_mask=mask))
    assert [y.dtype for y in outputs] == [torch.float32] * 2
    assert torch.equal(outputs[0], outputs[1])
    assert torch.backends.mha.get_fastpath_enabled()
    applied.remove()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_running_statistics_stay_float32_and_right(precision: Precision, kind: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4) if kind == "batch" else nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    model, reference = nn.Sequential(norm), nn.Sequential(copy.deepcopy(norm))
    applied = apply(model, "bf16", {"0": precision})
    for _ in range(3):
        x = torch.randn(8, 4, 3, 3)
        with applied.autocast():
            model(x)
        reference(x)
    for name in ("running_mean", "running_var"):
        value = getattr(model[0], name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, getattr(reference[0], name), rtol=0.02, atol=0.02)
    assert model.eval()(x).isfinite().all()
    applied.remove()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_under_torch_func(precision: Precision) -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": precision})
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, values, (X,)).square().mean()

    grads = torch.func.grad(loss)(parameters)
    loss(parameters).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
    zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
    assert not torch.func.functional_call(model, zeros, (X,)).any()
    applied.remove()


def test_frozen_and_double_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[0].weight.requires_grad_(False)
    applied = apply(model, "fp32", {"0": "bf16_pure"})
    y = model[1](model[0](torch.ones(1, 4)).double())
    y.sum().backward()
    assert y.dtype == torch.float64
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    applied.remove()


def test_an_fp32_island_keeps_a_batch_from_overflowing_statistics_upstream() -> None:
    model = nn.Sequential(nn.Conv1d(3, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm1d(16))
    applied = apply(model, "fp16", {"0": "fp32"})
    with applied.autocast():
        model(torch.rand(2, 3, 10) * 300000)
    assert model[2].running_mean.isfinite().all()
    applied.remove()


def test_moving_the_model_after_apply_changes_the_device_that_is_asked() -> None:
    model = Net()
    applied = apply(model, "bf16", {"first": "fp32"})
    assert applied.device_type == "cpu"
    model.to("meta")
    assert applied.device_type == "meta"
    applied.remove()


def test_classes_are_shared_by_equal_islands_and_freed_with_the_last() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    island = Island(precision="fp32", outside="bf16")
    swap(a, island)
    swap(b, island)
    assert type(a) is type(b)
    registered = nn.Linear.__subclasses__()
    assert type(a) in registered


def test_a_registry_of_subclasses_does_not_see_the_swapped_class() -> None:
    registered: list[str] = []

    class Registered(nn.Module):
        def __init_subclass__(cls) -> None:
            registered.append(cls.__name__)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    swap(Registered(), Island(precision="fp32", outside="bf16"))
    assert registered == []


class Squares(nn.Module):
    """Squares of what a Linear gives, as a root of their mean: 300 squared is over fp16's 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        nn.init.constant_(self.inp.weight, 40.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        return (h * h).mean(dim=-1, keepdim=True).sqrt()


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(dim=-1, keepdim=True).sqrt()


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
@pytest.mark.parametrize("low", ["fp16", "fp16_pure"])
def test_a_bf16_island_among_fp16_layers_has_the_range_of_bf16(precision: Precision, low: Precision) -> None:
    x = torch.ones(2, 8)
    alone = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(1, 1))
    nn.init.constant_(alone[0].weight, 40.0)
    container = nn.Sequential(nn.Linear(8, 8), Squares(), nn.Linear(1, 1))
    nn.init.constant_(container[0].weight, 1.0)
    for model, guilty, harmless in ((alone, "1", "0"), (container, "1", "1.inp")):
        exact = model(x)
        low_everywhere = apply_policy(model, policy_for(model, "fp16", {harmless: "fp16_pure"} if low == "fp16_pure" else {}))
        assert not torch.isfinite(model(x)).all(), "the hazard is real"
        low_everywhere.remove()
        applied = apply_policy(model, policy_for(model, "fp16", {guilty: precision, harmless: low}))
        torch.testing.assert_close(model(x), exact, rtol=0.02, atol=0.1)
        model(x).sum().backward()
        assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        applied.remove()
