"""A plain PyTorch loop that trains a model.py in FP32 and with a tuned policy, and prints both loss curves side by side.

    python examples/train_with_policy.py examples/digits_cnn.py reports/digits_cnn-rtx-4090-d/policy.json

What a training script of your own needs are the lines marked (1) to (4).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import autoprec
from autoprec.bench.batch import split_batch, to_device
from autoprec.bench.workload import Workload, load_workload


def train_fp32(workload: Workload, model: nn.Module, data: Iterator[Any], device: str, steps: int) -> list[float]:
    optimizer = workload.build_optimizer(model)
    losses = []
    for _ in range(steps):
        value = workload.loss(model, to_device(next(data), device))
        value.backward()
        if workload.grad_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), workload.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return torch.stack(losses).tolist()


def train_with_policy(
    workload: Workload, model: nn.Module, data: Iterator[Any], device: str, steps: int, policy: autoprec.Policy
) -> list[float]:
    applied = autoprec.apply_policy(model, policy)  # (1) sets the layers' precisions, in place
    scaler = applied.grad_scaler()  # (2) a torch.amp.GradScaler with the policy's numbers; disabled where nothing is fp16
    train_model: Any = applied.compiled()  # (3) the model itself unless the policy says compile
    optimizer = workload.build_optimizer(model)
    losses = []
    for _ in range(steps):
        batch = to_device(next(data), device, channels_last=policy.backend.channels_last)
        micro_batches = split_batch(batch, policy.batch.micro) if policy.batch.accumulation_steps > 1 else [batch]
        total = torch.zeros((), device=device)
        for micro in micro_batches:
            with applied.autocast():  # (4) forward and loss
                value = workload.loss(train_model, micro) / len(micro_batches)
            scaler.scale(value).backward()
            total += value.detach()
        if workload.grad_clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), workload.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
    curve = torch.stack(losses).tolist()
    applied.remove()
    return curve


def print_curves(fp32: list[float], tuned: list[float], every: int) -> None:
    """Prints the mean loss of each ``every`` steps of both runs, with a bar each."""
    top = max(fp32)
    print(f"{'steps':>11}  {'FP32':>8}  {'policy':>8}")
    for start in range(0, len(fp32), every):
        means = [sum(curve[start : start + every]) / len(curve[start : start + every]) for curve in (fp32, tuned)]
        bars = ["#" * round(28 * mean / top) if mean == mean else "nan" for mean in means]
        end = min(start + every, len(fp32))
        print(f"{start + 1:>5}-{end:<5}  {means[0]:8.4f}  {means[1]:8.4f}  {bars[0]:<28} | {bars[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains in FP32 and with a policy, and prints both loss curves.")
    parser.add_argument("model", help="a model.py that 'autoprec tune' takes")
    parser.add_argument("policy", help="the policy.json that the tune wrote for it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    policy = autoprec.load_policy(options.policy)
    workload = load_workload(options.model)

    def run(name: str, train: Callable[..., list[float]], *extra: Any) -> list[float]:
        torch.manual_seed(options.seed)
        model = workload.build_model().to(options.device)
        data = iter(workload.batches(policy.batch.effective, options.seed))
        print(f"{name}: {options.steps} steps ...", flush=True)
        started = time.perf_counter()
        curve = train(workload, model, data, options.device, options.steps, *extra)
        print(f"{name}: {time.perf_counter() - started:.1f} s")
        return curve

    fp32 = run("FP32", train_fp32)
    tuned = run("policy", train_with_policy, policy)
    print_curves(fp32, tuned, every=max(options.steps // 12, 1))


if __name__ == "__main__":
    main()
