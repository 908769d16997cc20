"""The profile: each kind of hazard is found in the layer that has it, and harmless models are left alone."""

from __future__ import annotations

import gc

import profiled
import pytest
import torch
import torch.nn.functional as F
from profiled import WIDTH, Net, hard, most_sensitive, profile_of, stands_for_4090d, workload_of
from torch import nn

from autoprec.bench.look import trace_workload
from autoprec.bench.profile import profile, rescore, uniform_policy
from autoprec.policy import PRECISIONS, LayerSetting

FP16 = ("fp16", "fp16_pure")
# What rounding alone leaves in bf16, squared and with room: (2^-8)^2 = 1.5e-5 for each of a few parts.
HARMLESS = 1e-3


class Wide(nn.Linear):
    """Its output passes 65504."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        with torch.no_grad():
            self.weight.mul_(3e6)


class HiddenSquare(nn.Module):
    """A square in the middle passes 65504; what comes out is small."""

    def forward(self, x):
        return torch.sqrt((3000 * x) * (3000 * x) + 1) / 3000


class OwnSoftplus(nn.Module):
    """log(1 + exp(x)) for x up to 30: exp overflows fp16, but stock autocast computes it in float32."""

    def forward(self, x):
        return torch.log(1 + torch.exp(10 * x))


class MeanBySum(nn.Module):
    def forward(self, x):
        return (x.square() + 200).repeat(1, 1024).view(-1, WIDTH, 1024).sum(-1) / 1024


class OnePassNorm(nn.Module):
    """E[x^2] - E[x]^2 of values around 300: the difference is lost in half precision, in bf16 too."""

    def forward(self, x):
        x = x + 300
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(((x * x).mean(-1, keepdim=True) - mean * mean).clamp_min(0) + 0.1)


class ClosedGate(nn.Linear):
    """A gate of 1e-8: fp16 makes it and its gradients zero."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        nn.init.constant_(self.bias, -18.5)

    def forward(self, x):
        return x + torch.sigmoid(super().forward(x))


class MaskedMean(nn.Module):
    """Fills with a constant that fp16 cannot hold, which raises there."""

    def forward(self, x):
        return torch.softmax(F.linear(x, torch.eye(WIDTH, dtype=x.dtype)).masked_fill(x > 1, -1e9), -1)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x.float(), dim=-1).abs().repeat(1, 2)[:, :WIDTH]


@pytest.mark.parametrize(
    ("hazard", "pinned", "also_sensitive"),
    [
        (Wide, ("fp16", "fp16_pure"), ()),
        (HiddenSquare, ("fp16", "fp16_pure"), ()),
        (OwnSoftplus, ("fp16_pure",), ()),
        (MeanBySum, ("fp16_pure",), ()),
        (OnePassNorm, ("fp16", "fp16_pure"), ("fp16", "bf16", "bf16_pure")),
        (ClosedGate, (), ("fp16", "fp16_pure")),
        (MaskedMean, ("fp16", "fp16_pure"), ()),
        (Spectrum, ("fp16", "bf16", "fp16_pure", "bf16_pure"), ()),
    ],
)
def test_a_hazard_is_found_in_its_layer_and_in_no_other(hazard, pinned, also_sensitive):
    layers = profile_of(hazard)
    for precision in PRECISIONS[1:]:
        found = hard(layers, precision)
        assert found <= ({"middle"} if precision in pinned else set()) | readers(hazard, precision)
        assert ("middle" in found) == (precision in pinned)
    for precision in also_sensitive:
        assert most_sensitive(layers, precision) == "middle"
        assert layers["middle"].sensitivity[precision] > 0.05
    for name in ("stem", "head"):
        assert all(layers[name].sensitivity[precision] < HARMLESS for precision in ("fp16", "bf16"))


def readers(hazard, precision):
    """In pure fp16 the norm behind an overflow would read it in fp16 too."""
    return {"calm"} if hazard is Wide and precision == "fp16_pure" else set()


def test_a_reader_of_an_overflow_is_pinned_only_where_it_would_cast_it():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.relu, self.scale = Wide(), nn.ReLU(), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.scale(self.relu(self.wide(x)))

    layers = profile_of(Chain)
    assert hard(layers, "fp16") == {"middle.wide"}
    assert {"middle.wide", "middle.relu"} <= hard(layers, "fp16_pure")


def test_a_head_whose_gradient_needs_another_loss_scale_is_pinned():
    class Micro(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1e-6

    def loss(model, batch):
        x, y = batch
        return 1e12 * F.mse_loss(model(x), 1e-6 * y)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.act, self.micro = nn.Linear(WIDTH, WIDTH), nn.Tanh(), Micro(WIDTH, 1)

        def forward(self, x):
            return self.micro(self.act(self.stem(x)))

    workload, target = workload_of(Two, loss=loss), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    layers = {layer.layer: layer for layer in profile(workload, target, look, FP16, trace=trace).layers}
    assert hard(layers, "fp16") == {"micro"}
    text = next(risk.text for risk in layers["micro"].risks if risk.hard)
    assert "gradients reach" in text and "loss scale" in text


def test_a_harmless_model_has_no_pins_and_only_rounding_errors():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act, self.drop, self.down = nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, WIDTH)

        def forward(self, x):
            return x + self.down(self.drop(self.act(self.up(x))))

    layers = profile_of(Block)
    for precision in PRECISIONS[1:]:
        assert hard(layers, precision) == set()
    for name, layer in layers.items():
        assert layer.sensitivity["fp32"] == 0.0
        assert 0 < layer.sensitivity["fp16"] < 1e-5, name
        assert layer.sensitivity["fp16"] < layer.sensitivity["bf16"] < HARMLESS, name


def test_a_bias_whose_gradient_is_zero_but_for_rounding_makes_no_layer_sensitive():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return self.norm(self.before(x))

    assert profile_of(Normed)["middle.before"].sensitivity["fp16"] < 1e-4


def test_dropout_in_a_low_pass_drops_what_the_float32_pass_dropped():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = F.dropout(x.unsqueeze(1).expand(-1, 4, -1), 0.5)
            return self.attention(x, x, x, need_weights=False)[0].mean(1)

    layers = profile_of(Dropped)
    assert all(layers[name].sensitivity["fp16"] < 1e-4 for name in layers)


def test_recurrent_and_checkpointed_layers_are_profiled_like_others():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.linear = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            out, (hidden, _) = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
            return torch.utils.checkpoint.checkpoint(self.linear, out[:, -1] + hidden[0], use_reentrant=False)

    layers = profile_of(Recurrent, ("fp16", "bf16"))
    assert {"middle", "middle.lstm", "middle.linear"} <= set(layers)
    for name in layers:
        assert hard(layers, "fp16") == set()
        assert 0 <= layers[name].sensitivity["fp16"] < 1e-4, name


def test_an_error_in_the_backward_pass_rules_the_precision_out_for_every_layer():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if grad.dtype != torch.float32:
                raise RuntimeError("no gradient in half")
            return grad

    class Picky(nn.Module):
        def forward(self, x):
            return Half.apply(x)

    layers = profile_of(Picky, ("fp16", "bf16_pure"))
    assert hard(layers, "fp16") == hard(layers, "bf16_pure") == set(layers)
    assert "no gradient in half" in layers["stem"].risks[0].text


def test_gradients_taken_inside_the_forward_pass_do_not_confuse_the_scores():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.requires_grad_()
            energy = self.net(x)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return energy + force.square().sum(1, keepdim=True)

    workload, target = workload_of(Energy), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    for layer in profile(workload, target, look, PRECISIONS, trace=trace).layers:
        assert max(layer.sensitivity.values()) < HARMLESS and not any(risk.hard for risk in layer.risks)


def test_sparse_gradients_are_profiled():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.head(self.table((x > 0).sum(1) % 8))

    workload = workload_of(Bag, build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    target = stands_for_4090d()
    look, trace = trace_workload(workload, target)
    layers = {layer.layer: layer for layer in profile(workload, target, look, ("fp16",), trace=trace).layers}
    assert hard(layers, "fp16") == set()
    assert 0 < layers["head"].sensitivity["fp16"] < 1e-5


def test_a_pooling_that_now_and_then_picks_the_other_of_two_near_maxima_is_not_blamed():
    class Pool(nn.Module):
        def forward(self, x):
            return F.max_pool1d(x.repeat_interleave(8, 1) + torch.arange(8 * WIDTH) % 8 / 400, 8)

    layers = profile_of(Pool, ("bf16",))
    assert layers["middle"].sensitivity["bf16"] < HARMLESS


def test_ranges_are_those_of_float32():
    layers = profile_of(HiddenSquare)
    assert layers["middle"].max_output > 65504
    assert 0 < layers["stem"].max_output < 10
    assert 0 < layers["head"].max_grad < 1
    assert layers["head"].underflow_share == 0.0


def test_tiny_gradients_show_as_an_underflow_share():
    layers = profile_of(nn.Tanh, ("fp16",), loss=lambda model, batch: 1e-12 * F.mse_loss(model(batch[0]), batch[1]))
    assert layers["stem"].underflow_share > 0.9


def test_a_mask_that_is_as_large_as_float32_goes_is_no_overflow():
    class Masked(nn.Module):
        def forward(self, x):
            mask = torch.where(x > 0, 0.0, torch.finfo(torch.float32).min)
            return torch.softmax(x + mask, -1)

    layers = profile_of(Masked, ("fp16",))
    assert hard(layers, "fp16") == set()
    assert layers["middle"].max_output < 100


def test_times_are_predicted_for_every_layer_and_precision():
    workload, target = workload_of(lambda: Net(nn.Tanh())), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    found = profile(workload, target, look, ("fp16", "bf16"), trace=trace)
    assert found.precisions == ("fp32", "fp16", "bf16")
    assert all(layer.time_origin == "predicted" and set(layer.time_s) == set(found.precisions) for layer in found.layers)
    assert sum(layer.time_s["fp32"] for layer in found.layers) <= found.base_step_s
    assert found.cast_s_per_byte == pytest.approx(1e-12, rel=0.9)
    assert found.cost_s > 0


def test_a_cpu_that_is_itself_the_target_is_measured():
    workload = workload_of(lambda: Net(nn.Tanh()))
    target = profiled.resolve_target("cpu")
    look, trace = trace_workload(workload, target)
    assert 0 < look.matmul_share < 1
    found = profile(workload, target, look, ("bf16",), trace=trace)
    assert all(layer.time_origin == "measured" and layer.time_s["fp32"] > 0 for layer in found.layers)
    assert 0 < found.cast_s_per_byte < 1e-6


def test_the_cost_is_a_few_passes_for_each_precision_whatever_the_number_of_layers():
    calls = []

    class Counted(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)], nn.Linear(WIDTH, 1))

        def forward(self, x):
            calls.append(1)
            return self.net(x)

    counts = []
    for depth in (2, 20):
        workload, target = workload_of(lambda depth=depth: Counted(depth)), stands_for_4090d()
        look, trace = trace_workload(workload, target)
        calls.clear()
        profile(workload, target, look, PRECISIONS, trace=trace)
        counts.append(len(calls))
    plain = 4  # passes that run only so that the cost can be told in passes
    assert counts[0] == counts[1] <= 3 * len(PRECISIONS) + plain


def test_a_profile_leaves_process_state_alone_and_says_the_same_twice():
    workload, target = workload_of(lambda: Net(nn.Sequential(nn.Dropout(0.2), nn.Tanh()))), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    random = torch.get_rng_state()
    first, second = (profile(workload, target, look, ("fp16",), trace=trace) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), random)
    assert first.layers == second.layers


def test_layers_are_scored_again_with_an_assignment_around_them():
    workload, target = workload_of(lambda: Net(OnePassNorm())), stands_for_4090d()
    look, trace = trace_workload(workload, target)
    low = uniform_policy(look, "fp16")
    cured = low.model_copy(update={"layers": {"middle": LayerSetting(precision="fp32")}})
    before, after = (rescore(workload, target, look, policy, trace=trace, scale=1024.0) for policy in (low, cured))
    assert before["middle"].total > 0.5
    assert after["middle"].total < before["middle"].total / 100
    assert after["stem"].total == pytest.approx(before["stem"].total, rel=0.5)


def test_lifting_a_container_leaves_its_children_low():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + self.fc(x)

    look, _ = trace_workload(workload_of(lambda: Net(Inner())), stands_for_4090d())
    policy = uniform_policy(look, "bf16", lifted=["middle"])
    assert policy.precision_of("middle") == "fp32"
    assert policy.precision_of("middle.fc") == policy.precision_of("stem") == "bf16"


def test_a_profile_leaves_no_tensor_in_memory() -> None:
    # A way from the autograd graph back to the recorder would be a cycle that Python's collector cannot see.
    workload, target = workload_of(lambda: Net(nn.ReLU(inplace=True))), stands_for_4090d()
    look, trace = trace_workload(workload, target)

    def alive() -> int:
        gc.collect()
        return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())

    before = alive()
    profile(workload, target, look, PRECISIONS, trace=trace)
    assert alive() == before
