"""Windows: repeatable, equal to a plain loop in FP32, and every way of failing is a value with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.seeding import seed_everything
from autoprec.bench.target import Target
from autoprec.bench.window import run_window
from autoprec.bench.workload import Workload
from autoprec.errors import PolicyMismatch, WorkloadError
from autoprec.policy import LossScale, Policy
from autoprec.records import Failure, Measurement, Window

MakeWorkload = Callable[..., Workload]
MakePolicy = Callable[..., Policy]


@dataclass
class FixedSpeed:
    seconds: float = 0.002
    memory: int = 12345

    def step_s(self, policy: Policy) -> float:
        return self.seconds

    def peak_bytes(self, policy: Policy) -> int:
        return self.memory


def _run(workload: Workload, target: Target, policy: Policy, window: Window | None = None, **more: Any) -> Measurement | Failure:
    window = window or Window(steps=4, warmup_steps=2)
    speed = FixedSpeed() if target.timing == "predicted" else None
    return run_window(
        workload, target, policy, window, data=DataCache(workload), models=ModelCache(workload), speed=speed, **more
    )


def _measured(outcome: Measurement | Failure) -> Measurement:
    assert isinstance(outcome, Measurement), outcome
    return outcome


def _failed(outcome: Measurement | Failure) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome


def test_fp32_gives_the_losses_of_a_plain_loop_to_the_bit(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target
) -> None:
    workload = make_workload(GRAD_CLIP=0.5)
    outcome = _measured(_run(workload, cpu, make_policy(workload), Window(steps=4, warmup_steps=2, seed=3)))
    seed_everything(3)
    model = workload.build_model().train()
    seed_everything(3)
    optimizer, stream, losses = workload.build_optimizer(model), workload.batches(16, 3), []
    for _ in range(6):
        optimizer.zero_grad()
        x, y = next(stream)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert list(outcome.losses) == losses


def test_a_window_repeats_itself_and_depends_on_its_seed(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target
) -> None:
    workload = make_workload()
    policy = make_policy(workload)
    data, models = DataCache(workload), ModelCache(workload)
    window = Window(steps=3, seed=1)
    first, again = (_measured(run_window(workload, cpu, policy, window, data=data, models=models)) for _ in range(2))
    other = _measured(run_window(workload, cpu, policy, Window(steps=3, seed=2), data=data, models=models))
    assert first.losses == again.losses
    assert first.losses != other.losses


def test_a_measured_window_has_a_time_for_every_step_after_the_warmup(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target
) -> None:
    workload = make_workload()
    outcome = _measured(_run(workload, cpu, make_policy(workload), Window(steps=5, warmup_steps=3)))
    assert (len(outcome.losses), len(outcome.step_times_s)) == (8, 5)
    assert all(time_s > 0 for time_s in outcome.step_times_s)
    assert (outcome.speed_origin, outcome.batch_samples, outcome.device_times_s) == ("measured", 16, ())
    assert outcome.peak_bytes > 0
    assert outcome.environment.torch_version == torch.__version__


def test_a_predicted_window_takes_time_and_memory_from_the_speed_model(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload()
    outcome = _measured(_run(workload, stand_in, make_policy(workload, "fp16")))
    assert outcome.step_times_s == (0.002,) * 4
    assert (outcome.speed_origin, outcome.peak_bytes) == ("predicted", 12345)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_pure", "bf16_pure"])
def test_half_precisions_train_like_fp32(
    precision: Any, make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload()
    reference = _measured(_run(workload, stand_in, make_policy(workload), Window(steps=12)))
    outcome = _measured(_run(workload, stand_in, make_policy(workload, precision), Window(steps=12)))
    assert outcome.losses != reference.losses
    assert outcome.losses == pytest.approx(reference.losses, abs=0.05)
    assert (outcome.final_scale is not None) == precision.startswith("fp16")


def test_micro_batches_do_not_change_the_data_order(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.flatten(1))  # type: ignore[no-any-return]

    workload = make_workload(build_model=Plain)
    whole = _measured(_run(workload, cpu, make_policy(workload)))
    parts = _measured(_run(workload, cpu, make_policy(workload, micro=4)))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


def test_a_perturbed_twin_differs_by_rounding_only(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    workload = make_workload()
    plain = _measured(_run(workload, cpu, make_policy(workload), Window(steps=6)))
    twin = _measured(_run(workload, cpu, make_policy(workload), Window(steps=6, perturbation=2.0**-24)))
    assert twin.losses != plain.losses
    assert twin.losses == pytest.approx(plain.losses, rel=1e-3)


class Overflowing(nn.Module):
    """A layer whose output passes 65504, and a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(36, 8)
        self.huge = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            self.huge.weight.mul_(1e6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.huge(self.first(x.flatten(1)))))  # type: ignore[no-any-return]


def test_a_planted_overflow_diverges_and_names_the_layer_and_the_operation(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload(build_model=Overflowing)
    failure = _failed(_run(workload, stand_in, make_policy(workload, "fp16"), Window(steps=20)))
    assert (failure.kind, failure.step, failure.layer) == ("diverged", 0, "huge")
    assert "First not finite: linear (float16) in 'huge'." in failure.message
    mended = _measured(
        _run(workload, stand_in, make_policy(workload, "fp16", {"huge": "fp32", "norm": "fp32"}), Window(steps=20))
    )
    assert all(map(torch.isfinite, map(torch.tensor, mended.losses)))


def test_running_statistics_that_go_infinite_fail_though_the_loss_is_finite(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.norm = nn.BatchNorm2d(4)
            self.head = nn.Linear(36, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(self.conv(x * 1e6))
            return self.head(x.flatten(1))  # type: ignore[no-any-return]

    workload = make_workload(build_model=Statistics)
    assert _measured(_run(workload, stand_in, make_policy(workload)))
    failure = _failed(_run(workload, stand_in, make_policy(workload, "fp16")))
    assert (failure.kind, failure.layer) == ("diverged", "conv")
    assert "running statistics" in failure.message


def test_a_mask_of_minus_infinity_is_no_broken_buffer(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 3)
            self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x.flatten(1)) + self.mask.clamp(min=-10)  # type: ignore[no-any-return, operator]

    workload = make_workload(build_model=Masked)
    assert _measured(_run(workload, cpu, make_policy(workload)))


def test_a_collapsing_loss_scale_is_its_own_failure(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload(loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * 1e7)
    settings = LossScale(init=1024.0, growth_interval=1000, backoff_factor=0.25, floor=64.0)
    failure = _failed(_run(workload, stand_in, make_policy(workload, "fp16", scale=settings), Window(steps=30)))
    assert failure.kind == "scale_collapsed"
    assert "under its floor of 64" in failure.message
    mostly = _failed(_run(workload, stand_in, make_policy(workload, "fp16", scale=LossScale(init=8192.0)), Window(steps=4)))
    assert mostly.kind == "scale_collapsed"
    assert "skipped 4 of 4 steps" in mostly.message


def test_skipped_steps_are_counted(make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target) -> None:
    workload = make_workload(loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * 300)
    policy = make_policy(workload, "fp16", scale=LossScale(init=65536.0, growth_interval=1000))
    outcome = _measured(_run(workload, stand_in, policy, Window(steps=30)))
    assert outcome.skipped_steps > 0
    assert outcome.final_scale == 65536.0 / 2**outcome.skipped_steps


class Filling(nn.Module):
    """Attention with a mask constant that half cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(1)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
        return self.head((scores.softmax(-1) @ x).mean(1))  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Filling()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)  # type: ignore[no-any-return]


def test_an_error_under_a_policy_names_the_module_that_owns_the_operation(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload(build_model=Wrapper)
    failure = _failed(_run(workload, stand_in, make_policy(workload, "fp16")))
    assert (failure.kind, failure.layer) == ("unsupported", "attention")
    assert "without overflow" in failure.message
    assert "Raised by masked_fill (float16) in 'attention'." in failure.message
    assert "Traceback" in failure.traceback
    assert _measured(_run(workload, stand_in, make_policy(workload, "bf16")))


def test_the_same_error_in_plain_fp32_is_the_users(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise IndexError("label 7 is out of range")

    workload = make_workload(loss=loss)
    with pytest.raises(WorkloadError, match="Step 0 of plain FP32 training raised IndexError: label 7 is out of range"):
        _run(workload, cpu, make_policy(workload))


def test_running_out_of_memory_is_known_by_its_type(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    workload = make_workload(loss=loss)
    failure = _failed(_run(workload, cpu, make_policy(workload)))
    assert failure.kind == "out_of_memory"
    assert "20.00 GiB" in failure.message


def test_batches_that_end_early_are_the_users_mistake(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    import itertools

    from bench_stands import image_batches

    workload = make_workload(batches=lambda n, seed: itertools.islice(image_batches(n, seed), 3))
    with pytest.raises(WorkloadError, match="ended after 3 batches; 6 are needed"):
        _run(workload, cpu, make_policy(workload))


def test_a_policy_for_another_model_is_refused(make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target) -> None:
    policy = make_policy(make_workload(build_model=Overflowing))
    with pytest.raises(PolicyMismatch):
        _run(make_workload(), cpu, policy)


def test_an_optimizer_with_a_closure_trains_in_bf16(
    make_workload: MakeWorkload, make_policy: MakePolicy, stand_in: Target
) -> None:
    workload = make_workload(build_optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    outcome = _measured(_run(workload, stand_in, make_policy(workload, "bf16"), Window(steps=4)))
    assert min(outcome.losses[1:]) < outcome.losses[0]
    failure = _failed(_run(workload, stand_in, make_policy(workload, "fp16"), Window(steps=4)))
    assert failure.kind == "unsupported"
    assert "LBFGS" in failure.message


def test_everything_global_is_as_before_even_where_user_code_changes_it(
    make_workload: MakeWorkload, make_policy: MakePolicy, cpu: Target
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(99)
        return F.cross_entropy(model(batch[0]), batch[1])

    from autoprec.policy import Backend

    workload = make_workload(loss=loss)
    policy = make_policy(workload, backend=Backend(tf32=True, cudnn_benchmark=True))
    state = torch.get_rng_state()
    with torch.no_grad():
        _measured(_run(workload, cpu, policy))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32
