"""What applying a policy costs: one equal to stock AMP against hand-written autocast and GradScaler.

Both arms train in one process, in blocks that alternate (A B A B), each with a model of its own from the same seed. The figure is
the ratio policy / by hand of paired blocks' step times: median, and a 95% bootstrap interval. Goal: at most 1.01.

    python benchmarks/applier_overhead.py --out reports/applier-overhead
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet50

from autoprec.policy import Batch, Fingerprint, LossScale, Policy
from autoprec.runtime import apply_policy, layer_signature, named_layers

RESAMPLES = 10_000
SCALE = 8192.0


class Attention(nn.Module):
    """Causal self-attention over ``[batch, length, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A decoder of GPT-2's layout; 124M parameters at its full size, the head tied to the embedding."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class Case:
    """One workload: its model, and a batch made on the device."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]


def _images(num: int, size: int, classes: int) -> Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]:
    return lambda device: (
        torch.randn(num, 3, size, size, device=device),
        torch.randint(classes, (num,), device=device),
    )


def _vectors(num: int, width: int) -> Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]:
    return lambda device: (torch.randn(num, width, device=device), torch.randint(10, (num,), device=device))


def _text(num: int, length: int, vocabulary: int) -> Callable[[torch.device], tuple[torch.Tensor, torch.Tensor]]:
    return lambda device: (
        torch.randint(vocabulary, (num, length), device=device),
        torch.randint(vocabulary, (num, length), device=device),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cases(quick: bool) -> dict[str, Case]:
    """The workloads; ``quick`` makes them small enough for a CPU's smoke test."""
    if quick:
        return {"gpt2": Case(lambda: Gpt(64, 16, 2, 1, 8), _text(2, 8, 64)), "mlp": Case(_mlp, _vectors(8, 784))}
    return {
        "resnet50": Case(resnet50, _images(128, 224, 1000)),
        "gpt2": Case(lambda: Gpt(50257, 768, 12, 12, 1024), _text(8, 1024, 50257)),
        "mlp": Case(_mlp, _vectors(128, 784)),
    }


def stock_policy(model: nn.Module, dtype: str) -> Policy:
    """A policy equal to stock AMP: one default precision, no exception, the same loss scale as the other arm."""
    named = named_layers(model)
    # nn.MultiheadAttention reads the weights of its out_proj and never calls it.
    idle = [f"{name}.out_proj" for name, module in named.items() if isinstance(module, nn.MultiheadAttention)]
    made_for = Fingerprint.of(
        {name: layer_signature(module) for name, module in named.items() if name not in idle},
        idle=tuple(idle),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        capability=None,
        torch_version=torch.__version__,
        workload_sha256="0" * 64,
    )
    return Policy(
        default=dtype,  # type: ignore[arg-type]
        loss_scale=LossScale(init=SCALE),
        batch=Batch(effective=1, micro=1),
        outputs="computed",
        fingerprint=made_for,
    )


class Arm:
    """A model in training, one way or the other; ``step`` does not wait for the device."""

    def __init__(self, case: Case, device: torch.device, dtype: str, *, applied: bool) -> None:
        torch.manual_seed(0)
        self.model = case.build().to(device)
        self.x, self.y = case.batch(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.device = device
        self.half = torch.float16 if dtype == "fp16" else torch.bfloat16
        self.handle = apply_policy(self.model, stock_policy(self.model, dtype)) if applied else None
        on = dtype == "fp16"
        self.scaler = (
            self.handle.grad_scaler() if self.handle else torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=on)
        )

    def step(self) -> torch.Tensor:
        """One optimizer step; returns the loss on the device."""
        around = self.handle.autocast() if self.handle else torch.autocast(self.device.type, dtype=self.half)
        with around:
            z = self.model(self.x)
            loss = F.cross_entropy(z.flatten(0, -2), self.y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def block(self, steps: int) -> float:
        """Mean seconds of a step over a block, the device waited for before and after."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        return (time.perf_counter() - start) / steps


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median and its 95% percentile bootstrap interval."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def measure(case: Case, device: torch.device, dtype: str, *, blocks: int, steps: int) -> dict[str, Any]:
    """Runs both arms interleaved and returns raw samples and the ratio."""
    # TF32 is a flag of the process, which apply_policy sets to the policy's (off); both arms run with it.
    arms = {"by_hand": Arm(case, device, dtype, applied=False), "policy": Arm(case, device, dtype, applied=True)}
    for arm in arms.values():
        arm.block(max(3, steps // 2))
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(blocks):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        for name in order:
            samples[name].append(arms[name].block(steps))
    losses = {name: float(arm.step()) for name, arm in arms.items()}
    handle = arms["policy"].handle
    if handle is not None:
        handle.remove()
    median, low, high = interval([a / b for a, b in zip(samples["policy"], samples["by_hand"], strict=True)])
    return {
        "dtype": dtype,
        "ratio": median,
        "low": low,
        "high": high,
        "step_s": samples,
        "loss": losses,
        "steps_per_block": steps,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Where the samples were taken, with the command and commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": " ".join(sys.argv),
        "commit": commit,
    }


def main() -> None:
    """Measures every case, prints a line for each and writes the raw samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/applier-overhead"), help="folder for overhead.json")
    parser.add_argument("--quick", action="store_true", help="tiny models and few blocks: a smoke test, on a CPU too")
    parser.add_argument("--only", nargs="*", default=[], help="names of workloads; all of them otherwise")
    parser.add_argument("--blocks", type=int, default=30, help="blocks of each arm")
    parser.add_argument(
        "--steps", type=int, default=10, help="steps in a block (the MLP: five times as many, in six times as many blocks)"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks, steps = (4, 2) if arguments.quick else (arguments.blocks, arguments.steps)
    results = {}
    for name, case in cases(arguments.quick).items():
        if arguments.only and name not in arguments.only:
            continue
        for dtype in ("bf16",) if device.type == "cpu" else ("fp16", "bf16"):
            # The MLP waits for its host, whose speed wanders: many short blocks, so that a pair sees the same host.
            much = (blocks * 6, steps * 5) if name == "mlp" else (blocks, steps)
            result = results[f"{name} {dtype}"] = measure(case, device, dtype, blocks=much[0], steps=much[1])
            print(
                f"{name:>9} {dtype}: policy / by hand {result['ratio']:.4f} [{result['low']:.4f}, {result['high']:.4f}]",
                flush=True,
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(device), "results": results}
    (arguments.out / "overhead.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
