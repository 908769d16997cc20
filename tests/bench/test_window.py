"""Windows: raw samples, failures as values, and nothing left changed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.bench.arms import interleave
from autoprec.bench.bench import Bench
from autoprec.bench.data import Start
from autoprec.bench.target import resolve_target
from autoprec.bench.workload import load_workload
from autoprec.errors import WorkloadError
from autoprec.policy import Batch, LayerSetting, LossScale, Policy
from autoprec.records import Failure, Measurement, Window
from autoprec.tune.study_space import fingerprint_of

WORKLOADS = Path(__file__).parent.parent / "workloads"


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return resolve_target("4090d")


def bench_of(name, target):
    return Bench(str(WORKLOADS / name), target)


def policy_of(bench, default="fp32", **changes):
    look = bench.look()
    return Policy(
        default=default,
        batch=changes.pop("batch", Batch(effective=look.effective_batch, micro=look.effective_batch)),
        fingerprint=fingerprint_of(look),
        **changes,
    )


def test_an_fp32_window_gives_the_losses_of_a_hand_written_loop(target):
    bench = bench_of("tiny_mlp.py", target)
    outcome = bench.window(policy_of(bench), Window(steps=7, warmup_steps=2, seed=3))
    workload = load_workload(str(WORKLOADS / "tiny_mlp.py"))
    torch.manual_seed(3)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    expected = []
    stream = workload.batches(16, 3)
    for _ in range(7):
        loss = workload.loss(model, next(stream))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert isinstance(outcome, Measurement)
    assert list(outcome.losses) == pytest.approx(expected, rel=1e-6)
    assert len(outcome.step_times_s) == 5
    assert outcome.speed_origin == "predicted"
    assert outcome.samples_per_s > 0


def test_accumulation_over_micro_batches_trains_on_the_same_samples(target):
    bench = bench_of("tiny_mlp.py", target)
    whole = bench.window(policy_of(bench), Window(steps=5))
    split = bench.window(policy_of(bench, batch=Batch(effective=16, micro=4, accumulation_steps=4)), Window(steps=5))
    assert list(split.losses) == pytest.approx(list(whole.losses), rel=1e-4)


def test_the_same_window_twice_gives_the_same_losses(target):
    bench = bench_of("tiny_mlp.py", target)
    policy = policy_of(bench, "fp16")
    first, second = (bench.window(policy, Window(steps=6, seed=1)) for _ in range(2))
    assert first.losses == second.losses


def test_a_perturbed_twin_differs_by_rounding_only(target):
    bench = bench_of("tiny_mlp.py", target)
    plain = bench.window(policy_of(bench), Window(steps=4))
    twin = bench.window(policy_of(bench), Window(steps=4, perturbation=2.0**-24))
    assert plain.losses != twin.losses
    assert list(twin.losses) == pytest.approx(list(plain.losses), rel=1e-4)


def test_a_forward_overflow_is_a_divergence_that_names_the_layer(target):
    bench = bench_of("overflow.py", target)
    outcome = bench.window(policy_of(bench, "fp16"), Window(steps=8))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "diverged"
    assert outcome.layer == "wide"
    assert outcome.step == 0


def test_the_guilty_layer_in_fp32_cures_the_overflow(target):
    bench = bench_of("overflow.py", target)
    reference = bench.window(policy_of(bench), Window(steps=8))
    layers = {"wide": LayerSetting(precision="fp32")}
    cured = bench.window(policy_of(bench, "fp16", layers=layers, loss_scale=LossScale(init=4096.0)), Window(steps=8))
    assert isinstance(cured, Measurement)
    assert list(cured.losses) == pytest.approx(list(reference.losses), rel=2e-2)


class _Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        if y.dtype == torch.float16:
            raise RuntimeError("no half here")
        return y


def in_memory(build, **more):
    class Workload:
        BATCH_SIZE = 8
        build_model = staticmethod(build)

        @staticmethod
        def batches(batch_size, seed):
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield (torch.randn(batch_size, 4, generator=generator),)

        @staticmethod
        def loss(model, batch):
            return model(batch[0]).float().pow(2).mean()

    for name, value in more.items():
        setattr(Workload, name, staticmethod(value) if callable(value) else value)
    return Workload


def test_an_error_under_a_policy_is_a_failure_that_names_the_module(target):
    bench = Bench(in_memory(lambda: nn.Sequential(nn.Linear(4, 4), _Raises())), target)
    outcome = bench.window(policy_of(bench, "fp16"), Window(steps=3))
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.layer) == ("unsupported", "1")
    assert "no half here at 'raise RuntimeError(\"no half here\")' (test_window.py, line " in outcome.message


def test_an_error_in_plain_fp32_is_the_users_and_raised(target):
    state = {"calls": 0}

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            if state["calls"] == "on":
                raise ValueError("broken on purpose")
            return self.inner(x)

    bench = Bench(in_memory(Breaks), target)
    policy = policy_of(bench)
    state["calls"] = "on"
    with pytest.raises(WorkloadError, match="broken on purpose"):
        bench.window(policy, Window(steps=2))


def test_batches_that_end_early_are_named_with_their_number(target):
    def few(batch_size, seed):
        for _ in range(5):
            yield (torch.ones(batch_size, 4),)

    bench = Bench(in_memory(lambda: nn.Linear(4, 4), batches=few), target)
    policy = policy_of(bench)
    with pytest.raises(WorkloadError, match="ended after 5 batches"):
        bench.window(policy, Window(steps=9))


def test_a_batch_norm_that_caught_an_infinity_fails_though_the_loss_is_finite(target):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)
            with torch.no_grad():
                self.lin.weight.mul_(1e6)

        def forward(self, x):
            self.bn(self.lin(x))
            return x * self.lin.bias

    bench = Bench(in_memory(Net), target)
    outcome = bench.window(policy_of(bench, "fp16"), Window(steps=2))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "diverged"
    assert outcome.layer == "lin", "the producer is at fault, not the norm that caught it"


def test_interleaved_arms_train_from_the_same_start_and_keep_their_samples(target):
    bench = bench_of("tiny_mlp.py", target)
    fp32, fp16 = policy_of(bench), policy_of(bench, "fp16")
    window = Window(steps=14, warmup_steps=2)
    one, other = bench.interleave((fp32, fp16), window)
    assert len(one.losses) == len(other.losses) == 14
    assert len(one.step_times_s) == len(other.step_times_s) == 12
    assert list(one.losses) == pytest.approx(list(bench.window(fp32, window).losses), rel=1e-6)
    assert list(other.losses) == pytest.approx(list(one.losses), rel=5e-2)


def test_an_arm_that_fails_does_not_end_the_others(target):
    bench = bench_of("overflow.py", target)
    fp32, fp16 = policy_of(bench), policy_of(bench, "fp16")
    good, bad = bench.interleave((fp32, fp16), Window(steps=8, warmup_steps=2))
    assert isinstance(good, Measurement)
    assert isinstance(bad, Failure)


def test_a_window_leaves_every_random_state_as_it_was(target):
    bench = bench_of("tiny_mlp.py", target)
    policy = policy_of(bench)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    bench.window(policy, Window(steps=2))
    interleave(
        load_workload(str(WORKLOADS / "tiny_mlp.py")),
        target,
        [policy],
        Window(steps=8),
        Start(load_workload(str(WORKLOADS / "tiny_mlp.py")), 0, pinned=False),
    )
    assert torch.equal(before, torch.get_rng_state())


def test_every_loss_of_a_measurement_is_finite(target):
    bench = bench_of("tiny_mlp.py", target)
    outcome = bench.window(policy_of(bench, "bf16"), Window(steps=12))
    assert all(math.isfinite(loss) for loss in outcome.losses)
