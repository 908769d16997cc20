"""A real card and a real neighbour: what another process computes is seen, and what we compute is never taken for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from autoprec.bench.bench import Bench
from autoprec.bench.disturbance import card_of
from autoprec.bench.nvml import SAMPLE_S, Card
from autoprec.bench.target import resolve_target
from autoprec.policy import Batch, Policy
from autoprec.records import Failure, Measurement, Window
from autoprec.tune.study_space import fingerprint_of

WORKLOADS = Path(__file__).parent.parent / "workloads"
WINDOW = Window(steps=60, warmup_steps=5)
LIFE_S = 60

MULTIPLIES = """
import pathlib, sys, time, torch
a = torch.randn(4096, 4096, device="cuda")
end_s = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end_s:
    for _ in range(50):
        b = a @ a
    torch.cuda.synchronize()
    pathlib.Path(sys.argv[1]).touch()
"""
# Started by a process that ends at once: a child of this one would count as part of the training.
STARTS = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True).pid)"


@pytest.fixture
def bench() -> Bench:
    return Bench(str(WORKLOADS / "overflow.py"), resolve_target(None))


@pytest.fixture
def card() -> Card:
    card = card_of(resolve_target(None))
    assert card is not None
    return card


@pytest.fixture
def neighbour(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Starts a process that multiplies matrices on the card and is no child of ours; returns when it does."""
    started: list[int] = []

    def start() -> None:
        ready = tmp_path / "ready"
        command = [sys.executable, "-c", STARTS, MULTIPLIES, str(ready), str(LIFE_S)]
        with open(tmp_path / "log", "wb") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=True, timeout=30)
        started.append(int(done.stdout.split()[0]))
        deadline_s = time.monotonic() + 40
        while not ready.exists():
            if time.monotonic() > deadline_s:
                pytest.skip("the other process did not get the card: " + (tmp_path / "log").read_text()[-300:])
            time.sleep(0.1)

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)


def policies_of(bench: Bench) -> tuple[Policy, Policy]:
    look = bench.look()
    shared = {"batch": Batch(effective=look.effective_batch, micro=look.effective_batch), "fingerprint": fingerprint_of(look)}
    return Policy(default="fp32", **shared), Policy(default="bf16", **shared)


def test_our_own_work_alone_is_never_taken_for_another_process(bench: Bench, card: Card) -> None:
    since_s = time.time()
    outcomes = bench.interleave(policies_of(bench), WINDOW)
    end_s = time.monotonic() + 2 * SAMPLE_S
    a = torch.randn(4096, 4096, device="cuda")
    while time.monotonic() < end_s:
        a @ a
        torch.cuda.synchronize()
    assert not card.others_at_work(since_s)
    for outcome in outcomes:
        assert isinstance(outcome, Measurement)
        assert (outcome.shared_steps, sum(outcome.block_steps)) == (0, len(outcome.step_times_s))


def test_steps_beside_another_process_are_counted_as_shared(bench: Bench, card: Card, neighbour: Callable[[], None]) -> None:
    bench.interleave(policies_of(bench), Window(steps=8, warmup_steps=2))  # kernels are loaded
    since_s = time.time()
    if card.others_at_work(since_s) is None:
        pytest.skip("the driver does not say which processes compute (NVML: no utilisation by process here)")
    neighbour()
    # In a container that numbers processes otherwise we have to compute too before two are seen.
    bench.interleave(policies_of(bench), WINDOW)
    time.sleep(2 * SAMPLE_S)
    if not card.others_at_work(since_s):
        pytest.skip("NVML shows no other process at work here, though one is: a container that hides its processes")
    for outcome in bench.interleave(policies_of(bench), WINDOW):
        if isinstance(outcome, Failure):
            assert outcome.kind == "disturbed"
            assert "another process used the card" in outcome.message
        else:
            assert outcome.shared_steps > 0
