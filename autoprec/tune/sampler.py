"""The study's sampler: multivariate TPE that never proposes a policy twice.

TPE does not avoid repeats (30 trials of a 9-point space gave 7 distinct points), and a repeat costs a whole window. So a
proposal is drawn completely, looked up, and drawn again where its policy has been tried; after some draws a random untried one
is taken.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from autoprec.tune.study_space import Params, StudySpace

TPE_DRAWS = 16
RANDOM_DRAWS = 400
# Trials before TPE takes over from random draws; baselines and starting points count. Source: Optuna's default.
STARTUP_TRIALS = 10


def distributions_of(space: StudySpace) -> dict[str, BaseDistribution]:
    """Optuna's distributions of the space's parameters, by name."""
    return {
        name: IntDistribution(0, len(choices) - 1) if name == "front_index" else CategoricalDistribution(choices)
        for name, choices in space.params().items()
    }


def random_untried(space: StudySpace, is_tried: Callable[[Params], bool], rng: random.Random) -> Params | None:
    """A random set of parameters whose policy was not tried; None where none turned up, so that the space is exhausted."""
    choices = space.params()
    for _ in range(RANDOM_DRAWS):
        params: Params = {"dtype": rng.choice(choices["dtype"])}
        params |= {name: rng.choice(choices[name]) for name in space.active(params["dtype"]) if name != "dtype"}
        if not is_tried(params):
            return params
    return None


class FreshSampler(BaseSampler):
    """Multivariate TPE over a StudySpace; ``is_tried`` says whether a set of parameters must not be proposed."""

    def __init__(self, space: StudySpace, seed: int, is_tried: Callable[[Params], bool]) -> None:
        self._space = space
        self._is_tried = is_tried
        self._distributions = distributions_of(space)
        self._rng = random.Random(seed)
        self._tpe = TPESampler(
            seed=seed,
            multivariate=True,
            n_startup_trials=STARTUP_TRIALS,
            constant_liar=False,  # one trial at a time: two on one GPU would spoil each other's times
        )

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters: each proposal is drawn whole, so that its policy can be looked up."""
        return self._distributions

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
        """Draws parameters whose policy was not tried; the last draw where the space seems exhausted."""
        params: Params = {}
        for _ in range(TPE_DRAWS):
            params = self._draw(study, trial)
            if not self._is_tried(params):
                return params
        return random_untried(self._space, self._is_tried, self._rng) or params

    def _draw(self, study: Study, trial: FrozenTrial) -> Params:
        joint = self._tpe.sample_relative(study, trial, self._tpe.infer_relative_search_space(study, trial))
        params: Params = {"dtype": self._value("dtype", joint, study, trial)}
        for name in self._space.active(params["dtype"]):
            if name != "dtype":
                params[name] = self._value(name, joint, study, trial)
        return params

    def _value(self, name: str, joint: Mapping[str, Any], study: Study, trial: FrozenTrial) -> Any:
        choices = self._space.params()[name]
        if len(choices) == 1:
            return choices[0]
        if name in joint:
            return joint[name]
        return self._tpe.sample_independent(study, trial, name, self._distributions[name])

    def sample_independent(self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Draws one parameter that no whole proposal holds."""
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)

    def reseed_rng(self) -> None:
        """Asks for new random numbers, as Optuna does in each worker."""
        self._tpe.reseed_rng()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Lets TPE prepare."""
        self._tpe.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Lets TPE note the result."""
        self._tpe.after_trial(study, trial, state, values)
