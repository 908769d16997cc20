"""Windows on a CUDA device: measured speed, memory, execution modes and the planted overflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoprec.bench.bench import Bench
from autoprec.bench.target import resolve_target
from autoprec.policy import Backend, Batch, LayerSetting, LossScale, Policy
from autoprec.records import Failure, Measurement, Window
from autoprec.session import tune
from autoprec.tune.study_space import fingerprint_of

WORKLOADS = Path(__file__).parent.parent / "workloads"


@pytest.fixture
def bench():
    return Bench(str(WORKLOADS / "overflow.py"), resolve_target(None))


def policy_of(bench, default="fp32", **changes):
    look = bench.look()
    batch = Batch(effective=look.effective_batch, micro=look.effective_batch)
    return Policy(default=default, batch=batch, fingerprint=fingerprint_of(look), **changes)


CURED = {"layers": {"wide": LayerSetting(precision="fp32")}, "loss_scale": LossScale(init=4096.0)}


def test_speed_and_memory_are_measured_here(bench):
    outcome = bench.window(policy_of(bench), Window(steps=20, warmup_steps=5))
    assert isinstance(outcome, Measurement)
    assert outcome.speed_origin == "measured"
    assert outcome.peak_bytes > 0
    assert len(outcome.step_times_s) == 15
    assert outcome.environment.device == torch.cuda.get_device_name()


def test_stock_amp_overflows_in_the_planted_layer_and_the_cure_trains_like_fp32(bench):
    window = Window(steps=30, warmup_steps=5)
    reference = bench.window(policy_of(bench), window)
    stock = bench.window(policy_of(bench, "fp16"), window)
    cured = bench.window(policy_of(bench, "fp16", **CURED), window)
    assert isinstance(stock, Failure)
    assert (stock.kind, stock.layer) == ("diverged", "wide")
    assert list(cured.losses) == pytest.approx(list(reference.losses), rel=5e-2)


@pytest.mark.parametrize("execution", ["compile", "compile_cudagraphs"])
def test_compiled_windows_track_the_eager_ones(bench, execution):
    window = Window(steps=20, warmup_steps=5, timeout_s=300)
    eager = bench.window(policy_of(bench, "fp16", **CURED), window)
    compiled = bench.window(policy_of(bench, "fp16", execution=execution, **CURED), window)
    assert isinstance(compiled, Measurement), compiled
    assert list(compiled.losses) == pytest.approx(list(eager.losses), rel=5e-2)


def test_interleaved_arms_keep_their_own_flags_and_leave_none_behind(bench):
    before = torch.backends.cuda.matmul.allow_tf32
    window = Window(steps=20, warmup_steps=5)
    arms = (policy_of(bench), policy_of(bench, backend=Backend(tf32=True)), policy_of(bench, "bf16"))
    outcomes = bench.interleave(arms, window)
    assert all(isinstance(outcome, Measurement) for outcome in outcomes)
    plain, tf32, _ = outcomes
    assert list(plain.losses) == pytest.approx(list(bench.window(arms[0], window).losses), rel=1e-5)
    assert plain.losses != tf32.losses
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_a_whole_tune_measures_and_never_exports_what_diverges(tmp_path):
    result = tune(str(WORKLOADS / "overflow.py"), trials=12, budget_s=60, out=tmp_path / "run", execution="eager")
    assert result.policy.evidence.speed_origin == "measured"
    assert result.policy.evidence.verdict == "passed"
    assert not result.policy.precisions()["wide"].startswith("fp16")
    arms = {arm.name: arm.samples_per_s for arm in result.arms}
    assert arms["stock AMP fp16"] is None
