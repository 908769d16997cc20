"""Is the tuned policy as fast as what an expert writes by hand? GPT-2 124M and a UNet, every arm in one process.

By hand, in plain PyTorch: for GPT-2 bf16 autocast, the vocabulary padded to 50304 (a multiple of 64) in the model itself, LayerNorm in
bf16; for the UNet bf16 autocast and GroupNorm in bf16. Each eager and under ``torch.compile(mode="reduce-overhead")``, beside stock AMP.
The tuned arms come from a run's folder: its policy, and the fastest eager set-up of its final timing.

Arms run in blocks of steps whose order alternates. Printed: median step time, and the ratio to the arm by hand of the same kind with a
95% bootstrap interval over blocks.

    python benchmarks/hand_made.py gpt2 --run reports/gpt2-h200 --out reports/gpt2-h200
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from applier_overhead import environment, interval
from torch import Tensor, nn

import autoprec
from autoprec.bench.batch import to_device
from autoprec.bench.memory import free_memory
from autoprec.bench.timing import StepClock
from autoprec.bench.workload import Workload, load_workload
from autoprec.policy import Policy
from autoprec.records import Candidate, Measurement

WORKLOADS = Path(__file__).parent / "workloads"
PADDED_VOCABULARY = 50304
Step = Callable[[], Tensor]


class HalfLayerNorm(nn.LayerNorm):
    """LayerNorm that reads and writes bf16; its kernel adds up in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x.bfloat16(), self.normalized_shape, self.weight.bfloat16(), self.bias.bfloat16(), self.eps)


class HalfGroupNorm(nn.GroupNorm):
    """The same for GroupNorm."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.group_norm(x.bfloat16(), self.num_groups, self.weight.bfloat16(), self.bias.bfloat16(), self.eps)


def by_hand(model: nn.Module) -> nn.Module:
    """The expert's version of a model: norms in half, an odd vocabulary padded in the parameters."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = HalfLayerNorm
        elif type(module) is nn.GroupNorm:
            module.__class__ = HalfGroupNorm
    head, tokens = getattr(model, "head", None), getattr(model, "tokens", None)
    if isinstance(head, nn.Linear) and isinstance(tokens, nn.Embedding):
        with torch.no_grad():
            larger = torch.zeros(PADDED_VOCABULARY, tokens.embedding_dim, device=tokens.weight.device)
            larger[: tokens.num_embeddings] = tokens.weight
        tokens.weight = head.weight = nn.Parameter(larger)
        tokens.num_embeddings = head.out_features = PADDED_VOCABULARY
    return model


def stock_step(workload: Workload, model: nn.Module, batch: Any, dtype: torch.dtype, *, graphs: bool) -> Step:
    """Plain autocast and GradScaler."""
    optimizer = workload.build_optimizer(model)
    scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)
    called = torch.compile(model, mode="reduce-overhead") if graphs else model
    device = next(model.parameters()).device.type

    def step() -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, dtype=dtype):
            loss = workload.loss(called, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach().clone()

    return step


def tuned_step(workload: Workload, model: nn.Module, batch: Any, policy: Policy) -> Step:
    """A policy as a user writes it; the whole batch at once."""
    if policy.batch.accumulation_steps != 1:
        raise SystemExit("The policy splits the batch; this comparison does not.")
    applied = autoprec.apply_policy(model, policy)
    optimizer, scaler, called = workload.build_optimizer(model), applied.grad_scaler(), applied.compiled()
    batch = to_device(batch, next(model.parameters()).device.type, channels_last=policy.backend.channels_last)

    def step() -> Tensor:
        with applied.autocast():
            loss = workload.loss(called, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach().clone()

    return step


def fastest_eager(run: Path) -> Policy:
    """The fastest eager set-up of a run's final timing whose verification windows all ended well."""
    lines = (run / "candidates.jsonl").read_text(encoding="utf-8").splitlines()
    candidates = [Candidate.model_validate_json(line) for line in lines]
    verified = {c.policy.setup_hash() for c in candidates if c.role == "verification" and isinstance(c.outcome, Measurement)}
    timed = [
        (statistics.median(c.outcome.step_times_s), number, c.policy)
        for number, c in enumerate(candidates)
        if c.role == "timing" and isinstance(c.outcome, Measurement) and c.policy.execution == "eager"
    ]
    return min(entry for entry in timed if entry[2].setup_hash() in verified)[2]


def build_arms(workload: Workload, run: Path, device: str) -> dict[str, Step]:
    """Every arm by name; all start from the same weights and train on one batch."""
    torch.manual_seed(0)
    model = workload.build_model().to(device).train()
    batch = to_device(next(iter(workload.batches(workload.batch_size, 0))), device)
    best, eager = autoprec.load_policy(run / "policy.json"), fastest_eager(run)

    def twin() -> nn.Module:
        return copy.deepcopy(model)

    arms = {
        "stock AMP fp16": stock_step(workload, twin(), batch, torch.float16, graphs=False),
        "stock AMP bf16": stock_step(workload, twin(), batch, torch.bfloat16, graphs=False),
        "by hand, eager": stock_step(workload, by_hand(model), batch, torch.bfloat16, graphs=False),
        "tuned, eager": tuned_step(workload, twin(), batch, eager),
        "by hand, graphs": stock_step(workload, by_hand(model), batch, torch.bfloat16, graphs=True),
    }
    if best.execution != "eager":
        arms["tuned, best"] = tuned_step(workload, twin(), batch, best)
    return arms


def measure(arms: dict[str, Step], device: str, *, blocks: int, steps: int) -> dict[str, Any]:
    """Step times and the last loss of every arm."""
    clocks = {name: StepClock(device) for name in arms}
    losses: dict[str, Tensor] = {}
    for step in arms.values():
        for _ in range(max(steps, 5)):  # a CUDA graph is recorded in the second step
            step()
    for number in range(blocks):
        for name in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            arms[name]()  # untimed: caches are cold after a change of arm
            for _ in range(steps):
                clocks[name].time(lambda name=name: losses.update({name: arms[name]()}))
    return {name: {"step_s": clocks[name].times_s(), "loss": float(losses[name])} for name in arms}


def main() -> None:
    """Measures, prints a line an arm and writes the raw samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", help="gpt2, unet or the path of a model.py")
    parser.add_argument("--run", type=Path, required=True, help="folder of a tune of the same workload")
    parser.add_argument("--out", type=Path, required=True, help="folder for hand_made.json")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a block")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = options.workload if options.workload.endswith(".py") else str(WORKLOADS / f"{options.workload}.py")
    free_memory()
    results = measure(build_arms(load_workload(path), options.run, device), device, blocks=options.blocks, steps=options.steps)

    def medians(name: str) -> list[float]:
        times = results[name]["step_s"]
        return [statistics.median(times[at : at + options.steps]) for at in range(0, len(times), options.steps)]

    for name in results:
        base = "by hand, eager" if name.endswith("eager") or name.startswith("stock") else "by hand, graphs"
        ratio, low, high = interval([own / other for own, other in zip(medians(name), medians(base), strict=True)])
        print(
            f"{name:>15}: {statistics.median(medians(name)) * 1e3:7.2f} ms; {ratio:.3f} [{low:.3f}, {high:.3f}] x {base}; "
            f"loss {results[name]['loss']:.4f}",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(torch.device(device)), "steps_per_block": options.steps, "results": results}
    (options.out / "hand_made.json").write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
