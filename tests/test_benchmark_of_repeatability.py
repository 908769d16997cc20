"""The benchmark of the ruler itself: what it counts, what it plants, and that it runs on a CPU."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.bench import arms
from autoprec.bench.training import Training

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "repeatability.py").is_file(), reason="there is no benchmarks/repeatability.py here"
)
MODEL = """
import torch
from torch import nn

BATCH_SIZE = 8

def build_model():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)
"""


@pytest.fixture
def repeatability(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # small on any machine, one with a GPU too
    return importlib.import_module("repeatability")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def row(ratio: float, low: float, high: float, different: bool) -> dict[str, Any]:
    return {"ratio": ratio, "low": low, "high": high, "different": different}


def test_equal_arms_count_when_called_different_either_way_and_repeats_without_an_answer_do_not(repeatability):
    rows = [row(1.02, 1.01, 1.03, True), row(0.98, 0.97, 0.99, True), row(1.0, 0.99, 1.01, False), {"repeat": 3}]
    count, text = repeatability.counted(rows, 0.0)
    assert count == 2
    assert text.startswith("equal arms were called different in 2 of 4 repeats (6.8% to 93.2% with 95% confidence)")
    assert text.endswith("half of the intervals are narrower than 1.00% to either side; 1 gave no answer")


def test_a_slowdown_counts_as_found_only_where_the_slowed_arm_is_the_slower_one(repeatability):
    rows = [row(1.03, 1.02, 1.04, True), row(0.98, 0.97, 0.99, True), row(1.03, 0.99, 1.07, False), {"repeat": 3}]
    assert repeatability.counted(rows, 0.03)[0] == 1


def test_a_wait_on_the_host_takes_its_share_of_the_step(repeatability):
    began = time.perf_counter()
    repeatability.wait_on_host(0.5)(0.02)
    assert time.perf_counter() - began >= 0.01


def test_only_the_arm_asked_for_is_slowed_and_afterwards_none_is(repeatability, model, monkeypatch):
    place = repeatability.Place(model)
    waited: list[int] = []
    built: list[Any] = []
    seen: set[tuple[int, bool]] = set()
    own = repeatability.Slowed.__init__

    def noted(self: Any, *given: Any) -> None:
        own(self, *given)
        built.append(self)

    monkeypatch.setattr(repeatability.Slowed, "__init__", noted)
    step = repeatability.Slowed.step

    def stepped(self: Any, parts: Any) -> None:
        before = len(waited)
        step(self, parts)
        seen.add((built.index(self), len(waited) > before))

    monkeypatch.setattr(repeatability.Slowed, "step", stepped)
    policy = place.policies["fp32"]
    with repeatability.planted(lambda step_s: waited.append(1), first=False):
        outcomes = place.compare([policy, policy], steps=20, seed=0)
    assert [len(outcome.losses) for outcome in outcomes] == [20, 20]
    assert seen == {(0, False), (1, True)}
    assert len(waited) == 20
    assert outcomes[0].losses == outcomes[1].losses
    assert arms.Training is Training


def test_a_planted_slowdown_that_dwarfs_the_noise_is_found_every_time_and_samples_are_kept(repeatability, model, tmp_path):
    given = ["aa", model, "--out", str(tmp_path), "--repeats", "2", "--steps", "34", "--slowdown", "20"]
    assert repeatability.main(given) == 0
    result = json.loads((tmp_path / "slowdown-model.json").read_text())
    assert result["text"].startswith("a slowdown of 2000% was found in 2 of 2 repeats")
    for entry in result["repeats"]:
        assert entry["low"] > 5
        assert len(entry["slow"]["step_times_s"]) == len(entry["fast"]["step_times_s"]) == 28
        assert sum(entry["slow"]["block_steps"]) == 28
    assert (result["policy"], result["environment"]["torch_version"]) == ("fp32", torch.__version__)


def test_equal_arms_that_are_called_different_too_often_end_in_exit_code_1(repeatability, model, tmp_path, monkeypatch):
    monkeypatch.setattr(repeatability, "is_different", lambda low, high: True)
    assert repeatability.main(["aa", model, "--out", str(tmp_path), "--repeats", "2", "--steps", "20"]) == 1


def test_an_unknown_baseline_is_refused_with_those_there_are(repeatability, model, tmp_path):
    with pytest.raises(SystemExit, match=r"no baseline 'int8' here; there are fp32, amp_bf16"):
        repeatability.main(["aa", model, "--out", str(tmp_path), "--policy", "int8"])


def test_two_finished_tunes_are_timed_against_each_other_and_fp32(repeatability, model, tmp_path):
    place = repeatability.Place(model)
    for word, role in (("first", "fp32"), ("second", "amp_bf16")):
        folder = tmp_path / f"model-{word}"
        folder.mkdir()
        (folder / "policy.json").write_text(place.policies[role].model_dump_json())
    code = repeatability.main(["tunes", model, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "tunes-model.json").read_text())
    assert code == (0 if abs(result["ratio"] - 1) <= 0.02 else 1)
    assert not result["same_set_up"]
    assert result["low"] <= result["ratio"] <= result["high"]
    assert {len(arm["step_times_s"]) for arm in result["arms"].values()} == {180}


def test_a_tune_that_ends_in_an_error_says_where_its_words_are(repeatability, model, tmp_path, monkeypatch):
    monkeypatch.setattr(repeatability.subprocess, "run", lambda *given, **options: SimpleNamespace(returncode=2))
    with pytest.raises(SystemExit, match=r"ended with exit code 2; see .*model-first.tune\.log"):
        repeatability.main(["tunes", model, "--out", str(tmp_path)])
