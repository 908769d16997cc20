"""A plain PyTorch loop that trains a model.py in FP32 and with a tuned policy, and prints both loss curves side by side.

    python examples/train_with_policy.py examples/digits_cnn.py reports/digits_cnn-4090d/policy.json

What a training script of your own needs are the lines marked (1) to (4).
"""

from __future__ import annotations

import argparse
import runpy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoprec

Loss = Callable[[nn.Module, Any], Tensor]


def default_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def to_device(batch: Any, device: str) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return type(batch)(to_device(part, device) for part in batch)


def micro_batches(batch: Any, size: int) -> Iterator[Any]:
    """Yields the batch in slices of ``size`` samples; a batch is a tensor or a tuple of tensors."""
    if isinstance(batch, Tensor):
        yield from batch.split(size)
    else:
        yield from zip(*(part.split(size) for part in batch), strict=True)


def train_fp32(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Any],
    loss: Loss,
    clip: float | None,
    device: str,
    steps: int,
) -> list[float]:
    losses = []
    for _ in range(steps):
        value = loss(model, to_device(next(data), device))
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return torch.stack(losses).tolist()


def train_with_policy(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Any],
    loss: Loss,
    clip: float | None,
    device: str,
    steps: int,
    policy: autoprec.Policy,
) -> list[float]:
    applied = autoprec.apply_policy(model, policy)  # (1) sets the layers' precisions, in place
    scaler = applied.grad_scaler()  # (2) a torch.amp.GradScaler with the policy's numbers; disabled where nothing is fp16
    train_model = applied.compiled()  # (3) the model itself unless the policy says compile
    losses = []
    for _ in range(steps):
        total = torch.zeros((), device=device)
        for micro in micro_batches(to_device(next(data), device), policy.batch.micro):
            with applied.autocast():  # (4) forward and loss
                value = loss(train_model, micro) / policy.batch.accumulation_steps
            scaler.scale(value).backward()
            total += value.detach()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
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
    parser.add_argument("model", help="a model.py that 'autoprec tune' takes, with batches()")
    parser.add_argument("policy", help="the policy.json that the tune wrote for it")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    policy = autoprec.load_policy(options.policy)
    workload = runpy.run_path(options.model)
    loss: Loss = workload.get("loss", default_loss)
    make_optimizer = workload.get("build_optimizer", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))

    def run(train: Callable[..., list[float]], *extra: Any) -> list[float]:
        torch.manual_seed(options.seed)
        model = workload["build_model"]().to(options.device)
        data = workload["batches"](policy.batch.effective, options.seed)
        started = time.perf_counter()
        clip = workload.get("GRAD_CLIP")
        curve = train(model, make_optimizer(model), data, loss, clip, options.device, options.steps, *extra)
        print(f"{train.__name__}: {options.steps} steps in {time.perf_counter() - started:.1f} s")
        return curve

    fp32 = run(train_fp32)
    tuned = run(train_with_policy, policy)
    print_curves(fp32, tuned, every=max(options.steps // 12, 1))


if __name__ == "__main__":
    main()
