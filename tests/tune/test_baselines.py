from __future__ import annotations

from decision_fakes import layer, look_of, small_model

from autoprec.policy import Backend, LossScale
from autoprec.tune.baselines import baseline_policies

LOW = ("fp32", "fp16", "bf16")


def test_the_baselines_come_in_order_with_each_layout() -> None:
    look, _ = small_model()
    plain = ["fp32", "fp32_tf32", "amp_fp16", "amp_bf16"]
    roles = list(baseline_policies(look, LOW, cuda=True, capability="8.9"))
    assert roles == plain + [f"{role}_channels_last" for role in plain]


def test_only_what_means_something_is_a_baseline() -> None:
    dense = look_of([layer("fc")])
    assert list(baseline_policies(dense, LOW, cuda=True, capability="7.5")) == ["fp32", "amp_fp16", "amp_bf16"]
    assert list(baseline_policies(dense, ("fp32", "bf16"), cuda=False)) == ["fp32", "amp_bf16"]
    complex_model = look_of([layer("fc")], forbids_fp16="complex parameters")
    assert list(baseline_policies(complex_model, LOW, cuda=True, capability="9.0")) == ["fp32", "fp32_tf32", "amp_bf16"]


def test_stock_amp_is_torchs_own_defaults() -> None:
    policies = baseline_policies(look_of([layer("fc")]), LOW, cuda=True, capability="8.0")
    stock = policies["amp_fp16"]
    assert (stock.default, stock.layers) == ("fp16", {})
    assert stock.loss_scale == LossScale(init=65536.0, growth_interval=2000, growth_factor=2.0, backoff_factor=0.5)
    assert stock.backend == Backend() and policies["fp32_tf32"].backend == Backend(tf32=True)
    assert not policies["amp_bf16"].needs_loss_scale
    assert policies["fp32"].fingerprint.capability == "8.0"


def test_the_largest_micro_batch_holds_the_effective_batch() -> None:
    look = look_of([layer("fc")], effective_batch=64, micro_batches=(32, 16))
    batch = baseline_policies(look, LOW, cuda=False)["fp32"].batch
    assert (batch.effective, batch.micro, batch.accumulation_steps) == (64, 32, 2)
