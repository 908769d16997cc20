"""``autoprec verify`` as a user runs it: a worker process, what is printed, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoprec.policy import Batch, Fingerprint, Policy, save_policy

ROOT = Path(__file__).parent.parent.parent
WORKLOADS = ROOT / "tests" / "workloads"
TINY = {"0": "Linear bias=24 weight=24x6", "1": "GELU", "2": "LayerNorm bias=24 weight=24", "3": "Linear bias=1 weight=1x24"}
OVERFLOW = {
    "": "Net",
    "stem": "Linear bias=32 weight=32x8",
    "wide": "Linear bias=32 weight=32x32",
    "calm": "LayerNorm bias=32 weight=32",
    "body.0": "Linear bias=32 weight=32x32",
    "body.1": "GELU",
    "body.2": "Linear bias=32 weight=32x32",
    "body.3": "GELU",
    "head": "Linear bias=1 weight=1x32",
}


def saved(folder: Path, layers: dict[str, str], batch: int) -> Path:
    """An fp16 policy for a 4090 D."""
    made = Fingerprint.of(
        layers, device="NVIDIA GeForce RTX 4090 D", capability="8.9", torch_version="2.9.0", workload_sha256="0" * 64
    )
    path = folder / "policy.json"
    save_policy(Policy(default="fp16", batch=Batch(effective=batch, micro=batch), fingerprint=made), path)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from autoprec.cli import main; main()", "verify", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=240, check=False
    )


def test_a_policy_that_passes_ends_with_0_and_shows_its_losses_beside_fp32s(tmp_path):
    path = saved(tmp_path, TINY, 16)
    done = run(path, WORKLOADS / "tiny_mlp.py", "--steps", 40, "--seeds", 2, "--tolerance", 0.2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: " in done.stdout
    assert "tuned on NVIDIA GeForce RTX 4090 D with torch 2.9.0" in done.stdout
    assert "the policy was made with 2.9.0" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if "loss" in line and " to 0." in line] == ["FP32", "policy"]
    data = json.loads((tmp_path / "verify-1" / "verify.json").read_text())
    assert data["status"] == "passed"
    assert [len(one["losses"]) for arm in data["arms"] for one in arm["runs"]] == [40] * 6
    assert (tmp_path / "verify.log").exists()


def test_a_policy_that_overflows_ends_with_1_and_names_the_layer(tmp_path):
    done = run(saved(tmp_path, OVERFLOW, 1024), WORKLOADS / "overflow.py", "--steps", 20, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Rejected: " in done.stdout
    assert "wide" in done.stdout
    assert json.loads((tmp_path / "out" / "verify.json").read_text())["status"] == "rejected"


def refused(*arguments: object) -> str:
    done = run(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Error" in done.stderr
    return " ".join(done.stderr.split())


def test_a_policy_for_another_model_is_refused_with_the_layers(tmp_path):
    text = refused(saved(tmp_path, OVERFLOW, 1024), WORKLOADS / "tiny_mlp.py", "--gpu", "4090d")
    assert "wide" in text
    assert "autoprec tune" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No policy at"), ("{}", "not an autoprec policy"), ("{", "not valid JSON")],
    ids=["missing", "something else", "damaged"],
)
def test_a_file_that_is_no_policy_is_refused(tmp_path, content, words):
    path = tmp_path / "policy.json"
    if content is not None:
        path.write_text(content)
    assert words in refused(path, WORKLOADS / "tiny_mlp.py")


def test_a_missing_model_file_and_an_unknown_card_are_named(tmp_path):
    path = saved(tmp_path, TINY, 16)
    assert "nothing.py" in refused(path, tmp_path / "nothing.py")
    assert "4090x" in refused(path, WORKLOADS / "tiny_mlp.py", "--gpu", "4090x")


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(tmp_path):
    path = saved(tmp_path, TINY, 16)
    process = subprocess.Popen(
        command(path, WORKLOADS / "tiny_mlp.py", "--steps", 100_000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
    )
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and not (tmp_path / "verify-1" / "stages.json").exists():
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "finished windows are kept" in errors
    assert "Run the same command again" in errors
    assert "Traceback" not in errors
