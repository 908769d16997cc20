"""What the search pays before its first trial: tracing, profiling and solving the fronts of a model.

    python benchmarks/profile_cost.py benchmarks/workloads/transformer48.py examples/resnet50.py --out reports/profile-cost-h200

Printed for each workload: layers, seconds of each stage, and what the profile's sensitivity passes are worth in FP32 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from applier_overhead import environment

from autoprec.bench.bench import Bench
from autoprec.bench.memory import free_memory
from autoprec.bench.target import resolve_target
from autoprec.bench.workload import load_workload
from autoprec.tune.space import search_space_for
from autoprec.tune.study_space import StudySpace


def measure(path: str) -> dict[str, Any]:
    """Seconds of look, profile and front for one workload."""
    target = resolve_target(None)
    bench = Bench(load_workload(path), target)
    began = time.perf_counter()
    look = bench.look()
    looked = time.perf_counter()
    profile = bench.profile(target.precisions)
    profiled = time.perf_counter()
    space = StudySpace.bind(
        search_space_for(target.capability or "cpu"),
        look,
        profile,
        precisions=target.precisions,
        cuda=target.stands_for_cuda,
        measured=target.timing == "measured",
        capability=target.capability,
    )
    solved = time.perf_counter()
    return {
        "workload": path,
        "layers": len(look.layers),
        "look_s": looked - began,
        "profile_s": profiled - looked,
        "front_s": solved - profiled,
        "plans": sum(len({plan.key() for plan in plans}) for plans in space.plans.values()),
        "fp32_step_s": profile.base_step_s,
        "sensitivity_passes": dict(profile.sensitivity_passes),
    }


def main() -> None:
    """Measures every workload, prints a line for each and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for profile_cost.json")
    options = parser.parse_args()
    rows = []
    for path in options.workloads:
        row = measure(path)
        rows.append(row)
        scoring_words = "".join(f", {passes:.1f} passes to score {name}" for name, passes in row["sensitivity_passes"].items())
        print(
            f"{path}: {row['layers']} layers; look {row['look_s']:.1f} s, profile {row['profile_s']:.1f} s, front {row['front_s']:.1f} s "
            f"({row['plans']} plans); one FP32 step {row['fp32_step_s']:.3f} s{scoring_words}",
            flush=True,
        )
        free_memory()
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")), "rows": rows}
    (options.out / "profile_cost.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
