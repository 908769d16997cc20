"""When a tune says that low precision is not worth it, and when it must not."""

from __future__ import annotations

import pytest
from timed_bench import CUDA, PREDICTED, Clock, TimedBench, is_low, is_pure, looked, tuned, usual

from autoprec import load_policy

# Of the 1.07 ms that a 784-512-512-10 MLP takes on an H200 in FP32, what its kernels do beyond their least time.
MLP = {"heavy_s": 1e-4, "light_s": 5e-5, "has_conv": False, "matmul_share": 0.4}


def host_bound(amp: float = 1.7, tf32: float = 1.05, graphs: float = 1.0, amp_graphs: float = 1.5):
    """The MLP's times in shares of FP32's."""

    def step_s(policy):
        if policy.execution != "eager":
            return 1.07e-3 * (amp_graphs if is_low(policy) else graphs)
        return 1.07e-3 * (amp if is_low(policy) else tf32 if policy.backend.tf32 else 1.0)

    return step_s


def run(folder, step_s, look, **options):
    clock = Clock()
    settings = {name: options.pop(name) for name in ("anyway", "execution", "budget_s", "target") if name in options}
    bench = TimedBench(clock, step_s, look=looked(**look), **options)
    settings = {"budget_s": 240.0, "execution": "eager", **settings}
    result, said, used_s = tuned(folder, bench, clock, **settings)
    return result, said, bench, used_s


def test_a_host_bound_mlp_stops_before_reference_profile_and_study_with_an_fp32_policy_that_says_why(folder):
    result, said, _bench, used_s = run(folder, host_bound(), MLP, host_bound=True)
    assert not {"reference", "profile", "study"} & set(said.stages)
    assert result.policy.precisions() == dict.fromkeys(result.policy.precisions(), "fp32")
    assert result.policy.backend.tf32 is False and not result.worth_it
    assert used_s < 30
    for told in (result.message, load_policy(result.policy_path).evidence.note):
        assert "1.07 ms" in told and "stock AMP fp16 1.82 ms (0.59x" in told and "issuing operations from the host" in told
    assert result.policy.evidence.verdict == "passed"
    for name in ("report.html", "report.md"):
        text = (folder / name).read_text()
        assert "does not pay here" in text and "1.82 ms" in text
    assert {arm.name for arm in result.arms} >= {"FP32", "FP32 + TF32", "stock AMP fp16", "pure bf16"}


def test_the_ceiling_is_said(folder):
    result, *_ = run(folder, host_bound(), MLP, host_bound=True)
    assert "more than 1.11x as fast" in result.message


def test_a_model_whose_time_goes_into_its_optimizer_stops_too(folder):
    """Elementwise work that no precision shortens: a large embedding under Adam, read and written in float32 whatever runs before."""
    look = {"heavy_s": 2e-3, "light_s": 3e-3, "has_conv": False, "matmul_share": 0.1}

    def step_s(policy):
        return 0.05 * (1.02 if is_low(policy) else 0.999 if policy.backend.tf32 else 1.0)

    result, said, *_ = run(folder, step_s, look)
    assert "study" not in said.stages and not result.worth_it
    assert "the optimizer and the least time of every operation" in result.message


@pytest.mark.parametrize("heavy_s, light_s", [(0.03, 0.015), (0.002, 0.045)])
def test_models_with_much_to_shorten_are_searched_and_nothing_is_timed_before(folder, heavy_s, light_s):
    """A convolution net or a transformer, and one that is all norms and activations: pure half may halve their traffic."""
    result, said, _bench, _ = run(folder, usual(0.05), {"heavy_s": heavy_s, "light_s": light_s})
    assert said.stages.index("reference") < said.stages.index("profile") < said.stages.index("study")
    assert "worth it?" not in said.stages
    assert is_low(result.policy) and result.worth_it


def test_where_only_pure_half_pays_it_is_searched(folder):
    """Stock AMP is slower than FP32 here: its casts cost more than they save. The uniform pure arm shows that there is a gain."""

    def step_s(policy):
        return 0.01 * (0.85 if is_pure(policy) else 1.2 if is_low(policy) else 1.0)

    result, said, *_ = run(folder, step_s, {"heavy_s": 1e-3, "light_s": 2e-3, "has_conv": False})
    assert "worth it?" in said.stages and "study" in said.stages
    assert any("pure fp16 is 1.18x FP32" in line for line in said.lines)
    assert is_pure(result.policy) and result.worth_it


def test_a_gain_that_noise_hides_is_searched_for(folder):
    def step_s(policy):
        return 1.07e-3 * (0.99 if is_low(policy) else 1.0)

    _, said, *_ = run(folder, step_s, MLP, host_bound=True, scatter=0.4)
    assert "study" in said.stages


def test_a_model_that_nothing_was_measured_of_is_searched(folder):
    _, said, *_ = run(folder, host_bound(), {"heavy_s": 0.0, "light_s": 0.0})
    assert "study" in said.stages


def test_anyway_searches_all_the_same(folder):
    result, said, *_ = run(folder, host_bound(), MLP, host_bound=True, anyway=True)
    assert "study" in said.stages and "worth it?" not in said.stages
    assert not is_low(result.policy)


def test_what_was_searched_for_once_is_not_stopped_early_the_next_time(folder):
    clock = Clock()
    bench = TimedBench(clock, host_bound(), look=looked(**MLP), host_bound=True)
    tuned(folder, bench, clock, budget_s=120.0, execution="eager", anyway=True)
    _, said, _ = tuned(folder, bench, clock, budget_s=120.0, execution="eager")
    assert "study" in said.stages and "worth it?" not in said.stages


def test_where_tf32_pays_and_no_low_precision_does_the_policy_is_tf32_verified(folder):
    result, said, *_ = run(folder, host_bound(tf32=0.8), MLP, host_bound=True)
    assert not {"profile", "study"} & set(said.stages) and "reference" in said.stages
    assert result.policy.backend.tf32 and not is_low(result.policy)
    assert result.verdict.status == "passed" and result.worth_it
    assert result.message.startswith("No low precision pays here; FP32 + TF32 does: 1.25x FP32")
    assert "1.25×" in (folder / "report.md").read_text() or "1.25" in (folder / "report.md").read_text()
    assert "No low precision pays here" in (folder / "report.html").read_text()


def test_cuda_graphs_are_tried_before_stopping_and_may_be_what_pays_under_fp32(folder):
    step_s = host_bound(graphs=0.6, amp_graphs=0.9)
    result, said, _bench, _ = run(folder, step_s, MLP, host_bound=True, execution="auto", compile_s=10.0)
    assert not {"profile", "study"} & set(said.stages)
    assert result.policy.execution == "compile_cudagraphs" and not is_low(result.policy)
    assert result.verdict.status == "passed"
    assert "No low precision pays here" in result.message and "CUDA graphs" in result.message


def test_low_precision_that_pays_only_under_cuda_graphs_is_searched(folder):
    step_s = host_bound(graphs=0.6, amp_graphs=0.4)
    result, said, *_ = run(folder, step_s, MLP, host_bound=True, execution="auto", compile_s=10.0, budget_s=400.0)
    assert "study" in said.stages
    assert is_low(result.policy) and result.policy.execution == "compile_cudagraphs"


def test_graphs_that_the_budget_does_not_hold_are_named_as_untried(folder):
    result, *_ = run(folder, host_bound(), MLP, host_bound=True, execution="auto", compile_s=40.0, budget_s=60.0)
    assert not result.worth_it
    assert "CUDA graphs, which were not tried" in result.message


def test_a_batch_that_fp32_has_to_split_is_searched_for(folder):
    """Low precision may be what makes the whole batch fit."""
    from autoprec.records import Failure

    class Full(TimedBench):
        def window(self, policy, window):
            if not is_low(policy) and policy.batch.micro > 32:
                return Failure(kind="out_of_memory", message="no room")
            return super().window(policy, window)

    clock = Clock()
    bench = Full(clock, host_bound(), look=looked(**MLP), host_bound=True)
    _, said, _ = tuned(folder, bench, clock, budget_s=120.0, execution="eager")
    assert "study" in said.stages


@pytest.mark.parametrize(("gain", "searched"), [(1.0, False), (1.005, False), (1.5, True)])
def test_a_predicted_target_stops_where_the_roofline_bounds_the_gain_to_nothing(folder, gain, searched):
    result, said, *_ = run(folder, host_bound(), {"has_conv": False}, host_bound=True, target=PREDICTED, gain=gain)
    assert ("study" in said.stages) == searched
    if not searched:
        assert "even with a host twice as fast as assumed" in result.message


def test_the_same_command_again_measures_nothing(folder):
    clock = Clock()
    bench = TimedBench(clock, host_bound(), look=looked(**MLP), host_bound=True)
    first, _, _ = tuned(folder, bench, clock, budget_s=60.0, execution="eager")
    calls = [what for what, _ in bench.calls]
    again, _, _ = tuned(folder, bench, clock, budget_s=60.0, execution="eager")
    assert {what for what, _ in bench.calls[len(calls) :]} <= {"probe"}
    assert again.message == first.message and again.policy.setup_hash() == first.policy.setup_hash()


def test_the_fake_target_is_measured():
    assert CUDA.timing == "measured" and PREDICTED.timing == "predicted"
