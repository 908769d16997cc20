"""How much faster is a tuned policy than what people run today? Every arm in one process, A B A B.

Arms: FP32 with TF32 off, FP32 with TF32, stock eager AMP in fp16 and in bf16 (plain torch.autocast and torch.amp.GradScaler, as
people write them), and each policy the way a user writes it (load_policy, apply_policy, grad_scaler, compiled).

On CUDA each arm first trains alone for a few steps, for its peak memory. Then all are built again from the same weights and data,
warmed up, and timed in blocks of steps whose order is drawn anew each round. The first step of a block is not timed: caches are
cold after a change of arm. Steps are timed with device events on CUDA and the wall clock on a CPU, on batches that are on the
device already. The loss of every step is kept, so that one can see the arms train.

Printed: median step time, samples/s, ratios to stock AMP fp16 and to FP32, each with a 95% bootstrap interval over whole rounds
(see ``round_bootstrap``), peak memory, loss.
``--out DIR`` also writes ``compare.json``: raw samples, losses, environment, command and commit.

Run: ``python benchmarks/compare_arms.py examples/resnet50.py --policy reports/resnet50-h200/policy.json --out reports/compare``
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import random
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from comparison_arms import DEVICE_BATCHES, Arm, Setup, Training, build_training
from comparison_table import FP32, STOCK_AMP, finite, print_table, summary

import autoprec
from autoprec.bench.batch import batch_bytes, batch_length, split_batch, to_device, why_unsplittable
from autoprec.bench.environment import environment
from autoprec.bench.memory import free_memory
from autoprec.bench.nvml import Card
from autoprec.bench.seeding import untouched_random_state
from autoprec.bench.timing import StepClock
from autoprec.bench.workload import Workload, load_workload
from autoprec.bench.workload_check import build_checked, check_workload, take_batches
from autoprec.errors import DeviceError, UserError, WorkloadError
from autoprec.policy import Policy, write_atomically

# Steps of an arm alone. Source: a CUDA graph is warmed up in the first, recorded in the second and replayed from the third on.
ALONE_STEPS = 5
# Untimed steps at the start of a block. Own choice.
LEAD_IN_STEPS = 1
QUICK = {"steps": 6, "warmup": 2, "blocks": 2}


def measure_alone(arm: Arm, build: Callable[[], Training]) -> None:
    """Trains the arm for a few steps with nothing else built, and notes its peak memory with one batch on the device."""
    free_memory()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    arm.training = build()
    for _ in range(ALONE_STEPS):
        arm.step()
    torch.cuda.synchronize()
    one_batch = sum(batch_bytes(part) for part in arm.parts[0])
    arm.peak_bytes = torch.cuda.max_memory_allocated() - before + one_batch
    arm.reserved_bytes = torch.cuda.max_memory_reserved() - reserved + one_batch
    arm.close()


def warm_up(arm: Arm, build: Callable[[], Training], device: str, steps: int) -> None:
    arm.training, arm.clock = build(), StepClock(device)
    arm.read_scale()
    for _ in range(steps - 1):
        arm.step()
    arm.clock.probe_host(arm.step)
    arm.read_scale()


def run_block(arm: Arm, steps: int, uuid: str) -> None:
    assert arm.clock is not None
    for _ in range(LEAD_IN_STEPS):
        arm.step()
    for _ in range(steps):
        arm.clock.time(arm.step)
    arm.block_steps.append(steps)
    if uuid:
        torch.cuda.synchronize()
        arm.throttled_blocks += Card(uuid).is_throttled()
    arm.read_scale()


def finish(arm: Arm) -> None:
    """Reads what was kept on the device."""
    assert arm.clock is not None
    arm.step_times_s = arm.clock.times_s()
    arm.losses = torch.stack(arm.losses_on_device).double().tolist()


def run_arms(arms: Sequence[Arm], workload: Workload, device: str, options: argparse.Namespace) -> list[list[str]]:
    """Runs every arm; returns the order of the blocks. Random states and flags are as before when it returns."""
    compiled = any(arm.setup.policy is not None and arm.setup.policy.execution != "eager" for arm in arms)

    def build(arm: Arm) -> Callable[[], Training]:
        return lambda: build_training(arm.setup, workload, device, options.seed)

    with untouched_random_state():
        try:
            for arm in arms if device == "cuda" else ():
                say(f"alone: {arm.setup.label}")
                arm.guard(lambda arm=arm: measure_alone(arm, build(arm)))
                forget_compiled(compiled)
            for arm in arms:
                say(f"warm-up: {arm.setup.label}")
                arm.guard(lambda arm=arm: warm_up(arm, build(arm), device, options.warmup))
            order = interleave(arms, device, options)
            for arm in arms:
                arm.guard(lambda arm=arm: finish(arm))
        finally:
            for arm in reversed(arms):
                arm.close()
            forget_compiled(compiled)
    return order


def interleave(arms: Sequence[Arm], device: str, options: argparse.Namespace) -> list[list[str]]:
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else ""
    shuffle, order, rounds = random.Random(options.seed), list(arms), []
    for block in range(options.blocks):
        steps = options.steps * (block + 1) // options.blocks - options.steps * block // options.blocks
        shuffle.shuffle(order)
        rounds.append([arm.setup.key for arm in order if not arm.failure])
        say(f"round {block + 1} of {options.blocks}")
        for arm in order:
            arm.guard(lambda arm=arm, steps=steps: run_block(arm, steps, uuid))
    return rounds


def forget_compiled(compiled: bool) -> None:
    """Drops compiled code and the memory of CUDA graphs, so that they are in nobody else's way."""
    if compiled:
        torch._dynamo.reset()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def plan(options: argparse.Namespace) -> tuple[Workload, list[Arm], dict[str, str]]:
    """Loads and checks everything named on the command line.

    Returns:
        The workload with the policies' effective batch, the arms with their batches on the device, and why an arm is missing.

    Raises:
        UserError: the model file, a policy or the device cannot be used.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda was given, and torch finds no CUDA device here.", hint="Use --device cpu.")
    policies = {path: autoprec.load_policy(path) for path in options.policy}
    batches = {policy.batch.effective for policy in policies.values()}
    if len(batches) > 1:
        found = ", ".join(f"{path}: {policy.batch.effective}" for path, policy in policies.items())
        raise UserError(f"The policies have different effective batches ({found}).", hint="Compare those with the same one.")
    size = batches.pop()
    workload = dataclasses.replace(load_workload(options.model), batch_size=size, batch_size_given=True)
    workload = check_workload(workload, options.device)
    for path, policy in policies.items():
        check_policy(workload, path, policy)
    setups, missing = stock_setups(options.device)
    for number, (path, policy) in enumerate(policies.items(), start=1):
        setups.append(Setup(f"tuned_{number}", f"tuned: {short(path)}", policy=policy, policy_path=path))
    return workload, place_batches(workload, setups, size, options), missing


def short(path: str) -> str:
    """The file and its folder, which tell policies apart in a table."""
    return "/".join(Path(path).parts[-2:])


def check_policy(workload: Workload, path: str, policy: Policy) -> None:
    """Applies the policy once, before anything is timed."""
    with untouched_random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself shows them
        try:
            applied = autoprec.apply_policy(build_checked(workload), policy)
            try:
                applied.grad_scaler()
            finally:
                applied.remove()
        except UserError as error:
            raise type(error)(f"{path}: {error.message}", hint=error.hint) from None


def stock_setups(device: str) -> tuple[list[Setup], dict[str, str]]:
    setups = [Setup(FP32, "FP32"), Setup(STOCK_AMP, "stock AMP fp16"), Setup("amp_bf16", "stock AMP bf16")]
    # Source: NVIDIA Ampere architecture (compute capability 8.0) brought TF32.
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        setups.insert(1, Setup("fp32_tf32", "FP32 with TF32", tf32=True))
        return setups, {}
    return setups, {"fp32_tf32": "TF32 needs a CUDA device of capability 8.0 or higher"}


def place_batches(workload: Workload, setups: Sequence[Setup], size: int, options: argparse.Namespace) -> list[Arm]:
    """The arms with their batches on the device; those of one layout share them."""
    host = take_batches(workload, options.seed, DEVICE_BATCHES)
    placed: dict[bool, list[Any]] = {}
    arms = []
    for setup in setups:
        if setup.channels_last not in placed:
            placed[setup.channels_last] = [to_device(batch, options.device, channels_last=setup.channels_last) for batch in host]
        parts = [micro_batches(batch, setup.policy, size) for batch in placed[setup.channels_last]]
        arms.append(Arm(setup, parts))
    return arms


def micro_batches(batch: Any, policy: Policy | None, size: int) -> list[Any]:
    length = batch_length(batch)
    if length is not None and length != size:
        raise WorkloadError(
            f"batches() gives {length} samples where the policies' effective batch is {size}.",
            hint="Use the model file the policies were tuned for.",
        )
    if policy is None or policy.batch.accumulation_steps == 1:
        return [batch]
    reason = why_unsplittable(batch)
    if reason:
        raise WorkloadError(f"The policy asks for micro-batches and the batch cannot be split: {reason}.")
    return split_batch(batch, policy.batch.micro)


def git(*words: str) -> str | None:
    """What git says about this script's repository; None where there is none."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def record(options: argparse.Namespace, argv: Sequence[str], workload: Workload) -> dict[str, Any]:
    """Where the samples come from."""
    changes = git("status", "--porcelain", "--untracked-files=no")
    here: dict[str, Any] = environment(options.device).model_dump(mode="json")
    if options.device == "cuda":
        here |= {"cuda_version": torch.version.cuda, "cudnn_version": torch.backends.cudnn.version()}
    settings = {name: getattr(options, name) for name in ("steps", "warmup", "blocks", "seed", "device")}
    return {
        "version": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/compare_arms.py", *argv]),
        "commit": git("rev-parse", "HEAD") or "unknown",
        "uncommitted_changes": None if changes is None else bool(changes),
        "environment": here,
        "workload": {"model": options.model, "sha256": workload.sha256, "batch_size": workload.batch_size}
        | {"grad_clip": workload.grad_clip},
        "settings": settings | {"lead_in_steps": LEAD_IN_STEPS, "device_batches": DEVICE_BATCHES},
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare_arms.py", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="path of the model.py that the policies were tuned for")
    parser.add_argument("--policy", action="append", required=True, help="a policy.json; may be given several times")
    parser.add_argument("--steps", type=int, help="timed steps of each arm (default 60)")
    parser.add_argument("--warmup", type=int, help="untimed steps of each arm before the first block (default 15)")
    parser.add_argument("--blocks", type=int, help="rounds in which every arm gets one block of steps (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and the order of blocks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder for compare.json; nothing is written without it")
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that everything runs")
    options = parser.parse_args(argv)
    defaults = QUICK if options.quick else {"steps": 60, "warmup": 15, "blocks": 6}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be 1 or more")
    if options.steps < options.blocks:
        parser.error(f"--steps {options.steps} are fewer than --blocks {options.blocks}; every block needs a step")
    options.policy = list(dict.fromkeys(options.policy))
    return options


def compare(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the comparison and prints it; 0, or 1 where every arm failed."""
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {options.out} cannot be made: {error}", hint="Give a folder that can be written.") from None
    workload, arms, missing = plan(options)
    order = run_arms(arms, workload, options.device, options)
    base = {arm.setup.key: arm for arm in arms}
    rows = {arm.setup.key: summary(arm, base, workload.batch_size, options.warmup) for arm in arms}
    print(f"{workload.name}, batch {workload.batch_size}, {environment(options.device).device}, torch {torch.__version__}")
    print_table(rows)
    for key, reason in missing.items():
        print(f"  {key}: left out, {reason}")
    if options.out is not None:
        data = record(options, argv, workload) | {"left_out": missing, "block_order": order, "arms": rows}
        path = options.out / "compare.json"
        write_atomically(path, json.dumps(finite(data), indent=2, allow_nan=False) + "\n")
        print(f"samples: {path}")
    return 1 if all(arm.failure for arm in arms) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where every arm failed, 2 for a mistake in what was given."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = parse(words)
    try:
        return compare(options, words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
