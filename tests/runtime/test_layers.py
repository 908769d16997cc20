"""Names, signatures and the comparison with a fingerprint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_policies import Net, fingerprint_of, policy_for
from torch import nn
from torch.nn.utils import parametrizations

from autoprec.errors import PolicyError, PolicyMismatch
from autoprec.policy import Fingerprint
from autoprec.records import Layer
from autoprec.runtime import apply_policy, layer_signature, named_layers, strip_prefixes
from autoprec.runtime.layers import aliases


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("module.fc", "fc"),
        ("_orig_mod.module.fc", "fc"),
        ("module._orig_mod.fc.weight", "fc.weight"),
        ("block._orig_mod.fc", "block.fc"),
        ("blocks.module_list.0", "blocks.module_list.0"),
        ("encoder.module.fc", "encoder.module.fc"),
        ("", ""),
    ],
)
def test_wrapper_parts_are_stripped_and_the_users_own_names_kept(name: str, stripped: str) -> None:
    assert strip_prefixes(name) == stripped


@given(st.lists(st.sampled_from(["a", "fc", "0", "module", "_orig_mod"])))
def test_stripping_twice_changes_nothing_more(parts: list[str]) -> None:
    once = strip_prefixes(".".join(parts))
    assert strip_prefixes(once) == once


@pytest.mark.parametrize(
    "module",
    [nn.Linear(3, 2), nn.LSTM(2, 3), nn.ReLU(), nn.Conv2d(3, 4, 3, bias=False), nn.PReLU()],
    ids=lambda m: type(m).__name__,
)
def test_signature_agrees_with_the_records(module: nn.Module) -> None:
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert layer_signature(module) == Layer(name="x", kind=type(module).__name__, parameters=shapes).signature


def test_a_parametrized_layer_has_the_plain_layers_signature_and_its_state_is_not_touched() -> None:
    plain, normed = nn.Linear(3, 2), parametrizations.spectral_norm(nn.Linear(3, 2))
    before = {key: value.clone() for key, value in normed.state_dict().items()}
    assert layer_signature(normed) == layer_signature(plain) == "Linear bias=2 weight=2x3"
    assert all(torch.equal(value, before[key]) for key, value in normed.state_dict().items())
    assert layer_signature(parametrizations.weight_norm(nn.Linear(3, 2))) == "Linear bias=2 weight=2x3"


def test_a_lazy_layer_is_refused_until_it_has_seen_a_batch() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(PolicyError, match="lazy module") as caught:
        layer_signature(model[0])
    assert "Run one batch" in caught.value.hint


def test_a_shared_module_has_one_entry_under_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.ReLU(), "c": shared})
    assert list(named_layers(model)) == ["", "a", "b"]
    assert aliases(model)["c"] == "a"


def test_names_are_the_same_through_wrappers() -> None:
    model = Net()
    names = list(named_layers(model))
    assert list(named_layers(torch.compile(model))) == names
    assert list(named_layers(nn.DataParallel(model))) == names
    assert list(named_layers(torch.optim.swa_utils.AveragedModel(model))) == names
    inner = Net()
    inner.first = torch.compile(inner.first)
    assert list(named_layers(inner)) == names


def test_mismatch_lists_missing_extra_and_changed_with_a_hint() -> None:
    made_for = Net()
    policy = policy_for(made_for)
    model = Net()
    model.head = nn.Linear(8, 9)
    model.tail = model.second
    del model.second
    model.stem_2 = nn.Linear(2, 2)
    with pytest.raises(PolicyMismatch) as caught:
        apply_policy(model, policy)
    text = str(caught.value)
    assert "missing from the model (3): second, second.fc, second.norm" in text
    assert "extra in the model (4): tail, tail.norm, tail.fc, stem_2" in text
    assert "changed (1): head (policy: Linear bias=5 weight=5x8; model: Linear bias=9 weight=9x8)" in text
    assert "strict=False" in caught.value.hint
    assert type(model.stem) is nn.Linear, "a refused policy leaves the model as it was"


def test_not_strict_applies_what_matches_and_warns_with_the_list() -> None:
    policy = policy_for(Net(), "bf16", {"head": "fp32", "second": "fp32"})
    model = Net()
    model.third = model.second
    del model.second
    with pytest.warns(UserWarning, match=r"missing from the model \(3\): second"):
        applied = apply_policy(model, policy, strict=False)
    assert isinstance(model.head, nn.Linear)
    assert type(model.head) is not nn.Linear
    applied.remove()


@pytest.mark.parametrize("strict", [True, False])
def test_a_policy_that_matches_nothing_is_an_error(strict: bool) -> None:
    with pytest.raises(PolicyMismatch, match="matches nothing in this Bilinear"):
        apply_policy(nn.Bilinear(2, 2, 2), policy_for(Net()), strict=strict)


def test_idle_modules_are_not_taken_for_extra_layers() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    applied = apply_policy(model, policy_for(model, idle=("0.out_proj",)))
    applied.remove()


def test_an_alias_in_the_policy_finds_the_module() -> None:
    shared = nn.Linear(2, 2)
    made_for = nn.ModuleDict({"a": shared, "c": shared})
    policy = policy_for(made_for, "bf16", {"a": "fp32"})
    model = nn.ModuleDict({"c": shared, "a": shared})
    applied = apply_policy(model, policy)
    assert shared(torch.ones(1, 2).bfloat16()).dtype == torch.float32
    applied.remove()


def test_another_gpu_or_torch_release_is_a_warning() -> None:
    model = Net()
    layers = fingerprint_of(model).layers
    other = Fingerprint.of(layers, device="cpu", capability=None, torch_version="2.9.0", workload_sha256="0")
    with pytest.warns(UserWarning, match=r"tuned with torch 2\.9\.0; this is"):
        apply_policy(model, policy_for(model, fingerprint=other)).remove()


def test_applying_twice_is_refused() -> None:
    model = Net()
    applied = apply_policy(model, policy_for(model))
    with pytest.raises(PolicyError, match="already applied") as caught:
        apply_policy(model, policy_for(model))
    assert "remove()" in caught.value.hint
    applied.remove()
