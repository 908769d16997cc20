from __future__ import annotations

import pytest
from made_up_run import DIVERGED, OUT_OF_MEMORY, candidates, gaps, report_data

from autoprec.records import Failure
from autoprec.tune.rows import TrialRow, failure_words, is_baseline, role_words, row_of, rows_of


def test_every_candidate_gets_a_row_in_order():
    found = candidates()
    rows = rows_of(found, loss_gaps=gaps(), stock_samples_per_s=2976.0)
    assert [row.number for row in rows] == list(range(35))
    assert [row.role for row in rows[:2]] == ["fp32", "fp32_tf32"]


def test_a_row_holds_the_figures_of_its_candidate_and_their_ratio_to_stock_amp():
    found = candidates()[34]
    row = row_of(found, loss_gap=0.0024, stock_samples_per_s=2976.0, verdict="passed", params={"front_index": 3})
    assert row.samples_per_s == pytest.approx(6160)
    assert row.ratio_to_stock_amp == pytest.approx(6160 / 2976)
    assert (row.loss_gap, row.peak_bytes, row.final_scale, row.origin) == (0.0024, 6_000_000_000, 8192.0, "predicted")
    assert (row.default_precision, row.num_exceptions, row.verdict, row.params) == ("fp16", 17, "passed", {"front_index": 3})
    assert (row.outcome, row.failure) == ("ok", "")


def test_a_failure_has_its_reason_and_no_figures():
    rows = report_data().trials
    assert (rows[8].outcome, rows[8].failure) == (
        "out_of_memory",
        "tried to allocate 2.1 GB with 0.4 GB free in stages.3.conv1 at step 0",
    )
    assert (rows[9].outcome, rows[9].failure) == ("diverged", "the loss is nan in head at step 14")
    assert (rows[8].samples_per_s, rows[8].loss_gap, rows[8].peak_bytes, rows[8].origin) == (None, None, None, None)


def test_a_failures_layer_and_step_are_not_said_twice():
    said = Failure(kind="diverged", message="the loss is nan at step 14", layer="head", step=14)
    assert failure_words(said) == "the loss is nan at step 14 in head"
    assert failure_words(DIVERGED) == "the loss is nan in head at step 14"
    assert failure_words(Failure(kind="timeout", message="no answer in 600 s")) == "no answer in 600 s"
    assert failure_words(OUT_OF_MEMORY).endswith("in stages.3.conv1 at step 0")


def test_parameters_are_those_of_the_candidates_own_trial():
    found = (candidates()[6], candidates()[7].model_copy(update={"trial": None}))
    rows = rows_of(found, loss_gaps={}, stock_samples_per_s=None, params={6: {"front_index": 1}, 7: {"front_index": 2}})
    assert [row.params for row in rows] == [{"front_index": 1}, {}]
    assert rows[0].ratio_to_stock_amp is None


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("fp32_tf32", "FP32 + TF32"),
        ("amp_fp16_channels_last", "stock AMP fp16, channels_last"),
        ("amp_bf16_compile_cudagraphs", "stock AMP bf16, compiled with CUDA graphs"),
        ("amp_fp16_channels_last_compile", "stock AMP fp16, channels_last, compiled"),
        ("start", "starting point"),
        ("finalist 2 (trial 16)", "finalist 2 (trial 16)"),
    ],
)
def test_a_role_is_said_in_words(role, words):
    assert role_words(role) == words


@pytest.mark.parametrize(
    ("role", "is_one"),
    [("fp32", True), ("amp_fp16_channels_last", True), ("amp_bf16_compile", True), ("search", False), ("repaired_fp16", False)],
)
def test_only_set_ups_that_need_no_search_are_baselines(role, is_one):
    assert is_baseline(role) is is_one


def test_rows_survive_json():
    for row in report_data().trials:
        assert TrialRow.model_validate_json(row.model_dump_json()) == row
