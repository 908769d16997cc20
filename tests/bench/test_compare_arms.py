"""The comparison script runs all arms and writes every sample."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoprec.bench.workload import load_workload
from autoprec.policy import Policy, save_policy

MODEL = """
import torch
from torch import nn
BATCH_SIZE = 8
def build_model(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
def batches(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(batch_size, 4, generator=generator), torch.randint(0, 3, (batch_size,), generator=generator)
"""


@pytest.fixture
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "compare_arms.py"
    spec = importlib.util.spec_from_file_location("compare_arms", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_arms"] = module
    spec.loader.exec_module(module)
    return module


def test_every_arm_is_timed_and_written_with_its_samples(
    script: ModuleType, tmp_path: Path, make_policy: Callable[..., Policy], capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.py"
    model.write_text(MODEL)
    policy = tmp_path / "policy.json"
    save_policy(make_policy(load_workload(model), "bf16", {"2": "fp32"}, micro=4), policy)
    arguments = [str(model), "--policy", str(policy), "--steps", "7", "--warmup", "2", "--device", "cpu"]
    result = script.main([*arguments, "--out", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "compare_arms.json").read_text()) == json.loads(json.dumps(result))
    names = [arm["name"] for arm in result["arms"]]
    assert names == ["fp32 (TF32 off)", "stock AMP fp16", "stock AMP bf16", "tuned (bf16, eager)"]
    for arm in result["arms"]:
        assert len(arm["step_times_s"]) == 7
        assert len(arm["losses"]) == 2 + 7 + 2
        assert arm["losses"] == pytest.approx(result["arms"][0]["losses"], abs=0.02)
    assert result["arms"][0]["over_fp32"][0] == 1.0
    assert "stock AMP fp16" in capsys.readouterr().out
    assert torch.backends.cudnn.allow_tf32


def test_a_ratio_lies_inside_its_interval(script: ModuleType) -> None:
    middle, low, high = script.ratio([2.0, 2.1, 1.9, 2.0], [1.0, 1.05, 0.95, 1.0], 0)
    assert middle == 2.0
    assert 1.7 < low <= middle <= high < 2.4
