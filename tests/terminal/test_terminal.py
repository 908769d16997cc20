"""The terminal's tables and progress."""

from __future__ import annotations

import io
import time

from rich.console import Console

from autoprec.policy import Figures
from autoprec.terminal import TerminalProgress, figures_table


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
