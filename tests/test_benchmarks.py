"""The benchmark scripts run end to end on a tiny model, and what they write down is what was run."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.bench.workload import load_workload
from autoprec.policy import Backend, Batch, Fingerprint, LayerSetting, LossScale, Policy, save_policy
from autoprec.runtime import PolicyScaler, layer_signature, named_layers

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "tests" / "workloads" / "tiny_mlp.py")
# --quick: 2 warm-up steps, 6 timed ones in 2 blocks, each after one untimed step.
TIMED, RUN = 6, 2 + 6 + 2
STOCK = ["fp32", "amp_fp16", "amp_bf16"]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("compare_arms")


def fingerprint(layers: dict[str, str] | None = None) -> Fingerprint:
    own = {name: layer_signature(module) for name, module in named_layers(load_workload(MODEL).build_model()).items() if name}
    return Fingerprint.of(layers or own, device="cpu", capability=None, torch_version=torch.__version__, workload_sha256="0")


@pytest.fixture
def write_policy(tmp_path: Path) -> Callable[..., str]:
    def write(name: str = "policy.json", **changes: Any) -> str:
        whole = {
            "default": "fp32",
            "batch": Batch(effective=16, micro=16),
            "fingerprint": fingerprint(changes.pop("layers_of", None)),
        }
        save_policy(Policy(**(whole | changes)), tmp_path / name)
        return str(tmp_path / name)

    return write


def run(compare: Any, out: Path, *policies: str, more: tuple[str, ...] = (), model: str = MODEL) -> dict[str, Any]:
    named = [word for path in policies for word in ("--policy", path)]
    assert compare.main([model, *named, "--quick", "--device", "cpu", "--out", str(out), *more]) == 0
    return json.loads((out / "compare.json").read_text())


def hand_loop(steps: int, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    workload = load_workload(MODEL)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    stream = workload.batches(16, seed)
    kept = [next(stream) for _ in range(4)]
    losses = []
    for step in range(steps):
        x, y = kept[step % 4]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_every_arm_leaves_its_samples_and_finite_losses(compare, write_policy, tmp_path):
    layers = {"2": LayerSetting(precision="fp32")}
    path = write_policy(default="bf16", layers=layers)
    data = run(compare, tmp_path / "out", path)
    assert list(data["arms"]) == [*STOCK, "tuned_1"]
    assert list(data["left_out"]) == ["fp32_tf32"]
    for arm in data["arms"].values():
        assert arm["failure"] is None
        assert (len(arm["step_times_s"]), len(arm["losses"])) == (TIMED, RUN)
        assert all(seconds > 0 for seconds in arm["step_times_s"])
        assert all(math.isfinite(loss) for loss in arm["losses"])
        median_s = statistics.median(arm["step_times_s"])
        low_s, high_s = arm["step_s_95"]
        assert (arm["median_step_s"], arm["samples_per_s"]) == pytest.approx((median_s, 16 / median_s))
        assert low_s <= median_s <= high_s
        assert arm["samples_per_s_95"] == pytest.approx([16 / high_s, 16 / low_s])
        assert arm["block_steps"] == [3, 3]
    assert [sorted(block) for block in data["block_order"]] == [sorted(data["arms"])] * 2


def test_fp32_and_an_all_fp32_policy_train_like_a_loop_by_hand(compare, write_policy, tmp_path):
    data = run(compare, tmp_path / "out", write_policy(), more=("--seed", "3"))
    expected = hand_loop(RUN, seed=3)
    assert data["arms"]["fp32"]["losses"] == expected
    assert data["arms"]["tuned_1"]["losses"] == expected
    assert data["arms"]["amp_bf16"]["losses"] != expected
    assert data["arms"]["fp32"]["first_loss"] == pytest.approx(statistics.fmean(expected[:4]))
    assert data["arms"]["fp32"]["last_loss"] == pytest.approx(statistics.fmean(expected[-4:]))


def test_gradients_are_clipped_in_every_arm(compare, write_policy, tmp_path):
    sgd = "def build_optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=0.05)\n"
    left: dict[str, dict[str, float]] = {}
    for clip in ("None", "0.01"):
        model = tmp_path / "clipped.py"
        model.write_text(Path(MODEL).read_text() + f"\n\n{sgd}\n\nGRAD_CLIP = {clip}\n")
        arms = run(compare, tmp_path / clip, write_policy(default="fp16"), model=str(model))["arms"]
        left[clip] = {key: arm["last_loss"] / arm["first_loss"] for key, arm in arms.items()}
    assert list(left["None"]) == [*STOCK, "tuned_1"]
    # Ten steps of at most 0.05 x 0.01 hardly move the weights; unclipped gradients of norm 1 to 10 do.
    assert all(share > 0.97 for share in left["0.01"].values()), left
    assert all(share < 0.9 for share in left["None"].values()), left


def test_only_arms_with_a_channels_last_policy_get_channels_last_batches(compare, write_policy):
    setups = [compare.Setup("fp32", "FP32"), compare.Setup("tuned_1", "tuned", policy=channels_last_policy())]
    options = argparse.Namespace(seed=0, device="cpu")
    workload = load_workload(Images())
    plain, tuned = compare.place_batches(workload, setups, 4, options)
    for one, other in zip(plain.parts, tuned.parts, strict=True):
        assert one[0][0].is_contiguous()
        assert [part[0].shape[0] for part in other] == [2, 2]
        assert all(part[0].is_contiguous(memory_format=torch.channels_last) for part in other)
        assert torch.equal(torch.cat([part[0] for part in other]), one[0][0])


class Images:
    BATCH_SIZE = 4

    def build_model(self) -> nn.Module:
        return nn.Conv2d(3, 2, 3)

    def batches(self, batch_size: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(batch_size, 3, 8, 8, generator=generator), torch.zeros(batch_size, 6, 6, dtype=torch.long)


def channels_last_policy() -> Policy:
    return Policy(
        default="fp32",
        batch=Batch(effective=4, micro=2, accumulation_steps=2),
        backend=Backend(channels_last=True),
        fingerprint=fingerprint(),
    )


def test_micro_batches_add_up_to_the_same_losses(compare, write_policy, tmp_path):
    path = write_policy(batch=Batch(effective=16, micro=4, accumulation_steps=4))
    data = run(compare, tmp_path / "out", path)
    assert data["arms"]["tuned_1"]["losses"] == pytest.approx(data["arms"]["fp32"]["losses"], rel=1e-4)
    assert data["arms"]["tuned_1"]["micro_batch"] == 4


def test_ratios_compare_medians_and_lie_in_their_intervals(compare, write_policy, tmp_path):
    arms = run(compare, tmp_path / "out", write_policy())["arms"]
    for key in ("amp_fp16", "fp32"):
        assert arms[key][f"ratio_to_{key}"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
        figures = arms["tuned_1"][f"ratio_to_{key}"]
        assert figures["ratio"] == pytest.approx(arms[key]["median_step_s"] / arms["tuned_1"]["median_step_s"])
        assert figures["low"] <= figures["ratio"] <= figures["high"]


def test_each_fp16_arm_scales_its_loss_with_its_own_numbers(compare, write_policy, tmp_path):
    arms = run(compare, tmp_path / "out", write_policy(default="fp16", loss_scale=LossScale(init=1024.0)))["arms"]
    # Initial, after the warm-up, after each block. 65536 is torch's own; it is too much for the first gradients here.
    assert arms["amp_fp16"]["loss_scales"][0] == 65536.0
    assert arms["tuned_1"]["loss_scales"] == [1024.0] * 4
    assert arms["amp_bf16"]["loss_scales"] == []
    assert arms["tuned_1"]["blocks_with_skipped_steps"] == 0


def test_the_record_says_where_the_samples_come_from(compare, write_policy, tmp_path):
    path = write_policy()
    data = run(compare, tmp_path / "out", path)
    assert data["command"].startswith(f"python benchmarks/compare_arms.py {MODEL} --policy {path} --quick")
    assert data["environment"]["torch_version"] == torch.__version__
    assert data["arms"]["tuned_1"]["setup_sha256"] == Policy.model_validate_json(Path(path).read_text()).setup_hash()
    assert (data["workload"]["sha256"], data["workload"]["batch_size"]) == (load_workload(MODEL).sha256, 16)
    assert len(data["commit"]) == 40 or data["commit"] == "unknown"


def test_an_arm_that_cannot_compile_is_reported_and_the_others_go_on(compare, write_policy, tmp_path, monkeypatch, capsys):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(torch, "compile", refuse)
    arms = run(compare, tmp_path / "out", write_policy("bad.json", execution="compile"), write_policy("good.json"))["arms"]
    assert arms["tuned_1"]["failure"] == "RuntimeError: no compiler"
    assert "step_times_s" not in arms["tuned_1"]
    assert all(len(arms[key]["step_times_s"]) == TIMED for key in (*STOCK, "tuned_2"))
    assert "FAILED: RuntimeError: no compiler" in capsys.readouterr().out


def test_an_arm_that_runs_out_of_memory_midway_is_reported_and_the_others_go_on(compare, write_policy, tmp_path, monkeypatch):
    original, calls = nn.LayerNorm.forward, []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            calls.append(1)
            if len(calls) > 4:
                raise torch.OutOfMemoryError("tried to allocate")
        return original(module, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", forward)
    arms = run(compare, tmp_path / "out", write_policy())["arms"]
    assert arms["amp_fp16"]["failure"] == "out of memory: OutOfMemoryError: tried to allocate"
    assert arms["tuned_1"]["ratio_to_amp_fp16"] is None
    assert arms["tuned_1"]["ratio_to_fp32"]["ratio"] > 0
    assert arms["fp32"]["losses"] == hand_loop(RUN)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("missing.py", {}, "No model file at"),
        (MODEL, {"batch": Batch(effective=8, micro=8), "second": True}, "different effective batches"),
        (MODEL, {"layers_of": {"head": "Linear"}}, "head"),
    ],
)
def test_a_mistake_exits_with_2_and_says_what_is_wrong(compare, write_policy, capsys, model, changes, message):
    changes = dict(changes)
    other = ["--policy", write_policy("other.json")] if changes.pop("second", False) else []
    assert compare.main([model, "--policy", write_policy(**changes), *other, "--quick", "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_policy_and_too_few_steps_exit_with_2(compare, write_policy, capsys):
    assert compare.main([MODEL, "--policy", "nowhere.json", "--device", "cpu"]) == 2
    assert "No policy at nowhere.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        compare.main([MODEL, "--policy", write_policy(), "--steps", "3", "--blocks", "4"])
    assert stopped.value.code == 2
    assert "--steps 3 are fewer than --blocks 4" in capsys.readouterr().err


def test_skipped_steps_are_seen_in_the_block_they_happen_in(compare, write_policy, tmp_path, monkeypatch, capsys):
    original, tuned = torch.amp.GradScaler.scale, []

    def scale(scaler: torch.amp.GradScaler, loss: torch.Tensor) -> torch.Tensor:
        if not isinstance(scaler, PolicyScaler):
            return original(scaler, loss)
        tuned.append(loss)
        return original(scaler, loss) * (math.inf if len(tuned) == 4 else 1.0)

    # Two warm-up steps and an untimed one come before: the fourth is the first timed step of the first block.
    monkeypatch.setattr(torch.amp.GradScaler, "scale", scale)
    policy = write_policy(default="fp16", loss_scale=LossScale(init=64.0))
    arm = run(compare, tmp_path / "out", policy)["arms"]["tuned_1"]
    assert arm["loss_scales"] == [64.0, 64.0, 32.0, 32.0]
    assert arm["blocks_with_skipped_steps"] == 1
    assert "1 timed blocks hold skipped steps" in capsys.readouterr().out


def test_losses_that_are_not_finite_are_written_as_words(compare):
    assert compare.finite({"a": [1.0, math.nan, -math.inf]}) == {"a": [1.0, "nan", "-inf"]}


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("round_bootstrap")


def test_what_a_round_does_to_both_arms_cancels_in_their_ratio(bootstrap):
    # Round by round the machine gets slower, by far more than the arms differ.
    drift = [scale for scale in (1.0, 1.5, 2.0, 2.5) for _ in range(5)]
    ratio, low, high = bootstrap.ratio_interval([0.2 * scale for scale in drift], [0.1 * scale for scale in drift], [5] * 4)
    assert (ratio, low, high) == pytest.approx((2.0, 2.0, 2.0))
    median, low, high = bootstrap.step_interval([0.1 * scale for scale in drift], [5] * 4)
    assert median == pytest.approx(0.175)
    assert (low, high) == pytest.approx((0.1, 0.25), abs=0.03)


def test_many_steps_of_few_rounds_are_no_proof_where_the_rounds_differ(bootstrap):
    levels, jitter = [0.10, 0.11, 0.12, 0.13], [0.000, 0.001, 0.002, 0.003]
    by_round = [level + extra for level in levels for extra in jitter * 5]
    mixed = [level + extra for extra in jitter for level in levels * 5]
    assert sorted(by_round) == sorted(mixed)
    (_, low, high), (_, mixed_low, mixed_high) = (bootstrap.step_interval(times, [20] * 4) for times in (by_round, mixed))
    assert high - low > 1.5 * (mixed_high - mixed_low)


def test_equal_steps_give_an_interval_without_width_and_one_round_suffices(bootstrap):
    assert bootstrap.ratio_interval([0.3] * 4, [0.1] * 4, [4]) == pytest.approx((3.0, 3.0, 3.0))


@pytest.mark.parametrize("blocks", [[], [2, 1], [4, 0], [5]])
def test_blocks_that_do_not_make_up_the_steps_are_refused(bootstrap, blocks):
    with pytest.raises(ValueError, match="do not make up 4 steps"):
        bootstrap.step_interval([0.1] * 4, blocks)
