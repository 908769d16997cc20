"""The terminal's tables and progress."""

from __future__ import annotations

import io
import time

from rich.console import Console

from autoprec.policy import Batch, Figures, Fingerprint, Policy
from autoprec.records import Environment
from autoprec.session import VerifyResult
from autoprec.terminal import TerminalProgress, figures_table, loss_lines, print_verification, speed_line, stretches_table
from autoprec.tune.long_run import LongRun, Noise, Run, Timed, Trained


def arm(name: str, samples_per_s: float | None, **more: object) -> Figures:
    return Figures(name=name, samples_per_s=samples_per_s, speed_origin="measured", **more)


def shown(*arms: Figures, chosen: str) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(figures_table(arms, chosen))
    return console.file.getvalue()


ARMS = (arm("FP32", 100.0, loss_gap=0.0, peak_bytes=2**20), arm("stock AMP fp16", 150.0), arm("stock AMP bf16", 200.0))


def test_ratios_are_against_fp32_and_the_faster_stock_amp():
    row = next(line for line in shown(*ARMS, arm("tuned", 400.0), chosen="tuned").splitlines() if "tuned" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][:4] == ["tuned", "400", "4.00", "2.00"]


def test_a_stock_set_up_with_another_layout_is_not_what_ratios_are_against():
    text = shown(*ARMS, arm("stock AMP bf16, channels_last", 800.0), chosen="FP32")
    row = next(line for line in text.splitlines() if "channels_last" in line)
    assert "4.00" in row


def test_a_stock_set_up_that_became_the_policy_is_marked():
    assert "FP32 = the policy" in shown(*ARMS, chosen="FP32")


def test_an_arm_that_failed_says_so_and_small_memory_is_not_zero():
    text = shown(*ARMS, arm("tuned", None), chosen="FP32")
    assert "failed" in text
    assert next(line for line in text.splitlines() if "FP32 = " in line).strip("│ ").endswith("1.00")


def test_progress_into_a_file_is_plain_lines():
    console = Console(file=io.StringIO(), width=80)
    with TerminalProgress(console, 60.0, started_s=time.monotonic() - 50) as progress:
        progress.stage("study", 20)
        for number in range(20):
            progress.advance(f"best {number}")
        progress.found("study: done")
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "study ... (10 s left)"
    assert "  study: 20/20  best 19  10 s left" in lines
    assert lines[-1] == "study: done"
    assert len(lines) == 12


def long_run() -> LongRun:
    """A policy whose loss ends 0.4% above FP32's, on one seed of 80 steps."""
    fp32 = tuple(1.0 + 4.0 * 0.9**step for step in range(80))
    gap = 0.004
    arms = (
        Trained(role="fp32", runs=(Run(seed=0, losses=fp32),)),
        Trained(role="policy", runs=(Run(seed=0, losses=tuple(loss * (1 + gap) for loss in fp32), loss_gap=gap),)),
        Trained(role="fp32_twin", runs=(Run(seed=0, losses=tuple(loss * 1.001 for loss in fp32), loss_gap=0.001),)),
    )
    fingerprint = Fingerprint.of({}, device="d", capability=None, torch_version="2", workload_sha256="")
    return LongRun(
        name="verify-1",
        status="passed",
        text="Passed: so it is.",
        verdict=None,
        policy=Policy(default="bf16", batch=Batch(effective=1, micro=1), fingerprint=fingerprint),
        policy_file="policy.json",
        workload="model.py",
        target="cpu",
        numerics="",
        steps=80,
        steps_chosen="as asked",
        seeds=1,
        tolerance=0.01,
        arms=arms,
        noise=Noise(floor=0.002, pairs=1, tf32_counts=False, text=""),
        environment=Environment(device="d", capability=None, driver=None, torch_version="2", python_version="3", platform="p"),
    )


def test_a_long_run_is_shown_in_few_lines_that_fit_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    console.print(stretches_table(long_run()))
    rows = [line.split() for line in console.file.getvalue().splitlines() if "+" in line]
    assert len(rows) == 8
    assert rows[-1] == ["80", "1.002", "1.006", "+0.40%", "±", "0.20", "%"]
    lines = loss_lines(long_run())
    assert [line.split()[0] for line in lines] == ["FP32", "policy", "departure"]
    assert lines[0].split()[1][0] == "█"
    assert lines[2].split()[1] == "-" * 40


def test_a_long_run_is_shown_without_block_signs_where_the_terminal_has_none():
    assert all(line.isascii() for line in loss_lines(long_run(), unicode=False))


def test_a_speed_says_how_sure_it_is():
    known = Timed(name="FP32", speed_origin="measured", policy_ratio=2.0, policy_ratio_low=1.9, policy_ratio_high=2.1)
    assert speed_line(known) == "speed: the policy is 2.00x as fast as FP32 (1.90 to 2.10), measured"
    assert "no room" in speed_line(Timed(name="stock AMP fp16", speed_origin="measured", failure="no room"))


def test_the_result_of_a_verification_names_its_files(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    print_verification(console, VerifyResult(long_run(), tmp_path))
    text = console.file.getvalue()
    assert "Passed: so it is." in text
    for name in ("verify.json", "verify.html", "verify.svg"):
        assert str(tmp_path / name) in text


def test_the_best_so_far_stays_in_sight_and_an_over_run_budget_is_said():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with TerminalProgress(console, 60.0, started_s=time.monotonic() - 61) as progress:
        progress.stage("study", 4)
        progress.advance("best 2,791 samples/s, 1.95x stock AMP (stock AMP fp16)")
        progress.stage("verification", 3)
    text = console.file.getvalue()
    last = text[text.rindex("verification") :]
    assert "1.95x stock AMP" in last and "0/3" in last
    assert "finishing, the budget is over" in last
