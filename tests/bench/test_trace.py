"""Layers, edges and operations of models of every build, found by running them."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import profiled
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from autoprec.bench.attribution import LOSS
from autoprec.bench.look import trace_workload
from autoprec.bench.trace import trace_model


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_square(model, batch):
    out = model(batch)
    return (out[0] if isinstance(out, tuple) else out).float().square().mean()


def traced(model, batch, loss=mean_square, samples=2):
    return trace_model(model, batch, loss, samples=samples)


def names(found):
    return [layer.name for layer in found.layers]


def flops(found, phase):
    return Counter({op.layer: 0 for op in found.op_trace.ops}) + Counter(
        {
            layer: sum(op.flops for op in found.op_trace.ops if op.layer == layer and op.phase == phase)
            for layer in found.op_trace.layers
        }
    )


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.attention, self.norm = Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class SmallGpt(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(11, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 11)
        self.use_reentrant = use_reentrant

    def forward(self, index):
        x = self.tokens(index)
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x).flatten(0, 1)


def gpt_batch():
    return torch.randint(11, (2, 6)), torch.randint(11, (12,))


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (torchvision.models.resnet18, (torch.randn(2, 3, 64, 64), torch.tensor([1, 2]))),
        (SmallGpt, (torch.arange(12).view(2, 6) % 11, torch.arange(12) % 11)),
    ],
    ids=["resnet18", "gpt"],
)
def test_flops_agree_with_torchs_counter_in_sum_and_by_pass(build, batch):
    model = build()
    found = traced(model, batch, cross_entropy)
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model, batch)
        forward = counter.get_total_flops()
        loss.backward()
    assert found.op_trace.total_flops == counter.get_total_flops() > 0
    assert sum(op.flops for op in found.op_trace.ops if op.phase == "forward") == forward
    assert sum(layer.flops for layer in found.layers) == forward


def test_backward_operations_belong_to_the_layer_that_made_them():
    found = traced(SmallGpt(), gpt_batch(), cross_entropy)
    forward, backward = flops(found, "forward"), flops(found, "backward")
    for layer in ("blocks.0.attention.qkv", "blocks.0.attention", "blocks.1.mlp.0", "head"):
        assert backward[layer] == 2 * forward[layer] > 0
    assert backward[LOSS] == 0


def test_a_container_with_its_own_operations_is_a_layer_and_one_without_is_not():
    found = traced(SmallGpt(), gpt_batch(), cross_entropy)
    kinds = {layer.name: layer for layer in found.layers}
    assert kinds["blocks.0"].ops == ("add",)
    assert "bmm" in kinds["blocks.0.attention"].ops
    assert kinds["tokens"].ops == ("embedding",)
    assert not {"", "blocks", "blocks.0.mlp"} & set(kinds)


def test_operations_of_the_root_make_a_layer_without_a_name():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    found = traced(Scaled(3, 3), torch.randn(2, 3))
    assert names(found) == [""]
    assert found.layers[0].signature == "Scaled bias=3 weight=3x3"


def test_a_module_that_only_changes_the_layout_is_no_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.fc = nn.Flatten(), nn.Linear(8, 2)

        def forward(self, x):
            return self.fc(torch.cat([self.flat(x).contiguous(), self.flat(x.clone()).detach()], 1))

    assert names(traced(Net(), torch.randn(2, 2, 2))) == ["fc"]


def test_a_projection_that_multihead_attention_never_calls_is_idle():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    found = traced(Net(), torch.randn(2, 4, 16))
    assert names(found) == ["attention"]
    assert found.idle == ("attention.out_proj",)


def test_a_module_under_two_names_is_one_layer_with_an_alias():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    found = traced(Twice(), torch.randn(2, 4))
    layer = next(layer for layer in found.layers if layer.name == "first")
    assert (layer.aliases, layer.calls) == (("second",), 2)
    assert layer.flops == 2 * (2 * 2 * 4 * 4)
    assert "second" not in names(found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_models_have_the_layers_of_plain_ones_and_a_third_pass(use_reentrant):
    torch.manual_seed(0)
    plain, again = SmallGpt(), SmallGpt(use_reentrant)
    batch = gpt_batch()
    without, found = traced(plain, batch, cross_entropy), traced(again, batch, cross_entropy)
    assert set(names(found)) == set(names(without))
    forward, backward = flops(found, "forward"), flops(found, "backward")
    assert forward == flops(without, "forward")
    for layer in ("blocks.0.attention", "blocks.1.attention.qkv", "blocks.0.mlp.0"):
        assert backward[layer] == 3 * forward[layer]
    assert backward["head"] == 2 * forward["head"]
    assert sum(kept.value.elements for kept in found.op_trace.saved) < sum(kept.value.elements for kept in without.op_trace.saved)


def test_an_lstm_counts_the_matmuls_of_every_step_and_direction():
    found = traced(nn.Sequential(nn.LSTM(4, 8, num_layers=2, bidirectional=True)), torch.randn(5, 3, 4))
    assert names(found) == ["0"]
    rows, first, second = 15, 2 * 32 * (4 + 8), 2 * 32 * (16 + 8)
    assert found.layers[0].flops == 2 * rows * (first + second)
    assert sum(op.flops for op in found.op_trace.ops if op.phase == "backward") == 2 * found.layers[0].flops


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.tanh(grad)


def test_both_passes_of_an_autograd_function_belong_to_the_module_that_applies_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.custom = Custom()

        def forward(self, x):
            return self.custom(self.inner(x))

    class Custom(nn.Module):
        def forward(self, x):
            return Doubled.apply(x)

    found = traced(Net(), torch.randn(2, 4))
    assert names(found) == ["inner", "custom"]
    assert [op.layer for op in found.op_trace.ops if op.name == "tanh"] == ["custom"]


@dataclass
class Batch:
    features: torch.Tensor
    extra: dict


def test_batches_may_be_dataclasses_and_models_may_answer_with_objects():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, features, weight):
            return SimpleNamespace(loss=(self.fc(features).square() * weight).mean())

    batch = Batch(torch.randn(3, 4), {"weight": torch.ones(3, 1)})
    found = traced(Net(), batch, lambda model, b: model(features=b.features, weight=b.extra["weight"]).loss, samples=3)
    assert names(found) == ["", "fc"]
    addmm = next(op for op in found.op_trace.ops if op.name == "addmm")
    assert {value.origin for value in addmm.inputs} == {"parameter", "data"}


def test_weight_norm_is_work_of_the_layer_whose_weight_it_makes():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU())
    found = traced(model, torch.randn(2, 4))
    assert names(found) == ["0", "1"]
    assert found.layers[0].kind == "Linear"
    assert found.idle == ()


def test_edges_follow_values_through_views_and_copies():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            both = torch.cat([self.a(x).view(2, 6), self.b(x).t().contiguous().t()])
            return self.c(both.reshape(2, 2, 6).transpose(0, 1))

    found = traced(Net(), torch.randn(2, 4))
    assert {(edge.producer, edge.consumer): edge.elements for edge in found.edges} == {("a", "c"): 12, ("b", "c"): 12}


def test_tracing_leaves_the_model_as_it_was():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).train()
    model[1].eval()
    model[0].weight.grad = torch.ones(4, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    traced(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4)) and model[3].weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True, False, True, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


def test_a_trace_survives_the_border_to_another_process():
    found = traced(SmallGpt(), gpt_batch(), cross_entropy)
    assert pickle.loads(pickle.dumps(found.op_trace)).ops == found.op_trace.ops


def test_what_is_kept_for_backward_is_known_with_the_operation_that_needs_it():
    found = traced(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(2, 4))
    trace = found.op_trace
    kept = sorted((trace.ops[saved.op].name, saved.value.elements) for saved in trace.saved)
    assert ("addmm", 8) in kept and ("gelu", 16) in kept and ("addmm", 16) in kept
    index = next(index for index, op in enumerate(trace.ops) if op.name == "gelu")
    assert trace.saved_bytes(index) == 16 * 4


class Scaled(nn.Linear):
    """Odd, and with a forward of its own, so that nothing can pad it."""

    def forward(self, x):
        return super().forward(x) / 2


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.even, self.odd = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 16), nn.Linear(16, 3)
        self.own = Scaled(3, 3)

    def forward(self, x):
        return self.own(self.odd(self.even(self.norm(self.conv(x)).mean((2, 3)))))


def images(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 3, 6, 6, generator=generator), torch.randint(3, (batch_size,), generator=generator)


def test_a_look_says_what_there_is_to_tune():
    workload = profiled.workload_of(Mixed, batches=images, loss=cross_entropy, batch_size=32)
    look, trace = trace_workload(workload, profiled.stands_for_4090d())
    assert [layer.name for layer in look.layers] == ["", "conv", "norm", "even", "odd", "own"]
    assert look.has_conv and look.odd_layers == ("conv", "odd")
    assert look.micro_batches == (32, 16, 8)
    assert 0 < look.matmul_share < 1
    assert look.loss == pytest.approx(1.1, abs=0.5)
    assert look.num_parameters == sum(parameter.numel() for parameter in Mixed().parameters())
    assert look.capability == "8.9" and "4090 D" in look.device_name
    # AdamW keeps two moments and a step count for each tensor.
    assert trace.optimizer_state_bytes == 2 * 4 * look.num_parameters + 4 * len(list(Mixed().parameters()))


def test_without_batch_statistics_the_batch_may_be_split_to_an_eighth():
    look, _ = trace_workload(
        profiled.workload_of(lambda: nn.Linear(profiled.WIDTH, 1), batch_size=8), profiled.stands_for_4090d()
    )
    assert look.micro_batches == (8, 4, 2, 1)


def test_an_optimizer_with_a_closure_forbids_fp16_and_says_so():
    workload = profiled.workload_of(
        lambda: nn.Linear(profiled.WIDTH, 1), build_optimizer=lambda model: torch.optim.LBFGS(model.parameters())
    )
    look, _ = trace_workload(workload, profiled.stands_for_4090d())
    assert "LBFGS" in look.forbids_fp16 and "closure" in look.forbids_fp16
