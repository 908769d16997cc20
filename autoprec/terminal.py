"""What a person sees in the terminal: progress, the final table, a policy in words."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from autoprec.bench.gpus import Gpu, normalised
from autoprec.policy import Figures
from autoprec.session import TuneResult, VerifyResult
from autoprec.session.long_run_arms import THE_POLICY
from autoprec.tune import quantities
from autoprec.tune.long_run import VERIFY_FILE, LongRun, Timed
from autoprec.tune.long_run_curves import BLOCKS, curves_of, departure_strip, sparkline

# Characters of a loss line, and rows of the table of losses: a terminal of 80 columns holds them.
SPARK_POINTS, TABLE_POINTS = 40, 8


class TerminalProgress:
    """A progress bar with stage, windows done, best so far and time left; plain lines where the output is not a terminal."""

    def __init__(self, console: Console, budget_s: float | None = None, *, started_s: float | None = None) -> None:
        """Starts nothing yet.

        Args:
            console: where to show it.
            budget_s: wall time of the tune; without one no time left is shown.
            started_s: when it began, by ``time.monotonic``; now where None.
        """
        self._console = console
        self._budget_s = budget_s
        self._start_s = time.monotonic() if started_s is None else started_s
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", style="dim"),
            TextColumn("{task.fields[best]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._name, self._best, self._done, self._total = "", "", 0, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def stage(self, name: str, total: int) -> None:
        """Starts a new bar for the stage."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        # The best so far stays in sight while it is verified and timed.
        self._task = self._bar.add_task(name, total=max(total, 1), left=self._left(), best=self._best)
        self._name, self._done, self._total = name, 0, total
        if not self._console.is_terminal:
            self._console.print(f"{name} ... ({self._left()})", highlight=False, markup=False)

    def advance(self, text: str = "") -> None:
        """Moves the bar by one window."""
        self._done += 1
        self._best = text or self._best
        if self._task is not None:
            self._bar.update(self._task, advance=1, left=self._left(), best=self._best)
        # Ten lines a stage are enough for a log.
        every = max(1, self._total // 10)
        if not self._console.is_terminal and (self._done % every == 0 or self._done == self._total):
            parts = (f"  {self._name}: {self._done}/{self._total}", text, self._left())
            self._console.print("  ".join(filter(None, parts)), highlight=False, markup=False, soft_wrap=True)

    def found(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)

    def _left(self) -> str:
        if self._budget_s is None:
            return ""
        left_s = self._budget_s - (time.monotonic() - self._start_s)
        if left_s <= 0:
            return "finishing, the budget is over"
        return f"{left_s:.0f} s left" if left_s < 100 else f"{left_s / 60:.1f} min left"


def figures_table(arms: tuple[Figures, ...], chosen: str) -> Table:
    """The comparison a tune ends in: throughput, ratios, loss gap and memory of every arm."""
    origins = " and ".join(sorted({arm.speed_origin for arm in arms}))
    table = Table(title=f"Training speed ({origins}) and loss against FP32", title_justify="left")
    for heading in ("set-up", "samples/s", "x FP32", "x AMP", "loss gap", "MiB"):
        table.add_column(heading, justify="left" if heading == "set-up" else "right", no_wrap=heading != "set-up")
    speeds = {arm.name: arm.samples_per_s for arm in arms}
    stock = max((speeds[name] or 0.0 for name in ("stock AMP fp16", "stock AMP bf16") if name in speeds), default=None)
    for arm in arms:
        table.add_row(
            arm.name if arm.name != chosen or chosen == "tuned" else f"{arm.name} = the policy",
            f"{arm.samples_per_s:,.0f}" if arm.samples_per_s else "failed",
            _ratio(arm.samples_per_s, speeds.get("FP32")),
            _ratio(arm.samples_per_s, stock),
            f"{arm.loss_gap:+.2%}".replace("-0.00%", "+0.00%") if arm.loss_gap is not None else "-",
            _mebibytes(arm.peak_bytes),
            style="bold green" if arm.name == chosen else None,
        )
    table.caption = "x AMP: against the faster stock AMP. MiB: peak memory."
    table.caption_justify = "left"
    return table


def _mebibytes(peak_bytes: int | None) -> str:
    if not peak_bytes:
        return "-"
    size = peak_bytes / 2**20
    return f"{size:,.0f}" if size >= 10 else f"{size:.2f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else "-"


def print_result(console: Console, result: TuneResult) -> None:
    """Prints the table, the verdict and where everything is."""
    console.print()
    console.print(figures_table(result.arms, result.chosen))
    console.print(result.message, highlight=False, markup=False, soft_wrap=True)
    console.print()
    for label, path in (
        ("policy", result.policy_path),
        ("study", result.study_path),
        ("report", result.report_path),
        ("trials", result.trials_path),
    ):
        console.print(f"  {label:<7} {path}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nReview: optuna-dashboard sqlite:///{result.study_path}", highlight=False, markup=False, soft_wrap=True)


def print_verification(console: Console, result: VerifyResult) -> None:
    """Prints the loss of policy and FP32 over the run, the speed, the verdict and where everything is."""
    run = result.long_run
    console.print()
    for line in loss_lines(run, unicode=(console.encoding or "").lower().startswith("utf")):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(stretches_table(run))
    for speed in run.speeds:
        if speed.name != THE_POLICY:
            console.print(speed_line(speed), highlight=False, markup=False, soft_wrap=True)
    style = {"passed": "bold green", "rejected": "bold red", "inconclusive": "bold yellow"}[run.status]
    console.print(Text(run.text, style=style), soft_wrap=True)
    for note in run.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    paths = [("losses", result.folder / VERIFY_FILE), ("page", result.page_path), ("picture", result.picture_path)]
    paths += [("report", result.run_report)] if result.run_report else []
    for label, path in paths:
        console.print(f"  {label:<7} {path}", highlight=False, markup=False, soft_wrap=True)


def loss_lines(run: LongRun, *, unicode: bool = True) -> list[str]:
    """Three lines of a character a stretch: FP32's loss, the policy's, and whether their difference is noise."""
    curves = curves_of(run, points=SPARK_POINTS)
    known = [loss for loss in (*curves.fp32, *curves.policy) if math.isfinite(loss)]
    low, high, signs = min(known), max(known), BLOCKS if unicode else "_.-=^"
    lines = [f"FP32       {sparkline(curves.fp32, low, high, signs=signs)}  loss {curves.fp32[0]:.4g} to {curves.fp32[-1]:.4g}"]
    if curves.policy:
        spark = sparkline(curves.policy, low, high, signs=signs)
        lines.append(f"policy     {spark}  loss {curves.policy[0]:.4g} to {curves.policy[-1]:.4g}")
        strip = departure_strip(curves, run.limit)
        key = "· inside FP32's own noise, - inside the limit, + above, v below"
        lines.append(f"departure  {strip}  {key}")
        lines[-1] = lines[-1] if unicode else lines[-1].replace("·", "o")
    if curves.lost:
        lines.append(f"lost run   {sparkline(curves.lost, low, high, signs=signs)}x loss {curves.lost[-1]:.4g} before it failed")
    return lines


def stretches_table(run: LongRun) -> Table:
    """The run in a few stretches: losses of both, the departure, and what FP32 departs from itself by."""
    curves = curves_of(run, points=TABLE_POINTS, smoothed=False)
    seeds = len(curves.departures) or 1
    table = Table(title=f"Mean loss over {seeds} {'seed' if seeds == 1 else 'seeds'}", title_justify="left", box=SIMPLE)
    for heading in ("up to step", "FP32", "policy", "departure", "FP32's noise"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, step in enumerate(curves.steps):
        departs = curves.departure[index] if index < len(curves.departure) else None
        noise = curves.band[index] if index < len(curves.band) else None
        table.add_row(
            f"{step:,}",
            f"{curves.fp32[index]:.4g}",
            f"{curves.policy[index]:.4g}" if index < len(curves.policy) else "-",
            f"{departs:+.2%}" if departs is not None else "-",
            f"± {quantities.gap(noise)}" if noise is not None else "-",
        )
    return table


def speed_line(speed: Timed) -> str:
    """How the policy's speed compares with an arm's."""
    if speed.failure or speed.policy_ratio is None:
        return f"speed: {speed.name} not timed: {speed.failure or 'the policy has no times'}"
    interval = ""
    if speed.policy_ratio_low is not None and speed.policy_ratio_high is not None:
        interval = f" ({speed.policy_ratio_low:.2f} to {speed.policy_ratio_high:.2f})"
    return f"speed: the policy is {speed.policy_ratio:.2f}x as fast as {speed.name}{interval}, {speed.speed_origin}"


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """The GPU table with the figures predictions rest on; dense peaks, no sparsity."""
    table = Table(title="Cards that --gpu knows (dense peaks in TFLOP/s)", title_justify="left", box=SIMPLE, padding=(0, 1))
    for heading in ("--gpu", "family", "cap.", "GiB", "GB/s", "fp32", "tf32", "fp16", "bf16"):
        table.add_column(heading, justify="left" if heading in ("--gpu", "family") else "right", no_wrap=True)
    for gpu in gpus:
        peaks = (gpu.rates_flops.get(mode) for mode in ("fp32", "tf32", "fp16", "bf16"))
        table.add_row(
            normalised(gpu.key),
            gpu.architecture,
            gpu.capability,
            f"{gpu.memory_bytes / 2**30:.0f}",
            f"{gpu.bandwidth_bytes_per_s / 1e9:,.0f}",
            *(f"{peak / 1e12:.0f}" if peak else "-" for peak in peaks),
        )
    return table
