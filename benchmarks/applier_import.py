"""What loading and applying cost in time: ``import autoprec`` with ``load_policy``, and apply_policy on a 1,000-layer model.

Goal: no torch loaded by the first, at most 100 ms for the second.

    python benchmarks/applier_import.py --out reports/applier-overhead
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoprec.policy import Batch, Fingerprint, LayerSetting, Policy, save_policy
from autoprec.runtime import apply_policy, layer_signature, named_layers

NUM_LAYERS = 1000
GOAL_S = 0.1


def thousand_layers() -> nn.Module:
    """A model of 1,000 Linear layers in blocks of ten."""
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))) for _ in range(NUM_LAYERS // 10)))


def policy_for(model: nn.Module) -> Policy:
    """Half of the layers as exceptions, which is far more than a tune exports."""
    layers = {name: layer_signature(module) for name, module in named_layers(model).items()}
    exceptions = [name for number, name in enumerate(layers) if name and number % 2]
    made_for = Fingerprint.of(layers, device="cpu", capability=None, torch_version=torch.__version__, workload_sha256="0" * 64)
    settings = {name: LayerSetting(precision="fp32") for name in exceptions}
    return Policy(default="bf16", layers=settings, batch=Batch(effective=1, micro=1), fingerprint=made_for)


def apply_times_s(repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of apply_policy and of remove(), each repeat on a new model."""
    applying, removing = [], []
    for _ in range(repeats):
        model = thousand_layers()
        policy = policy_for(model)
        start = time.perf_counter()
        applied = apply_policy(model, policy)
        middle = time.perf_counter()
        applied.remove()
        removing.append(time.perf_counter() - middle)
        applying.append(middle - start)
    return applying, removing


def load_times_s(repeats: int) -> list[float]:
    """Seconds of a new interpreter's ``import autoprec; load_policy``; fails where torch or the search is loaded."""
    code = (
        "import sys, time; start = time.perf_counter(); import autoprec; autoprec.load_policy(sys.argv[1]); "
        "print(time.perf_counter() - start); assert not {'torch', 'optuna', 'pandas', 'click'} & set(sys.modules)"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.json"
        save_policy(policy_for(thousand_layers()), path)
        command = [sys.executable, "-c", code, str(path)]
        return [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]


def main() -> None:
    """Measures, prints and writes the raw samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/applier-overhead"), help="folder for import.json")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 15
    applying, removing = apply_times_s(repeats)
    loading = load_times_s(repeats)
    print(f"apply_policy, {NUM_LAYERS} layers: median {statistics.median(applying) * 1e3:.1f} ms (goal {GOAL_S * 1e3:.0f})")
    print(f"remove():                  median {statistics.median(removing) * 1e3:.1f} ms")
    print(f"import and load_policy:    median {statistics.median(loading) * 1e3:.1f} ms")
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "command": " ".join(sys.argv),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip(),
        "apply_s": applying,
        "remove_s": removing,
        "load_s": loading,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "import.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
