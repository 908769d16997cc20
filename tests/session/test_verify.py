"""``verify`` on small models: what it answers, what it writes, what it does not train twice, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autoprec
from autoprec.bench.bench import Bench, LongRunBench
from autoprec.bench.target import resolve_target
from autoprec.errors import DeviceError, PolicyError, PolicyMismatch, RunFolderError, UserError, WorkloadError
from autoprec.policy import Batch, LayerSetting, Policy, save_policy
from autoprec.records import Environment
from autoprec.session import Interrupted, verify
from autoprec.session.settings import Plan
from autoprec.tune.identity import Identity
from autoprec.tune.long_run import read_long_run
from autoprec.tune.report import write_report
from autoprec.tune.report_data import ReportData, read_report_data
from autoprec.tune.run_folder import RunFolder
from autoprec.tune.study_space import fingerprint_of

WORKLOADS = Path(__file__).parent.parent / "workloads"
STEPS = 40


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Watcher:
    """Keeps what a verification says."""

    def __init__(self):
        self.lines = []

    def stage(self, name, total):
        pass

    def advance(self, text=""):
        pass

    def found(self, text):
        self.lines.append(text)


def module(name):
    """A workload as a module in memory, so that it runs in this process."""
    spec = importlib.util.spec_from_file_location(name, WORKLOADS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def look_of(workload, gpu="4090d"):
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        return Bench(workload, resolve_target(gpu)).look()
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def tiny():
    return module("tiny_mlp")


@pytest.fixture(scope="module")
def tiny_look(tiny):
    return look_of(tiny)


@pytest.fixture(scope="module")
def planted():
    return module("overflow")


def policy_of(look, default="fp16", **more):
    size = look.effective_batch
    made = fingerprint_of(look, capability="8.9").model_copy(update={"device": "NVIDIA GeForce RTX 4090 D"})
    return Policy(default=default, batch=Batch(effective=size, micro=size), fingerprint=made, **more)


def written(folder, policy):
    folder.mkdir(parents=True, exist_ok=True)
    save_policy(policy, folder / "policy.json")
    return folder / "policy.json"


def run_folder(path, look, policy, trial_steps=4):
    """A tune's folder with what verify reads of it: identity, plan, policy and the report's data."""
    identity = Identity(
        workload="w", workload_sha256="", layer_list_sha256="", search_space_sha256="", target="t", torch_version="2"
    )
    plan = Plan(
        trial_steps=trial_steps, trial_warmup_steps=1, verify_steps=trial_steps, verify_seeds=3, timed_steps=20, timeout_s=60.0
    )
    with RunFolder.open(path, identity) as folder:
        folder.save_stage("plan", plan)
        folder.save_policy(policy)
    here = Environment(device="d", capability=None, driver=None, torch_version="2", python_version="3", platform="p")
    data = ReportData(
        name="run",
        workload="w",
        target="t",
        speed_origin="predicted",
        numerics="",
        policy=policy,
        look=look,
        environment=here,
        command="autoprec tune",
    )
    write_report(path, data)
    return path


@pytest.fixture(scope="module")
def passed(tmp_path_factory, tiny, tiny_look):
    """A verification that passes, in a tune's folder."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: False)
    watcher = Watcher()
    folder = run_folder(tmp_path_factory.mktemp("tune") / "run", tiny_look, policy_of(tiny_look))
    try:
        result = verify(folder, tiny, tolerance=0.1, progress=watcher)
    finally:
        patch.undo()
    return SimpleNamespace(result=result, watcher=watcher, run=folder, policy=policy_of(tiny_look))


def test_a_sound_policy_passes_on_three_seeds_for_ten_times_the_tunes_trial_window(passed):
    run = passed.result.long_run
    assert passed.result.status == "passed"
    assert run.steps == 10 * 4
    assert "10 times the 4 steps of this run's trials" in run.steps_chosen
    assert [len(one.losses) for one in run.arm("policy").runs] == [40, 40, 40]
    assert [one.seed for one in run.arm("fp32_twin").runs] == [0, 1, 2]
    assert run.verdict.seeds == 3
    assert abs(run.verdict.loss_gap) < 0.1


def test_policy_and_fp32_start_from_the_same_weights_and_data(passed):
    run = passed.result.long_run
    for fp32, policy in zip(run.arm("fp32").runs, run.arm("policy").runs, strict=True):
        assert policy.losses[0] == pytest.approx(fp32.losses[0], rel=1e-2)
        assert policy.losses != fp32.losses
    assert len({one.losses[0] for one in run.arm("fp32").runs}) == 3


def test_the_json_holds_every_loss_the_verdict_the_settings_and_where_it_ran(passed):
    data = json.loads((passed.run / "verify-1" / "verify.json").read_text())
    assert data["status"] == "passed"
    assert (data["steps"], data["seeds"], data["tolerance"]) == (40, 3, 0.1)
    assert {arm["role"]: len(arm["runs"]) for arm in data["arms"]} == {"fp32": 3, "policy": 3, "fp32_twin": 3}
    assert data["environment"]["torch_version"] == torch.__version__
    assert set(data["environment"]) >= {"device", "driver", "cuda_version", "platform", "python_version"}
    assert data["command"]
    assert data["created"].endswith("UTC")
    assert data["noise"]["pairs"] == 3
    assert data["verdict"]["low"] <= data["verdict"]["loss_gap"] <= data["verdict"]["high"]
    assert Policy.model_validate_json(json.dumps(data["policy"])) == passed.policy


def test_what_is_written_reads_back_equal(passed):
    assert read_long_run(passed.run / "verify-1") == passed.result.long_run


def test_the_report_of_the_run_is_written_again_with_the_verification_in_it(passed):
    assert passed.result.run_report == passed.run / "report.html"
    html = (passed.run / "report.html").read_text()
    assert "Over a long run: verify-1" in html
    assert "The policy trains like FP32 over 40 steps" in html
    sections = read_report_data(passed.run).long_runs
    assert [section.page for section in sections] == ["verify-1/verify.html"]


def test_page_and_picture_lie_beside_the_losses(passed):
    assert "The policy trains like FP32 over 40 steps" in passed.result.page_path.read_text()
    assert passed.result.picture_path.read_text().startswith("<svg")


def test_it_says_at_once_where_the_policy_was_made_and_what_is_here(passed):
    assert passed.watcher.lines[0].startswith("policy: ")
    assert "tuned on NVIDIA GeForce RTX 4090 D" in passed.watcher.lines[0]
    assert f"with torch {torch.__version__}" in passed.watcher.lines[0]


def test_a_speed_that_cannot_be_measured_is_predicted_and_says_so(passed):
    speeds = {speed.name: speed for speed in passed.result.long_run.speeds}
    assert set(speeds) == {"FP32", "the policy"}
    assert speeds["FP32"].speed_origin == "predicted"
    assert speeds["FP32"].policy_ratio > 0
    assert speeds["FP32"].policy_ratio_low is None


def test_the_same_call_again_trains_nothing_and_answers_the_same(passed, tiny):
    lines = (passed.run / "verify-1" / "candidates.jsonl").read_text()
    again = verify(passed.run, tiny, tolerance=0.1)
    assert again.folder == passed.result.folder
    assert (passed.run / "verify-1" / "candidates.jsonl").read_text() == lines
    assert again.long_run.arms == passed.result.long_run.arms


def test_another_tolerance_judges_the_same_losses_and_another_length_gets_a_folder_of_its_own(passed, tiny):
    lines = (passed.run / "verify-1" / "candidates.jsonl").read_text()
    assert verify(passed.run, tiny, tolerance=0.2).folder == passed.run / "verify-1"
    assert (passed.run / "verify-1" / "candidates.jsonl").read_text() == lines
    other = verify(passed.run, tiny, tolerance=0.2, steps=24, seeds=1)
    assert other.folder == passed.run / "verify-2"
    assert [section.name for section in read_report_data(passed.run).long_runs] == ["verify-1", "verify-2"]


def test_more_seeds_train_only_what_is_new(tmp_path, tiny, tiny_look):
    path = written(tmp_path, policy_of(tiny_look))
    first = verify(path, tiny, steps=24, seeds=1, tolerance=0.5)
    count = len((first.folder / "candidates.jsonl").read_text().splitlines())
    second = verify(path, tiny, steps=24, seeds=2, tolerance=0.5)
    assert second.folder == first.folder == tmp_path / "verify-1"
    assert len((first.folder / "candidates.jsonl").read_text().splitlines()) == 2 * count
    assert second.long_run.arm("policy").runs[0] == first.long_run.arm("policy").runs[0]


def test_a_planted_overflow_is_rejected_with_its_layer_and_the_fp32_losses_are_kept(tmp_path, planted):
    path = written(tmp_path, policy_of(look_of(planted)))
    result = verify(path, planted, steps=24)
    assert result.status == "rejected"
    assert "seed 0" in result.long_run.text
    assert "wide" in result.long_run.text
    assert result.long_run.arm("policy").runs[0].failure.layer == "wide"
    assert len(result.long_run.arm("fp32").runs[0].losses) == 24
    assert result.long_run.speeds == ()
    assert "does not train like FP32" in result.page_path.read_text()
    assert result.run_report is None


def test_the_cure_of_the_planted_overflow_passes(tmp_path, planted):
    policy = policy_of(look_of(planted), layers={"wide": LayerSetting(precision="fp32")})
    result = verify(policy, planted, steps=24, seeds=2, tolerance=0.2, gpu="4090d", out=tmp_path / "here")
    assert result.status == "passed"
    assert result.folder == tmp_path / "here"
    assert result.long_run.policy_file == "a policy in memory"


def test_a_policy_made_elsewhere_is_verified_all_the_same_and_the_difference_is_said(tmp_path, tiny, tiny_look):
    made = policy_of(tiny_look)
    other = made.fingerprint.model_copy(
        update={"device": "NVIDIA H200", "capability": "9.0", "torch_version": "2.11.0", "workload_sha256": "0" * 64}
    )
    path = written(tmp_path, made.model_copy(update={"fingerprint": other}))
    result = verify(path, tiny, steps=24, seeds=1, tolerance=0.5, gpu="4090d")
    said = " / ".join(result.long_run.warnings)
    assert "made with 2.11.0" in said
    assert "made for NVIDIA H200" in said
    assert "file has changed" in said


def test_without_cuda_the_cpu_stands_in_for_the_policys_card(tmp_path, tiny, tiny_look):
    result = verify(written(tmp_path, policy_of(tiny_look)), tiny, steps=24, seeds=1, tolerance=0.5)
    assert result.long_run.target == "NVIDIA GeForce RTX 4090 D"
    assert result.long_run.warnings == ()


def test_a_card_that_nobody_knows_needs_a_name(tmp_path, tiny, tiny_look):
    made = policy_of(tiny_look)
    other = made.fingerprint.model_copy(update={"device": "Voodoo 2"})
    with pytest.raises(DeviceError, match=r"Voodoo 2.*\n.*--gpu"):
        verify(written(tmp_path, made.model_copy(update={"fingerprint": other})), tiny)


def test_a_compiled_policy_is_verified_eager_without_cuda_and_that_is_said(tmp_path, tiny, tiny_look):
    path = written(tmp_path, policy_of(tiny_look, execution="compile_cudagraphs"))
    run = verify(path, tiny, steps=24, seeds=1, tolerance=0.5).long_run
    assert run.policy.execution == "eager"
    assert "eager numerics" in run.changes[0]
    assert "CUDA graphs" in run.changes[0]


def test_on_the_cpu_itself_speed_is_measured_in_turns_and_not_twice(tmp_path, tiny):
    look = look_of(tiny, "cpu")
    path = written(tmp_path, policy_of(look, "bf16"))
    first = verify(path, tiny, steps=24, seeds=1, tolerance=0.5, gpu="cpu")
    speeds = {speed.name: speed for speed in first.long_run.speeds}
    assert set(speeds) == {"FP32", "stock AMP bf16", "the policy"}
    for name in ("FP32", "stock AMP bf16"):
        assert speeds[name].speed_origin == "measured"
        assert speeds[name].policy_ratio_low <= speeds[name].policy_ratio <= speeds[name].policy_ratio_high
    lines = (first.folder / "candidates.jsonl").read_text()
    assert verify(path, tiny, steps=24, seeds=1, tolerance=0.5, gpu="cpu").long_run.speeds == first.long_run.speeds
    assert (first.folder / "candidates.jsonl").read_text() == lines


def test_data_that_ends_is_gone_through_again_and_that_is_said(tmp_path, tiny_look):
    source = module("tiny_mlp")
    endless = source.batches

    def few(batch_size, seed):
        stream = endless(batch_size, seed)
        yield from (next(stream) for _ in range(7))

    source.batches = few
    result = verify(written(tmp_path, policy_of(tiny_look)), source, steps=28, seeds=1, tolerance=0.5)
    assert result.status == "passed"
    note = next(note for note in result.long_run.notes if "batches()" in note)
    assert "ended after 7 batches" in note
    assert "28 steps go 4.0 times" in note


def test_a_policy_for_another_model_is_refused_before_anything_is_trained(tmp_path, tiny, planted):
    path = written(tmp_path, policy_of(look_of(planted)))
    with pytest.raises(PolicyMismatch, match="wide") as error:
        verify(path, tiny)
    assert "autoprec tune" in error.value.hint
    assert error.value.exit_code == 2
    assert not (tmp_path / "verify-1").exists()


def test_a_policy_for_another_batch_is_refused(tmp_path, tiny, tiny_look):
    policy = policy_of(tiny_look).model_copy(update={"batch": Batch(effective=32, micro=32)})
    with pytest.raises(PolicyMismatch, match="batches of 32 samples; the model's file gives 16"):
        verify(written(tmp_path, policy), tiny)


def test_a_missing_policy_and_a_file_that_is_none_are_named(tmp_path, tiny):
    with pytest.raises(PolicyError, match="No policy at"):
        verify(tmp_path / "policy.json", tiny)
    with pytest.raises(PolicyError, match="No policy at"):
        verify(tmp_path, tiny)
    (tmp_path / "other.json").write_text('{"trials": 3}')
    with pytest.raises(PolicyError, match="not an autoprec policy"):
        verify(tmp_path / "other.json", tiny)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("steps", 5, "20 or more"), ("seeds", 0, "1 or more"), ("tolerance", 1.5, "between 0 and 1")],
)
def test_a_setting_outside_its_range_says_what_is_allowed(field, value, words):
    with pytest.raises(UserError, match=words):
        verify("policy.json", "model.py", **{field: value})


def test_a_folder_of_another_verification_is_refused_with_the_difference(tmp_path, tiny, tiny_look):
    path = written(tmp_path, policy_of(tiny_look))
    verify(path, tiny, steps=24, seeds=1, tolerance=0.5, out=tmp_path / "out")
    with pytest.raises(RunFolderError, match="steps: the folder holds 24, asked was 25"):
        verify(path, tiny, steps=25, seeds=1, out=tmp_path / "out")


def test_fp32_that_does_not_train_is_the_workloads_fault(tmp_path, tiny_look):
    source = module("tiny_mlp")
    source.build_optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=1e9)
    with pytest.raises(WorkloadError, match="FP32"):
        verify(written(tmp_path, policy_of(tiny_look)), source, steps=24)


def test_ctrl_c_keeps_the_finished_windows_and_the_same_call_goes_on(tmp_path, tiny, tiny_look, monkeypatch):
    path = written(tmp_path, policy_of(tiny_look))
    real, trained = LongRunBench.window, []

    def until_the_fourth(self, policy, window):
        if window.steps == 24:
            if len(trained) == 3:
                raise KeyboardInterrupt
            trained.append(window)
        return real(self, policy, window)

    monkeypatch.setattr(LongRunBench, "window", until_the_fourth)
    with pytest.raises(Interrupted, match="3 finished windows are kept") as error:
        verify(path, tiny, steps=24, seeds=2, tolerance=0.5)
    assert error.value.exit_code == 130
    kept = (tmp_path / "verify-1" / "candidates.jsonl").read_text()
    monkeypatch.setattr(LongRunBench, "window", real)
    result = verify(path, tiny, steps=24, seeds=2, tolerance=0.5)
    lines = (result.folder / "candidates.jsonl").read_text()
    assert lines.startswith(kept)
    assert len(lines.splitlines()) == 6


def test_the_package_offers_verify():
    assert autoprec.verify is verify
