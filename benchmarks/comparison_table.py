"""What ``compare_arms.py`` says about its arms: the rows of compare.json and the printed table."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from comparison_arms import DEVICE_BATCHES, Arm
from round_bootstrap import ratio_interval, step_interval

STOCK_AMP, FP32 = "amp_fp16", "fp32"


def summary(arm: Arm, base: Mapping[str, Arm], size: int, warmup: int) -> dict[str, Any]:
    """What compare.json says about an arm."""
    setup = arm.setup
    row: dict[str, Any] = {"label": setup.label, "failure": arm.failure or None, "notes": arm.notes}
    if setup.policy is not None:
        row |= {"policy": setup.policy_path, "setup_sha256": setup.policy.setup_hash(), "execution": setup.policy.execution}
        row |= {"micro_batch": setup.policy.batch.micro, "accumulation_steps": setup.policy.batch.accumulation_steps}
    row |= {"peak_bytes": arm.peak_bytes, "reserved_bytes": arm.reserved_bytes}
    if arm.failure:
        return row
    median_s, low_s, high_s = step_interval(arm.step_times_s, arm.block_steps)
    ends = min(DEVICE_BATCHES, len(arm.losses) // 2)
    row |= {"median_step_s": median_s, "step_s_95": [low_s, high_s]}
    row |= {"samples_per_s": size / median_s, "samples_per_s_95": [size / high_s, size / low_s]}
    row |= {f"ratio_to_{key}": ratio(base[key], arm) for key in (STOCK_AMP, FP32)}
    row |= {"first_loss": statistics.fmean(arm.losses[:ends]), "last_loss": statistics.fmean(arm.losses[-ends:])}
    row |= {"host_bound": arm.clock is not None and arm.clock.host_bound, "throttled_blocks": arm.throttled_blocks}
    row |= {"loss_scales": arm.scales, "blocks_with_skipped_steps": blocks_with_skips(arm.scales[1:])}
    row |= {"warmup_steps": warmup, "block_steps": arm.block_steps}
    return row | {"step_times_s": list(arm.step_times_s), "losses": arm.losses}


def ratio(base: Arm, arm: Arm) -> dict[str, float] | None:
    """How many times faster the arm is, with a 95% interval; None where the base failed."""
    if base.failure:
        return None
    if base is arm:
        return {"ratio": 1.0, "low": 1.0, "high": 1.0}
    return dict(zip(("ratio", "low", "high"), ratio_interval(base.step_times_s, arm.step_times_s, arm.block_steps), strict=True))


def blocks_with_skips(scales: Sequence[float]) -> int:
    """Blocks after which the loss scale is smaller than before: some of their steps were skipped, and fast for nothing."""
    return sum(after < before for before, after in itertools.pairwise(scales))


def print_table(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints the comparison, failures and what is to be known about the samples."""
    heads = (
        "arm",
        "step ms (95%)",
        "samples/s (95%)",
        "x stock AMP fp16 (95%)",
        "x FP32 (95%)",
        "peak MiB",
        "loss first -> last",
    )
    lines = [heads, *(cells(row) for row in rows.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *padded[1:]]))
    for row in rows.values():
        remarks = [f"FAILED: {row['failure']}"] if row["failure"] else []
        if not all(math.isfinite(loss) for loss in row.get("losses", ())):
            remarks.append("the loss became NaN or infinite, so its speed is worth nothing")
        if row.get("blocks_with_skipped_steps"):
            remarks.append(f"{row['blocks_with_skipped_steps']} timed blocks hold skipped steps, which are faster than real ones")
        if row.get("throttled_blocks"):
            remarks.append(f"heat or power held the clocks down at the end of {row['throttled_blocks']} blocks")
        if row.get("host_bound"):
            remarks.append("the device waits for the host")
        for remark in (*remarks, *row["notes"]):
            print(f"  {row['label']}: {remark}")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    memory = f"{row['peak_bytes'] / 2**20:,.0f}" if row["peak_bytes"] is not None else "-"
    if row["failure"]:
        return (row["label"], "failed", "-", "-", "-", memory, "-")
    ratios = [interval(row[f"ratio_to_{key}"]) for key in (STOCK_AMP, FP32)]
    loss = f"{row['first_loss']:.4g} -> {row['last_loss']:.4g}"
    low_ms, high_ms = (seconds * 1e3 for seconds in row["step_s_95"])
    step = f"{row['median_step_s'] * 1e3:.3f} ({low_ms:.3f} to {high_ms:.3f})"
    slow, fast = row["samples_per_s_95"]
    return (row["label"], step, f"{row['samples_per_s']:,.0f} ({slow:,.0f} to {fast:,.0f})", *ratios, memory, loss)


def interval(value: Mapping[str, float] | None) -> str:
    return f"{value['ratio']:.3f} ({value['low']:.3f} to {value['high']:.3f})" if value is not None else "-"


def finite(value: Any) -> Any:
    """The value with NaN and infinities as words, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
