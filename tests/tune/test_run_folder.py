from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from made_up_run import DIVERGED, WINDOW, candidates, look, measurement, policy, profile, report_data, verdict

from autoprec.errors import RunFolderError
from autoprec.policy import load_policy
from autoprec.records import Verdict, Window
from autoprec.tune.identity import Identity, default_path, differences
from autoprec.tune.run_folder import RunFolder, trials_frame


def identity(**changes: object) -> Identity:
    fields = {
        "workload": "model.py",
        "workload_sha256": "a" * 64,
        "layer_list_sha256": "b" * 64,
        "search_space_sha256": "c" * 64,
        "target": "NVIDIA GeForce RTX 4090 D",
        "torch_version": "2.14.1",
        "settings": {"tolerance": 0.01},
        "budget": {"trials": 24},
        "command": "autoprec tune model.py",
    }
    return Identity(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reports" / "model-4090d"


# --- Evaluations ----------------------------------------------------------------------------------------------------------


def test_candidates_come_back_as_they_were_recorded(path):
    with RunFolder.open(path, identity()) as folder:
        for candidate in candidates():
            folder.add(candidate)
    assert tuple(RunFolder.read(path).candidates) == candidates()


def test_an_evaluation_is_on_disk_when_record_returns(path):
    with RunFolder.open(path, identity()) as folder:
        made = folder.record("search", policy(), WINDOW, measurement(), trial=3)
        assert (made.number, made.role, made.trial) == (0, "search", 3)
        assert RunFolder.read(path).candidates == [made]
        assert folder.record("repair", policy(default="bf16"), WINDOW, DIVERGED).number == 1


def test_the_same_set_up_and_window_are_looked_up_and_the_first_outcome_stays(path):
    first, second = measurement(0.02), measurement(0.03)
    with RunFolder.open(path, identity()) as folder:
        assert folder.lookup(policy(), WINDOW) is None
        folder.record("search", policy(), WINDOW, first)
        folder.record("search", policy(), WINDOW, second)
        assert folder.lookup(policy(), WINDOW.model_copy(update={"purpose": "verification"})) == first
        assert folder.lookup(policy(), Window(steps=61)) is None
        assert folder.lookup(policy(default="bf16"), WINDOW) is None
    with RunFolder.open(path, identity()) as again:
        assert again.lookup(policy(), WINDOW) == first


def test_numbers_only_grow(path):
    with RunFolder.open(path, identity()) as folder:
        folder.add(candidates()[5])
        with pytest.raises(ValueError, match="candidate 5 after 5"):
            folder.add(candidates()[5])
        assert folder.record("search", policy(), WINDOW, measurement()).number == 6


def test_a_line_cut_short_by_a_crash_is_left_out_noted_and_overwritten(path):
    with RunFolder.open(path, identity()) as folder:
        for candidate in candidates()[:2]:
            folder.add(candidate)
    whole = folder.candidates_path.read_bytes()
    folder.candidates_path.write_bytes(whole[:-40])
    with RunFolder.open(path, identity()) as again:
        assert [c.number for c in again.candidates] == [0]
        assert "cut short by a crash" in again.notes[0]
        again.add(candidates()[1])
    assert folder.candidates_path.read_bytes() == whole


def test_a_line_that_is_corrupt_in_the_middle_is_named(path):
    with RunFolder.open(path, identity()) as folder:
        for candidate in candidates()[:3]:
            folder.add(candidate)
    lines = folder.candidates_path.read_bytes().splitlines(keepends=True)
    folder.candidates_path.write_bytes(lines[0] + b"{}\n" + lines[2])
    with pytest.raises(RunFolderError, match="corrupt in line 2"):
        RunFolder.open(path, identity())


# --- Resuming and refusing ------------------------------------------------------------------------------------------------


def test_an_equal_run_is_resumed_and_may_ask_for_a_larger_budget(path):
    with RunFolder.open(path, identity()) as folder:
        assert not folder.resumed
    with RunFolder.open(path, identity(budget={"trials": 80}, command="another", autoprec_version="9")) as folder:
        assert folder.resumed
    assert RunFolder.read(path).identity.budget == {"trials": 80}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"workload_sha256": "d" * 64}, "the model's file: the folder holds aaaaaaaaaaaa, asked was dddddddddddd"),
        ({"layer_list_sha256": "d" * 64}, "the layer list: the folder holds bbbbbbbbbbbb, asked was dddddddddddd"),
        ({"search_space_sha256": "d" * 64}, "the search space: the folder holds cccccccccccc, asked was dddddddddddd"),
        ({"target": "NVIDIA H200"}, "the GPU: the folder holds NVIDIA GeForce RTX 4090 D, asked was NVIDIA H200"),
        ({"torch_version": "2.11.0"}, "torch: the folder holds 2.14.1, asked was 2.11.0"),
        ({"settings": {"tolerance": 0.02}}, "tolerance: the folder holds 0.01, asked was 0.02"),
        ({"settings": {}}, "tolerance: the folder holds 0.01, asked was None"),
    ],
)
def test_another_run_is_refused_with_the_difference_and_nothing_is_lost(path, change, line):
    with RunFolder.open(path, identity()) as folder:
        folder.add(candidates()[0])
    before = {item.name: item.read_bytes() for item in path.iterdir()}
    with pytest.raises(RunFolderError) as caught:
        RunFolder.open(path, identity(**change))
    assert line in caught.value.message
    assert "--out" in caught.value.hint
    assert {item.name: item.read_bytes() for item in path.iterdir()} == before
    assert differences(identity(), identity(**change)) == [line]


def test_samples_of_an_unknown_run_are_not_taken_over(path):
    path.mkdir(parents=True)
    (path / "candidates.jsonl").write_text("")
    with pytest.raises(RunFolderError, match=r"candidates.jsonl but no run.json"):
        RunFolder.open(path, identity())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"workload": 3}'])
def test_a_corrupt_run_file_is_refused(path, text):
    RunFolder.open(path, identity()).close()
    (path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match="corrupt or from another version"):
        RunFolder.open(path, identity())


def test_a_folder_without_a_run_is_not_read(tmp_path):
    with pytest.raises(RunFolderError, match=r"it has no run.json"):
        RunFolder.read(tmp_path)


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunFolderError, match="is a file, not a folder"):
            RunFolder.open(path, identity())


def test_the_default_folder_has_no_signs_that_shells_dislike():
    assert default_path("my model:Net", "rtx 4090/d") == Path("reports/my-model-Net-rtx-4090-d")
    assert default_path("..", "cpu") == Path("reports/run-cpu")


# --- The lock -------------------------------------------------------------------------------------------------------------


def test_two_tunes_cannot_share_a_folder(path):
    with RunFolder.open(path, identity()):
        with pytest.raises(RunFolderError, match=f"in use by another tune .process {os.getpid()} on"):
            RunFolder.open(path, identity())
        assert RunFolder.read(path).resumed
    RunFolder.open(path, identity()).close()


def test_a_refused_run_lets_go_of_the_lock(path):
    RunFolder.open(path, identity()).close()
    with pytest.raises(RunFolderError):
        RunFolder.open(path, identity(target="NVIDIA H200"))
    RunFolder.open(path, identity()).close()


def test_the_lock_of_a_process_that_died_is_taken_over_and_noted(path):
    code = (
        "import os, sys; from pathlib import Path; from autoprec.tune.folder_lock import FolderLock;"
        "lock = FolderLock(Path(sys.argv[1])); os._exit(9)"
    )
    path.mkdir(parents=True)
    root = Path(__file__).parents[2]
    died = subprocess.run([sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert died.returncode == 9
    with RunFolder.open(path, identity()) as folder:
        assert "left its lock behind when it died" in folder.notes[0]


def test_a_lock_of_another_machine_is_respected(path):
    path.mkdir(parents=True)
    (path / ".lock").write_text(json.dumps({"pid": 7, "host": f"not-{socket.gethostname()}"}))
    with pytest.raises(RunFolderError, match="process 7 on not-") as caught:
        RunFolder.open(path, identity())
    assert "delete" in caught.value.hint


# --- Stages, look, profile, policy, table ---------------------------------------------------------------------------------


def test_stages_look_profile_and_policy_come_back(path):
    with RunFolder.open(path, identity()) as folder:
        assert (folder.load_look(), folder.load_profile(), folder.load_stage("verify", Verdict)) == (None, None, None)
        folder.save_look(look())
        folder.save_profile(profile())
        folder.save_stage("other", WINDOW)
        folder.save_stage("verify", verdict())
        folder.save_policy(policy())
    again = RunFolder.read(path)
    assert (again.load_look(), again.load_profile()) == (look(), profile())
    assert again.load_stage("verify", Verdict) == verdict()
    assert again.load_stage("other", Window) == WINDOW
    assert load_policy(again.policy_path) == policy()


def test_a_stage_of_another_shape_is_refused_with_its_name(path):
    with RunFolder.open(path, identity()) as folder:
        folder.save_stage("verify", WINDOW)
        with pytest.raises(RunFolderError, match="stage 'verify'"):
            folder.load_stage("verify", Verdict)


def test_a_disk_without_room_is_an_error_with_what_to_do(path, monkeypatch):
    with RunFolder.open(path, identity()) as folder:
        folder.add(candidates()[0])

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(RunFolderError, match="No space left") as caught:
                folder.add(candidates()[1])
        assert "the same command goes on" in caught.value.hint
        folder.add(candidates()[1])
    assert [c.number for c in RunFolder.read(path).candidates] == [0, 1]


def test_the_table_has_a_row_a_candidate_and_a_column_a_parameter(path):
    with RunFolder.open(path, identity()) as folder:
        folder.write_trials(report_data().trials)
    table = pd.read_csv(folder.trials_path)
    assert len(table) == 35
    assert table.loc[34, ["number", "role", "verdict", "params.micro_batch"]].tolist() == [34, "trial", "passed", 64]
    assert table.loc[34, "samples_per_s"] == pytest.approx(6160)
    assert table.loc[8, "outcome"] == "out_of_memory"
    assert pd.isna(table.loc[8, "peak_bytes"])


def test_whole_numbers_stay_whole_in_a_table_with_gaps():
    text = trials_frame(report_data().trials).to_csv(index=False)
    assert ",6000000000," in text
    assert "6000000000.0" not in text


def test_the_studys_address_is_absolute(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with RunFolder.open("here", identity()) as folder:
        assert folder.study_url == f"sqlite:///{tmp_path}/here/study.db"
