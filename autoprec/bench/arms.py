"""Several policies timed against each other in one process, A B A B, so that drift cancels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from autoprec.bench.data import Start
from autoprec.bench.disturbance import MOST_REPEATS, Disturbance, TimedBlocks, card_of
from autoprec.bench.failures import failure_of
from autoprec.bench.target import Target
from autoprec.bench.timing import HOST_PROBES, LEAD_STEPS, StepClock
from autoprec.bench.training import Training, free_memory, undisturbed
from autoprec.bench.window import counted, finished, look_at
from autoprec.bench.workload import Workload
from autoprec.errors import PolicyMismatch, WorkloadError
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Outcome, Window
from autoprec.runtime.backend import set_flags

# Rounds in which every arm gets one block of steps. Own choice: all of seven pairs of equal blocks lie on one side by chance in
# 2 / 2^7 = 1.6% of cases, so that "95%" also holds with few blocks (see ``tune.verdict.speed_ratio``); six would give 3.1%.
BLOCKS = 7


class _Arm:
    """One policy's training, its clock and blocks, and what ended it."""

    def __init__(self, policy: Policy, target: Target, window: Window, disturbance: Disturbance) -> None:
        self.policy, self.target, self.disturbance = policy, target, disturbance
        # A block asks for a step each at the least.
        self.warmup_steps = max(window.warmup_steps, 1)
        self.timed_steps = max(window.steps - window.warmup_steps, BLOCKS)
        self.training: Training | None = None
        self.clock = StepClock(target.device)
        self.blocks = TimedBlocks(self.clock, disturbance)
        self.failure: Failure | None = None
        self.step = 0
        self.repeats = 0

    def guard(self, action: Callable[[], None]) -> None:
        """Runs a part of the arm's work; what it raises ends this arm only."""
        if self.failure is not None:
            return
        try:
            action()
        except (WorkloadError, PolicyMismatch):
            raise
        except Exception as error:
            self.failure = failure_of(error, self.policy, self.training.model if self.training else None, self.step)


def interleave(workload: Workload, target: Target, policies: Sequence[Policy], window: Window, start: Start) -> list[Outcome]:
    """Trains every policy from the window's seed, in blocks of steps whose order is drawn anew each round.

    Warm-up steps (compiling included) are untimed. An arm that fails gives a Failure, and the others go on. Peak memory is not
    known per arm and is 0. Blocks in which something slowed the card are dropped, counted and tried again, up to MOST_REPEATS times.
    """
    disturbance = Disturbance(card_of(target))
    arms = [_Arm(policy, target, window, disturbance) for policy in policies]
    # The outermost flags undo what every arm sets, whatever order the arms end in.
    with undisturbed(target), _own_flags(policies[0]):
        try:
            for arm in arms:
                with _own_flags(arm.policy):
                    arm.guard(lambda arm=arm: _warm_up(arm, workload, window, start))  # type: ignore[misc]
            _run_blocks(arms, window)
            return [_outcome(arm) for arm in arms]
        finally:
            # In reverse order, so that flags and layouts unwind as they were set.
            for arm in reversed(arms):
                if arm.training is not None:
                    arm.training.close()
                    arm.training = None
            free_memory(target, compiled=any(policy.execution != "eager" for policy in policies))


@contextmanager
def _own_flags(policy: Policy) -> Iterator[None]:
    """Process-wide flags of one arm, for its block only."""
    undo = set_flags(policy.backend)
    try:
        yield
    finally:
        undo()


def _warm_up(arm: _Arm, workload: Workload, window: Window, start: Start) -> None:
    """Builds an arm and trains its first steps, of which the last ones show whether the host is the limit."""
    arm.training = Training(workload, arm.target, arm.policy, window, start)
    for number in range(arm.warmup_steps):
        run = arm.clock.probe_host if number >= arm.warmup_steps - HOST_PROBES else _untimed
        _run_step(arm, run)


def _run_blocks(arms: Sequence[_Arm], window: Window) -> None:
    order = list(arms)
    shuffle = random.Random(window.seed)
    for block in range(BLOCKS):
        shuffle.shuffle(order)
        for arm in order:
            timed = arm.timed_steps
            _run_block(arm, timed * (block + 1) // BLOCKS - timed * block // BLOCKS)
    for _ in range(MOST_REPEATS):
        order = [arm for arm in order if not arm.failure]
        # What the last blocks showed may speak of earlier ones, so who lacks blocks is asked anew each time.
        if not any(_lacking_steps(arm) for arm in order):
            return
        if not order[0].disturbance.settle():
            continue
        shuffle.shuffle(order)
        for arm in order:
            if steps := _lacking_steps(arm):
                arm.repeats += 1
                _run_block(arm, steps)


def _lacking_steps(arm: _Arm) -> int:
    """Steps of a block that was disturbed and has not been tried again; 0 where there is none."""
    return next(iter(arm.blocks.lost()[arm.repeats :]), 0)


def _run_block(arm: _Arm, steps: int) -> None:
    with _own_flags(arm.policy):
        arm.guard(lambda: _time_block(arm, steps))


def _time_block(arm: _Arm, steps: int) -> None:
    """One arm's block. On CUDA its first steps are untimed, until the host is ahead of the device again, and the device is only
    waited for at the end."""
    assert arm.training is not None
    arm.disturbance.start()
    first = arm.step
    lead = LEAD_STEPS if arm.target.device == "cuda" and steps > 2 * LEAD_STEPS else 0
    for number in range(steps):
        _run_step(arm, _untimed if number < lead else lambda step: arm.clock.time(step, arm.step))
    arm.failure = look_at(arm.training)  # waits for the device
    arm.blocks.end(range(first, arm.step))


def _untimed(step: Callable[[], None]) -> None:
    step()


def _run_step(arm: _Arm, run: Callable[[Callable[[], None]], None]) -> None:
    """Runs an arm's next step; repeats of blocks go through its batches again."""
    assert arm.training is not None
    parts = arm.training.prepare(arm.step % (arm.warmup_steps + arm.timed_steps))
    run(lambda: arm.training.step(parts))  # type: ignore[union-attr]
    arm.step += 1


def _outcome(arm: _Arm) -> Outcome:
    if arm.failure is not None:
        return arm.failure
    assert arm.training is not None
    outcome = finished(arm.training, arm.clock, arm.target)
    return counted(outcome, arm.training, arm.blocks, arm.target, in_turns=True) if isinstance(outcome, Measurement) else outcome
