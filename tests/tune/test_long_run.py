"""A long run's record, its curves, its picture and its page."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_run import ENVIRONMENT, policy, report_data

from autoprec.errors import RunFolderError
from autoprec.records import Failure
from autoprec.tune.divergence import loss_gap
from autoprec.tune.long_run import (
    LongRun,
    Run,
    Timed,
    Trained,
    long_run_folders,
    noise_of,
    read_long_run,
    verdict_of,
    write_long_run,
)
from autoprec.tune.long_run_curves import curves_of, departure_strip, sparkline
from autoprec.tune.long_run_page import picture, render_html, write_pages
from autoprec.tune.long_run_section import section_of, sections_of
from autoprec.tune.report import render_html as render_report

NASTY = "<script>alert(1)</script>"
STEPS = 1000


def losses(scale: float = 1.0, steps: int = STEPS) -> tuple[float, ...]:
    return tuple(scale * (0.5 + 2 * math.exp(-step / 100)) for step in range(steps))


def arm(role: str, *gaps: float) -> Trained:
    runs = []
    for seed, gap in enumerate(gaps):
        runs.append(Run(seed=seed, losses=losses(1 + gap), loss_gap=None if role == "fp32" else gap))
    return Trained(role=role, runs=tuple(runs))


ARMS = (arm("fp32", 0, 0, 0), arm("policy", 0.004, -0.002, 0.001), arm("fp32_twin", 0.001, -0.001, 0.001))


def long_run(arms: tuple[Trained, ...] = ARMS, tolerance: float = 0.01, **changes: object) -> LongRun:
    noise = noise_of(arms, tolerance)
    status, text, verdict = verdict_of(next(a for a in arms if a.role == "policy"), noise, tolerance)
    data = {
        "name": "verify-1",
        "status": status,
        "text": text,
        "verdict": verdict,
        "policy": policy(),
        "policy_file": "runs/a/policy.json",
        "workload": "model.py",
        "target": "NVIDIA H200",
        "numerics": "losses and speed measured on NVIDIA H200",
        "steps": STEPS,
        "steps_chosen": "as asked",
        "seeds": 3,
        "tolerance": tolerance,
        "arms": arms,
        "noise": noise,
        "speeds": (
            Timed(name="FP32", samples_per_s=100.0, speed_origin="measured", policy_ratio=2.5, policy_ratio_low=2.4),
            Timed(name="stock AMP fp16", speed_origin="measured", failure="the loss is nan"),
            Timed(name="the policy", samples_per_s=250.0, speed_origin="measured"),
        ),
        "environment": ENVIRONMENT,
        "command": "autoprec verify policy.json model.py",
        "created": "2026-01-02 03:04 UTC",
    }
    return LongRun.model_validate({**data, **changes})


def failing(kind: str = "diverged") -> tuple[Trained, ...]:
    failure = Failure(kind=kind, message="the loss is nan at step 400", layer="stem", step=400, losses=losses(1.3, 400))
    broken = Run(seed=0, losses=failure.losses, failure=failure)
    return (arm("fp32", 0), Trained(role="policy", runs=(broken,)), Trained(role="fp32_twin"))


def test_a_file_reads_back_equal_and_one_that_is_damaged_is_refused(tmp_path):
    for run in (long_run(), long_run(failing())):
        write_long_run(tmp_path, run)
        assert read_long_run(tmp_path) == run
    (tmp_path / "verify.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"verify\.json"):
        read_long_run(tmp_path)


def test_the_noise_floor_is_twice_the_root_mean_square_of_the_twins():
    noise = noise_of(ARMS, 0.01)
    assert noise.floor == pytest.approx(0.002, rel=1e-6)
    assert noise.pairs == 3


def test_tf32_counts_as_noise_only_where_it_trains_like_fp32_itself():
    near, far = arm("fp32_tf32", 0.003, -0.003, 0.003), arm("fp32_tf32", 0.08, 0.08, 0.08)
    counted, left_out = noise_of((*ARMS, near), 0.01), noise_of((*ARMS, far), 0.01)
    assert (counted.pairs, counted.tf32_counts) == (6, True)
    assert counted.floor == pytest.approx(2 * math.sqrt((1e-6 + 9e-6) / 2), rel=1e-6)
    assert (left_out.pairs, left_out.tf32_counts) == (3, False)
    assert left_out.floor == pytest.approx(0.002, rel=1e-6)
    assert "+8.00%, too far" in left_out.text


def test_tf32_that_failed_does_not_count():
    lost = Trained(role="fp32_tf32", runs=(Run(seed=0, losses=(), failure=Failure(kind="diverged", message="nan")),))
    assert noise_of((*ARMS, lost), 0.01).pairs == 3


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("diverged", "rejected"),
        ("scale_collapsed", "rejected"),
        ("out_of_memory", "rejected"),
        ("crashed", "inconclusive"),
        ("timeout", "inconclusive"),
    ],
)
def test_a_failure_rejects_but_a_process_that_died_decides_nothing(kind, status):
    run = long_run(failing(kind))
    assert run.status == status
    assert run.verdict is None
    assert "seed 0" in run.text
    assert "at step 400" in run.text


def test_a_policy_beyond_the_limit_is_rejected():
    assert long_run((ARMS[0], arm("policy", 0.05, 0.05, 0.05), ARMS[2])).status == "rejected"


@pytest.mark.parametrize(("points", "count"), [(8, 8), (40, 40), (240, 200)])
def test_curves_are_means_over_stretches_and_end_at_the_last_step(points, count):
    curves = curves_of(long_run(), points=points, smoothed=False)
    assert len(curves.steps) == len(curves.fp32) == len(curves.policy) == len(curves.band) == count
    assert curves.steps[-1] == STEPS
    assert curves.departure[-1] == pytest.approx(0.001, rel=1e-6)
    assert curves.band[-1] == pytest.approx(0.002, rel=1e-6)


def test_the_last_quarters_departure_is_the_gap_that_is_judged():
    reference, mine = losses(), tuple(value * 1.02 + 0.001 * (step % 7) for step, value in enumerate(losses()))
    arms = (
        Trained(role="fp32", runs=(Run(seed=0, losses=reference),)),
        Trained(role="policy", runs=(Run(seed=0, losses=mine, loss_gap=loss_gap(reference, mine)),)),
        arm("fp32_twin", 0.0),
    )
    curves = curves_of(long_run(arms), points=4, smoothed=False)
    assert curves.departure[-1] == pytest.approx(loss_gap(reference, mine), rel=1e-9)


@pytest.mark.parametrize(("value", "sign"), [(0.001, "·"), (0.005, "-"), (-0.005, "-"), (0.02, "+"), (-0.02, "v")])
def test_the_strip_says_whether_a_departure_is_noise(value, sign):
    curves = curves_of(long_run(), points=4).model_copy(update={"departure": (value,) * 4})
    assert departure_strip(curves, 0.01) == sign * 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_sparkline_has_a_character_a_value_and_its_ends_at_the_extremes(values):
    line = sparkline(values, min(values), max(values))
    assert len(line) == len(values)
    if max(values) > min(values):
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


@pytest.mark.parametrize("arms", [ARMS, failing(), (ARMS[0], arm("policy", 0.5, 0.5, 0.5), ARMS[2])], ids=["ok", "lost", "far"])
def test_the_picture_is_sound_asks_nothing_of_the_network_and_follows_light_and_dark(arms):
    text = picture(long_run(arms, target=NASTY))
    root = parsed(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_band_is_drawn_and_a_lost_run_ends_in_a_cross():
    assert 'class="noise"' in picture(long_run())
    lost = picture(long_run(failing()))
    assert "curve broken" in lost
    assert "✕" in lost


def test_the_page_tells_the_answer_the_seeds_the_speed_and_where_it_ran():
    html = render_html(long_run(warnings=(f"torch is {NASTY}",)))
    for words in (
        "The policy trains like FP32 over 1,000 steps",
        "2.50×",
        "the loss is nan",
        "AMD EPYC 7B13",
        "as asked",
        "0.40 %",
    ):
        assert words in html
    assert NASTY not in html
    assert "Torch is &lt;script&gt;" in html
    assert html.count("<section>") == html.count("</section>") == 3


def test_a_rejected_and_an_unclear_run_say_so_in_their_heading():
    assert "does not train like FP32 over 1,000 steps" in render_html(long_run(failing()))
    assert "is not settled after 1,000 steps" in render_html(long_run(failing("timeout")))


def test_verifications_are_found_in_the_order_of_their_numbers_and_unreadable_ones_are_left_out(tmp_path):
    for number in (10, 2):
        folder = tmp_path / f"verify-{number}"
        folder.mkdir()
        write_long_run(folder, long_run(name=f"verify-{number}"))
        write_pages(folder, long_run())
    (tmp_path / "verify-3").mkdir()
    (tmp_path / "verify-3" / "verify.json").write_text("{}")
    (tmp_path / "verify-notes").mkdir()
    assert [folder.name for folder in long_run_folders(tmp_path)] == ["verify-2", "verify-3", "verify-10"]
    assert [section.name for section in sections_of(tmp_path)] == ["verify-2", "verify-10"]


def test_the_report_of_a_run_shows_its_verifications_and_stays_small():
    section = section_of(long_run(), "verify-1/verify.html")
    html = render_report(report_data(long_runs=(section,)))
    assert "Over a long run: verify-1" in html
    assert section.text in unescape(html)
    assert len(html) < 300_000
    assert "Over a long run" not in render_report(report_data())
