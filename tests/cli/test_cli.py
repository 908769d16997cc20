"""The command line: what people get for mistakes, and that help answers without loading torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
WORKLOADS = ROOT / "tests" / "workloads"


def run_cli(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a user does, without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-c", "from autoprec.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=240, check=False)


def refused(*arguments: object, cwd: Path = ROOT) -> str:
    """The error text of a call that must be refused as a user's mistake."""
    result = run_cli(*arguments, cwd=cwd)
    assert result.returncode == 2, result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    assert "Error" in result.stderr
    return " ".join(result.stderr.split())


def tune_source(tmp_path: Path, source: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(source)
    return refused("tune", path, "--gpu", "4090d", "--out", tmp_path / "run")


GOOD = (WORKLOADS / "tiny_mlp.py").read_text()


def test_help_lists_the_commands_without_loading_torch():
    code = "import sys; from autoprec.cli import main\ntry: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "tune" in result.stdout
    assert "show" in result.stdout
    assert result.stdout.strip().endswith("False")


def test_no_gpu_and_none_named_offers_cpu_or_a_name(tmp_path):
    text = refused("tune", WORKLOADS / "tiny_mlp.py", "--out", tmp_path)
    assert "--gpu cpu" in text
    assert "4090d" in text


def test_an_unknown_gpu_lists_the_known_ones(tmp_path):
    text = refused("tune", WORKLOADS / "tiny_mlp.py", "--gpu", "4090x", "--out", tmp_path)
    assert "4090x" in text
    assert "h200" in text.lower()


def test_a_missing_model_file_is_named(tmp_path):
    text = refused("tune", tmp_path / "nothing.py", "--gpu", "4090d", "--out", tmp_path / "run")
    assert "nothing.py" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def build_model(:\n", ["line 1"]),
        (GOOD.replace("def build_model", "def build_modle"), ["build_modle", "build_model"]),
        (GOOD.replace("def batches", "def nothing"), ["batches", "dataset"]),
        (GOOD.replace("return nn.Sequential", "return str"), ["build_model()", "torch.nn.Module"]),
        (GOOD.replace("F.mse_loss(model(x), y)", "(model(x) - y)"), ["scalar"]),
        (GOOD.replace("F.mse_loss(model(x), y)", "F.mse_loss(model(x), y) * float('nan')"), ["nan", "FP32"]),
        (GOOD.replace("while True:", "for _ in range(3):"), ["3 batches"]),
        (GOOD.replace("manual_seed(seed)", "manual_seed(torch.seed() % 2**30)"), ["seed"]),
    ],
    ids=["syntax error", "misspelt", "no data", "no module", "no scalar", "NaN in FP32", "ends early", "not reproducible"],
)
def test_a_broken_model_file_is_refused_with_the_reason(tmp_path, source, words):
    text = tune_source(tmp_path, source)
    for word in words:
        assert word in text, text


def test_an_output_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    text = refused("tune", WORKLOADS / "tiny_mlp.py", "--gpu", "4090d", "--out", tmp_path / "file")
    assert "--out" in text


@pytest.mark.parametrize("budget", ["fast", "0s", "10"])
def test_a_budget_that_is_no_time_says_how_to_write_one(tmp_path, budget):
    text = refused("tune", WORKLOADS / "tiny_mlp.py", "--gpu", "4090d", "--budget", budget)
    assert "10m" in text


def test_show_refuses_a_corrupt_and_a_newer_policy(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text("{ not json")
    assert "not valid JSON" in refused("show", path)
    path.write_text(json.dumps({"version": 99}))
    assert "99" in refused("show", path)
    assert "nowhere.json" in refused("show", tmp_path / "nowhere.json")


def test_gpus_prints_the_table_with_the_4090_d_beside_the_4090():
    result = run_cli("gpus")
    assert result.returncode == 0
    assert " 4090d " in result.stdout
    assert " 4090 " in result.stdout


def test_a_model_that_gains_nothing_gets_fp32_says_so_and_is_no_error(tmp_path):
    """Mixed precision is slower than FP32 on small models: NVIDIA/apex#297, open-mmlab/mmcv#742."""
    out = tmp_path / "run"
    done = run_cli("tune", WORKLOADS / "tiny_mlp.py", "--gpu", "4090d", "--trials", 1, "--budget", "60s", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "Not worth it" in done.stdout
    policy = json.loads((out / "policy.json").read_text())
    assert policy["default"] == "fp32"
    assert policy["layers"] == {}
    roles = [json.loads(line)["role"] for line in (out / "candidates.jsonl").read_text().splitlines()]
    assert {"fp32", "fp32_tf32", "amp_fp16", "amp_bf16"} <= set(roles)
