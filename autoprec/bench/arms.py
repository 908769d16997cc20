"""Several policies timed against each other in one process: A B A B, so that drift of clocks and machine cancels."""

from __future__ import annotations

import random
from collections.abc import Sequence

from autoprec.bench.memory import free_memory
from autoprec.bench.nvml import Card
from autoprec.bench.provisions import DataCache, ModelCache
from autoprec.bench.target import Target
from autoprec.bench.training import SpeedModel, TrainingRun
from autoprec.bench.window import Raised, advance, as_failure, is_users_mistake, raised, run_window, shut
from autoprec.bench.workload import Workload
from autoprec.policy import Policy
from autoprec.records import Failure, Measurement, Window

# Steps of one arm before the next one's turn: long enough that a change of arm is rare, short enough that drift cancels.
BLOCK_STEPS = 5
# The first step of a block finds the other arm's data in the caches; it trains and is not timed.
_SETTLING_STEPS = 1


def interleave(
    workload: Workload,
    target: Target,
    policies: Sequence[Policy],
    window: Window,
    *,
    data: DataCache,
    models: ModelCache,
    speed: SpeedModel | None = None,
) -> list[Measurement | Failure]:
    """Measures policies side by side: all are built and warmed up, then take turns in blocks, in a random order each round.

    Each arm takes ``window.steps`` timed steps, plus one untimed step a block. An arm that does not fit into memory beside the
    others is measured alone afterwards, with a note. Where speed is predicted nothing can drift, so windows run one by one.

    Args:
        workload: what to train.
        target: where.
        policies: the arms.
        window: warm-up, timed steps and seed, the same for all.
        data: batches by seed.
        models: initial weights by seed.
        speed: as for ``run_window``.

    Returns:
        One outcome a policy, in their order.

    Raises:
        WorkloadError: as for ``run_window``.
    """
    arguments = {"data": data, "models": models, "speed": speed}
    if target.timing == "predicted":
        return [run_window(workload, target, policy, window, **arguments) for policy in policies]  # type: ignore[arg-type]
    arms = [_Arm(TrainingRun(workload, target, policy, window, **arguments)) for policy in policies]  # type: ignore[arg-type]
    try:
        _run(arms, window)
    finally:
        shut(*(arm.run for arm in arms))
    free_memory()
    outcomes = []
    for arm, policy in zip(arms, policies, strict=True):
        if arm.again_alone:
            outcomes.append(_alone(run_window(workload, target, policy, window, **arguments)))  # type: ignore[arg-type]
        else:
            assert arm.outcome is not None
            outcomes.append(arm.outcome)
    return outcomes


class _Arm:
    """A run and what came of it; once there is an outcome it takes no more turns."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.outcome: Measurement | Failure | None = None
        self.again_alone = False

    @property
    def going(self) -> bool:
        return self.outcome is None and not self.again_alone

    def take(self, steps: int, *, timed: bool, build: bool = False) -> None:
        """Takes a turn; a failure or exception ends the arm."""
        broken: Raised | None = None
        try:
            with self.run.active():
                if build:
                    self.run.build()
                self.outcome = advance(self.run, steps, timed=timed)
        except Exception as error:
            if is_users_mistake(error):
                raise
            broken = raised(error, self.run.num_steps)
        if broken is not None:
            self._end(broken)

    def finish(self) -> None:
        """Turns the samples into the outcome."""
        broken: Raised | None = None
        try:
            with self.run.active():
                failure = self.run.final_check()
                if failure is None:
                    self.run.probe_device_time()
                self.outcome = failure or self.run.measurement()
        except Exception as error:
            if is_users_mistake(error):
                raise
            broken = raised(error, self.run.num_steps)
        if broken is not None:
            self._end(broken)

    def _end(self, broken: Raised) -> None:
        # Alone it has the whole memory; and alone a failure's layer is looked for.
        self.again_alone = broken.kind in ("out_of_memory", "unsupported")
        if not self.again_alone:
            self.outcome = as_failure(broken, self.run.target)
        with self.run.active():  # not shut(): forgetting all compilations would stop the other arms' clocks for a minute
            self.run.close()
        free_memory()


def _run(arms: list[_Arm], window: Window) -> None:
    for arm in arms:
        arm.take(window.warmup_steps, timed=False, build=True)
    order, card = random.Random(window.seed), Card()
    done = 0
    while done < window.steps:
        steps = min(BLOCK_STEPS, window.steps - done)
        turns = [arm for arm in arms if arm.going]
        order.shuffle(turns)
        for arm in turns:
            arm.take(_SETTLING_STEPS, timed=False)
            if arm.going:
                arm.take(steps, timed=True)
            if arm.going and card.throttled():
                arm.run.drop_last_times(steps)
        done += steps
    for arm in arms:
        if arm.going:
            arm.finish()


def _alone(outcome: Measurement | Failure) -> Measurement | Failure:
    if isinstance(outcome, Failure):
        return outcome
    return outcome.model_copy(update={"note": f"{outcome.note} Measured alone: it did not run beside the other arms.".strip()})
