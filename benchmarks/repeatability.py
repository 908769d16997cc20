"""Is the ruler worth trusting? Equal arms must not be called different, a real slowdown must be found, two tunes must agree.

``aa`` times one set-up against itself, many times, as a tune times its arms: two trainings interleaved in one process, the ratio of
their steps with its 95% interval. It counts how often the two are called different. With ``--slowdown 0.03`` one of the two, in turns,
really takes 3% longer: every step of it is followed by a wait of that share of a step (on CUDA in the device's own queue, on a CPU by
its own clock). It counts how often that is found.

``tunes`` runs ``autoprec tune`` twice from nothing, with the seeds 0 and 1, and times the two policies and FP32 interleaved. A folder that
holds a finished tune already is taken as it is.

    python benchmarks/repeatability.py aa examples/resnet50.py --repeats 100 --out reports/repeatability-h200
    python benchmarks/repeatability.py aa examples/resnet50.py --repeats 100 --slowdown 0.03 --out reports/repeatability-h200
    python benchmarks/repeatability.py tunes examples/resnet50.py --out reports/repeatability-h200 --tune "--budget 2m"

Written: every step time (seconds, 6 digits), the interval of each repeat, the environment, the command and the commit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from scipy import stats

import autoprec
from autoprec.bench import arms
from autoprec.bench.data import Start
from autoprec.bench.environment import environment
from autoprec.bench.look import trace_workload
from autoprec.bench.target import Target, resolve_target
from autoprec.bench.training import Training
from autoprec.bench.workload import load_workload
from autoprec.bench.workload_check import check_workload
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Outcome, Window
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.verdict import is_different, speed_ratio

# What a tune times an arm for, at most (``session.budget``), and its warm-up.
TUNE_STEPS, TUNE_WARMUP_STEPS = 62, 6
# How many times as long the policies of two tunes are timed: what a tune gives to a pair that is close.
TIMES_LONGER = 3
GOAL_DIFFERENCE = 0.02
# Cycles of the wait that tells how long a cycle takes. Own choice: tens of milliseconds, against which a launch is nothing.
CALIBRATION_CYCLES = 50_000_000


class Slowed(Training):
    """Training whose every step is followed by a wait, where it is switched on.

    Attributes:
        wait: takes the seconds that issuing the step took and waits on the host or in the device's queue.
        slowed: for each training in the order they are built, whether it waits; empty when all of a comparison are built.
    """

    wait: Callable[[float], None]
    slowed: list[bool]

    def __init__(self, *given: Any) -> None:
        self._waits = Slowed.slowed.pop(0)
        super().__init__(*given)

    def step(self, parts: list[Any]) -> None:
        began_s = time.perf_counter()
        super().step(parts)
        if self._waits:
            Slowed.wait(time.perf_counter() - began_s)


@contextmanager
def planted(wait: Callable[[float], None] | None, first: bool) -> Iterator[None]:
    """Makes the first or the second of the next two trainings slower; nothing where there is no wait."""
    if wait is None:
        yield
        return
    Slowed.wait, Slowed.slowed = staticmethod(wait), [first, not first]  # type: ignore[assignment]
    arms.Training = Slowed  # type: ignore[misc]
    try:
        yield
    finally:
        arms.Training = Training  # type: ignore[misc]


def wait_on_host(share: float) -> Callable[[float], None]:
    """Waits a share of what each step took, without giving the processor away."""

    def wait(step_s: float) -> None:
        until_s = time.perf_counter() + share * step_s
        while time.perf_counter() < until_s:
            pass

    return wait


def wait_on_device(share: float, step_s: float) -> Callable[[float], None]:
    """Keeps the device busy for a share of a step of ``step_s`` seconds; the host goes on."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):  # the first may find a sleeping clock
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        torch.cuda.synchronize()
    cycles = round(share * step_s / (start.elapsed_time(end) / 1e3) * CALIBRATION_CYCLES)
    return lambda _: torch.cuda._sleep(cycles)


def ratio_of(base: Measurement, other: Measurement, seed: int = 0) -> tuple[float, float, float]:
    """How many times faster ``other`` is, with its 95% interval."""
    return speed_ratio(
        base.step_times_s,
        other.step_times_s,
        baseline_block_steps=base.block_steps,
        candidate_block_steps=other.block_steps,
        seed=seed,
    )


def samples_of(outcome: Outcome) -> dict[str, Any]:
    """The raw samples of an arm, or why there are none."""
    if isinstance(outcome, Failure):
        return {"failure": f"{outcome.kind}: {outcome.message}"}
    return {
        "step_times_s": [float(f"{time_s:.6g}") for time_s in outcome.step_times_s],
        "block_steps": outcome.block_steps,
        "dropped": outcome.dropped,
        "host_bound": outcome.host_bound,
    }


class Place:
    """A workload on this machine with the set-ups that people train it with."""

    def __init__(self, path: str, *, seed: int = 0) -> None:
        self.path = path
        self.target = resolve_target(None if torch.cuda.is_available() else "cpu")
        self.workload = check_workload(load_workload(path), self.target.device)
        look, _ = trace_workload(self.workload, self.target)
        self.policies = baseline_policies(
            look, self.target.precisions, cuda=self.target.stands_for_cuda, capability=self.target.capability
        )
        self.start = Start(self.workload, seed, pinned=self.target.device == "cuda")

    def compare(self, policies: Sequence[Policy], *, steps: int, seed: int) -> list[Outcome]:
        """One comparison from the same weights and data; the seed draws the order of the blocks."""
        window = Window(steps=steps, warmup_steps=TUNE_WARMUP_STEPS, seed=seed, purpose="repeatability")
        return arms.interleave(self.workload, self.target, policies, window, self.start)


def repeated(place: Place, policy: Policy, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every repeat of ``aa``: what was seen, which arm was slowed, and what the interval says."""
    wait: Callable[[float], None] | None = None
    if options.slowdown and place.target.device == "cuda":
        (alone,) = place.compare([policy], steps=options.steps, seed=0)
        if isinstance(alone, Failure) or alone.host_bound:
            raise SystemExit("A wait on the device tells nothing where the device waits for the host: give a larger model.")
        wait = wait_on_device(options.slowdown, statistics.median(alone.step_times_s))
    elif options.slowdown:
        wait = wait_on_host(options.slowdown)
    rows = []
    for repeat in range(options.repeats):
        with planted(wait, first=repeat % 2 == 0):
            first, second = place.compare([policy, policy], steps=options.steps, seed=repeat)
        slow, fast = (first, second) if repeat % 2 == 0 else (second, first)
        row: dict[str, Any] = {"repeat": repeat, "slow": samples_of(slow), "fast": samples_of(fast)}
        if isinstance(slow, Measurement) and isinstance(fast, Measurement):
            ratio, low, high = ratio_of(slow, fast, seed=repeat)
            row |= {"ratio": ratio, "low": low, "high": high, "different": is_different(low, high)}
        rows.append(row)
        print(f"{repeat:>4}: {words_of(row)}", flush=True)
    return rows


def words_of(row: dict[str, Any]) -> str:
    """One repeat in a line."""
    if "ratio" not in row:
        return "no answer: " + "; ".join(arm["failure"] for arm in (row["slow"], row["fast"]) if "failure" in arm)
    verdict = "different" if row["different"] else "equal"
    return f"{row['ratio']:.4f} [{row['low']:.4f}, {row['high']:.4f}] {verdict}"


def counted(rows: Sequence[dict[str, Any]], slowdown: float) -> tuple[int, str]:
    """How often the answer was "different" (with a slowdown: the slowed arm the slower one), and that in words.

    A repeat without an answer calls nothing different and finds nothing.
    """
    if slowdown:
        count = sum(row.get("different", False) and row["ratio"] > 1 for row in rows)
    else:
        count = sum(row.get("different", False) for row in rows)
    exact = stats.binomtest(count, len(rows)).proportion_ci()
    unanswered = sum("ratio" not in row for row in rows)
    what = f"a slowdown of {slowdown:.0%} was found" if slowdown else "equal arms were called different"
    text = f"{what} in {count} of {len(rows)} repeats ({exact.low:.1%} to {exact.high:.1%} with 95% confidence)"
    widths = [row["high"] - row["low"] for row in rows if "ratio" in row]
    if widths:
        text += f"; half of the intervals are narrower than {statistics.median(widths) / 2:.2%} to either side"
    return count, text + (f"; {unanswered} gave no answer" if unanswered else "")


def run_aa(options: argparse.Namespace) -> int:
    """Exit code 0 where the goal is met: different in under 5%, or the slowdown found in at least 95%."""
    place = Place(options.workload)
    role = options.policy or ("amp_bf16" if place.target.device == "cuda" and "amp_bf16" in place.policies else "fp32")
    if role not in place.policies:
        raise SystemExit(f"There is no baseline {role!r} here; there are {', '.join(place.policies)}.")
    began = time.perf_counter()
    rows = repeated(place, place.policies[role], options)
    count, text = counted(rows, options.slowdown)
    print(f"{Path(options.workload).stem}, {role}: {text}; {time.perf_counter() - began:.0f} s", flush=True)
    name = f"{'slowdown' if options.slowdown else 'aa'}-{Path(options.workload).stem}"
    result = {"workload": options.workload, "policy": role, "slowdown": options.slowdown, "steps": options.steps, "text": text}
    write(options.out, name, place.target, result | {"repeats": rows})
    return 0 if (count >= 0.95 * len(rows) if options.slowdown else count < 0.05 * len(rows)) else 1


def tuned(workload: str, folder: Path, seed: int, given: Sequence[str]) -> Policy:
    """The policy of a tune from nothing, whose words go to ``tune.log``; of an earlier one where the folder holds it."""
    if not (folder / "policy.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "autoprec.cli", "tune", workload, "--out", str(folder), "--seed", str(seed), *given]
        with open(folder / "tune.log", "w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with exit code {done.returncode}; see {folder / 'tune.log'}.")
    return autoprec.load_policy(folder / "policy.json")


def run_tunes(options: argparse.Namespace) -> int:
    """Exit code 0 where the two policies differ by at most GOAL_DIFFERENCE."""
    stem = Path(options.workload).stem
    given = shlex.split(options.tune)
    if not torch.cuda.is_available() and "--gpu" not in given:
        given += ["--gpu", "cpu"]
    began = time.perf_counter()
    first, second = (
        tuned(options.workload, options.out / f"{stem}-{word}", seed, given) for seed, word in enumerate(("first", "second"))
    )
    tuned_s = time.perf_counter() - began
    place = Place(options.workload)
    fp32 = place.policies["fp32"].model_copy(update={"batch": first.batch})
    outcomes = place.compare([first, second, fp32], steps=TIMES_LONGER * TUNE_STEPS, seed=0)
    names = ("first", "second", "fp32")
    result: dict[str, Any] = {
        "workload": options.workload,
        "tune": shlex.join(given),
        "tunes_s": tuned_s,
        "same_set_up": first.setup_hash() == second.setup_hash(),
        "arms": dict(zip(names, map(samples_of, outcomes), strict=True)),
    }
    failed = [f"{name}: {outcome.message}" for name, outcome in zip(names, outcomes, strict=True) if isinstance(outcome, Failure)]
    if failed:
        print(f"{stem}: {'; '.join(failed)}", flush=True)
        write(options.out, f"tunes-{stem}", place.target, result)
        return 1
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    ratio, low, high = ratio_of(measured[0], measured[1])
    over_fp32 = [ratio_of(measured[2], arm)[0] for arm in measured[:2]]
    same = "the same set-up" if result["same_set_up"] else "different set-ups"
    text = f"second against first {ratio:.4f} [{low:.4f}, {high:.4f}], {same}; {over_fp32[0]:.2f}x and {over_fp32[1]:.2f}x FP32"
    print(f"{stem}: {text}; both tunes took {tuned_s:.0f} s", flush=True)
    write(options.out, f"tunes-{stem}", place.target, result | {"ratio": ratio, "low": low, "high": high, "text": text})
    return 0 if abs(ratio - 1) <= GOAL_DIFFERENCE else 1


def write(folder: Path, name: str, target: Target, result: dict[str, Any]) -> None:
    """Writes ``<name>.json`` with where and how it was taken."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    command = shlex.join(["python", *sys.argv])
    head = {"environment": environment(target.device).model_dump(), "command": command, "commit": commit}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(head | result) + "\n", encoding="utf-8")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    aa = commands.add_parser("aa", help="one set-up against itself")
    aa.add_argument("--policy", help="role of a baseline, such as fp32 or amp_bf16; default amp_bf16 on CUDA, fp32 on a CPU")
    aa.add_argument("--repeats", type=int, default=100)
    aa.add_argument("--steps", type=int, default=TUNE_STEPS, help="of each arm in a repeat, warm-up included")
    aa.add_argument("--slowdown", type=float, default=0.0, help="share by which one of the two is really slower")
    aa.set_defaults(run=run_aa)
    tunes = commands.add_parser("tunes", help="two tunes from nothing")
    tunes.add_argument("--tune", default="", help="options for both tunes, in one word")
    tunes.set_defaults(run=run_tunes)
    for command in (aa, tunes):
        command.add_argument("workload", help="path of a model.py")
        command.add_argument("--out", type=Path, required=True, help="folder for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
