"""Is a planted trap one? Checks what the workloads of ``trap_report.py`` say of themselves, without any search.

For every file with ``TRAP = {"layers": [...], "bites": [...], "bf16_ok": ...}``, over several seeds, against FP32:

* FP32 trains: the loss falls;
* the cure (the layers in FP32, all others in fp16) tracks FP32 within 3%, under stock autocast and with everything in pure half;
* each layer is needed: with it alone in pure half, the others cured, training fails or departs by more than 3%;
* no initial loss scale cures all of them in pure half;
* whether stock AMP fails too, and whether bf16 in place of FP32 is a cure, are as the file says.

Run: ``python benchmarks/trap_check.py FOLDER [--only NAME ...]``; on a CUDA GPU or the CPU under CUDA's autocast rules.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trap_report import EvenBench, target_here, trap_of, traps_in

from autoprec.policy import Batch, LossScale, Policy, Precision
from autoprec.records import Failure, Window
from autoprec.tune.assignment import exceptions_of
from autoprec.tune.divergence import loss_gap
from autoprec.tune.study_space import fingerprint_of

TRACKS = 0.03
SCALES = (1.0, 2.0**4, 2.0**8, 2.0**13, 2.0**16, 2.0**20)


class Checker:
    """Trains one workload in set-ups given as layers' precisions."""

    def __init__(self, path: Path, steps: int, seeds: int) -> None:
        self.bench = EvenBench(str(path), target_here())
        self.look = self.bench.look()
        self._windows = [Window(steps=steps, seed=seed) for seed in range(seeds)]
        self.names = [layer.name for layer in self.look.layers]

    def losses(self, policy: Policy, seed: int) -> tuple[float, ...] | None:
        outcome = self.bench.window(policy, self._windows[seed])
        return None if isinstance(outcome, Failure) else outcome.losses

    def policy(self, default: Precision, lifted: Mapping[str, Precision], scale: float = 2.0**13) -> Policy:
        """Every layer in ``default``, but those lifted; the root of a pure policy is under plain autocast, as in any search."""
        root: Precision = lifted.get("", default.removesuffix("_pure"))  # type: ignore[arg-type]
        precisions: dict[str, Precision] = {name: lifted.get(name, default if name else root) for name in self.names}
        batch = Batch(effective=self.look.effective_batch, micro=self.look.effective_batch)
        return Policy(
            default=root,
            layers=exceptions_of(precisions, root),
            loss_scale=LossScale(init=scale, floor=2.0**-20),
            batch=batch,
            fingerprint=fingerprint_of(self.look),
        )

    def gap(self, policy: Policy) -> float:
        """The mean loss gap to FP32; infinite where a seed fails."""
        plain = self.policy("fp32", {})
        gaps = []
        for seed in range(len(self._windows)):
            reference, losses = self.losses(plain, seed), self.losses(policy, seed)
            assert reference is not None
            gaps.append(math.inf if losses is None else loss_gap(reference, losses))
            if gaps[-1] == math.inf:
                break
        return statistics.fmean(gaps)


def check(path: Path, steps: int, seeds: int) -> list[str]:
    """What is wrong with a file's claims; prints the figures."""
    trap = trap_of(path)
    guilty: tuple[str, ...] = tuple(trap["layers"])
    checker = Checker(path, steps, seeds)
    wrong = [f"no layer {name}" for name in guilty if name not in checker.names]
    if wrong:
        return [*wrong, f"there are {checker.names}"]
    cure: dict[str, Precision] = dict.fromkeys(guilty, "fp32")
    soft: dict[str, Precision] = dict.fromkeys(guilty, "bf16")
    reference = checker.losses(checker.policy("fp32", {}), 0)
    assert reference is not None
    fall = statistics.fmean(reference[-20:]) / statistics.fmean(reference[:5])
    cures = {default: checker.gap(checker.policy(default, cure)) for default in ("fp16", "fp16_pure")}
    stock = checker.gap(checker.policy("fp16", {}))
    singles = {name: checker.gap(checker.policy("fp16_pure", {k: v for k, v in cure.items() if k != name})) for name in guilty}
    scales = {scale: checker.gap(checker.policy("fp16_pure", {}, scale)) for scale in SCALES}
    softened = checker.gap(checker.policy("fp16_pure", soft))
    print(
        f"{path.stem:22} fall {fall:.2f}; cure {_figures(cures)}; stock {stock:+.1%}; each {_figures(singles)}; "
        f"scales {_figures(scales)}; bf16 {softened:+.1%}",
        flush=True,
    )
    wrong += ["FP32 does not train"] if not fall < 0.9 else []
    wrong += [f"the cure departs under {name}" for name, gap in cures.items() if not abs(gap) <= TRACKS]
    wrong += [f"{name} is not needed" for name, gap in singles.items() if gap <= TRACKS]
    wrong += [f"a loss scale of {scale:g} cures it" for scale, gap in scales.items() if guilty and gap <= TRACKS]
    wrong += (
        [f"stock AMP departs by {stock:+.1%}, the file says otherwise"] if (stock > TRACKS) != ("amp" in trap["bites"]) else []
    )
    wrong += [f"bf16 departs by {softened:+.1%}"] if (softened <= TRACKS) != trap["bf16_ok"] else []
    return wrong


def _figures(gaps: Mapping[object, float]) -> str:
    return " ".join(f"{key}:{gap:+.1%}" for key, gap in gaps.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(argv)
    bad = 0
    for path in traps_in(options.folder):
        if not options.only or path.stem in options.only:
            wrong = check(path, options.steps, options.seeds)
            bad += bool(wrong)
            for line in wrong:
                print(f"    {line}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
