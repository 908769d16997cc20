"""The benchmarks of what applying a policy costs run on a CPU, and their two arms train alike."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
needs = {
    name: pytest.mark.skipif(not (ROOT / "benchmarks" / name).is_file(), reason=f"there is no benchmarks/{name} here")
    for name in ("applier_overhead.py", "applier_import.py")
}


def run(script: str, out: Path, written: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Small on any machine, one with a GPU too.
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, cwd=out)
    assert done.returncode == 0, done.stderr
    return json.loads((out / written).read_text())


@needs["applier_overhead.py"]
def test_a_policy_equal_to_stock_amp_trains_like_autocast_by_hand(tmp_path):
    report = run("applier_overhead.py", tmp_path, "overhead.json")
    assert report["environment"]["torch"] == torch.__version__
    assert {"gpt2 bf16", "mlp bf16"} <= set(report["results"])
    for result in report["results"].values():
        by_hand, policy = result["step_s"]["by_hand"], result["step_s"]["policy"]
        assert len(by_hand) == len(policy) >= 4
        assert result["loss"]["policy"] == result["loss"]["by_hand"]
        assert result["ratio"] == statistics.median(a / b for a, b in zip(policy, by_hand, strict=True))
        assert result["low"] <= result["ratio"] <= result["high"]


@needs["applier_import.py"]
def test_applying_removing_and_loading_leave_a_sample_for_each_repeat(tmp_path):
    report = run("applier_import.py", tmp_path, "import.json")
    for name in ("apply_s", "remove_s", "load_s"):
        assert len(report[name]) == 3
        assert all(seconds > 0 for seconds in report[name])
