"""A whole tune on small models: every stage runs, the folder holds what it should, and a second run resumes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pandas as pd
import pytest
import torch

from autoprec import load_policy
from autoprec.bench import roofline
from autoprec.errors import RunFolderError
from autoprec.policy import FORMAT_VERSION
from autoprec.records import Candidate, Measurement
from autoprec.session import tune

ROOT = Path(__file__).parent.parent.parent
WORKLOADS = ROOT / "tests" / "workloads"


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Watcher:
    """Keeps what a tune says."""

    def __init__(self):
        self.lines, self.stages = [], []

    def stage(self, name, total):
        self.stages.append(name)

    def advance(self, text=""):
        pass

    def found(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def busy_device():
    """A model that a CPU trains in milliseconds keeps no GPU busy, and then FP32 is right. So the host costs nothing here."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("HOST_OP_S", "HOST_VIEW_S", "HOST_STEP_S", "SCALER_HOST_S", "KERNEL_S"):
        patch.setattr(roofline, name, 1e-12)
    yield
    patch.undo()


def overflow():
    """The planted overflow as a module in memory, so that it runs in this process."""
    spec = importlib.util.spec_from_file_location("overflow", WORKLOADS / "overflow.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def overflow_run(tmp_path_factory, busy_device):
    # A wide tolerance, so that neither the seeds drawn nor the speed of this machine decides about a verdict.
    watcher = Watcher()
    out = tmp_path_factory.mktemp("overflow")
    result = tune(overflow(), gpu="t4", trials=20, budget_s=900, tolerance=0.1, out=out, progress=watcher)
    return result, watcher


def test_every_stage_runs_and_says_what_it_found(overflow_run):
    _, watcher = overflow_run
    assert watcher.stages[:4] == ["look", "reference", "profile", "study"]
    assert {"verification", "export"} <= set(watcher.stages)
    assert any(line.startswith("look: ") for line in watcher.lines)


def test_a_planted_overflow_leaves_exactly_its_layer_out_of_fp16(overflow_run):
    # A T4 has no bfloat16, so FP32 is the only cure.
    result, _ = overflow_run
    precisions = result.policy.precisions()
    assert precisions["wide"] == "fp32"
    low = {name for name, precision in precisions.items() if precision.startswith("fp16")}
    assert {"stem", "body.0", "body.2", "head"} <= low
    assert result.policy.evidence.verdict == "passed"
    assert result.worth_it


def test_stock_amp_fails_on_the_planted_overflow_and_the_table_says_so(overflow_run):
    result, _ = overflow_run
    arms = {arm.name: arm for arm in result.arms}
    assert arms["stock AMP fp16"].samples_per_s is None
    assert arms["FP32"].samples_per_s > 0
    assert arms[result.chosen].samples_per_s > arms["FP32"].samples_per_s


def test_the_exception_carries_its_reason(overflow_run):
    result, _ = overflow_run
    reason = result.policy.layers["wide"].reason
    assert reason.kind in ("range", "divergence", "sensitivity")
    assert any(character.isdigit() for character in reason.text)


def test_the_folder_holds_everything_a_review_needs(overflow_run):
    result, _ = overflow_run
    for name in ("policy.json", "study.db", "report.html", "trials.csv", "candidates.jsonl", "profile.json", "run.json"):
        assert (result.folder / name).stat().st_size > 0
    assert load_policy(result.policy_path) == result.policy
    rows = pd.read_csv(result.trials_path)
    assert {"fp32", "amp_fp16"} <= set(rows["role"])
    report = (result.folder / "report.html").read_text()
    assert "predicted" in report and "FP32 forward and backward passes</div>" in report


def test_the_study_holds_the_baselines_first_and_the_trials_with_readable_parameters(overflow_run):
    result, _ = overflow_run
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{result.study_path}")
    finished = [t for t in study.trials if t.state.is_finished() and t.state != optuna.trial.TrialState.FAIL]
    roles = [trial.user_attrs["role"] for trial in finished]
    baselines = [role for role in roles if role.startswith(("fp32", "amp"))]
    assert roles[: len(baselines)] == baselines
    assert len(finished) - len(baselines) >= 20
    names = {name for trial in study.trials for name in trial.params}
    assert {"front_index", "micro_batch", "init_scale", "growth_interval"} <= names
    assert len(names) <= 15
    assert study.metric_names == ["samples_per_s", "divergence"]


def test_every_raw_sample_reads_back(overflow_run):
    result, _ = overflow_run
    lines = (result.folder / "candidates.jsonl").read_text().splitlines()
    candidates = [Candidate.model_validate_json(line) for line in lines]
    assert any(isinstance(c.outcome, Measurement) and c.outcome.speed_origin == "predicted" for c in candidates)


def test_a_second_tune_into_the_folder_measures_nothing_again(overflow_run):
    result, _ = overflow_run
    before = len((result.folder / "candidates.jsonl").read_text().splitlines())
    again = tune(overflow(), gpu="t4", trials=20, budget_s=900, tolerance=0.1, out=result.folder)
    after = len((result.folder / "candidates.jsonl").read_text().splitlines())
    assert after == before
    assert again.policy.setup_hash() == result.policy.setup_hash()


def test_another_model_is_refused_with_the_difference(overflow_run):
    result, _ = overflow_run
    with pytest.raises(RunFolderError, match="layer list"):
        tune(str(WORKLOADS / "tiny_mlp.py"), gpu="t4", out=result.folder)


def test_the_policy_trains_in_a_plain_loop_as_fp32_does(overflow_run):
    result, _ = overflow_run
    command = [sys.executable, "examples/train_with_policy.py", str(WORKLOADS / "overflow.py"), str(result.policy_path)]
    done = subprocess.run(
        [*command, "--steps", "40", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = [line for line in done.stdout.splitlines() if line.strip()[:1].isdigit() and "-" in line][-1].split()
    fp32, tuned = float(last[1]), float(last[2])
    assert tuned == pytest.approx(fp32, rel=0.1)


def test_the_cpu_itself_is_measured(tmp_path):
    result = tune(str(WORKLOADS / "tiny_mlp.py"), gpu="cpu", trials=3, budget_s=60, anyway=True, out=tmp_path / "cpu")
    assert result.policy.evidence.speed_origin == "measured"
    assert {arm.speed_origin for arm in result.arms} == {"measured"}


def test_an_object_in_memory_is_tuned_in_this_process(tmp_path):
    class Regression:
        BATCH_SIZE = 8

        @staticmethod
        def build_model():
            return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

        @staticmethod
        def batches(batch_size, seed):
            generator = torch.Generator().manual_seed(seed)
            while True:
                x = torch.randn(batch_size, 8, generator=generator)
                yield x, (x[:, 0] > 0).long()

    result = tune(Regression, gpu="4090d", trials=2, budget_s=40, anyway=True, out=tmp_path / "object")
    assert result.policy_path.exists()
    assert json.loads(result.policy_path.read_text())["version"] == FORMAT_VERSION


def test_ctrl_c_keeps_the_finished_trials_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    code = "from autoprec.cli import main; main()"
    arguments = ["tune", str(WORKLOADS / "tiny_mlp.py"), "--gpu", "4090d", "--out", str(out), "--trials", "400", "--budget", "5m"]
    arguments += ["--anyway"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and not _has_trials(out / "candidates.jsonl"):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "finished trials" in errors
    assert "again" in errors
    assert "Traceback" not in errors
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{out / 'study.db'}")
    assert any(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)


def _has_trials(path: Path) -> bool:
    return path.exists() and sum('"trial":' in line and '"trial":null' not in line for line in path.read_text().splitlines()) >= 6
