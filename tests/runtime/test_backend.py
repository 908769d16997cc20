"""Process-wide flags and memory layout are set by the handle and put back by remove()."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime_policies import policy_for
from torch import nn

from autoprec.errors import PolicyError
from autoprec.policy import Backend
from autoprec.runtime import apply_policy
from autoprec.runtime.backend import _new_flags, set_flags

OLD = ((torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"))


@pytest.fixture
def tidy() -> Iterator[None]:
    old = [(owner, name, getattr(owner, name)) for owner, name in OLD]
    new = [(owner, name, getattr(owner, name)) for owner, name in _new_flags()]
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owner, name, value in (*old, *new):
            setattr(owner, name, value)


def new_values() -> list[Any]:
    return [getattr(owner, name) for owner, name in _new_flags()]


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_tf32_is_set_and_restored_where_the_user_set_it_the_old_way(tidy: None, tf32: bool, before: bool) -> None:
    for owner, name in OLD:
        setattr(owner, name, before)
    state = new_values()
    undo = set_flags(Backend(tf32=tf32))
    assert [getattr(owner, name) for owner, name in OLD] == [tf32, tf32]
    undo()
    assert [getattr(owner, name) for owner, name in OLD] == [before, before]
    assert new_values() == state


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("value", ["tf32", "ieee"])
def test_tf32_is_set_and_restored_where_the_user_set_it_the_new_way(tidy: None, tf32: bool, value: str) -> None:
    flags = _new_flags()
    if not flags:
        pytest.skip("this torch has no fp32_precision")
    for owner, name in flags:
        setattr(owner, name, value)
    undo = set_flags(Backend(tf32=tf32))
    expected = ("tf32",) if tf32 else ("ieee", "none")
    assert all(now in expected for now in new_values())
    undo()
    assert new_values() == [value] * len(flags)


def test_no_warning_reaches_the_user_about_flags_they_did_not_write(tidy: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_flags(Backend(tf32=True))()


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"), reason="this torch has no fp16 accumulation"
)
def test_cudnn_benchmark_and_fp16_accumulation_are_set_and_restored() -> None:
    matmul = torch.backends.cuda.matmul
    undo = set_flags(Backend(cudnn_benchmark=True, fp16_accumulation=True))
    assert torch.backends.cudnn.benchmark
    assert matmul.allow_fp16_accumulation
    undo()
    assert not torch.backends.cudnn.benchmark
    assert not matmul.allow_fp16_accumulation


def test_channels_last_changes_strides_only_and_is_undone_exactly() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    model[0].register_buffer("kernel", torch.randn(2, 3, 5, 5).transpose(2, 3))
    parameters = list(model.parameters())
    x = torch.randn(2, 3, 3, 3)
    model(x).sum().backward()
    before = [(p.stride(), p.grad.stride()) for p in parameters]
    odd, values = model[0].kernel.stride(), model[0].kernel.clone()
    output = model(x)
    applied = apply_policy(model, policy_for(model, "fp32", backend=Backend(channels_last=True)))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    torch.testing.assert_close(model(x), output)
    applied.remove()
    assert [(p.stride(), p.grad.stride()) for p in parameters] == before
    assert model[0].kernel.stride() == odd
    assert torch.equal(model[0].kernel, values)
    assert torch.equal(model(x), output)


def test_a_refused_policy_leaves_the_flags_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    policy = policy_for(model, "fp32", pad={"0": 8}, backend=Backend(cudnn_benchmark=True))
    with pytest.raises(PolicyError, match="cannot be padded"):
        apply_policy(model, policy)
    assert not torch.backends.cudnn.benchmark
