"""How many trials does each search need? Made-up models whose best assignment is known; nothing is trained.

Each model has layers with heavy-tailed harm and random gains; the search sees sensitivities that are off by a lognormal factor
(sigma 0.7) and throughputs with 0.5% noise. A policy passes where its true harm is at most 1%.
Compared at equal budgets and seeds:

* autoprec: the assignment front under multivariate TPE (``tune.study``)
* TPE, one categorical a layer
* random, one categorical a layer
* delta debugging from all-fp16 (``tune.repair``, order of the noisy sensitivities)

Printed: median trials to 98% of the best known throughput that passes (the budget where it is never reached), and the mean
hypervolume of passing and failing policies with harm under 10%.

Run: ``python benchmarks/search_efficiency.py --layers 54 --trials 80 --seeds 5``
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import optuna

from autoprec.policy import Policy, Precision
from autoprec.records import Edge, Environment, Layer, LayerProfile, Look, Measurement, Profile, Window
from autoprec.tune.assignment import Assignment, assess
from autoprec.tune.baselines import baseline_policies
from autoprec.tune.front import hypervolume
from autoprec.tune.front_solver import solve_front
from autoprec.tune.repair import smallest_lift
from autoprec.tune.space import load_search_space
from autoprec.tune.study import run_study
from autoprec.tune.study_space import StudySpace
from autoprec.tune.yardstick import Yardstick

TOLERANCE = 0.01
OPTIONS: tuple[Precision, ...] = ("fp32", "fp16")
REFERENCE = (1.0,) * 20
WINDOW = Window(steps=20)
ENVIRONMENT = Environment(
    device="made up", capability=None, driver=None, torch_version="none", python_version="3", platform="none"
)


@dataclass
class Trace:
    """What a search saw, trial by trial: (throughput without noise, true harm)."""

    points: list[tuple[float, float]]

    def trials_to(self, goal: float, budget: int) -> int:
        hits = (i + 1 for i, (speed, harm) in enumerate(self.points) if harm <= TOLERANCE and speed >= goal)
        return next(hits, budget)


class Model:
    """A made-up model: true and noisy profile, and what a window would say."""

    def __init__(self, num_layers: int, seed: int) -> None:
        rng = random.Random(seed)
        names = [f"block{i // 6:02d}.layer{i:03d}" for i in range(num_layers)]
        harms = [10 ** rng.gauss(-4.5, 1.0) for _ in names]
        times = [rng.lognormvariate(-7, 0.7) for _ in names]
        gains = [rng.uniform(0.3, 0.9) for _ in names]
        noise = [rng.lognormvariate(0, 0.7) for _ in names]
        edges = tuple(Edge(producer=a, consumer=b, elements=10**5) for a, b in pairwise(names))
        self.look = Look(
            layers=tuple(Layer(name=name, kind="Linear") for name in names),
            idle=(),
            edges=edges,
            matmul_share=0.9,
            num_parameters=1,
            effective_batch=64,
            micro_batches=(64,),
            loss=1.0,
            workload_sha256="0",
            device_name="made up",
            capability=None,
            torch_version="none",
        )
        self.truth = _profile(names, times, gains, harms)
        self.guess = _profile(names, times, gains, [h * n for h, n in zip(harms, noise, strict=True)])
        self.names = names
        self._noise = random.Random(seed + 1)
        self.trace = Trace([])
        allowed = dict.fromkeys(names, OPTIONS)
        points = solve_front(self.look, self.truth, allowed, size=64, time_limit_s=60)
        self.best_known = max(64 / plan.time_s for plan in points if plan.harm <= TOLERANCE)

    def measure(self, precisions: Mapping[str, Precision], default: Precision) -> tuple[float, float]:
        """Noisy throughput and true harm; noted in the trace without the noise."""
        plan: Assignment = assess(precisions, default, self.look, self.truth)
        self.trace.points.append((64 / plan.time_s, plan.harm))
        return 64 / plan.time_s * self._noise.gauss(1, 0.005), plan.harm


def _profile(names: list[str], times: list[float], gains: list[float], harms: list[float]) -> Profile:
    layers = tuple(
        LayerProfile(
            layer=name,
            time_s={"fp32": t, "fp16": t * gain},
            time_origin="measured",
            max_output=1,
            max_grad=1,
            underflow_share=0,
            sensitivity={"fp32": 0.0, "fp16": harm},
        )
        for name, t, gain, harm in zip(names, times, gains, harms, strict=True)
    )
    return Profile(layers=layers, cast_s_per_byte=1e-11, base_step_s=sum(times), cost_s=0, precisions=OPTIONS)


def front_search(model: Model, trials: int, seed: int) -> None:
    space = StudySpace.bind(load_search_space("cpu"), model.look, model.guess, precisions=OPTIONS, cuda=False)

    def evaluate(policy: Policy, window: Window) -> Measurement:
        speed, harm = model.measure(policy.precisions(), policy.default)
        losses = tuple(x * (1 + harm) for x in REFERENCE)
        return Measurement(
            losses=losses,
            step_times_s=(64 / speed,),
            speed_origin="measured",
            batch_samples=64,
            peak_bytes=1,
            environment=ENVIRONMENT,
        )

    baselines = baseline_policies(model.look, OPTIONS, cuda=False)
    run_study(
        space, evaluate, Yardstick(REFERENCE, tolerance=TOLERANCE), window=WINDOW, baselines=baselines, trials=trials, seed=seed
    )


def per_layer(model: Model, trials: int, sampler: optuna.samplers.BaseSampler) -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    for precision in OPTIONS[::-1]:
        study.enqueue_trial(dict.fromkeys(model.names, precision))

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        precisions: dict[str, Precision] = {name: trial.suggest_categorical(name, OPTIONS) for name in model.names}
        speed, harm = model.measure(precisions, "fp16")
        trial.set_constraint("divergence", min(harm / TOLERANCE - 1, 10.0))
        return speed, harm

    study.optimize(objective, n_trials=trials)


def tpe_search(model: Model, trials: int, seed: int) -> None:
    per_layer(model, trials, optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=False))


def random_search(model: Model, trials: int, seed: int) -> None:
    per_layer(model, trials, optuna.samplers.RandomSampler(seed=seed))


def delta_debugging(model: Model, trials: int, seed: int) -> None:
    order = sorted(model.names, key=lambda name: -_guess(model, name))

    def passes(lifted: frozenset[str]) -> bool:
        precisions: dict[str, Precision] = {name: "fp32" if name in lifted else "fp16" for name in model.names}
        return model.measure(precisions, "fp16")[1] <= TOLERANCE

    if not passes(frozenset()):
        smallest_lift(order, passes, max_evaluations=trials - 1)


def _guess(model: Model, name: str) -> float:
    return next(item.sensitivity["fp16"] for item in model.guess.layers if item.layer == name)


SEARCHES: dict[str, Callable[[Model, int, int], None]] = {
    "autoprec": front_search,
    "TPE per layer": tpe_search,
    "random per layer": random_search,
    "delta debugging": delta_debugging,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=54)
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for name, search in SEARCHES.items():
        needed, areas, reached = [], [], []
        for seed in range(options.seeds):
            model = Model(options.layers, seed)
            search(model, options.trials, seed)
            points = model.trace.points
            needed.append(model.trace.trials_to(0.98 * model.best_known, options.trials))
            areas.append(hypervolume([(s / model.best_known, h / 0.1) for s, h in points], (0.0, 1.0)))
            passing = [speed for speed, harm in points if harm <= TOLERANCE]
            reached.append(max(passing, default=0.0) / model.best_known)
        row = {"search": name, "median_trials_to_98_percent": statistics.median(needed), "trials": needed}
        row |= {"best_share": round(statistics.mean(reached), 4), "hypervolume": round(statistics.mean(areas), 4)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
