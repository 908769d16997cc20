"""Padding on the fly never changes the function, its gradients or the state dict."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_policies import policy_for
from torch import nn

from autoprec.errors import PolicyError
from autoprec.policy import PRECISIONS, Backend, Precision
from autoprec.runtime import apply_policy, pad_batch, pad_collate

CASES = [
    (nn.Linear(7, 5), (3, 7)),
    (nn.Linear(7, 5, bias=False), (2, 3, 7)),
    (nn.Linear(8, 5), (8,)),
    (nn.Conv1d(3, 5, 3, padding=1), (2, 3, 9)),
    (nn.Conv2d(3, 5, 3, stride=2), (2, 3, 9, 9)),
    (nn.Conv2d(3, 5, 3, padding=2, padding_mode="reflect", bias=False), (3, 9, 9)),
    (nn.Conv3d(3, 5, 2, dilation=2), (2, 3, 5, 5, 5)),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("layer", "shape"), CASES, ids=lambda value: str(value) if isinstance(value, nn.Module) else "")
def test_a_padded_layer_is_the_same_function_with_the_same_gradients(
    layer: nn.Module, shape: tuple[int, ...], precision: Precision
) -> None:
    torch.manual_seed(0)
    model, reference = nn.Sequential(copy.deepcopy(layer)), copy.deepcopy(layer)
    keys = list(model.state_dict())
    applied = apply_policy(model, policy_for(model, "fp32", {"0": precision}, pad={"0": 8}))
    x = torch.randn(shape, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    y, expected = model(x), reference(same)
    (y * torch.linspace(0, 1, y.numel()).reshape(y.shape)).sum().backward()
    (expected * torch.linspace(0, 1, y.numel()).reshape(y.shape)).sum().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(y, expected, **tolerance)
    assert y.stride() == expected.stride(), "a later .view() must work as without padding"
    torch.testing.assert_close(x.grad, same.grad, **tolerance)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.shape == theirs.shape
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance["rtol"], atol=tolerance["atol"] * max(scale, 1))
    assert list(model.state_dict()) == keys
    applied.remove()


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), multiple=st.sampled_from([1, 2, 8, 16]), bias=st.booleans())
def test_padding_output_features_alone_is_exact_in_fp32(rows: int, columns: int, multiple: int, bias: bool) -> None:
    layer = nn.Linear(columns, rows, bias=bias)
    x = torch.randint(-4, 5, (3, columns)).float()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    expected = layer(x)  # whole numbers: sums are exact in any order
    model = nn.Sequential(layer)
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": multiple}))
    assert torch.equal(model(x), expected)
    applied.remove()


def test_the_loss_of_a_padded_vocabulary_head_is_that_of_the_plain_one_with_label_smoothing() -> None:
    head = nn.Linear(16, 10, bias=False)
    model = nn.Sequential(head)
    h, t = torch.randn(4, 16), torch.randint(0, 10, (4,))
    expected = [F.cross_entropy(head(h), t, label_smoothing=s) for s in (0.0, 0.1)]
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": 16}))
    got = [F.cross_entropy(model(h), t, label_smoothing=s) for s in (0.0, 0.1)]
    torch.testing.assert_close(got, expected)
    assert model(h).shape == (4, 10)
    assert head.out_features == 10
    nn.Linear(16, 10, bias=False).load_state_dict(head.state_dict())
    applied.remove()


def test_the_padded_product_really_has_aligned_sizes() -> None:
    model = nn.Sequential(nn.Linear(7, 5))
    applied = apply_policy(model, policy_for(model, "bf16", pad={"0": 8}))
    with torch.profiler.profile(record_shapes=True) as profile, applied.autocast():
        model(torch.ones(3, 7))
    shapes = [event.input_shapes for event in profile.events() if event.name in ("aten::addmm", "aten::mm", "aten::linear")]
    assert [3, 8] in [shape for shapes_of_event in shapes for shape in shapes_of_event]
    assert all([8, 8] in shapes_of_event for shapes_of_event in shapes)
    applied.remove()


def test_channels_last_output_of_a_padded_convolution_stays_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3))
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": 8}, backend=Backend(channels_last=True)))
    y = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    applied.remove()


class OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.LayerNorm(7), "only Linear and Conv"),
        (OwnLinear(7, 7), "only Linear and Conv"),
        (nn.Conv2d(4, 4, 3, groups=2), "grouped convolution"),
    ],
)
def test_what_cannot_be_padded_is_refused_by_name(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(layer)
    with pytest.raises(PolicyError, match=rf"padding\.layers: '0' is a {type(layer).__name__} and cannot be padded: .*{reason}"):
        apply_policy(model, policy_for(model, "fp32", pad={"0": 8}))


class Example(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


def test_a_batch_is_padded_with_its_mask_and_labels() -> None:
    batch = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "attention_mask": torch.ones(2, 5, dtype=torch.bool),
        "labels": torch.ones(2, 5, dtype=torch.long),
        "weight": torch.ones(2),
        "name": "kept",
    }
    padded = pad_batch(batch, 8)
    assert padded["input_ids"].shape == (2, 8)
    assert not padded["attention_mask"][:, 5:].any()
    assert (padded["labels"][:, 5:] == -100).all()
    assert padded["weight"] is batch["weight"]
    assert batch["labels"].shape == (2, 5), "the given batch is not changed"
    assert pad_batch(padded, 8) is padded


def test_a_tuple_batch_keeps_its_type_and_its_last_integers_are_labels() -> None:
    padded = pad_batch(Example(torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)), 4)
    assert type(padded) is Example
    assert padded.ids[0].tolist() == [1] * 5 + [0] * 3
    assert padded.labels[0].tolist() == [1] * 5 + [-100] * 3


def test_collate_wrapper_pads_and_ignored_labels_leave_the_loss_as_it_was() -> None:
    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        x = torch.tensor(samples).repeat(2, 3)
        return {"x": x, "labels": x % 5}

    logits = torch.randn(2, 16, 5)
    plain, padded = collate([1, 2, 3]), pad_collate(collate, 8, pad_values={"x": 7})([1, 2, 3])
    assert padded["x"][0, 9:].tolist() == [7] * 7
    expected = F.cross_entropy(logits[:, :9].reshape(-1, 5), plain["labels"].reshape(-1))
    torch.testing.assert_close(F.cross_entropy(logits.reshape(-1, 5), padded["labels"].reshape(-1)), expected)


@given(length=st.integers(1, 40), multiple=st.integers(1, 16))
def test_a_padded_length_is_the_next_multiple(length: int, multiple: int) -> None:
    padded = pad_batch({"x": torch.ones(1, length)}, multiple)["x"].shape[1]
    assert padded % multiple == 0
    assert length <= padded < length + multiple


class Standardised(nn.Conv2d):
    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def test_a_convolution_that_changes_its_weight_on_the_way_is_refused() -> None:
    model = nn.Sequential(Standardised(3, 5, 3))
    with pytest.raises(PolicyError, match="'0' is a Standardised and cannot be padded"):
        apply_policy(model, policy_for(model, "fp32", pad={"0": 8}))


@pytest.mark.parametrize(("layer", "shape"), [(nn.Linear(7, 5), (3, 7)), (nn.Conv2d(3, 5, 3), (1, 3, 7, 7))])
def test_a_padded_layer_takes_its_input_by_keyword(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(layer)
    x = torch.randn(shape)
    expected = layer(input=x)
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": 8}))
    torch.testing.assert_close(model[0](input=x), expected)
    applied.remove()


def test_a_padded_layer_takes_a_nested_tensor() -> None:
    model = nn.Sequential(nn.Linear(7, 5))
    ragged = torch.nested.nested_tensor([torch.ones(2, 7), torch.ones(3, 7)], layout=torch.jagged)
    expected = model(ragged)
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": 8}))
    torch.testing.assert_close(model(ragged).values(), expected.values())
    applied.remove()


def test_volumes_laid_out_channels_last_stay_so_through_a_padded_convolution() -> None:
    model = nn.Sequential(nn.Conv3d(3, 5, 2))
    x = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    expected = model(x)
    applied = apply_policy(model, policy_for(model, "fp32", pad={"0": 8}))
    assert model(x).stride() == expected.stride()
    assert model(x).is_contiguous(memory_format=torch.channels_last_3d)
    applied.remove()
