"""Which trainings a verification makes: more seeds where it is not clear, an end where the policy fails, a retry after a crash."""

from __future__ import annotations

import math
import time

import pytest

from autoprec.bench.target import Target
from autoprec.errors import WorkloadError
from autoprec.policy import Batch, Fingerprint, Policy
from autoprec.records import Environment, Failure, Layer, Look, Measurement
from autoprec.session.context import Context
from autoprec.session.long_run_arms import Job, timed_arms, trained_arms
from autoprec.session.progress import Silent
from autoprec.session.settings import Plan, Settings
from autoprec.tune.identity import Identity
from autoprec.tune.run_folder import RunFolder

HERE = Environment(device="card", capability="9.0", driver="1", torch_version="2.9", python_version="3.11", platform="p")
LAYERS = {"a": "Linear weight=4x4"}
MADE = Fingerprint.of(LAYERS, device="card", capability="9.0", torch_version="2.9", workload_sha256="w")
POLICY = Policy(default="fp16", batch=Batch(effective=8, micro=8), fingerprint=MADE)
STEPS = 40


def measured(scale: float) -> Measurement:
    losses = tuple(scale * (1.0 + math.exp(-step / 5)) for step in range(STEPS))
    return Measurement(
        losses=losses,
        step_times_s=(0.1 * scale,) * 20,
        speed_origin="measured",
        batch_samples=8,
        peak_bytes=1,
        environment=HERE,
    )


class FakeBench:
    """Answers by seed: how far the policy's losses lie from FP32's."""

    def __init__(self, gaps, twin=0.0, tf32=0.0):
        self.gaps, self.twin, self.tf32 = gaps, twin, tf32
        self.windows = []

    def window(self, policy, window):
        self.windows.append((policy, window))
        if policy.default != "fp32":
            gap = self.gaps[window.seed]
            return gap if isinstance(gap, Failure) else measured(1.0 + gap)
        if policy.backend.tf32:
            return self.tf32 if isinstance(self.tf32, Failure) else measured(1.0 + self.tf32)
        return measured(1.0 + (self.twin if window.perturbation else 0.0))

    def interleave(self, policies, window):
        return [measured(1.0 if policy.default == "fp32" else 0.5) for policy in policies]


@pytest.fixture
def job(tmp_path):
    target = Target("card", None, "cuda", "measured", False, None, ("fp32", "fp16", "bf16"), "9.0")
    look = Look(
        layers=(Layer(name="a", kind="Linear", parameters={"weight": (4, 4)}),),
        idle=(),
        edges=(),
        matmul_share=0.5,
        num_parameters=16,
        effective_batch=8,
        micro_batches=(8,),
        loss=1.0,
        workload_sha256="w",
        device_name="card",
        capability="9.0",
        torch_version="2.9",
    )
    plan = Plan(
        trial_steps=STEPS, trial_warmup_steps=2, verify_steps=STEPS, verify_seeds=3, timed_steps=20, timeout_s=9.0, fp32_micro=8
    )
    identity = Identity(
        workload="w", workload_sha256="", layer_list_sha256="", search_space_sha256="", target="t", torch_version="2"
    )
    folder = RunFolder.open(tmp_path / "folder", identity)

    def make(bench, tf32=False):
        context = Context(
            Settings(workload="w", budget_s=math.inf), target, bench, look, plan, folder, Silent(), time.monotonic()
        )
        return Job(context, POLICY, tf32)

    yield make
    folder.close()


def by_role(arms):
    return {arm.role: arm for arm in arms}


def test_a_clear_verdict_needs_the_seeds_asked_for_and_no_more(job):
    bench = FakeBench([0.0] * 6)
    arms = by_role(trained_arms(job(bench), 3, 0.01))
    assert len(bench.windows) == 9
    assert [len(arms[role].runs) for role in ("fp32", "policy", "fp32_twin")] == [3, 3, 3]
    assert arms["policy"].gaps == pytest.approx((0.0, 0.0, 0.0))


def test_windows_of_one_seed_are_trained_one_after_the_other(job):
    bench = FakeBench([0.0] * 6)
    trained_arms(job(bench, tf32=True), 2, 0.01)
    assert [window.seed for _, window in bench.windows] == [0] * 4 + [1] * 4


def test_an_unclear_verdict_adds_seeds_up_to_twice_as_many(job):
    bench = FakeBench([0.02, -0.02] * 3)
    assert len(by_role(trained_arms(job(bench), 3, 0.01))["policy"].runs) == 6


def test_seeds_end_where_the_verdict_becomes_clear(job):
    bench = FakeBench([0.012, -0.012, 0.0, 0.0, 0.0, 0.0])
    assert 3 < len(by_role(trained_arms(job(bench), 3, 0.01))["policy"].runs) < 6


def test_a_noise_in_which_nothing_can_be_told_asks_for_no_more_seeds(job):
    bench = FakeBench([0.0] * 6, twin=0.5)
    assert len(by_role(trained_arms(job(bench), 3, 0.01))["policy"].runs) == 3


def test_a_policy_that_fails_ends_the_run_without_its_twin(job):
    lost = Failure(kind="diverged", message="the loss is nan", step=7, losses=(1.0, 2.0))
    bench = FakeBench([0.0, lost, 0.0])
    arms = by_role(trained_arms(job(bench), 3, 0.01))
    assert [run.seed for run in arms["policy"].runs] == [0, 1]
    assert arms["policy"].failed.losses == (1.0, 2.0)
    assert len(arms["fp32_twin"].runs) == 1


def test_a_failed_window_is_remembered_and_a_crashed_one_is_tried_again(job):
    crash = Failure(kind="crashed", message="signal 9")
    assert by_role(trained_arms(job(FakeBench([crash])), 1, 0.01))["policy"].failed.failure == crash
    healed = FakeBench([0.0])
    assert by_role(trained_arms(job(healed), 1, 0.01))["policy"].failed is None
    assert [policy.default for policy, _ in healed.windows] == ["fp16", "fp32"]
    third = FakeBench([crash])
    assert by_role(trained_arms(job(third), 1, 0.01))["policy"].failed is None
    assert third.windows == []


def test_fp32_that_fails_is_the_workloads_fault(job):
    bench = FakeBench([0.0])
    bench.window = lambda policy, window: Failure(kind="diverged", message="the loss is nan at step 3")
    with pytest.raises(WorkloadError, match="nan at step 3"):
        trained_arms(job(bench), 1, 0.01)


def test_arms_are_timed_against_fp32_and_both_stock_amps(job):
    speeds = {speed.name: speed for speed in timed_arms(job(FakeBench([0.0])))}
    assert list(speeds) == ["FP32", "stock AMP fp16", "stock AMP bf16", "the policy"]
    assert speeds["FP32"].policy_ratio == pytest.approx(2.0)
    assert speeds["stock AMP fp16"].policy_ratio == pytest.approx(1.0)
    assert speeds["the policy"].samples_per_s == pytest.approx(8 / 0.05)
    assert speeds["the policy"].policy_ratio is None


def test_an_arm_that_cannot_be_timed_keeps_its_reason(job):
    bench = FakeBench([0.0])
    bench.interleave = lambda policies, window: [
        Failure(kind="out_of_memory", message="no room") if policy.default == "bf16" else measured(1.0) for policy in policies
    ]
    speeds = {speed.name: speed for speed in timed_arms(job(bench))}
    assert speeds["stock AMP bf16"].failure == "no room"
    assert speeds["stock AMP bf16"].policy_ratio is None
