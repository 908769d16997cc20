"""How a session begins: the worker that runs the user's model, the first look at it, and what an FP32 window costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.bench.isolation import IsolatedBench
from autoprec.bench.target import Target
from autoprec.errors import AutoprecError, WorkloadError
from autoprec.policy import Batch, Policy
from autoprec.records import Failure, Look, Measurement, Window
from autoprec.session.context import Measuring
from autoprec.session.logbook import Logbook
from autoprec.session.reference import fp32_error
from autoprec.tune.study_space import fingerprint_of

PROBES = (Window(steps=3, warmup_steps=1, purpose="probe"), Window(steps=9, warmup_steps=3, purpose="probe"))


class Interrupted(AutoprecError):
    """Ctrl-C in the middle; what was measured is kept."""

    exit_code = 130


def workload_name(workload: Any) -> str:
    """The name of a run's workload: the file's stem, the module's last part, or the object's own name."""
    if isinstance(workload, str | Path):
        head, _, tail = str(workload).partition(":")
        return Path(head).stem if head.endswith(".py") or "/" in head else (tail or head).rpartition(".")[2]
    return str(getattr(workload, "__name__", type(workload).__name__))


@contextlib.contextmanager
def opened_bench(workload: Any, target: Target, make: Callable[[Any, Target], Measuring], log_path: Path) -> Iterator[Measuring]:
    """A worker process for workloads given as text; objects cannot travel to another process and run in this one.

    Args:
        workload: as the user named it.
        target: where to measure.
        make: the kind of bench.
        log_path: receives what the user's code prints.
    """
    if not isinstance(workload, str | Path):
        yield make(workload, target)
        return
    bench = IsolatedBench(str(workload), target, make=make, log_path=log_path)
    try:
        yield bench
    finally:
        bench.close()


def first_look(bench: Measuring, target: Target, logbook: Logbook) -> Look:
    """Checks and traces the workload, and says what it found.

    Raises:
        WorkloadError: it does not train in FP32, or breaks the contract of a model.py.
    """
    logbook.stage("look", 1)
    look = bench.look()
    logbook.advance()
    logbook.found(
        f"look: {len(look.layers)} layers, {look.num_parameters:,} parameters, {look.matmul_share:.0%} of an FP32 step in "
        f"matmuls and convolutions; batch of {look.effective_batch}; FP32 loss {look.loss:.4g}; {target.numerics}"
    )
    for remark in (*look.notes, look.unsplittable, look.forbids_fp16):
        if remark:
            logbook.found(f"look: {remark}")
    return look


def fp32_that_fits(bench: Measuring, look: Look) -> Policy:
    """FP32 with the largest micro-batch that fits into memory: a batch may have been chosen for what AMP needs.

    Raises:
        WorkloadError: none does.
    """
    whole = look.effective_batch
    for micro in look.micro_batches or (whole,):
        batch = Batch(effective=whole, micro=micro, accumulation_steps=whole // micro)
        policy = Policy(default="fp32", batch=batch, fingerprint=fingerprint_of(look))
        outcome = bench.window(policy, PROBES[0])
        if not isinstance(outcome, Failure) or outcome.kind != "out_of_memory":
            return policy
    reason = f" It cannot be split: {look.unsplittable}" if look.unsplittable else ""
    raise WorkloadError(
        f"FP32 runs out of memory with micro-batches of {micro}, the smallest into which the batch of {whole} divides.{reason}",
        hint="autoprec compares with FP32, so FP32 has to fit: lower BATCH_SIZE.",
    )


@dataclass(frozen=True)
class Probed:
    """What FP32 costs by the wall clock, speed prediction or not: a step, a window besides its steps, and the longer window."""

    step_s: float
    overhead_s: float
    measurement: Measurement


def probed(bench: Measuring, policy: Policy, clock: Callable[[], float] = time.monotonic) -> Probed:
    """Times two windows of different length.

    The first window ever pays for loading kernels and making batches, so run one before.

    Raises:
        WorkloadError: FP32 does not train.
        DeviceError: the card was never quiet enough to time it.
    """
    (short_s, _), (long_s, measurement) = (_probe(bench, policy, probe, clock) for probe in PROBES)
    step_s = max(long_s - short_s, 0.0) / (PROBES[1].steps - PROBES[0].steps)
    return Probed(step_s, max(short_s - step_s * PROBES[0].steps, 0.0), measurement)


def _probe(bench: Measuring, policy: Policy, probe: Window, clock: Callable[[], float]) -> tuple[float, Measurement]:
    start_s = clock()
    outcome = bench.window(policy, probe)
    if isinstance(outcome, Failure):
        raise fp32_error(outcome, "probe")
    return clock() - start_s, outcome
