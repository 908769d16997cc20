"""What half copies of all weights made in one pass are worth: ViT-B/16, every arm in one process.

Arms, in fp16 and in bf16: stock AMP; policies under autocast and in pure half, each with ``weights`` "fp32" (every layer casts its
own) and "half_with_masters" (one pass); and half parameters with float32 masters in the optimizer, written by hand, whose checkpoints
would be half. Interleaved in blocks whose order alternates. Printed: ratio to the arm by hand, median and 95% bootstrap interval.

    python benchmarks/half_weights.py --out reports/half-weights-h200
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from applier_overhead import SCALE, environment, interval, stock_policy
from torch import nn
from torchvision.models import VisionTransformer, vit_b_16

from autoprec.bench.timing import StepClock
from autoprec.runtime import apply_policy

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Arm(Protocol):
    """A training whose ``step`` waits for nothing and returns the loss on the device."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


def build_model(device: torch.device, *, quick: bool) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    small = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return (VisionTransformer(**small) if quick else vit_b_16(weights=None)).to(device)


class Cast:
    """Float32 parameters: stock AMP, or a policy of a default precision and weights."""

    def __init__(self, model: nn.Module, dtype: str, device: torch.device, default: str = "", weights: str = "") -> None:
        self.model, self.half, self.device = model, HALF[dtype], device
        if default:
            apply_policy(model, stock_policy(model, default).model_copy(update={"weights": weights}))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=dtype == "fp16")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=self.half):
            loss = F.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()


class Masters:
    """Half parameters in the model, float32 copies in the optimizer."""

    def __init__(self, model: nn.Module, dtype: str, device: torch.device) -> None:
        self.model, self.half = model.to(HALF[dtype]), HALF[dtype]
        self.halves = list(model.parameters())
        self.masters = [half.detach().float().requires_grad_() for half in self.halves]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=device.type == "cuda")
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=dtype == "fp16")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x.to(self.half)).float(), y)
        self.scaler.scale(loss).backward()
        grads = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(grads, [half.grad for half in self.halves])
        for master, half, grad in zip(self.masters, self.halves, grads, strict=True):
            master.grad, half.grad = grad, None
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.halves, self.masters)
        return loss.detach()


def build_arms(device: torch.device, *, quick: bool) -> dict[str, Arm]:
    """Every arm by name."""
    arms: dict[str, Arm] = {}
    for dtype in HALF:
        arms[f"stock AMP {dtype}"] = Cast(build_model(device, quick=quick), dtype, device)
        for default in (dtype, f"{dtype}_pure"):
            for weights in ("fp32", "half_with_masters"):
                arms[f"{default} {weights}"] = Cast(build_model(device, quick=quick), dtype, device, default, weights)
        arms[f"by hand {dtype}"] = Masters(build_model(device, quick=quick), dtype, device)
    return arms


def measure(device: torch.device, *, blocks: int, steps: int, quick: bool) -> dict[str, Any]:
    """Step times and losses of every arm, by name."""
    size, batch = (32, 4) if quick else (224, 64)
    torch.manual_seed(1)
    x, y = torch.randn(batch, 3, size, size, device=device), torch.randint(10, (batch,), device=device)
    arms = build_arms(device, quick=quick)
    clocks = {name: StepClock(device.type) for name in arms}
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in arms}
    for arm in arms.values():
        for _ in range(steps):
            arm.step(x, y)
    for number in range(blocks):
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            arms[name].step(x, y)  # untimed: caches are cold after a change of arm
            for _ in range(steps):
                clocks[name].time(lambda name=name: losses[name].append(arms[name].step(x, y)))
    return {name: {"step_s": clocks[name].times_s(), "loss": torch.stack(losses[name]).tolist()} for name in arms}


def main() -> None:
    """Measures, prints a line an arm and writes the raw samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/half-weights"), help="folder for half_weights.json")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few blocks: a smoke test, on a CPU too")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks, steps = (2, 2) if options.quick else (options.blocks, options.steps)
    results = measure(device, blocks=blocks, steps=steps, quick=options.quick)
    for name, result in results.items():
        per_block = [statistics.median(result["step_s"][at : at + steps]) for at in range(0, blocks * steps, steps)]
        base = results[f"by hand {'fp16' if 'fp16' in name else 'bf16'}"]["step_s"]
        of_base = [statistics.median(base[at : at + steps]) for at in range(0, blocks * steps, steps)]
        ratio, low, high = interval([own / other for own, other in zip(per_block, of_base, strict=True)])
        print(
            f"{name:>27}: {statistics.median(per_block) * 1e3:7.2f} ms; {ratio:.3f} [{low:.3f}, {high:.3f}] x by hand; "
            f"loss {result['loss'][-1]:.4f}",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(device), "steps_per_block": steps, "results": results}
    (options.out / "half_weights.json").write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
