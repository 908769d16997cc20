"""Which timed steps count: none that the loss scaler skipped, none while heat, a power brake or another process slowed the card."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch

from autoprec.bench.nvml import SAMPLE_S, Card
from autoprec.bench.target import Target
from autoprec.bench.timing import StepClock
from autoprec.records import Failure, Measurement, Outcome, dropped_words

# How often blocks whose samples were dropped are tried again, with a pause of SAMPLE_S before each try. Own choice: a disturbance of
# a few seconds is waited for, and a card that is never quiet costs no more than that and twice the steps.
MOST_REPEATS = 6
UNTOLD = "another process is on the card, and the driver does not say whether it computes"


@dataclass(frozen=True)
class Block:
    """Steps of one training that were run in a row; times are those of ``time.time()``."""

    steps: range
    start_s: float
    end_s: float
    throttled: bool


class Disturbance:
    """What slowed the card while blocks were timed. Without a card (on a CPU, or where speed is predicted) nothing ever does."""

    def __init__(
        self, card: Card | None, *, now_s: Callable[[], float] = time.time, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._card, self._now_s, self._pause = card, now_s, pause
        self._seen_s: set[float] = set()
        # What was computed just before the first block may go on in it.
        self._since_s = self._start_s = now_s()
        self.untold = card is not None and card.others_at_work(self._since_s) is None and card.others_present()

    def start(self) -> None:
        """A block begins."""
        self._start_s = self._now_s()

    def end(self, steps: range) -> Block:
        """The block ends, and the device is done with it; the next one begins, if no ``start`` follows."""
        start_s, self._start_s = self._start_s, self._now_s()
        self._look()
        return Block(steps, start_s, self._start_s, self._is_throttled())

    def is_shared(self, block: Block) -> bool:
        """Whether another process may have computed during the block.

        A sample of the driver speaks of up to SAMPLE_S before it, and short blocks get none of their own: what was seen so long
        before or after a block counts. So the answer may change as later blocks end.
        """
        return any(block.start_s - SAMPLE_S < at_s < block.end_s + SAMPLE_S for at_s in self._seen_s)

    def settle(self) -> bool:
        """Waits for as long as a sample may look back; whether the card was quiet in that time."""
        since_s = self._now_s()
        self._pause(SAMPLE_S)
        self._look()
        return not self._is_throttled() and not any(at_s > since_s for at_s in self._seen_s)

    def _is_throttled(self) -> bool:
        return self._card is not None and self._card.is_throttled()

    def _look(self) -> None:
        if self._card is None:
            return
        # A sample may be told a little after it was taken.
        self._seen_s.update(self._card.others_at_work(self._since_s - SAMPLE_S) or ())
        self._since_s = self._now_s()


class TimedBlocks:
    """The blocks in which one training was timed."""

    def __init__(self, clock: StepClock, disturbance: Disturbance) -> None:
        self._clock, self._disturbance = clock, disturbance
        self._blocks: list[Block] = []

    def end(self, steps: range) -> None:
        """Keeps a block whose steps have just been run; the device has been waited for."""
        self._blocks.append(self._disturbance.end(steps))

    def lost(self) -> list[int]:
        """How many steps each block had that was disturbed, as far as is known by now."""
        return [len(block.steps) for block in self._blocks if self._is_disturbed(block)]

    def num_clean(self) -> int:
        """Samples of the blocks that were not disturbed, as far as is known by now."""
        return sum(self._clock.count(block.steps) for block in self._blocks if not self._is_disturbed(block))

    def counted(self, measurement: Measurement, skipped: Collection[int], *, in_turns: bool = False) -> Outcome:
        """The measurement with the step times that count and how many do not, or why none does.

        Args:
            measurement: without step times.
            skipped: numbers of the steps that the loss scaler skipped: they do less than a step, so they are no sample of one. That
                they trained nothing is counted by ``samples_per_s`` from ``skipped_steps``.
            in_turns: whether other trainings ran between the blocks, so that they are worth telling apart.
        """
        idle = self._clock.drop(skipped)
        throttled = sum(self._clock.drop(block.steps) for block in self._blocks if block.throttled)
        shared = sum(self._clock.drop(block.steps) for block in self._blocks if self._disturbance.is_shared(block))
        times_s = self._clock.times_s()
        if not times_s and idle + throttled + shared:
            return _nothing_left(measurement, throttled, shared)
        kept = [self._clock.count(block.steps) for block in self._blocks] if in_turns else []
        fields = {"step_times_s": times_s, "throttled_steps": throttled, "shared_steps": shared}
        counted = measurement.model_copy(update={**fields, "block_steps": tuple(steps for steps in kept if steps)})
        notes = (counted.note, counted.dropped, UNTOLD if self._disturbance.untold else "")
        return counted.model_copy(update={"note": "; ".join(note for note in notes if note)})

    def _is_disturbed(self, block: Block) -> bool:
        return block.throttled or self._disturbance.is_shared(block)


def card_of(target: Target) -> Card | None:
    """The card whose steps are timed; None where there is none, or where speed is predicted."""
    if target.device != "cuda" or target.timing == "predicted":
        return None
    return _opened(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


@cache
def _opened(uuid: str) -> Card:
    return Card(uuid)


def _nothing_left(measurement: Measurement, throttled: int, shared: int) -> Failure:
    """Why no step time counts."""
    if not throttled + shared:
        text = f"the loss scaler skipped every timed step; the loss scale is {measurement.final_scale or 0:g}"
        return Failure(kind="scale_collapsed", message=text, losses=measurement.losses)
    advice = ["stop the other process, or run this when it is done"] if shared else []
    advice += ["let the card cool down, or see to its power supply"] if throttled else []
    text = f"no step time counts: {dropped_words(throttled, shared, throttled + shared)}. To mend it, {'; '.join(advice)}"
    return Failure(kind="disturbed", message=text, losses=measurement.losses)
