"""Times a tuned policy against what a user would write by hand: FP32, stock AMP in fp16 and in bf16.

All arms live in one process and take turns in blocks, in a random order each round, so that drift of clocks cancels. The stock
arms are plain torch code and never touch autoprec; the tuned arm is used as the README shows: ``load_policy``, ``apply_policy``,
``grad_scaler()`` and ``compiled()``. Time is that of the whole optimizer step (forward, loss, backward, clipping, scaler, step),
with the batch on the device before it starts.

    python benchmarks/compare_arms.py model.py --policy policy.json [--steps 50] [--out DIR]

Prints a table and writes ``compare_arms.json`` with every sample, the environment, the command and the commit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autoprec
from autoprec.bench.batch import split_batch, to_device
from autoprec.bench.environment import driver_version, processor_name
from autoprec.bench.nvml import Card
from autoprec.bench.provisions import DataCache
from autoprec.bench.workload import Workload, load_workload

BLOCK_STEPS = 5
RESAMPLES = 2000
Step = Callable[[Any], torch.Tensor]


@dataclass
class Flags:
    """The process-wide flags an arm runs under; torch's own defaults unless said otherwise."""

    matmul_tf32: bool = False
    cudnn_tf32: bool = True
    cudnn_benchmark: bool = False
    fp16_accumulation: bool | None = None

    @classmethod
    def now(cls) -> Flags:
        """The flags in force."""
        matmul = torch.backends.cuda.matmul
        accumulation = getattr(matmul, "allow_fp16_accumulation", None) if torch.cuda.is_available() else None
        return cls(matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, accumulation)

    def set(self) -> None:
        """Puts them in force."""
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.fp16_accumulation is not None:
            torch.backends.cuda.matmul.allow_fp16_accumulation = self.fp16_accumulation


@dataclass
class Arm:
    """One way of training: its step, its flags, and what was measured."""

    name: str
    step: Step
    flags: Flags
    channels_last: bool = False
    times_s: list[float] = field(default_factory=list)
    throttled: list[bool] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


def _model(workload: Workload, device: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return workload.build_model().to(device).train()


def _clip(workload: Workload, optimizer: torch.optim.Optimizer) -> None:
    if workload.grad_clip is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, workload.grad_clip)


def fp32_arm(workload: Workload, device: str, seed: int) -> Arm:
    """Plain FP32 with TF32 off everywhere."""
    model = _model(workload, device, seed)
    optimizer = workload.build_optimizer(model)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model, batch)
        loss.backward()
        _clip(workload, optimizer)
        optimizer.step()
        return loss.detach()

    return Arm("fp32 (TF32 off)", step, Flags(matmul_tf32=False, cudnn_tf32=False))


def stock_amp_arm(workload: Workload, device: str, seed: int, dtype: torch.dtype) -> Arm:
    """Eager autocast with a default GradScaler for fp16, as torch's own tutorial has it; torch's default flags."""
    model = _model(workload, device, seed)
    optimizer = workload.build_optimizer(model)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=dtype):
            loss = workload.loss(model, batch)
        scaler.scale(loss).backward()
        if workload.grad_clip is not None:
            scaler.unscale_(optimizer)
        _clip(workload, optimizer)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return Arm(f"stock AMP {'fp16' if dtype == torch.float16 else 'bf16'}", step, Flags())


def tuned_arm(workload: Workload, device: str, seed: int, path: Path) -> Arm:
    """The policy as a user applies it."""
    policy = autoprec.load_policy(path)
    model = _model(workload, device, seed)
    applied = autoprec.apply_policy(model, policy)
    flags = Flags.now()
    train_model = applied.compiled()
    optimizer = workload.build_optimizer(model)
    scaler = applied.grad_scaler()
    parts = policy.batch.accumulation_steps

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = None
        for part in split_batch(batch, policy.batch.micro):
            with applied.autocast():
                loss = workload.loss(train_model, part) / parts
            scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        if workload.grad_clip is not None:
            scaler.unscale_(optimizer)
        _clip(workload, optimizer)
        scaler.step(optimizer)
        scaler.update()
        return total

    return Arm(f"tuned ({policy.default}, {policy.execution})", step, flags, policy.backend.channels_last)


def timed(step: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, Callable[[], float]]:
    """Runs a step; the second value gives its seconds once the GPU is done."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step()
        end.record()
        return loss, lambda: start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - began
    return loss, lambda: seconds


def run(arms: list[Arm], batches: list[Any], device: str, *, warmup: int, steps: int, seed: int) -> None:
    """Warms every arm up, then lets them take turns; each block has one untimed step before its timed ones."""
    taken = dict.fromkeys((arm.name for arm in arms), 0)

    def one_block(arm: Arm, count: int, *, settle: int, keep: bool) -> None:
        arm.flags.set()
        readers = []
        for number in range(settle + count):
            batch = to_device(batches[taken[arm.name] % len(batches)], device, arm.channels_last)
            loss, seconds = timed(lambda batch=batch: arm.step(batch), device)  # type: ignore[misc]
            taken[arm.name] += 1
            arm.losses.append(loss)
            if keep and number >= settle:
                readers.append(seconds)
        if device == "cuda":
            torch.cuda.synchronize()
        hot = bool(card.throttled())
        arm.times_s.extend(read() for read in readers)
        arm.throttled.extend([hot] * len(readers))

    card, order = Card(), random.Random(seed)
    for arm in arms:
        one_block(arm, warmup, settle=0, keep=False)
    for done in range(0, steps, BLOCK_STEPS):
        turns = list(arms)
        order.shuffle(turns)
        for arm in turns:
            one_block(arm, min(BLOCK_STEPS, steps - done), settle=1, keep=True)


def ratio(base: list[float], other: list[float], seed: int) -> tuple[float, float, float]:
    """How many times faster ``other`` is by the median step, with a 95% percentile-bootstrap interval."""
    generator = np.random.default_rng(seed)
    one, two = np.asarray(base), np.asarray(other)
    ones = np.median(generator.choice(one, (RESAMPLES, one.size)), axis=1)
    twos = np.median(generator.choice(two, (RESAMPLES, two.size)), axis=1)
    low, high = np.percentile(ones / twos, [2.5, 97.5])
    return float(np.median(one) / np.median(two)), float(low), float(high)


def kept(arm: Arm) -> list[float]:
    """The samples taken with free clocks; all of them where there are none."""
    return [time_s for time_s, hot in zip(arm.times_s, arm.throttled, strict=True) if not hot] or arm.times_s


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        where = Path(__file__).resolve().parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=where, capture_output=True, text=True, check=True).stdout
        return head + (" with changes" if changed.strip() else "")
    return "unknown"


def report(arms: list[Arm], workload: Workload, device: str, seed: int) -> dict[str, Any]:
    """Everything measured, ready for JSON."""
    fp32, stock = arms[0], arms[1]
    rows = []
    for arm in arms:
        times = kept(arm)
        rows.append(
            {
                "name": arm.name,
                "median_step_s": float(np.median(times)),
                "samples_per_s": workload.batch_size / float(np.median(times)),
                "over_fp32": ratio(kept(fp32), times, seed),
                "over_stock_amp_fp16": ratio(kept(stock), times, seed),
                "flags": vars(arm.flags),
                "step_times_s": arm.times_s,
                "throttled": arm.throttled,
                "losses": [float(loss) for loss in arm.losses],
            }
        )
    on_gpu = device == "cuda"
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
        "workload_sha256": workload.sha256,
        "batch_samples": workload.batch_size,
        "environment": {
            "device": torch.cuda.get_device_name() if on_gpu else processor_name(),
            "driver": driver_version() if on_gpu else None,
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "other_processes": Card().other_processes(),
        },
        "interval": "95% percentile bootstrap of the ratio of medians",
        "arms": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    """The table for people."""
    print(f"{result['environment']['device']}, torch {result['environment']['torch']}, batch {result['batch_samples']}")
    print(f"{'arm':<34}{'median ms':>11}{'samples/s':>12}{'over fp32':>24}{'over stock AMP fp16':>24}")
    for row in result["arms"]:
        cells = ["{:.2f}x [{:.2f}, {:.2f}]".format(*row[key]) for key in ("over_fp32", "over_stock_amp_fp16")]
        print(f"{row['name']:<34}{row['median_step_s'] * 1e3:>11.3f}{row['samples_per_s']:>12.1f}{cells[0]:>24}{cells[1]:>24}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Parses the command line, runs the arms, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="path/model.py, path/model.py:object or package.module:object")
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50, help="timed steps an arm")
    parser.add_argument("--warmup", type=int, default=15, help="untimed steps an arm at the start; compiling happens here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for compare_arms.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    workload, device, seed = load_workload(given.model), given.device, given.seed
    before = Flags.now()
    batches = DataCache(workload).take(seed, min(given.warmup + 2 * given.steps, 64))
    arms = [
        fp32_arm(workload, device, seed),
        stock_amp_arm(workload, device, seed, torch.float16),
        stock_amp_arm(workload, device, seed, torch.bfloat16),
        tuned_arm(workload, device, seed, given.policy),
    ]
    try:
        run(arms, batches, device, warmup=given.warmup, steps=given.steps, seed=seed)
    finally:
        before.set()
    result = report(arms, workload, device, seed)
    print_table(result)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / "compare_arms.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"Samples: {path}")
    return result


if __name__ == "__main__":
    try:
        main()
    except autoprec.UserError as error:
        sys.exit(f"{error}")
